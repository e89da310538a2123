"""Which of a measurement's samples rank it: those in which it had the processor to itself.

A call that is preempted measures the scheduler. On a two-core server with a run queue of 12, calls
of one kernel took 0.13 to 0.22 ms when no thread of the process was preempted and 24 to 152 ms
when one was; fourteen of its 25 samples were of the second kind, so every quantile but the lowest
ranked by luck. Where the timer recorded involuntary context switches beside each sample, samples
that these may have spoiled are therefore left out of ranking (they stay stored). Which ones is
decided by the switches and not by the time, so that a slow kernel does not lose its slow samples.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from autosel import stats
from autosel.core import Measurement

#: What a preemption may cost: about one time slice of Linux's scheduler.
SLICE_US = 4000.0
#: Share of a sample that preemptions may have cost before it no longer ranks.
SPOILED = 0.05


@dataclass(frozen=True, slots=True)
class Ranking:
    """The samples that rank a measurement, in order, with the sizes of their blocks.

    ``left_out`` counts the preempted ones. Where all were, they all stand here and ``clean`` is
    False: the measurement then bounds the candidate's time from above and settles nothing.
    ``blocks`` is empty where it is not recorded.
    """

    times_us: tuple[float, ...]
    blocks: tuple[int, ...]
    left_out: int
    clean: bool


def ranking(m: Measurement) -> Ranking:
    """The samples of ``m`` that rank it; ``blocks`` and ``switches`` come from its timing."""
    facts = dict(m.timing)
    blocks = _blocks(facts.get("blocks"), len(m.times_us))
    switches = _numbers(facts.get("switches"), len(m.times_us))
    pairs = itertools.zip_longest(m.times_us, switches, fillvalue=0.0)
    keep = [count * SLICE_US <= SPOILED * time_us for time_us, count in pairs]
    if not any(keep):
        return Ranking(m.times_us, blocks, len(m.times_us), False)
    ends = list(itertools.accumulate(blocks, initial=0))
    kept = (sum(keep[start:end]) for start, end in itertools.pairwise(ends))
    return Ranking(
        tuple(itertools.compress(m.times_us, keep)),
        tuple(size for size in kept if size),
        keep.count(False),
        True,
    )


def summary(m: Measurement) -> stats.Summary | None:
    """The ranking samples in a few numbers; None unless ``m`` is correct and timed."""
    if m.status != "ok" or not m.times_us:
        return None
    return stats.summarize(ranking(m).times_us, stats.ranking_quantile(m.device.kind))


def estimate(m: Measurement) -> stats.Estimate:
    """The ranking samples' estimate, for comparing; AutoselError for samples that are no times."""
    found = ranking(m)
    quantile = stats.ranking_quantile(m.device.kind)
    result = stats.estimate(found.times_us, quantile, blocks=found.blocks)
    return result if found.clean else result.unsettled()


def _blocks(text: object, samples: int) -> tuple[int, ...]:
    parts = text.split(",") if isinstance(text, str) else []
    sizes = tuple(int(part) for part in parts if part.isdecimal())
    return sizes if sum(sizes) == samples else ()


def _numbers(text: object, samples: int) -> tuple[float, ...]:
    parts = text.split(",") if isinstance(text, str) else []
    try:
        numbers = tuple(map(float, parts))
    except ValueError:
        return ()
    known = len(numbers) == samples and all(map(math.isfinite, numbers))
    return numbers if known else ()
