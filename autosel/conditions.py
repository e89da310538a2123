"""What a reader of a decision should know of the machine while it was measured, in words."""

from __future__ import annotations

from collections.abc import Sequence

from autosel import samples
from autosel.core import Measurement
from autosel.timing_nvml import throttled

#: Share of preempted samples, of time in which something waited for a processor, and of time that
#: the host gave to other guests, from which on the reason says that the machine was busy.
BUSY = 0.2
BUSY_PRESSURE = 0.5
BUSY_STEAL = 0.05


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
    reasons = sorted({why for m in measurements if (why := throttled(dict(m.timing)))})
    if reasons:
        found.append(f"clocks were lowered meanwhile ({'; '.join(reasons)})")
    if any(dict(m.timing).get("cut") is True for m in measurements):
        found.append("timing was ended by the time budget")
    return tuple(found)


def _most(measurements: Sequence[Measurement], name: str) -> float:
    shares = (dict(m.timing).get(name) for m in measurements)
    return max((float(s) for s in shares if isinstance(s, int | float)), default=0.0)
