"""Tables of ``docs/findings.md`` about the sweeps of the H200."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import mode

from autosel import evidence_files
from autosel.core import Measurement, Problem
from autosel.plots.latency import latency_data
from bench.findings_table import ratio_row, ratio_text, table
from bench.results_data import RESULTS, rows

PACKS = RESULTS / "nvidia-h200" / "packs"
DECISIONS = RESULTS / "nvidia-h200" / "decisions.csv"
OURS = "wna16_tiled"
#: What a table of its own, or a row of the summary, is about.
PLAIN = "int4 symmetric, bf16"
KINDS = (PLAIN, "skewed routing", "zero points", "int8 weights", "fp16 activations")


@dataclass(frozen=True)
class Layer:
    """What sweeps of a layer found, by tokens."""

    name: str
    kind: str
    #: (best other backend with 16-bit activations, its time over ours)
    rivals: Mapping[int, tuple[str, float]]
    #: Rows of ``decisions.csv``.
    decided: dict[int, dict[str, str]] = field(default_factory=dict)


def kind(problem: Problem, routing: str) -> str:
    """Which of :data:`KINDS` a layer belongs to: each is one step away from the first."""
    if routing != "uniform":
        return KINDS[1]
    if not problem.w13.symmetric:
        return KINDS[2]
    if problem.w13.num_bits == 8:
        return KINDS[3]
    return KINDS[4] if problem.act_dtype == "float16" else PLAIN


@functools.cache
def layers() -> tuple[Layer, ...]:
    """Every layer with a pack, by kind and name; each has rows in the table of decisions."""
    found = {}
    for path in sorted(PACKS.glob("*.json")):
        for one in evidence_files.read(path):
            # Only packs whose names would be alike have the routing in their label.
            name = _name(one.label.split(": ")[-1], one.routing)
            found[name] = Layer(name, kind(one.problem, one.routing), _rivals(one.measurements))
    for row in rows(DECISIONS):
        found[_name(row["model"], row["routing"])].decided[int(row["tokens"])] = row
    return tuple(sorted(found.values(), key=lambda layer: (KINDS.index(layer.kind), layer.name)))


def _name(label: str, routing: str) -> str:
    added = "" if routing == "uniform" else f", {routing}"
    return label.removesuffix(added) + added


def _rivals(measurements: Iterable[Measurement]) -> dict[int, tuple[str, float]]:
    found = {}
    timed = latency_data(tuple(measurements))
    for count, rows_ in timed[timed["accuracy"] == "exact"].groupby("num_tokens"):
        best = dict(zip(rows_["backend"], rows_["rank_us"], strict=True))
        ours = best.pop(OURS)
        other = min(best, key=lambda name: best[name])
        found[int(count)] = other, best[other] / ours
    return found


def chosen(plain: bool) -> str:
    """How much longer what vLLM's order takes needs than what is chosen, layers by tokens."""
    some = [layer for layer in layers() if (layer.kind == PLAIN) == plain]
    counts = sorted({count for layer in some for count in layer.decided})
    lines = []
    for layer in some:
        usual = mode(row["winner"] for row in layer.decided.values())
        shown = [_cell(layer.decided.get(count), usual) for count in counts]
        lines.append((layer.name, f"`{usual}`", *shown))
    return table(("layer", "mostly chosen", *(f"{count:,}" for count in counts)), lines)


def _cell(row: Mapping[str, str] | None, usual: str) -> str:
    if row is None or not row["speedup"]:
        return ""
    other = "" if row["winner"] == usual else f" (`{row['winner']}`)"
    return f"{ratio_text(float(row['speedup']))}{other}"


def losses() -> str:
    """Where another backend is ahead of ours, or less than 2 % behind: plain int4 layers."""
    lines = [
        (layer.name, f"{count:,}", f"`{name}`", ratio_text(ratio))
        for layer in layers()
        if layer.kind in KINDS[:2]
        for count, (name, ratio) in layer.rivals.items()
        if ratio < 1.02
    ]
    return table(("layer", "tokens", "best other exact backend", "its time over ours"), lines)


def variants() -> str:
    """The best other exact backend over ours for the other kinds of numbers, layers by tokens."""
    some = [layer for layer in layers() if layer.kind in KINDS[2:]]
    counts = sorted({count for layer in some for count in layer.rivals})
    lines = [
        (layer.name, *(
            ratio_text(layer.rivals[count][1]) if count in layer.rivals else "" for count in counts
        ))
        for layer in some
    ]  # fmt: skip
    return table(("layer", *(f"{count:,}" for count in counts)), lines)


def summary() -> list[tuple[object, ...]]:
    """Rows of the table of all devices."""
    lines = []
    for what in KINDS:
        some = [layer for layer in layers() if layer.kind == what]
        speedups = [
            float(row["speedup"])
            for layer in some
            for row in layer.decided.values()
            if row["speedup"]
        ]
        ratios = [ratio for layer in some for _, ratio in layer.rivals.values()]
        device = f"H200, sweeps: {what}"
        lines.append(ratio_row(device, "vLLM's choice over what is chosen", speedups))
        lines.append(ratio_row(device, "best other exact backend over ours", ratios))
    return lines


TABLES: dict[str, Callable[[], str]] = {
    "h200-sweeps": lambda: chosen(plain=True),
    "h200-losses": losses,
    "h200-variants": lambda: chosen(plain=False),
    "h200-variants-ours": variants,
}
