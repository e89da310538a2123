"""Sweeps our kernels' parameters over the benchmark cells, whole layers at a time.

    python -m bench.kernel_sweep --csv sweep.csv [--models a,b] [--tokens 1,4] [--top 2]

Round 1 times one starting point for every way to run a cell; round 2 varies the two GEMMs of the
best ones, one after the other. Every configuration is checked against a float32 reference on the
whole output before its time counts. Each model runs in a process of its own, so that a crash ends
one model only.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch

from autosel.kernels.wna16_moe import layer_launches
from bench import kernel_candidates as candidates
from bench.graph_timing import Compiler, capture, median, replays_us
from bench.moe_cases import (
    SHAPES,
    TOKENS,
    Inputs,
    Shape,
    Weights,
    meta_layer,
    reference,
    relative_error,
    tiled,
)

MAX_ERROR = 6e-3  # bf16: correct kernels give 0.0016 to 0.005
FIELDS = ["model", "tokens", "us", "us_min", "error", "roofline_us", "distinct", "params", "parts"]
START = time.time()


def log(*words: object) -> None:
    print(f"[{time.time() - START:6.1f}]", *words, flush=True)


def describe(shape: Shape, tokens: int, params: dict[str, Any]) -> list[Any]:
    """The launches of a configuration, for compilation only."""

    def empty(cols: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((tokens, cols), dtype=dtype, device="meta")

    x = empty(shape.hidden, torch.bfloat16)
    ids, weights = empty(shape.top_k, torch.int32), empty(shape.top_k, torch.float32)
    return layer_launches(meta_layer(shape), x, ids, weights, x, params)


class Cell:
    """One shape and token count on the device."""

    def __init__(self, shape: Shape, tokens: int, weights: Weights, copies: list[Any]) -> None:
        self.shape, self.tokens, self.copies = shape, tokens, copies
        touched = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** tokens)
        calls = math.ceil(400e6 / (touched * shape.expert_bytes))
        self.calls = max(8 if tokens < 1024 else 4, min(16, calls))
        self.inputs = Inputs(shape, tokens, self.calls)
        self.reference = reference(weights, self.inputs)
        self.out = torch.empty_like(self.inputs.x)

    def launches(self, params: dict[str, Any], r: int) -> list[Any]:
        i = self.inputs
        layer = tiled(self.shape, self.copies[r % len(self.copies)])
        return layer_launches(layer, i.x, i.ids[r], i.weights[r], self.out, params)

    def error(self, params: dict[str, Any]) -> float:
        worst = 0.0
        for _ in range(3):
            self.out.fill_(float("nan"))
            for launch in self.launches(params, 0):
                launch.run()
            error = relative_error(self.out, self.reference)
            worst = max(worst, error if error == error else math.inf)
        return worst

    def time(self, params: dict[str, Any], replays: int = 15) -> list[float]:
        def call(r: int) -> None:
            for launch in self.launches(params, r):
                launch.run()

        graph = capture([lambda r=r: call(r) for r in range(self.calls)])
        return [t / self.calls for t in replays_us(graph, replays)]

    def parts(self, params: dict[str, Any]) -> dict[str, float]:
        """Each launch alone; buffers hold what a whole call left there."""
        calls = [self.launches(params, r) for r in range(self.calls)]
        for launches in calls:
            for launch in launches:
                launch.run()
        out: dict[str, float] = {}
        for i, launch in enumerate(calls[0]):
            graph = capture([lambda c=c, i=i: c[i].run() for c in calls])
            name = f"{i}:{launch.kernel.fn.__name__}"
            out[name] = round(median(replays_us(graph, 9)) / self.calls, 2)
        return out


def sweep_model(shape: Shape, tokens: Iterable[int], path: str, top: int) -> None:
    compiler = Compiler()  # before CUDA starts in this process
    tokens = list(tokens)
    bases = {m: candidates.bases(shape, m) for m in tokens}
    log(
        shape.name,
        compiler.compile(x for m in tokens for p in bases[m] for x in describe(shape, m, p)),
    )
    weights = Weights(shape)
    copies = weights.packed_copies()
    new = not os.path.exists(path)
    stream = open(path, "a", newline="")  # noqa: SIM115
    writer = csv.DictWriter(stream, FIELDS)
    if new:
        writer.writeheader()
    cells = {m: Cell(shape, m, weights, copies) for m in tokens}
    log(shape.name, "data ready")
    results: dict[int, dict[str, tuple[float, dict[str, Any]]]] = {m: {} for m in tokens}

    def measure(m: int, params: dict[str, Any]) -> float:
        key = json.dumps(params, sort_keys=True)
        if key in results[m]:
            return results[m][key][0]
        cell, us, error = cells[m], math.inf, math.nan
        problem = compiler.usable(describe(shape, m, params))
        if problem is None:
            try:
                error = cell.error(params)
                times = cell.time(params)
                us = median(times) if error < MAX_ERROR else math.inf
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as e:
                problem = repr(e)[-200:]
                torch.cuda.synchronize()
        if problem or us == math.inf:
            log("BAD", shape.name, m, key, problem or f"error {error:.3g}")
        else:
            roof = shape.roofline_us(m, cell.inputs.distinct)
            writer.writerow(
                {
                    "model": shape.name,
                    "tokens": m,
                    "us": round(us, 2),
                    "us_min": round(min(times), 2),
                    "error": f"{error:.5f}",
                    "roofline_us": round(roof, 2),
                    "distinct": round(cell.inputs.distinct, 1),
                    "params": key,
                    "parts": "",
                }
            )
            stream.flush()
        results[m][key] = (us, params)
        return us

    for m in tokens:
        for params in bases[m]:
            measure(m, params)
    log(shape.name, "round 1 done")

    def best(m: int, count: int) -> list[dict[str, Any]]:
        return [p for us, p in sorted(results[m].values(), key=lambda v: v[0])[:count]]

    second = {
        m: [v for p in best(m, top) for v in candidates.variants(shape, m, p)] for m in tokens
    }
    log(
        shape.name,
        compiler.compile(x for m in tokens for p in second[m] for x in describe(shape, m, p)),
    )
    for m in tokens:
        for base in best(m, top):
            for part in ("up", "down", "all"):
                tried = [base, *candidates.variants(shape, m, base, part)]
                base = min(tried, key=lambda p, m=m: measure(m, p))
        winner = best(m, 1)[0]
        us = results[m][json.dumps(winner, sort_keys=True)][0]
        roof = shape.roofline_us(m, cells[m].inputs.distinct)
        parts = cells[m].parts(winner)
        writer.writerow(
            {
                "model": shape.name,
                "tokens": m,
                "us": round(us, 2),
                "us_min": "",
                "error": "",
                "distinct": "",
                "roofline_us": round(roof, 2),
                "params": json.dumps(winner, sort_keys=True),
                "parts": json.dumps(parts),
            }
        )
        stream.flush()
        log(f"{shape.name:16} M={m:<5} {us:8.1f} us  {roof / us:4.0%}", parts)
        log("   ", " ".join(f"{k}={v}" for k, v in winner.items()))
    stream.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", default="sweep.csv")
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--top", type=int, default=2)
    parser.add_argument("--one", action="store_true", help="run in this process")
    args = parser.parse_args()
    tokens = [int(t) for t in args.tokens.split(",")]
    torch.backends.cuda.matmul.allow_tf32 = False
    if not args.one:  # all models' first round at once keeps every core busy
        shapes = [SHAPES[name] for name in args.models.split(",")]
        compiler = Compiler()
        log(
            compiler.compile(
                x
                for shape in shapes
                for m in tokens
                for p in candidates.bases(shape, m)
                for x in describe(shape, m, p)
            )
        )
        for key, error in compiler.failed.items():
            log("FAILED", key[:300], error)
        compiler.pool.terminate()
    for name in args.models.split(","):
        if args.one:
            sweep_model(SHAPES[name], tokens, args.csv, args.top)
            continue
        command = [sys.executable, "-m", "bench.kernel_sweep", "--one", "--models", name]
        command += ["--csv", args.csv, "--tokens", args.tokens, "--top", str(args.top)]
        subprocess.run(command, check=False)
        log(name, "finished")


if __name__ == "__main__":
    main()
