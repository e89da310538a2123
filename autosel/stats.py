"""What a list of timings says: a robust estimate, its spread, and how two candidates compare.

**Which quantile ranks.** Noise only ever makes a run slower, so the low end of the samples is
nearest to the truth. On accelerators under CUDA graphs the noise is small and the median is the
steadier figure. On CPUs it is not: on a two-core server with a run queue of 5 to 10, ten repeats
of one decision among six backends (20 samples each) ended, at one token and sampled backend by
backend, with a mean regret of 56 % when ranked by the mean, 58 % by the median, 32 % by the 20 %
quantile and 7 % by the minimum; at 16 tokens with 70, 73, 16 and 12 %. The worst regrets were
134, 134, 134 and 8 % at one token and 418, 418, 23 and 23 % at 16. The minimum ranked best in
that test, but it keeps falling as samples are added, so a candidate that was sampled more would
look faster, and it has no usable confidence interval. The 20 % quantile of many short bursts is
the lowest quantile that two candidates with different sample counts can still be compared by.

**How two candidates compare.** By the log-ratio of their estimates, with a standard error from
seeded bootstraps (percentile spread, so that a few wild resamples do not widen it) and Student's t
for few samples. Candidates with equally many samples, or blocks, are resampled with the same
indices: where they took turns, drift that both suffered cancels; where they did not, the standard
error is that of independent indices. Samples of one block resemble each other more than those of
another (the machine's clock, its memory, its neighbours), so where blocks are known they are also
resampled whole, and the larger standard error counts, with the degrees of freedom that its two
parts leave (Satterthwaite, "An Approximate Distribution of Estimates of Variance Components",
1946). In simulations of two equal candidates in 5 blocks of 10 samples, with block effects of 1.5
times the sample noise, a "95 %" interval from single samples covered 56 % of the time and this one
92 %; without block effects both cover 95 % and are equally narrow. See Efron and Tibshirani, "An
Introduction to the Bootstrap" (1993), chapters 6, 8 and 12.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from autosel.errors import AutoselError, field_error

Floats = npt.NDArray[np.float64]

#: Quantile that ranks, by device kind; every other kind uses the median.
RANKING_QUANTILE = {"cpu": 0.2}
MEDIAN = 0.5
RESAMPLES = 2000
#: Shorter than a clock cycle takes: no call ever took less, whatever a file says.
LEAST_US = 1e-3
#: A logarithm that is larger has no exponential.
_MOST_LOG = 700.0
#: Samples resampled at once, so that long lists do not need gigabytes.
_CHUNK = 1_000_000
#: Fewer blocks say nothing about how blocks vary.
_MIN_BLOCKS = 3
#: 95 % quantile of the normal distribution: half of the central 90 % in standard errors.
_NORMAL_95 = 1.6448536269514722


def ranking_quantile(device_kind: str) -> float:
    """The quantile of the samples that ranks candidates on this kind of device."""
    return RANKING_QUANTILE.get(device_kind, MEDIAN)


def checked(times_us: Sequence[float]) -> Floats:
    """The samples as float64 ``[n]``; AutoselError unless all are finite, positive and n >= 1."""
    times = np.asarray(times_us, dtype=np.float64)
    if times.ndim != 1 or times.size == 0:
        raise AutoselError(field_error("times_us", "samples", times.size, "at least 1"))
    bad = ~(np.isfinite(times) & (times > 0))
    if bad.any():
        found = ", ".join(f"{value:g}" for value in times[bad][:3])
        raise AutoselError(field_error("times_us", "samples", found, "finite and above 0"))
    return times


@dataclass(frozen=True, slots=True)
class Summary:
    """Samples in a few numbers, all in microseconds: ``estimate_us`` is what ranks.

    ``low_us`` and ``high_us`` are the quartiles, so ``high_us - low_us`` is the spread (IQR).
    """

    samples: int
    quantile: float
    estimate_us: float
    min_us: float
    low_us: float
    median_us: float
    high_us: float

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        return (self.high_us - self.low_us) / self.median_us


def summarize(times_us: Sequence[float], quantile: float) -> Summary:
    """Summary of at least one sample; AutoselError if one is not finite and positive."""
    times = checked(times_us)
    at = np.quantile(times, [quantile, 0.0, 0.25, 0.5, 0.75])
    estimate, low, q1, median, q3 = map(float, at)
    return Summary(times.size, quantile, estimate, low, q1, median, q3)


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """One candidate's ranking figure with its bootstrap replicas, kept as logarithms.

    ``replicas`` resample single samples, float64 ``[RESAMPLES]``; ``block_replicas`` whole blocks,
    None where there are too few blocks to tell.
    """

    samples: int
    log: float
    replicas: Floats
    blocks: int = 0
    block_replicas: Floats | None = None

    @property
    def us(self) -> float:
        return math.exp(min(self.log, _MOST_LOG))

    def unsettled(self) -> Estimate:
        """The same figure without any claim to precision, as if from a single sample."""
        return Estimate(1, self.log, self.replicas)

    def over(self, other: Estimate) -> LogRatio:
        """``log(self / other)``: positive when this candidate is slower than ``other``."""
        log = self.log - other.log
        dof = min(self.samples, other.samples) - 1
        stderr = _stderr(self.replicas - other.replicas)
        if self.block_replicas is None or other.block_replicas is None or dof < 1:
            return LogRatio(log, stderr, dof)
        blocks = min(self.blocks, other.blocks)
        # Resampled blocks vary about the mean of the blocks there are, not about the truth.
        inflate = math.sqrt(blocks / (blocks - 1))
        whole = _stderr(self.block_replicas - other.block_replicas) * inflate
        if whole <= stderr:
            return LogRatio(log, stderr, dof)
        between = whole**2 - stderr**2
        freedom = whole**4 / (between**2 / (blocks - 1) + stderr**4 / dof)
        return LogRatio(log, whole, max(blocks - 1, min(dof, int(freedom))))


def margin_of(log: float) -> float:
    """The ratio minus one, of a log-ratio of any size."""
    return math.expm1(min(log, _MOST_LOG))


def _stderr(differences: Floats) -> float:
    """Standard error from bootstrap differences ``[RESAMPLES]``: their central 90 %."""
    low, high = np.quantile(differences, [0.05, 0.95])
    return float(high - low) / (2 * _NORMAL_95)


@dataclass(frozen=True, slots=True)
class LogRatio:
    """A log-ratio of two estimates, its standard error and the degrees of freedom behind it."""

    log: float
    stderr: float
    dof: int

    @property
    def margin(self) -> float:
        """The ratio minus one."""
        return margin_of(self.log)

    def half_width(self, confidence: float) -> float:
        """Half of the two-sided interval, in logarithms; infinite with a single sample."""
        if self.dof < 1:
            return math.inf
        return self.stderr * student_t(0.5 + confidence / 2, self.dof)

    def interval(self, confidence: float) -> tuple[float, float] | None:
        """Two-sided interval of :attr:`margin`, or None when too few samples say nothing."""
        half = self.half_width(confidence)
        if self.log + half > _MOST_LOG:
            return None
        return math.expm1(self.log - half), math.expm1(self.log + half)

    def exceeds(self, epsilon: float, confidence: float) -> bool:
        """Whether the whole interval lies above a ratio of ``1 + epsilon``."""
        return self.log - self.half_width(confidence) > math.log1p(epsilon)


def estimate(
    times_us: Sequence[float], quantile: float, seed: int = 0, blocks: Sequence[int] = ()
) -> Estimate:
    """The ``quantile`` of ``times_us`` with its bootstrap replicas. Same input, same answer.

    ``blocks`` are the sizes of the blocks that the samples were taken in, in order; they must add
    up to the number of samples.
    """
    times = checked(times_us)
    if blocks and (sum(blocks) != times.size or min(blocks) < 1):
        raise AutoselError(
            field_error("blocks", "sizes", list(blocks), f"at least 1 each, {times.size} in all")
        )
    singles = _resample(times[None, :], times.size, quantile, seed)
    whole = None
    if len(blocks) >= _MIN_BLOCKS:
        whole = _resample(_by_block(times, blocks), len(blocks), quantile, seed)
    log = math.log(np.quantile(times, quantile))
    return Estimate(times.size, log, singles, len(blocks), whole)


def compare(
    slow_us: Sequence[float],
    fast_us: Sequence[float],
    quantile: float,
    seed: int = 0,
    blocks: Sequence[int] = (),
) -> LogRatio:
    """Log-ratio ``slow / fast`` of two sample lists taken in the same ``blocks``."""
    slow = estimate(slow_us, quantile, seed, blocks)
    return slow.over(estimate(fast_us, quantile, seed, blocks))


def _by_block(times: Floats, blocks: Sequence[int]) -> Floats:
    """Samples as ``[longest block, blocks]``; shorter blocks repeat some to weigh the same."""
    longest = max(blocks)
    columns = []
    start = 0
    for size in blocks:
        columns.append(times[start + np.arange(longest) * size // longest])
        start += size
    return np.stack(columns, axis=1)


def _resample(table: Floats, count: int, quantile: float, seed: int) -> Floats:
    """Log of the quantile of ``table[:, drawn]`` for ``[RESAMPLES]`` draws of ``count`` columns."""
    # One stream for each count, so that equal counts share their draws.
    rng = np.random.default_rng((seed, count))
    rows = max(1, _CHUNK // table.size)
    replicas = np.empty(RESAMPLES)
    for start in range(0, RESAMPLES, rows):
        stop = min(start + rows, RESAMPLES)
        drawn = rng.integers(0, count, (stop - start, count))
        samples = table[:, drawn].transpose(1, 0, 2).reshape(stop - start, -1)  # [rows, samples]
        replicas[start:stop] = _row_quantiles(samples, quantile)
    return np.log(replicas)


def _row_quantiles(table: Floats, quantile: float) -> Floats:
    """``np.quantile(table, quantile, axis=1)``; sorts ``table`` in place.

    Several times faster for many short rows, and deciding spends its time here.
    """
    table.sort(axis=1)
    place = quantile * (table.shape[1] - 1)
    below = int(place)
    above = min(below + 1, table.shape[1] - 1)
    found: Floats = table[:, below] + (table[:, above] - table[:, below]) * (place - below)
    return found


@lru_cache(maxsize=256)
def student_t(probability: float, dof: int) -> float:
    """Quantile of Student's t for ``probability`` in [0.5, 1) and ``dof >= 1``.

    With ``t = sqrt(dof) * tan(u)`` the density becomes ``cos(u) ** (dof - 1)``, which is smooth
    on ``[0, pi/2]``: it is integrated by the trapezoid rule and inverted by interpolation
    (relative error below 1e-5 up to probability 0.9999).
    """
    u = np.linspace(0.0, math.pi / 2, 200_001)
    density: Any = np.cos(u) ** (dof - 1)
    mass = np.concatenate(([0.0], np.cumsum((density[1:] + density[:-1]) / 2)))
    wanted = (2 * probability - 1) * mass[-1]
    return math.sqrt(dof) * math.tan(float(np.interp(wanted, mass, u)))
