"""Bounds on a paired log-ratio that hold however long one goes on sampling.

Two candidates are timed once in every round, in an order drawn anew for each round, so that the
sign of their log-ratio is a fair coin when neither is faster: whatever the machine does (drift,
clock states, bursts of load) hits either place of the round alike. Nothing else is assumed about
the noise. A bet on that coin multiplies its stake by ``2p`` for a sign that agrees and by
``2(1 - p)`` for one that does not; the mean over several ``p`` is a test martingale, which stays
below ``1 / alpha`` for ever with probability ``1 - alpha`` (Ville 1939; Shafer, "Testing by
betting", 2021; Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting",
2024; for quantiles Howard and Ramdas, "Sequential estimation of quantiles", 2022). One may
therefore look after every round and stop when it suits, which a fixed-sample interval forbids.
Inverting the bet over all thresholds gives an interval for the median log-ratio between two of the
sorted log-ratios.

A coin needs a dozen tosses even where one candidate takes ten times as long. Such gaps are found
by a second bet that uses the size of the noise seen in the race: a candidate's own successive
rounds differ by more than a level only so often (an upper confidence bound of that frequency is
used), so a rival that is slower by more than that level in each of a few rounds is slower. This
one assumes that the noise on one candidate is like the noise on another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from autosel.stats import margin_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Chances that the bettor believes in, equally much in each; all above one half.
_BELIEFS = np.array([0.53, 0.56, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 0.999])
#: Ratios, minus one, at which a gap is gross, from within noise of a GPU to that of a busy server.
GROSS = (0.05, 0.2, 1.0)
#: The gross bet's belief that a slower rival exceeds the level, and the least chance it grants the
#: noise: at 5 % a round multiplies the stake by 18, so that three or four rounds are needed.
_GROSS_BELIEF = 0.9
_GROSS_LEAST = 0.05
#: The frequency with which noise exceeds a level is bounded at this confidence.
_GROSS_CONFIDENCE = 0.95


def log_quantile(times_us: Sequence[float], quantile: float) -> float:
    """Log of the samples' quantile: what a block of samples counts as.

    As :func:`numpy.quantile` interpolates, without its cost for the few samples of a block.
    """
    ordered = sorted(times_us)
    place = quantile * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return math.log(ordered[below] + (ordered[above] - ordered[below]) * (place - below))


def log_wealth(agree: Ints | int, rounds: Ints | int) -> Floats:
    """Log of the bet after ``agree`` of ``rounds`` signs agreed; any shapes that broadcast."""
    hits = np.asarray(agree, dtype=np.float64)[..., None]
    misses = np.asarray(rounds, dtype=np.float64)[..., None] - hits
    logs = hits * np.log(2 * _BELIEFS) + misses * np.log(2 * (1 - _BELIEFS))
    top = logs.max(axis=-1)
    total: Floats = top + np.log(np.exp(logs - top[..., None]).mean(axis=-1))
    return total


@lru_cache(maxsize=4096)
def needed(rounds: int, alpha: float) -> int | None:
    """Fewest signs of ``rounds`` that must agree to reject the coin at ``alpha``; None: no way."""
    enough = np.flatnonzero(log_wealth(np.arange(rounds + 1), rounds) >= -math.log(alpha))
    return int(enough[0]) if enough.size else None


def gross_log_wealth(above: Ints, rounds: Ints, noise: float) -> Floats:
    """Log of the second bet; ``noise``: how often noise alone exceeds the level, at most."""
    chance = max(noise, _GROSS_LEAST)
    if chance >= _GROSS_BELIEF:
        return np.zeros(np.shape(above))
    below = rounds - above
    wealth: Floats = above * math.log(_GROSS_BELIEF / chance) + below * math.log(
        (1 - _GROSS_BELIEF) / (1 - chance)
    )
    return wealth


@lru_cache(maxsize=1 << 16)
def upper_frequency(hits: int, trials: int) -> float:
    """Upper confidence bound of a frequency (Chernoff); 1 where nothing was tried."""
    if trials == 0:
        return 1.0
    seen = hits / trials
    budget = -math.log(1 - _GROSS_CONFIDENCE) / trials
    low, high = seen, 1.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if _divergence(seen, middle) < budget else (low, middle)
    return high


def _divergence(p: float, q: float) -> float:
    """Kullback-Leibler divergence of two coins, in nats."""
    q = min(max(q, 1e-12), 1 - 1e-12)
    heads = p * math.log(p / q) if p > 0 else 0.0
    tails = (1 - p) * math.log((1 - p) / (1 - q)) if p < 1 else 0.0
    return heads + tails


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """Log-ratios of two candidates, one a round: positive where the first was slower.

    The same questions can be put to it as to :class:`autosel.stats.LogRatio`.
    """

    logs: tuple[float, ...]

    @property
    def log(self) -> float:
        """The median log-ratio."""
        return float(np.median(self.logs))

    @property
    def margin(self) -> float:
        return margin_of(self.log)

    @property
    def stderr(self) -> float:
        """About one standard error of the median, from the median absolute deviation."""
        if len(self.logs) < 2:
            return math.inf
        spread = float(np.median(np.abs(np.asarray(self.logs) - self.log)))
        return 1.2533 * 1.4826 * spread / math.sqrt(len(self.logs))

    def interval(self, confidence: float) -> tuple[float, float] | None:
        """Two-sided interval of :attr:`margin`, valid at any time; None with too few rounds."""
        count = needed(len(self.logs), (1 - confidence) / 2)
        if count is None:
            return None
        ordered = sorted(self.logs)
        low, high = ordered[len(ordered) - count], ordered[count - 1]
        return margin_of(low), margin_of(high)

    def exceeds(self, epsilon: float, confidence: float) -> bool:
        """Whether the ratio is above ``1 + epsilon``, one-sided at ``confidence``."""
        count = needed(len(self.logs), 1 - confidence)
        above = sum(log > math.log1p(epsilon) for log in self.logs)
        return count is not None and above >= count


def lower_bound(logs: Sequence[float], alpha: float) -> float | None:
    """One-sided lower bound of the median log-ratio at ``alpha``; None with too few rounds."""
    count = needed(len(logs), alpha)
    return None if count is None else sorted(logs)[len(logs) - count]
