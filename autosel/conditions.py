"""What a reader of a decision should know of the machine while it was measured, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autosel import samples, stats
from autosel.core import Measurement
from autosel.racing_bounds import log_quantile
from autosel.timing_nvml import throttled

#: Share of preempted samples, of time in which something waited for a processor, and of time that
#: the host gave to other guests, from which on the reason says that the machine was busy.
BUSY = 0.2
BUSY_PRESSURE = 0.5
BUSY_STEAL = 0.05
#: Rounds in a third of a race, and the ratio between its last and its first third, that show that a
#: candidate gets slower with every call.
LEAST_THIRD = 4
SLOWER = 0.03
#: Candidates that a clause names.
NAMED = 2


def words(measurements: Sequence[Measurement]) -> tuple[str, ...]:
    """A clause for each thing that makes these measurements less sure; none on a quiet machine."""
    found = []
    taken = sum(len(m.times_us) for m in measurements)
    spoiled = sum(samples.ranking(m).left_out for m in measurements)
    if spoiled > BUSY * taken:
        found.append(
            f"the machine was busy: {spoiled} of {taken} samples were preempted and do not count"
        )
    pressure, steal = (_most(measurements, name) for name in ("pressure_share", "steal_share"))
    if pressure > BUSY_PRESSURE:
        found.append(f"the machine was busy: processors were waited for {pressure:.0%} of the time")
    if steal > BUSY_STEAL:
        found.append(f"the host gave {steal:.0%} of the time to other machines")
    held_back = _most(measurements, "held_back_share")
    if held_back > BUSY_STEAL:
        found.append(f"a quota of processor time held it back for {held_back:.0%} of the time")
    reasons = sorted({why for m in measurements if (why := throttled(dict(m.timing)))})
    if reasons:
        found.append(f"clocks were lowered meanwhile ({'; '.join(reasons)})")
    others = max(map(_other_processes, measurements), default=0)
    if others:
        found.append(f"up to {others} other processes used the device meanwhile")
    launched = [m.candidate.key for m in measurements if _is_launched(m)]
    if launched and len(launched) < len(measurements):
        named = ", ".join(launched[:NAMED]) + (" and more" if len(launched) > NAMED else "")
        found.append(f"timed with its launches, since no graph can be captured: {named}")
    slower = [m.candidate.key for m in measurements if _slows_down(m, measurements)]
    if slower:
        found.append(f"got slower from round to round, unlike the others: {', '.join(slower)}")
    if any(dict(m.timing).get("cut") is True for m in measurements):
        found.append("timing was ended by the time budget")
    return tuple(found)


def _most(measurements: Sequence[Measurement], name: str) -> float:
    shares = (dict(m.timing).get(name) for m in measurements)
    return max((float(s) for s in shares if isinstance(s, int | float)), default=0.0)


def _other_processes(m: Measurement) -> int:
    text = dict(m.timing).get("other_processes")
    parts = text.split(",") if isinstance(text, str) else []
    return max((int(part) for part in parts if part.isdecimal()), default=0)


def _is_launched(m: Measurement) -> bool:
    """Whether it was to be captured in a graph and could not be."""
    timing = dict(m.timing)
    return timing.get("graph") is True and timing.get("captured") is False


def _slows_down(m: Measurement, measurements: Sequence[Measurement]) -> bool:
    """Whether every late round of ``m`` was slower than every early one, beside its rivals too.

    A leak or a cache that fills up; a machine that slows down does so for all.
    """
    quantile = stats.ranking_quantile(m.device.kind)
    race, blocks = samples.race_of(m), samples.rounds(m)
    if race is None or not _rises([log_quantile(times, quantile) for times in blocks if times]):
        return False
    rivals = [r for r in measurements if r is not m and samples.race_of(r) == race]
    paired = [ratio for r in rivals if (ratio := samples.paired(m, r)) is not None]
    return bool(paired) and all(_rises(ratio.logs) for ratio in paired)


def _rises(logs: Sequence[float]) -> bool:
    third = len(logs) // 3
    early, late = logs[:third], logs[-third:]
    return third >= LEAST_THIRD and min(late) > max(early) + math.log1p(SLOWER)
