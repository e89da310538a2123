"""One layer's decision pack as it ships: small, and the same each time.

A pack of a GPU's 14 token counts with all that was measured would take about a megabyte. Kept are
the measurements of those that matter for a decision, with their samples: winner, runner-up, rivals
that the samples leave open, and each backend's fastest, which figures and ratios are made of; and
what failed, with its reason. Of the others a decision has time and reason, and ``samples.csv.xz``
has everything. Times are rounded to a nanosecond, far below what a device's clock resolves, and
figures made of them to six digits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any, TypeVar

from autosel import samples
from autosel.core import Candidate, Decision, ErrorFigures, Measurement, Scalar
from autosel.evidence import Evidence
from autosel.packs import content
from autosel.packs.build import build, model
from autosel.packs.model import Entry, Measured, Model, Pack
from autosel.packs.models import of_preset
from autosel.records import MODE_NAMES
from autosel.stats import Summary
from autosel.store import Store
from autosel.sweep_words import sweep_command
from autosel.words import open_rivals
from bench.results_layers import slug

F = TypeVar("F", ErrorFigures | None, Summary | None)

#: What is kept of how samples were taken: what compares them, and what a reader must know.
#: Clocks and temperatures of each sample are in ``samples.csv.xz``.
KEPT = frozenset(
    {*MODE_NAMES, "race", "blocks", "pace", "switches", "cut", "limited", "eliminated", "wall_s",
     "pressure_share", "steal_share", "captured", "repeats"}
)  # fmt: skip
#: Decimals of a microsecond, and significant digits of figures.
DECIMALS, DIGITS = 3, 6


def pack(store: Store, one: Evidence) -> Pack:
    """The pack of one layer and routing on its device; PackError where nothing was decided."""
    made = build(
        store, about(one), device=one.device, routing=one.routing, with_samples=True,
        command=sweep_command(one),
    )  # fmt: skip
    entries = tuple(_shipped(entry, one) for entry in made.entries)
    return content.sealed(replace(made, entries=entries))


def about(one: Evidence) -> Model:
    """The model of a layer: a preset by name, else its sizes."""
    if one.target:
        return of_preset(one.target.split()[0], one.problem)
    return model(slug(one.label), "checkpoint", [(one.problem, ())])


def _shipped(entry: Entry, one: Evidence) -> Entry:
    # When and by which commit the file was written says nothing about what was measured; the
    # kernels are known by content.
    fresh = entry.decided == entry.source.created  # nothing stored: decided just now
    decided = one.newest if fresh else entry.decided
    winners = {d.winner for d in entry.decisions}
    return replace(
        entry,
        source=replace(entry.source, created=decided, commit=None),
        decided=decided,
        measured=tuple(_thinned(entry)),
        # 3 kB each; the runners-up's are needed by nobody who does not measure again.
        certificates=tuple(c for c in entry.certificates if c.candidate in winners),
    )


def _thinned(entry: Entry) -> Iterator[Measured]:
    wanted = set(_that_matter(entry.decisions, [m.row for m in entry.measured]))
    for m in entry.measured:
        row = replace(m.row, errors=_short(m.row.errors))
        if row.status != "ok":
            yield replace(m, row=row)
        elif (row.num_tokens, row.candidate) in wanted:
            times = tuple(max(round(time, DECIMALS), 10.0**-DECIMALS) for time in row.times_us)
            kept = tuple((name, value) for name, value in row.timing if _keeps(name, value))
            row = replace(row, times_us=times, timing=kept)
            yield Measured(row, _short(m.summary))


def _short(figures: F) -> F:
    """A dataclass of numbers with fewer digits; None stays None."""
    if figures is None:
        return figures
    numbers: dict[str, Any] = {
        name: float(f"{value:.{DIGITS}g}")
        for name, value in asdict(figures).items()
        if isinstance(value, float)
    }
    return replace(figures, **numbers)


def _that_matter(
    decisions: Iterable[Decision], rows: Iterable[Measurement]
) -> Iterator[tuple[int, Candidate]]:
    """Token count and candidate of each measurement that keeps its samples."""
    for d in decisions:
        for candidate in (d.winner, d.runner_up, *open_rivals(d)):
            if candidate is not None:
                yield d.bucket.measured, candidate
    best: dict[tuple[int, str, str], Measurement] = {}
    for row in rows:
        if row.status == "ok":
            key = (row.num_tokens, row.candidate.backend, row.accuracy)
            if key not in best or _us(row) < _us(best[key]):
                best[key] = row
    for row in best.values():
        yield row.num_tokens, row.candidate


def _us(row: Measurement) -> float:
    found = samples.summary(row)
    return found.estimate_us if found else float("inf")


def _keeps(name: str, value: Scalar) -> bool:
    if name == "throttle":  # one figure a sample; all zero says nothing
        return isinstance(value, str) and bool(value.strip("0,. "))
    return name in KEPT
