"""What changed between two sets of results: decisions that flip, times, what no longer works.

Cells are compared where both sides measured the same layer, routing, device and token count. The
time of what a side *chooses* is what its users get, so that is what is compared: the second's over
the first's, with a 95 % interval from both sides' samples, as of two independent runs. A side
without samples (a published table, a pack that keeps none) gives a ratio without an interval.

**Regression.** A cell regresses when what the second chooses is slower than what the first chose by
more than the threshold, and the interval, where there is one, lies wholly above no change; or when
the second has nothing to choose where the first had. Noise alone is no regression, however large
the ratio looks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from autosel import records, samples
from autosel.core import Candidate, Decision, Measurement
from autosel.errors import AutoselError, field_error
from autosel.evidence import Evidence
from autosel.identity import (
    Difference,
    hardware_differences,
    problem_differences,
    version_differences,
)

Kind = Literal["same", "flip", "lost", "gained", "missing"]

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Cell:
    """One layer and token count on both sides.

    kind      ``same``: the same candidate is chosen. ``flip``: another one. ``lost``: nothing is
              any more. ``gained``: something is now. ``missing``: the second did not measure it.
    ratio     the second's time over the first's, ``interval`` its 95 % interval; None where a side
              has no time, the interval also where a side has no samples
    settled   whether the interval excludes no change; None without an interval
    """

    layer: str
    device: str
    routing: str
    num_tokens: int
    kind: Kind
    first: Candidate | None = None
    second: Candidate | None = None
    first_us: float | None = None
    second_us: float | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    settled: bool | None = None
    regression: bool = False

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        for name in ("first", "second"):
            found: Candidate | None = getattr(self, name)
            data[name] = (
                None if found is None else {**records.candidate_dict(found), "key": found.key}
            )
        return data


@dataclass(frozen=True, slots=True)
class StatusChange:
    """A candidate that ended otherwise: ``ok`` before and ``wrong`` now, for example."""

    layer: str
    num_tokens: int
    candidate: Candidate
    first: str
    second: str
    reason: str


@dataclass(frozen=True, slots=True)
class ResultDiff:
    """Everything that differs. ``machines`` are pairs' differing fields of device, software and
    way of timing, ``only_first`` and ``only_second`` layers that one side alone has.
    """

    cells: tuple[Cell, ...]
    statuses: tuple[StatusChange, ...]
    machines: tuple[tuple[str, tuple[Difference, ...]], ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    threshold: float

    @property
    def regressions(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.regression)

    @property
    def flips(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.kind == "flip")

    @property
    def missing(self) -> int:
        """Cells and layers that the first has and the second lacks."""
        return len(self.only_first) + sum(cell.kind == "missing" for cell in self.cells)

    @property
    def mean_ratio(self) -> float | None:
        """Geometric mean of the ratios; None where there is none."""
        logs = [math.log(cell.ratio) for cell in self.cells if cell.ratio]
        return math.exp(sum(logs) / len(logs)) if logs else None


def compare_results(
    first: Sequence[Evidence],
    second: Sequence[Evidence],
    *,
    threshold: float = 0.05,
    any_device: bool = False,
) -> ResultDiff:
    """Compare ``second`` with ``first``, the baseline.

    threshold   slow-down from which on a cell regresses: 0.05 is 5 %
    any_device  also pair layers measured on different devices

    Layers are paired on the same hardware, else on a device of the same name, whatever the software
    (that it differs is told). Raises AutoselError when no cell can be compared: a gate that
    compares nothing must not pass.
    """
    if not (math.isfinite(threshold) and threshold >= 0):
        raise AutoselError(field_error("diff", "threshold", threshold, "a number of at least 0"))
    pairs, only_first, only_second = _paired(first, second, any_device)
    cells = tuple(cell for one, two in pairs for cell in _cells(one, two, threshold))
    if not any(cell.kind != "missing" for cell in cells):
        what, expected = "layers and routing in both", "at least one, on the same device"
        if pairs:
            what = "decisions of the same layer at the same token count"
            expected = "at least one that either side has"
        found = f"{_known(first)} against {_known(second)}"
        raise AutoselError(field_error("diff", what, found, expected))
    machines: list[tuple[str, tuple[Difference, ...]]] = []
    for one, two in pairs:
        fields = (
            *hardware_differences(one.device, two.device),
            *version_differences(one.device, two.device),
            *_timing_differences(one, two),
        )
        # An unnamed device differs from itself; that is for look-ups, not for telling changes.
        real = tuple(item for item in fields if item.wanted != item.stored)
        told = (one.device.name or "(no name)", real)
        if real and told not in machines:
            machines.append(told)
    return ResultDiff(
        cells,
        tuple(change for one, two in pairs for change in _statuses(one, two)),
        tuple(machines),
        tuple(f"{one.label}, {one.routing} routing, {one.device.name}" for one in only_first),
        tuple(f"{one.label}, {one.routing} routing, {one.device.name}" for one in only_second),
        threshold,
    )


def _timing_differences(one: Evidence, two: Evidence) -> Iterator[Difference]:
    """In how the times were taken: another clock or page size is another measurement."""
    left, right = (records.newest_mode(side.measurements) for side in (one, two))
    if left is not None and right is not None:
        for name in sorted(left.keys() | right.keys()):
            yield Difference(f"timing {name}", left.get(name), right.get(name))


def _known(found: Sequence[Evidence]) -> str:
    names = sorted(
        {
            f"{one.label}, {one.routing} routing, on {one.device.name or 'an unnamed device'}"
            f" at {', '.join(map(str, one.token_counts)) or 'no'} tokens"
            for one in found
        }
    )
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) or "nothing") + more


def _paired(
    first: Sequence[Evidence], second: Sequence[Evidence], any_device: bool
) -> tuple[list[tuple[Evidence, Evidence]], list[Evidence], list[Evidence]]:
    """Pairs of the same layer and routing, the nearest devices first; and what is left over."""
    pairs: list[tuple[Evidence, Evidence]] = []
    left, right = list(first), list(second)
    ranks = range(4 if any_device else 3)
    for rank in ranks:
        for one in list(left):
            two = next((two for two in right if _rank(one, two) <= rank), None)
            if two is not None:
                pairs.append((one, two))
                left.remove(one)
                right.remove(two)
    pairs.sort(key=lambda pair: first.index(pair[0]))
    return pairs, left, right


def _rank(one: Evidence, two: Evidence) -> int:
    """0: same device and software. 1: same device. 2: same name. 3: another. 9: another layer."""
    if one.routing != two.routing or problem_differences(one.problem, two.problem):
        return 9
    if one.device == two.device:
        return 0
    same = [d for d in hardware_differences(one.device, two.device) if d.wanted != d.stored]
    if not same:
        return 1
    named = (one.device.kind, one.device.name) == (two.device.kind, two.device.name)
    return 2 if named else 3


def _cells(one: Evidence, two: Evidence, threshold: float) -> Iterator[Cell]:
    for outcome in one.outcomes:
        count = outcome.bucket.measured
        place = (one.label, one.device.name, one.routing, count)
        other = next((o for o in two.outcomes if o.bucket.measured == count), None)
        before = outcome if isinstance(outcome, Decision) else None
        after = other if isinstance(other, Decision) else None
        first_us = before.winner_us if before else None
        winner = before.winner if before else None
        if other is None:
            yield Cell(*place, "missing", winner, None, first_us)
        elif before is None and after is None:
            continue
        elif after is None:
            yield Cell(*place, "lost", winner, None, first_us, regression=True)
        elif before is None:
            yield Cell(*place, "gained", None, after.winner, None, after.winner_us)
        else:
            yield _compared(place, (one, before), (two, after), threshold)


def _compared(
    place: tuple[str, str, str, int],
    first: tuple[Evidence, Decision],
    second: tuple[Evidence, Decision],
    threshold: float,
) -> Cell:
    (one, before), (two, after) = first, second
    ratio = after.winner_us / before.winner_us
    interval = None
    old, new = _row(one, before, place[3]), _row(two, after, place[3])
    if old is not None and new is not None and old.times_us == new.times_us:
        ratio, interval = 1.0, (1.0, 1.0)  # the same samples, not two runs
    elif old is not None and new is not None:
        # Two runs: their rounds do not belong together, so they are not paired.
        log = samples.estimate(new).over(samples.estimate(old))
        ratio, found = 1 + log.margin, log.interval(CONFIDENCE)
        interval = None if found is None else (1 + found[0], 1 + found[1])
    settled = None if interval is None else interval[0] > 1 or interval[1] < 1
    sampled = old is not None and new is not None
    # Samples too few for an interval settle nothing; without samples there is only the ratio.
    clear = interval[0] > 1 if interval is not None else not sampled
    return Cell(
        *place,
        "same" if before.winner == after.winner else "flip",
        before.winner, after.winner, before.winner_us, after.winner_us, ratio, interval, settled,
        regression=ratio > 1 + threshold and clear,
    )  # fmt: skip


def _row(one: Evidence, decision: Decision, num_tokens: int) -> Measurement | None:
    """The winner's samples; None where they were not kept."""
    found = {m.candidate: m for m in one.at(num_tokens)}.get(decision.winner)
    usable = found is not None and found.status == "ok" and found.times_us and not one.figures
    return found if usable else None


def _statuses(one: Evidence, two: Evidence) -> Iterable[StatusChange]:
    for count in one.token_counts:
        now = {m.candidate: m for m in two.at(count)}
        for m in one.at(count):
            other = now.get(m.candidate)
            if other is not None and other.status != m.status:
                yield StatusChange(
                    one.label, count, m.candidate, m.status, other.status, other.reason
                )
