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
from bench.moe_cases import SHAPES, TOKENS, Inputs, Shape, Weights, reference, relative_error, tiled

FIELDS = ["model", "tokens", "system", "us", "us_min", "us_p90", "error", "roofline_us",
          "share_of_roofline", "times_best_peer", "distinct", "params"]  # fmt: skip
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
    """Something that runs a layer, with rotating copies of its weights."""

    def __init__(self, name: str, tensors: Any, copies: int) -> None:
        clone = (
            (lambda t: {k: v.clone() for k, v in t.items()})
            if isinstance(tensors, dict)
            else (lambda t: [v.clone() for v in t])
        )
        self.name = name
        self.copies = [tensors] + [clone(tensors) for _ in range(copies - 1)]


def run_model(shape: Shape, args: argparse.Namespace) -> None:
    tokens = [int(t) for t in args.tokens.split(",")]
    params = {m: read_params(args.params, shape, m) for m in tokens}
    compiler = Compiler()
    log(shape.name, compiler.compile(x for m in tokens for x in describe(shape, m, params[m])))
    compiler.pool.terminate()

    weights = Weights(shape)
    packed = weights.packed()
    nbytes = sum(t.numel() * 4 for t in packed.values())
    count = 4 if nbytes < 2e9 else 2
    systems = [System("autosel", packed, count)]
    makers: dict[str, Any] = {}
    if args.peers:
        from bench.peers import Humming, Marlin, load_operators

        load_operators(os.environ["PEER_SO"])
        folder = os.environ["PEER_DIR"]
        for kind in args.peers.split(","):
            began = time.time()
            peer = (
                Marlin(weights)
                if kind == "marlin"
                else Humming(
                    weights,
                    {"indexed": "indexed", "grouped": "grouped_contiguous"}[kind[8:]],
                    folder,
                )
            )
            if hasattr(peer, "prepare"):
                peer.prepare(tokens)
            systems.append(System(peer.name, peer.tensors, count))
            makers[peer.name] = peer
            log(shape.name, peer.name, f"ready in {time.time() - began:.1f} s")

    new = not os.path.exists(args.csv)
    with open(args.csv, "a", newline="") as stream:
        writer = csv.DictWriter(stream, FIELDS)
        if new:
            writer.writeheader()
        for m in tokens:
            for row in cell_rows(shape, m, weights, systems, makers, params[m], args):
                writer.writerow(row)
            stream.flush()


def cell_rows(
    shape: Shape, tokens: int, weights: Weights, systems: list[System], makers: dict[str, Any],
    params: dict[str, Any], args: argparse.Namespace,
) -> list[dict[str, Any]]:  # fmt: skip
    touched = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** tokens)
    calls = math.ceil(400e6 / (touched * shape.expert_bytes))
    calls = max(8 if tokens < 1024 else 4, min(16, calls))
    inputs = Inputs(shape, tokens, calls, seed=args.seed)
    ref = reference(weights, inputs)
    roof = shape.roofline_us(tokens, inputs.distinct)
    graphs, errors, times = {}, {}, {}
    for system in systems:
        out = torch.empty_like(inputs.x)
        run = makers[system.name].build(tokens) if system.name in makers else None

        def call(r: int, system: System = system, out: Any = out, run: Any = run) -> None:
            w = system.copies[r % len(system.copies)]
            if run is not None:
                run(w, inputs.x, inputs.ids[r], inputs.weights[r], out)
                return
            layer = tiled(shape, w)
            for launch in layer_launches(
                layer, inputs.x, inputs.ids[r], inputs.weights[r], out, params
            ):
                launch.run()

        worst = 0.0
        for _ in range(3):
            out.fill_(float("nan"))
            call(0)
            error = relative_error(out, ref)
            worst = max(worst, error if error == error else math.inf)
        errors[system.name] = worst
        graphs[system.name] = capture([lambda r=r, call=call: call(r) for r in range(calls)])
        times[system.name] = []
    for _ in range(3):
        for name, graph in graphs.items():
            times[name] += [t / calls for t in replays_us(graph, args.replays)]
    us = {name: median(t) for name, t in times.items()}
    peer_us = [t for name, t in us.items() if name in makers]
    best = min(peer_us) if peer_us else math.nan
    ours = us["autosel"]
    log(
        f"{shape.name:16} M={tokens:<5} ours {ours:8.1f} us {roof / ours:4.0%} of roofline, "
        f"best peer {best:8.1f} us, {best / ours:5.2f}x  "
        + " ".join(f"{n}={t:.1f}({errors[n]:.4f})" for n, t in us.items())
    )
    return [
        dict(model=shape.name, tokens=tokens, system=name, us=round(us[name], 2),
             us_min=round(min(t), 2), us_p90=round(sorted(t)[int(len(t) * 0.9)], 2),
             error=f"{errors[name]:.5f}", roofline_us=round(roof, 2),
             share_of_roofline=round(roof / us[name], 3),
             times_best_peer=round(best / us[name], 3), distinct=round(inputs.distinct, 1),
             params=json.dumps(params, sort_keys=True) if name == "autosel" else "")
        for name, t in times.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", default="kernels.csv")
    parser.add_argument("--params", default="", help="CSV with model, tokens, params columns")
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--peers", default="marlin,humming_indexed,humming_grouped")
    parser.add_argument("--replays", type=int, default=7, help="of three rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", action="store_true", help="run in this process")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    if args.one:
        run_model(SHAPES[args.models], args)
        return
    for name in args.models.split(","):
        command = [sys.executable, "-m", "bench.kernels", *sys.argv[1:], "--one", "--models", name]
        subprocess.run(command, check=False)


if __name__ == "__main__":
    main()
