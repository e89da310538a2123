"""Which of a measurement's samples rank it, and how two measurements compare.

A call that is preempted measures the scheduler. On a two-core server with a run queue of 12, calls
of one kernel took 0.13 to 0.22 ms when no thread of the process was preempted and 24 to 152 ms
when one was; fourteen of its 25 samples were of the second kind, so every quantile but the lowest
ranked by luck. Where the timer recorded involuntary context switches beside each sample, samples
that these may have spoiled are therefore left out of ranking (they stay stored). Which ones is
decided by the switches and not by the time, so that a slow kernel does not lose its slow samples.

Measurements of one race (``race`` in their timing) were taken in turns and are compared round by
round; those of a race of few rounds, of two sweeps or of unknown origin by bootstraps
(:mod:`autosel.stats`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from autosel import stats
from autosel.core import Measurement
from autosel.racing_bounds import PairedRatio, log_quantile
from autosel.racing_pace import PACE

#: What a preemption may cost: about one time slice of Linux's scheduler.
SLICE_US = 4000.0
#: Share of a sample that preemptions may have cost before it no longer ranks.
SPOILED = 0.05
#: Fewer rounds than these show nothing that would survive twenty reruns, whatever they hold
#: (:func:`autosel.racing_bounds.needed`), so they are compared as single samples are.
PAIRED_ROUNDS = 12


def spoiled(time_us: float, switches: float) -> bool:
    """Whether so many involuntary switches may have made a sample of this time useless."""
    return switches * SLICE_US > SPOILED * time_us


@dataclass(frozen=True, slots=True)
class Ranking:
    """The samples that rank a measurement, in order, with the sizes of their blocks.

    Where the device's pace changed during the race, ``times_us`` are at that of its first rounds.

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
    blocks = _blocks(m)
    keep = _kept(m)
    times_us = _at_first_pace(m, blocks)
    if not any(keep):
        sizes = tuple(size for size in blocks if size)
        return Ranking(times_us, sizes, len(times_us), False)
    kept = (sum(keep[start:end]) for start, end in _spans(blocks))
    return Ranking(
        tuple(itertools.compress(times_us, keep)),
        tuple(size for size in kept if size),
        keep.count(False),
        True,
    )


def race_of(m: Measurement) -> str | None:
    """The race that ``m`` was measured in, when its rounds are known."""
    race = dict(m.timing).get("race")
    return race if isinstance(race, str) and race and _blocks(m) else None


def rounds(m: Measurement) -> tuple[tuple[float, ...], ...]:
    """The undisturbed samples of each round of its race, in order; some rounds may have none."""
    keep = _kept(m)
    return tuple(
        tuple(itertools.compress(m.times_us[start:end], keep[start:end]))
        for start, end in _spans(_blocks(m))
    )


def summary(m: Measurement) -> stats.Summary | None:
    """The ranking samples in a few numbers; None unless ``m`` is correct and timed."""
    if m.status != "ok" or not m.times_us:
        return None
    return stats.summarize(ranking(m).times_us, stats.ranking_quantile(m.device.kind))


@lru_cache(maxsize=512)  # 32 kB each; a plan asks for the same candidate several times
def _estimate(
    times_us: tuple[float, ...], quantile: float, blocks: tuple[int, ...]
) -> stats.Estimate:
    return stats.estimate(times_us, quantile, blocks=blocks)


def estimate(m: Measurement) -> stats.Estimate:
    """The ranking samples' estimate, for comparing; AutoselError for samples that are no times."""
    found = ranking(m)
    quantile = stats.ranking_quantile(m.device.kind)
    result = _estimate(found.times_us, quantile, found.blocks)
    return result if found.clean else result.unsettled()


def paired(slow: Measurement, fast: Measurement) -> PairedRatio | None:
    """Log-ratios ``slow / fast`` over the rounds of one race; None when they share too few."""
    race = race_of(slow)
    if race is None or race != race_of(fast):
        return None
    quantile = stats.ranking_quantile(slow.device.kind)
    logs = []
    for a, b in zip(rounds(slow), rounds(fast), strict=False):
        # Equally many of both: a low quantile of more samples is lower.
        count = min(len(a), len(b))
        if count:
            logs.append(log_quantile(a[:count], quantile) - log_quantile(b[:count], quantile))
    return PairedRatio(tuple(logs)) if len(logs) >= PAIRED_ROUNDS else None


def _kept(m: Measurement) -> list[bool]:
    switches = _numbers(dict(m.timing).get("switches"), len(m.times_us))
    pairs = itertools.zip_longest(m.times_us, switches, fillvalue=0.0)
    return [not spoiled(time_us, count) for time_us, count in pairs]


def _at_first_pace(m: Measurement, blocks: Sequence[int]) -> tuple[float, ...]:
    """The samples divided by the pace of their round (:mod:`autosel.racing_pace`)."""
    factors = _numbers(dict(m.timing).get(PACE), len(blocks))
    if not factors or min(factors) <= 0:
        return m.times_us
    of_each = itertools.chain.from_iterable(map(itertools.repeat, factors, blocks))
    return tuple(time_us / factor for time_us, factor in zip(m.times_us, of_each, strict=True))


def _spans(blocks: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(itertools.accumulate(blocks, initial=0)))


def _blocks(m: Measurement) -> tuple[int, ...]:
    text = dict(m.timing).get("blocks")
    parts = text.split(",") if isinstance(text, str) else []
    sizes = tuple(int(part) for part in parts if part.isdecimal())
    return sizes if len(sizes) == len(parts) and sum(sizes) == len(m.times_us) else ()


def _numbers(text: object, count: int) -> tuple[float, ...]:
    parts = text.split(",") if isinstance(text, str) else []
    try:
        numbers = tuple(map(float, parts))
    except ValueError:
        return ()
    known = len(numbers) == count and all(map(math.isfinite, numbers))
    return numbers if known else ()
