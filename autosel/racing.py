"""Who is still in the race: rounds of samples in, eliminations out. No clock, no device.

Every round gives each candidate in the race a block of samples. A block counts as the logarithm of
its ranking quantile, taken over equally many undisturbed samples of everyone in that round, since
a low quantile of more samples is lower. Candidates are compared pair by pair over the rounds that
both ran in (:mod:`autosel.racing_bounds`), so what a round did to both cancels, and nobody is
compared with a time of the day at which he did not run.

* A candidate is **eliminated** as soon as some rival is shown to be faster by more than half of
  ``epsilon`` (:data:`SEPARATES`). It keeps its samples.
* The race is **settled** when all that remain are shown to be within ``epsilon`` of each other:
  any of them may be chosen, and :mod:`autosel.decide` does so by an order without timings.

The half leaves no gap at which a race could go on for ever: whatever the true ratio, one of the two
can be shown. Wrong eliminations have half of ``1 - confidence``, divided by :data:`RERUNS` so that
twenty reruns or twenty ranks agree, and wrong settlements the other half; each is divided among the
rivals (union bound). Successive elimination is Even-Dar, Mannor and Mansour, "Action Elimination
and Stopping Conditions for the Multi-Armed Bandit", 2006.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from autosel.errors import AutoselError, field_error
from autosel.racing_bounds import (
    GROSS,
    Floats,
    gross_log_wealth,
    log_quantile,
    log_wealth,
    lower_bound,
    upper_frequency,
)
from autosel.stats import margin_of

K = TypeVar("K", bound=Hashable)

EPSILON = 0.01
CONFIDENCE = 0.95
#: A rival is slower when it is by more than this share of epsilon.
SEPARATES = 0.5
#: A 95 % statement is wrong once in twenty tunings, so some of twenty reruns would disagree.
RERUNS = 20


@dataclass(frozen=True, slots=True)
class Eliminated(Generic[K]):
    """Who was eliminated by whom, after how many samples, and the least it is slower by."""

    by: K
    rounds: int
    samples: int
    at_least: float

    @property
    def text(self) -> str:
        percent = f"{100 * self.at_least:.3g} %"
        return f"eliminated after {self.samples} samples: slower by at least {percent}"


class Race(Generic[K]):
    """Candidates on their way through the rounds.

    classes   who competes with whom: only candidates of one class eliminate each other, so that a
              candidate that may not be chosen (8-bit activations) ends nobody's race
    quantile  of a block's samples, that ranks
    """

    def __init__(
        self,
        keys: Sequence[K],
        quantile: float,
        *,
        classes: Mapping[K, Hashable] | None = None,
        epsilon: float = EPSILON,
        confidence: float = CONFIDENCE,
    ) -> None:
        if not (0 < confidence < 1 and epsilon > 0):
            found = f"confidence {confidence}, epsilon {epsilon}"
            raise AutoselError(field_error("race", "limits", found, "in (0, 1) and above 0"))
        self.keys = list(dict.fromkeys(keys))
        self.eliminated: dict[K, Eliminated[K]] = {}
        self._quantile = quantile
        self._place = {key: place for place, key in enumerate(self.keys)}
        count = len(self.keys)
        groups = [None if classes is None else classes[key] for key in self.keys]
        self._rivals = np.array(
            [[a == b and i != j for j, b in enumerate(groups)] for i, a in enumerate(groups)],
            dtype=bool,
        ).reshape(count, count)
        sizes = np.maximum(self._rivals.sum(axis=1), 1)  # [K] rivals of each
        alpha = 1 - confidence
        # Half for eliminations, and half of that for each of the two ways to find one.
        self._alpha = alpha / (4 * RERUNS * sizes)
        self._settles = np.log(2 * sizes / alpha)
        self._slower = math.log1p(SEPARATES * epsilon)
        self._within = math.log1p(epsilon)
        self._rows: list[Floats] = []  # log of each block's quantile, nan where there is none
        self._rounds = np.zeros((count, count), dtype=np.int64)  # that both ran in
        self._above = np.zeros((count, count), dtype=np.int64)  # first slower than second
        self._near = np.zeros((count, count), dtype=np.int64)  # not slower by epsilon
        self._gross = np.zeros((len(GROSS), count, count), dtype=np.int64)
        self._noise = [[0, 0] for _ in GROSS]  # successive rounds beyond a level, and all
        self._last = np.full(count, np.nan)
        self._samples = np.zeros(count, dtype=np.int64)

    @property
    def alive(self) -> list[K]:
        return [key for key in self.keys if key not in self.eliminated]

    @property
    def rounds(self) -> int:
        return len(self._rows)

    def add(self, blocks: Mapping[K, Sequence[float]], eliminate: bool = True) -> list[K]:
        """One round's undisturbed samples, in microseconds, of whoever ran; who is now out."""
        ran = {key: times for key, times in blocks.items() if len(times) and _are_times(times)}
        row = np.full(len(self.keys), np.nan)
        if ran:
            count = min(map(len, ran.values()))
            for key, times in ran.items():
                place = self._place[key]
                self._samples[place] += len(times)
                row[place] = log_quantile(times[:count], self._quantile)
        self._rows.append(row)
        self._count(row)
        return self._eliminate() if eliminate and len(self.keys) > 1 else []

    def withdraw(self, key: K) -> None:
        """``key`` turned out not to be usable: whom it eliminated is in the race again."""
        self._rivals[self._place[key], :] = self._rivals[:, self._place[key]] = False
        self.eliminated = {k: out for k, out in self.eliminated.items() if out.by != key}

    def settled(self) -> bool:
        """Whether all that remain are shown to be within epsilon of each other."""
        return not self.contested(self.alive)

    def contested(self, among: Sequence[K]) -> list[K]:
        """Those that are not yet shown to be within epsilon of everyone in ``among``."""
        if not among:
            return []
        here = np.ix_(*[[self._place[key] for key in among]] * 2)
        wealth = log_wealth(self._near[here], self._rounds[here])
        open_pairs = (wealth < self._settles[here[0]]) & self._rivals[here]
        is_open = (open_pairs | open_pairs.T).any(axis=1)
        return [key for key, more in zip(among, is_open, strict=True) if more]

    def logs(self, key: K, other: K) -> tuple[float, ...]:
        """Log-ratios of two candidates over the rounds that both ran in."""
        a, b = self._place[key], self._place[other]
        both = [row[a] - row[b] for row in self._rows]
        return tuple(float(value) for value in both if not math.isnan(value))

    def _count(self, row: Floats) -> None:
        with np.errstate(invalid="ignore"):
            difference = row[:, None] - row[None, :]  # [K, K]
            self._rounds += ~np.isnan(difference)
            self._above += difference > self._slower
            self._near += difference < self._within
            step = np.abs(row - self._last)  # [K]
            for level, ratio in enumerate(GROSS):
                self._gross[level] += difference > math.log1p(ratio)
                self._noise[level][0] += int((step > math.log1p(ratio)).sum())
                self._noise[level][1] += int((~np.isnan(step)).sum())
        self._last = np.where(np.isnan(row), self._last, row)

    def _eliminate(self) -> list[K]:
        alive = self.alive
        here = np.ix_(*[[self._place[key] for key in alive]] * 2)
        rounds, rivals = self._rounds[here], self._rivals[here]  # [A, A] of who is in the race
        limit = -np.log(self._alpha)[here[0]]  # [A, 1] of the slower one
        beaten = log_wealth(self._above[here], rounds) >= limit
        for above, noise in zip(self._gross, self._noise, strict=True):
            wealth = gross_log_wealth(above[here], rounds, upper_frequency(*noise))
            beaten |= wealth >= limit + math.log(len(GROSS))
        beaten &= rivals
        out: list[K] = []
        for key, row in zip(alive, beaten, strict=True):
            by = [other for other, faster in zip(alive, row, strict=True) if faster]
            by = [other for other in by if other not in out]
            if by:  # else by somebody who went out just now, and whose rival follows
                gaps = {other: float(np.median(self.logs(key, other))) for other in by}
                self.eliminated[key] = self._record(key, max(by, key=gaps.__getitem__))
                out.append(key)
        return out

    def _record(self, key: K, by: K) -> Eliminated[K]:
        place, rival = self._place[key], self._place[by]
        alpha = float(self._alpha[place])
        bounds = [self._slower]
        found = lower_bound(self.logs(key, by), alpha)
        if found is not None:
            bounds.append(found)
        rounds = self._rounds[place, rival]
        for level, ratio in enumerate(GROSS):
            noise = upper_frequency(*self._noise[level])
            wealth = gross_log_wealth(self._gross[level, place, rival], rounds, noise)
            if wealth >= math.log(len(GROSS) / alpha):
                bounds.append(math.log1p(ratio))
        samples = int(self._samples[place])
        return Eliminated(by, int(rounds), samples, margin_of(max(bounds)))


def _are_times(times_us: Sequence[float]) -> bool:
    """Whether a clock that works gave these; a broken one's block counts as none."""
    return all(0 < time_us < math.inf for time_us in times_us)
