"""The products of our CPU kernel (fp32, bf16, AMX, int8) beside the other CPU backends.

    python -m bench.cpu_products --shapes A,B --tokens 1,4,16,64,256,1024 -o cpu_products.csv

No sweep, no race: for a machine at hand for minutes. Every backend that runs here computes the
same call; the first result is compared with the emulation (up to 64 tokens), then the lower
quartile of 12 calls (5 from 256 tokens on) is kept, cold (640 MB are read between calls) and, with
twice as many calls, hot. Backends of the class a8 quantise activations to 8 bits and answer a
different question.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch

from autosel import reference, registry
from autosel.core import CanonicalExperts, Device, Problem, Routing
from autosel.device import detect
from autosel.dispatch import apply
from autosel.errors import AutoselError
from autosel.interfaces import Backend, Layout, PackedExperts
from autosel.sources import RandomSource
from bench.cpu import SHAPES, problem

BACKENDS = ("cpu_native", "torch_int4", "emulation", "cpu_dense", "cpu", "zen_cpu")
FIELDS = (
    "shape", "group_size", "tokens", "backend", "setting",
    "accuracy", "cold_us", "hot_us", "rel_rms",
)  # fmt: skip
FLUSH_BYTES = 640 << 20  # above twice the largest last-level cache seen, 300 MB


def candidates(layer: Problem, device: Device) -> Iterator[tuple[Backend, dict[str, Any]]]:
    for name in BACKENDS:
        backend = registry.get(name)
        support = backend.supports(layer, device)
        if not support:
            click.echo(f"{name}: {support}", err=True)
            continue
        for params in backend.space(layer, 64, device):
            yield backend, dict(params)


def call_of(layer: Problem, tokens: int) -> tuple[torch.Tensor, Routing]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, layer.hidden_size, generator=generator).to(torch.bfloat16)
    weights, ids = torch.rand(tokens, layer.num_experts, generator=generator).topk(layer.top_k)
    return x, Routing(ids.to(torch.int32), weights / weights.sum(1, keepdim=True))


def quartile_us(call: Callable[[], object], count: int, flush: torch.Tensor | None) -> float:
    times = []
    for _ in range(count):
        if flush is not None:
            flush.sum()
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return sorted(times)[len(times) // 4]


def measured(
    backend: Backend,
    params: dict[str, Any],
    packed: PackedExperts,
    x: torch.Tensor,
    routing: Routing,
    truth: torch.Tensor | None,
    flush: torch.Tensor,
) -> dict[str, Any]:
    out = torch.full_like(x, float("nan"))
    apply(backend, packed, x, routing, params, out=out)
    error = "" if truth is None else f"{float((out.float() - truth).norm() / truth.norm()):.5f}"

    def call() -> object:
        return backend.run(packed, x, routing, params, out)

    count = 12 if len(x) <= 64 else 5
    return {
        "cold_us": round(quartile_us(call, count, flush), 1),
        "hot_us": round(quartile_us(call, 2 * count, None), 1),
        "rel_rms": error,
    }


def rows_of(shape: str, group_size: int, tokens: list[int]) -> Iterator[dict[str, Any]]:
    layer, device = problem(shape, group_size), detect("cpu")
    experts: CanonicalExperts = RandomSource(layer).load()
    flush = torch.ones(FLUSH_BYTES // 4)
    packs: dict[Layout, PackedExperts] = {}
    for count in tokens:
        x, routing = call_of(layer, count)
        truth = None
        if count <= 64:
            truth = reference.moe(x, experts, routing, dtype=torch.float32)
        for backend, params in candidates(layer, device):
            row: dict[str, Any] = {"shape": shape, "group_size": group_size, "tokens": count}
            row |= {"backend": backend.name, "accuracy": backend.accuracy(params)}
            row["setting"] = ",".join(f"{name}={value}" for name, value in sorted(params.items()))
            try:
                layout = backend.layout(layer, params)
                if layout not in packs:
                    packs[layout] = layout.pack(experts)
                yield row | measured(backend, params, packs[layout], x, routing, truth, flush)
            except (AutoselError, RuntimeError) as error:
                click.echo(f"{backend.name} {row['setting']}: {error}", err=True)


@click.command()
@click.option("--shapes", default=",".join(SHAPES))
@click.option("--tokens", default="1,4,16,64,256,1024")
@click.option("--group-size", default=128)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
def main(shapes: str, tokens: str, group_size: int, output: Path) -> None:
    counts = [int(t) for t in tokens.split(",")]
    with output.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, FIELDS, lineterminator="\n")
        writer.writeheader()
        for shape in shapes.split(","):
            for row in rows_of(shape, group_size, counts):
                writer.writerow(row)
                stream.flush()
                click.echo(" ".join(str(row[name]) for name in FIELDS))


if __name__ == "__main__":
    main()
