"""Our kernels and their peers side by side, whole layers, in one run.

    python -m bench.kernels --csv kernels.csv --params results/nvidia-h200/kernel_params.csv

Every system gets the same canonical weights, inputs and routings. Times are medians of CUDA graph
replays; a graph holds several calls, each with another routing and another copy of the weights, so
weights are never in L2. Systems take turns, so that drift hits all alike. Every system's output is
compared with a float32 reference before it is timed. Without peers (``--peers ""``) only ours runs.
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
from typing import Any

import torch

from autosel.kernels.wna16_moe import layer_launches
from bench.graph_timing import Compiler, capture, median, replays_us
from bench.kernel_sweep import describe
from bench.moe_cases import (
    SHAPES,
    TOKENS,
    Inputs,
    Shape,
    Weights,
    copies_of,
    reference,
    relative_error,
    tiled,
)

FIELDS = [
    "model",
    "tokens",
    "system",
    "us",
    "us_min",
    "us_p90",
    "error",
    "roofline_us",
    "share_of_roofline",
    "times_best_peer",
    "distinct",
    "params",
]
START = time.time()


def log(*words: object) -> None:
    print(f"[{time.time() - START:6.1f}]", *words, flush=True)


def read_params(path: str, shape: Shape, tokens: int) -> dict[str, Any]:
    """Our parameters of a cell: the built-in starting point, or what a sweep found."""
    if path:
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                if row["model"] == shape.name and int(row["tokens"]) == tokens:
                    return dict(json.loads(row["params"]))
    from autosel.kernels.wna16_space import starting_params
    from bench.moe_cases import meta_layer

    return starting_params(meta_layer(shape), tokens)


class System:
    """Something that runs a layer, with rotating copies of its weights.

    ``build(tokens)`` returns a callable of (weights, x, ids, topk_weights, out).
    """

    def __init__(self, name: str, copies: list[Any], build: Any) -> None:
        self.name, self.copies, self.build = name, copies, build


def ours(shape: Shape, name: str, copies: list[Any], params: dict[int, Any]) -> System:
    def build(tokens: int) -> Any:
        def call(w: Any, x: Any, ids: Any, topk_weights: Any, out: Any) -> None:
            layer = tiled(shape, w)
            for launch in layer_launches(layer, x, ids, topk_weights, out, params[tokens]):
                launch.run()

        return call

    return System(name, copies, build)


def peer_system(kind: str, weights: Weights, tokens: list[int], count: int) -> System:
    from bench.peers import Humming, Marlin

    if kind == "marlin":
        peer: Any = Marlin(weights)
    else:
        form = {"indexed": "indexed", "grouped": "grouped_contiguous"}[kind.split("_")[1]]
        peer = Humming(weights, form, os.environ["PEER_DIR"])
        peer.prepare(tokens)
    return System(peer.name, copies_of(peer.tensors, count), peer.build)


def run_model(shape: Shape, args: argparse.Namespace) -> None:
    tokens = [int(t) for t in args.tokens.split(",")]
    sets = {"autosel": {m: read_params(args.params, shape, m) for m in tokens}}
    if args.params:
        sets["autosel_start"] = {m: read_params("", shape, m) for m in tokens}
    compiler = Compiler()
    found = compiler.compile(
        x for params in sets.values() for m in tokens for x in describe(shape, m, params[m])
    )
    log(shape.name, found, list(compiler.failed.values())[:3])
    compiler.pool.terminate()

    weights = Weights(shape)
    copies = weights.packed_copies()
    count = len(copies)
    systems = [ours(shape, name, copies, params) for name, params in sets.items()]
    if args.peers:
        from bench.peers import load_operators

        load_operators(os.environ["PEER_SO"])
    for kind in filter(None, args.peers.split(",")):
        began = time.time()
        try:
            systems.append(peer_system(kind, weights, tokens, count))
            log(shape.name, kind, f"ready in {time.time() - began:.1f} s")
        except Exception as error:  # a peer that fails must not hide the others
            log(shape.name, kind, "FAILED", repr(error)[-300:])

    new = not os.path.exists(args.csv)
    with open(args.csv, "a", newline="") as stream:
        writer = csv.DictWriter(stream, FIELDS)
        if new:
            writer.writeheader()
        for m in tokens:
            writer.writerows(cell_rows(shape, m, weights, systems, sets, args))
            stream.flush()


def cell_rows(
    shape: Shape,
    tokens: int,
    weights: Weights,
    systems: list[System],
    sets: dict[str, dict[int, Any]],
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    touched = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** tokens)
    calls = math.ceil(400e6 / (touched * shape.expert_bytes))
    calls = max(8 if tokens < 1024 else 4, min(16, calls))
    inputs = Inputs(shape, tokens, calls, seed=args.seed)
    ref = reference(weights, inputs)
    roof = shape.roofline_us(tokens, inputs.distinct)
    graphs, errors, times = {}, {}, {}
    kept = []  # what a graph reads must outlive it
    for system in systems:
        try:
            run, out = system.build(tokens), torch.empty_like(inputs.x)
            kept.append((run, out))

            def call(r: int, system: System = system, out: Any = out, run: Any = run) -> None:
                w = system.copies[r % len(system.copies)]
                run(w, inputs.x, inputs.ids[r], inputs.weights[r], out)

            worst = 0.0
            for _ in range(3):
                out.fill_(float("nan"))
                call(0)
                error = relative_error(out, ref)
                worst = max(worst, error if error == error else math.inf)
            errors[system.name] = worst
            graphs[system.name] = capture([lambda r=r, call=call: call(r) for r in range(calls)])
            times[system.name] = []
        except Exception as error:
            log(shape.name, tokens, system.name, "FAILED", repr(error)[-300:])
            torch.cuda.synchronize()
    for _ in range(3):
        for name, graph in graphs.items():
            times[name] += [t / calls for t in replays_us(graph, args.replays)]
    us = {name: median(t) for name, t in times.items()}
    peer_us = [t for name, t in us.items() if name not in sets and errors[name] < 0.02]
    best = min(peer_us) if peer_us else math.nan
    mine = us["autosel"]
    log(
        f"{shape.name:16} M={tokens:<5} ours {mine:8.1f} us {roof / mine:4.0%} of roofline, "
        f"best peer {best:8.1f} us, {best / mine:5.2f}x | "
        + " ".join(f"{n}={t:.1f}({errors[n]:.4f})" for n, t in us.items())
    )
    return [
        {
            "model": shape.name,
            "tokens": tokens,
            "system": name,
            "us": round(us[name], 2),
            "us_min": round(min(t), 2),
            "us_p90": round(sorted(t)[int(len(t) * 0.9)], 2),
            "error": f"{errors[name]:.5f}",
            "roofline_us": round(roof, 2),
            "share_of_roofline": round(roof / us[name], 3),
            "times_best_peer": round(best / us[name], 3),
            "distinct": round(inputs.distinct, 1),
            "params": json.dumps(sets[name][tokens], sort_keys=True) if name in sets else "",
        }
        for name, t in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", default="kernels.csv")
    parser.add_argument("--params", default="", help="CSV with model, tokens, params columns")
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--peers", default="marlin,humming_indexed,humming_grouped")
    parser.add_argument("--replays", type=int, default=7, help="of three rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0, help="start no model after this")
    parser.add_argument("--one", action="store_true", help="run in this process")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    if args.one:
        run_model(SHAPES[args.models], args)
        return
    for name in args.models.split(","):
        if args.seconds and time.time() - START > args.seconds:
            log("out of time before", name)
            break
        command = [sys.executable, "-m", "bench.kernels", *sys.argv[1:], "--one", "--models", name]
        if subprocess.run(command, check=False).returncode and args.peers:
            log(name, "failed; once more without peers")
            subprocess.run([*command, "--peers", ""], check=False)


if __name__ == "__main__":
    main()
