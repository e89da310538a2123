"""Few tokens: whole grids of the decode kernels' settings, and the paths beside each other.

    python -m bench.few_tokens --csv few_tokens.csv [--models a,b] [--tokens 1,2,4,8]

Rows ``up`` and ``down`` vary one of the two kernels beside the built-in setting of the other, rows
``both`` combine the best of each: the kernels overlap, so that the best of each are not always
the best of both. Rows ``path`` have the starting point of each path, with uniform routing and with
all tokens on the same experts. Every setting is checked against float32 on the whole output before
its time counts.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autosel.kernels import wna16_space
from bench.graph_timing import Compiler, median
from bench.kernel_sweep import MAX_ERROR, Cell, describe, log
from bench.moe_cases import SHAPES, Shape, Weights, meta_layer, reference

Params = dict[str, Any]
FIELDS = ["model", "tokens", "routing", "part", "us", "params"]
MODELS = SHAPES | {
    s.name: s
    for s in (
        Shape("mixtral-8x7b-tp2", 8, 2, 4096, 7168, 128),
        Shape("mixtral-8x22b-tp8", 8, 2, 6144, 2048, 128),
        Shape("llama-4-scout-tp4", 16, 1, 5120, 2048, 128),
        Shape("olmoe-1b-7b", 64, 8, 2048, 1024, 128),
        Shape("glm-4.5-air", 128, 8, 4096, 1408, 128),
        Shape("qwen3-235b-a22b-tp4", 128, 8, 4096, 384, 128),
        Shape("minimax-m2-tp4", 256, 8, 3072, 384, 128),
        Shape("qwen3-next-80b-a3b", 512, 10, 2048, 512, 128),
    )
}
TOKENS = (1, 2, 4, 8)
COMBINED = 4  # of the best of each kernel


def halves(pre: str) -> Iterator[Params]:
    """Settings of one of the two kernels, legal ones and others."""
    warps = (4, 8) if pre == "down" else (None,)
    rows = (1, 2) if pre == "up" else (1,)
    grid = itertools.product(rows, (1, 2, 4, 8), (64, 128, 256, 512), (0, 3), warps)
    for r, ks, kw, stages, w in grid:
        half = {"r": r, "ks": ks, "kw": kw, "sub": min(kw, 128), "stages": stages}
        half |= {"warps": w} if w else {}
        yield {f"{pre}_{name}": value for name, value in half.items()}


def grid(shape: Shape, tokens: int, pre: str) -> list[Params]:
    """The decode setting of this cell with each legal setting of one kernel."""
    layer = meta_layer(shape)
    decode = (start for start in starts(shape, tokens) if start["path"] == "decode")
    varied = (start | half for start in decode for half in halves(pre))
    return [p for p in varied if wna16_space.problem_with(layer, p) is None]


def starts(shape: Shape, tokens: int) -> list[Params]:
    return wna16_space.starting_points(meta_layer(shape), tokens)


class Table:
    """Measures settings of one cell and writes a row for each."""

    def __init__(self, writer: Any, cell: Cell, routing: str) -> None:
        self.writer, self.cell, self.routing = writer, cell, routing

    def measure(self, part: str, points: Sequence[Params], rounds: int = 3) -> list[Params]:
        """The points that are right, the fastest first."""
        times: dict[str, list[float]] = {}
        for point in points:
            try:
                error: object = self.cell.error(point)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as e:  # whatever a compiler or a launch raises: the others go on
                error = repr(e)[-200:]
            if isinstance(error, float) and error < MAX_ERROR:
                times[json.dumps(point, sort_keys=True)] = []
            else:
                log("BAD", self.cell.shape.name, self.cell.tokens, point, error)
        for _ in range(rounds):
            for text, measured in times.items():
                measured += self.cell.time(json.loads(text), 4)
        ranked = sorted(times, key=lambda text: median(times[text]))
        for text in ranked:
            row = [self.cell.shape.name, self.cell.tokens, self.routing, part]
            self.writer.writerow([*row, round(median(times[text]), 2), text])
        return [json.loads(text) for text in ranked]


def same_experts(cell: Cell, weights: Weights) -> None:
    """All tokens of a call choose what its first one chooses."""
    for ids in cell.inputs.ids:  # [M, top_k]
        ids[1:] = ids[:1].clone()
    cell.reference = reference(weights, cell.inputs)


def run_model(shape: Shape, tokens: Sequence[int], writer: Any) -> None:
    weights = Weights(shape)
    copies = weights.packed_copies()
    for m in tokens:
        cell = Cell(shape, m, weights, copies)
        table = Table(writer, cell, "uniform")
        table.measure("path", starts(shape, m))
        ups, downs = (table.measure(pre, grid(shape, m, pre))[:COMBINED] for pre in ("up", "down"))
        table.measure("both", [down | _of(up, "up") for up in ups for down in downs])
        if m > 1:
            same_experts(cell, weights)
            Table(writer, cell, "same").measure("path", starts(shape, m))
        log(shape.name, m)


def _of(point: Params, pre: str) -> Params:
    return {name: value for name, value in point.items() if name.startswith(pre)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", default="few_tokens.csv")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    shapes = [MODELS[name] for name in args.models.split(",")]
    tokens = [int(t) for t in args.tokens.split(",")]
    compiler = Compiler()  # before CUDA starts in this process
    cells = list(itertools.product(shapes, tokens))
    points = ((s, m, p) for s, m in cells for pre in ("up", "down") for p in grid(s, m, pre))
    first = ((s, m, p) for s, m in cells for p in starts(s, m))
    log(
        compiler.compile(x for s, m, p in itertools.chain(first, points) for x in describe(s, m, p))
    )
    compiler.pool.terminate()
    with open(args.csv, "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(FIELDS)
        for shape in shapes:
            run_model(shape, tokens, writer)
            stream.flush()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
