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

**How two candidates compare.** The log-ratio of their estimates, with the standard error of a
seeded bootstrap over samples (percentile spread, so that a few wild resamples do not widen it)
and Student's t for few samples. Candidates with equally many samples are resampled with the same
indices: where samples were interleaved, drift that both suffered cancels; where they were not,
the standard error is the same as for independent indices. See Efron and Tibshirani,
"An Introduction to the Bootstrap" (1993), chapters 6 and 12.
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
#: Samples resampled at once, so that long lists do not need gigabytes.
_CHUNK = 1_000_000


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


@dataclass(frozen=True, slots=True)
class Estimate:
    """One candidate's ranking figure with its bootstrap replicas, kept as logarithms.

    ``replicas`` is float64 ``[RESAMPLES]``. Equal ``samples`` means shared resampling indices.
    """

    samples: int
    log: float
    replicas: Floats

    @property
    def us(self) -> float:
        return math.exp(self.log)

    def over(self, other: Estimate) -> LogRatio:
        """``log(self / other)``: positive when this candidate is slower than ``other``."""
        if self is other:
            return LogRatio(0.0, 0.0, max(self.samples - 1, 0))
        low, high = np.quantile(self.replicas - other.replicas, [0.05, 0.95])
        stderr = float(high - low) / (2 * _NORMAL_95)
        return LogRatio(self.log - other.log, stderr, min(self.samples, other.samples) - 1)


#: 95 % quantile of the normal distribution: half of the central 90 % in standard errors.
_NORMAL_95 = 1.6448536269514722


@dataclass(frozen=True, slots=True)
class LogRatio:
    """A log-ratio of two estimates, its standard error and the degrees of freedom behind it."""

    log: float
    stderr: float
    dof: int

    @property
    def margin(self) -> float:
        """The ratio minus one."""
        return math.expm1(self.log)

    def half_width(self, confidence: float) -> float:
        """Half of the two-sided interval, in logarithms; infinite with a single sample."""
        if self.dof < 1:
            return math.inf
        return self.stderr * student_t(0.5 + confidence / 2, self.dof)

    def interval(self, confidence: float) -> tuple[float, float] | None:
        """Two-sided interval of :attr:`margin`, or None when too few samples say nothing."""
        half = self.half_width(confidence)
        # A log-ratio beyond 700 no longer has an exponential.
        if self.log + half > 700:
            return None
        return math.expm1(self.log - half), math.expm1(self.log + half)

    def exceeds(self, epsilon: float, confidence: float) -> bool:
        """Whether the whole interval lies above a ratio of ``1 + epsilon``."""
        return self.log - self.half_width(confidence) > math.log1p(epsilon)


def estimate(times_us: Sequence[float], quantile: float, seed: int = 0) -> Estimate:
    """The ``quantile`` of ``times_us`` with its bootstrap replicas. Same input, same answer."""
    times = checked(times_us)
    # One stream for each sample count, so that equal counts share their indices.
    rng = np.random.default_rng((seed, times.size))
    rows = max(1, _CHUNK // times.size)
    replicas = np.empty(RESAMPLES)  # [RESAMPLES]
    for start in range(0, RESAMPLES, rows):
        stop = min(start + rows, RESAMPLES)
        indices = rng.integers(0, times.size, (stop - start, times.size))
        replicas[start:stop] = np.quantile(times[indices], quantile, axis=1)
    return Estimate(times.size, math.log(np.quantile(times, quantile)), np.log(replicas))


def compare(
    slow_us: Sequence[float], fast_us: Sequence[float], quantile: float, seed: int = 0
) -> LogRatio:
    """Log-ratio ``slow / fast`` of two sample lists."""
    return estimate(slow_us, quantile, seed).over(estimate(fast_us, quantile, seed))


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
