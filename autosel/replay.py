"""Strategies of choosing, run again on recorded samples: what each would have cost and missed.

A :class:`Cell` is one decision: candidates with their true times and a source of samples. A
strategy sees samples only; the truth serves to score it. Racing is not imitated here: it is the
timing engine itself (:func:`autosel.timing.time_candidates`) on a clock that the recording drives,
and :func:`autosel.decide.decide` on what that gives.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autosel.core import Candidate, Decision, Device, Measurement, Problem, QuantScheme, Scalar
from autosel.decide import canonical_order, decide
from autosel.errors import AutoselError, field_error
from autosel.racing_bounds import Floats
from autosel.timing import Call, Prepared, Sample, TimingSettings, time_candidates

#: Samples of each candidate in the fixed design that racing is compared with: as many as the race
#: grants those that it cannot tell apart. vLLM's tuner of MoE kernels takes as many calls of each
#: configuration (benchmarks/kernels/benchmark_moe.py: 20 replays of a graph of 10).
EXHAUSTIVE = TimingSettings().rounds
FEW = 10
#: Microseconds that a sample takes beside the call itself: flush, events and synchronisation.
OVERHEAD_US = 100.0

#: Gives ``[rounds, candidates, samples of a block]`` in microseconds.
Draw = Callable[[np.random.Generator, int], Floats]


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """One decision to make. ``candidates`` stand in canonical order, ``truth_us`` in the same.

    ``kind`` is the device's, which says what quantile ranks.
    """

    name: str
    candidates: tuple[Candidate, ...]
    truth_us: tuple[float, ...]
    draw: Draw
    kind: str = "cuda"
    quantile: float = 0.5

    def regret(self, place: int) -> float:
        """How much longer the chosen candidate takes than the best one."""
        return self.truth_us[place] / min(self.truth_us) - 1


@dataclass(frozen=True, slots=True)
class Choice:
    """What a strategy chose, the samples and device time it took, and whether it said tie."""

    place: int
    samples: int
    us: float
    tie: bool = False


Strategy = Callable[[Cell, np.random.Generator], Choice]


def _fixed_design(rounds: int, figure: Callable[[Floats], Floats]) -> Strategy:
    """``rounds`` blocks of everyone; the lowest figure of ``[samples, candidates]`` wins."""

    def choose(cell: Cell, rng: np.random.Generator) -> Choice:
        times = cell.draw(rng, rounds)  # [R, K, n]
        flat = times.transpose(0, 2, 1).reshape(-1, times.shape[1])
        us = float(flat.sum()) + OVERHEAD_US * flat.size
        return Choice(int(figure(flat).argmin()), flat.size, us)

    return choose


def exhaustive(cell: Cell, rng: np.random.Generator) -> Choice:
    """:data:`EXHAUSTIVE` rounds of everyone; the lowest ranking quantile wins."""
    ranked = _fixed_design(EXHAUSTIVE, lambda t: np.quantile(t, cell.quantile, axis=0))
    return ranked(cell, rng)


median_of_ten: Strategy = _fixed_design(FEW, lambda times: np.median(times, axis=0))
mean_of_ten: Strategy = _fixed_design(FEW, lambda times: times.mean(axis=0))
minimum_of_ten: Strategy = _fixed_design(FEW, lambda times: times.min(axis=0))


def racing(cell: Cell, rng: np.random.Generator, settings: TimingSettings | None = None) -> Choice:
    """The timing engine and the decision, as a sweep runs them."""
    settings = settings or TimingSettings(warmup=1)
    timer = _RecordedTimer(cell, cell.draw(rng, settings.rounds))
    calls = {candidate: timer.call(place) for place, candidate in enumerate(cell.candidates)}
    found = time_candidates(calls, settings, timer)
    rows = [
        _measurement(cell, candidate, timed.times_us, timed.timing)
        for candidate, timed in found.items()
    ]
    decision = decide(rows, epsilon=settings.epsilon, confidence=settings.confidence)
    assert isinstance(decision, Decision)
    place = cell.candidates.index(decision.winner)
    return Choice(place, timer.samples, timer.clock_us, decision.tie)


def fixed_list(order: Sequence[str]) -> Strategy:
    """The first backend of a list that is there, measured or not, as engines without tuning do."""

    def choose(cell: Cell, rng: np.random.Generator) -> Choice:
        names = [candidate.backend for candidate in cell.candidates]
        first = next((name for name in order if name in names), names[0])
        return Choice(names.index(first), 0, 0.0)

    return choose


STRATEGIES: Mapping[str, Strategy] = {
    "exhaustive": exhaustive,
    "racing": racing,
    "median of ten": median_of_ten,
    "mean of ten": mean_of_ten,
    "minimum of ten": minimum_of_ten,
}


@dataclass(frozen=True, slots=True)
class Score:
    """How a strategy did on one cell over several reruns.

    regrets   of each rerun; ``choices`` and ``ties`` likewise
    samples   and ``us`` are means over the reruns
    """

    cell: str
    strategy: str
    regrets: tuple[float, ...]
    choices: tuple[int, ...]
    ties: tuple[bool, ...]
    samples: float
    us: float

    @property
    def flips(self) -> float:
        """Share of reruns that chose otherwise than most."""
        return 1 - Counter(self.choices).most_common(1)[0][1] / len(self.choices)

    @property
    def settled_flips(self) -> float:
        """Share of pairs of reruns that neither called a tie and that disagree."""
        settled = [c for c, tie in zip(self.choices, self.ties, strict=True) if not tie]
        pairs = list(itertools.combinations(settled, 2))
        return sum(a != b for a, b in pairs) / len(pairs) if pairs else 0.0


def replay(
    cells: Sequence[Cell], strategies: Mapping[str, Strategy], reruns: int = 10, seed: int = 0
) -> list[Score]:
    """Every strategy on every cell, ``reruns`` times. Same input, same answer."""
    if reruns < 1:
        raise AutoselError(field_error("replay", "reruns", reruns, "at least 1"))
    scores = []
    for number, cell in enumerate(cells):
        for name, strategy in strategies.items():
            # Strategies of one rerun see the same machine.
            rngs = (np.random.default_rng((seed, number, rerun)) for rerun in range(reruns))
            found = [strategy(cell, rng) for rng in rngs]
            scores.append(
                Score(
                    cell.name,
                    name,
                    tuple(cell.regret(choice.place) for choice in found),
                    tuple(choice.place for choice in found),
                    tuple(choice.tie for choice in found),
                    float(np.mean([choice.samples for choice in found])),
                    float(np.mean([choice.us for choice in found])),
                )
            )
    return scores


#: 101 / 100 - 1 is a little above 0.01 in floating point.
_ONE_PERCENT = 0.01 + 1e-9


def summary(scores: Sequence[Score], strategy: str) -> dict[str, float]:
    """One strategy over all its cells: regret, samples and time in all, ties and flips."""
    mine = [score for score in scores if score.strategy == strategy]
    regrets = np.array([regret for score in mine for regret in score.regrets])
    worst = np.array([max(score.regrets) for score in mine])
    return {
        "cells": len(mine),
        "regret_mean": float(regrets.mean()),
        "regret_max": float(regrets.max()),
        "within_1_percent": float((regrets <= _ONE_PERCENT).mean()),
        "cells_always_within_1_percent": float((worst <= _ONE_PERCENT).mean()),
        "ties": float(np.mean([tie for score in mine for tie in score.ties])),
        "flips": float(np.mean([score.flips for score in mine])),
        "settled_flips": float(np.mean([score.settled_flips for score in mine])),
        "samples": float(sum(score.samples for score in mine)),
        "device_s": float(sum(score.us for score in mine)) / 1e6,
    }


class _RecordedTimer:
    """A :class:`~autosel.timing.Timer` whose calls take as long as the recording says."""

    def __init__(self, cell: Cell, times: Floats) -> None:
        self.quantile = cell.quantile
        self.block = times.shape[2]
        self.clock_us = 0.0
        self.samples = 0
        self._times = times.transpose(1, 0, 2).reshape(times.shape[1], -1)  # [K, samples]
        self._taken = [-1] * times.shape[1]  # the first sample is the warm-up's
        self._now = 0

    facts: Mapping[str, Scalar] = {"cache": "cold", "clock": "recorded"}

    def call(self, place: int) -> Call:
        def choose() -> None:
            self._now = place

        return choose

    def now(self) -> float:
        return self.clock_us / 1e6

    def run(self, call: Call) -> None:
        call()

    def prepare(self, call: Call, settings: TimingSettings) -> Prepared:
        return Prepared(call)

    def sample(self, call: Call, repeats: int) -> Sample:
        call()
        us = float(self._times[self._now, max(0, self._taken[self._now])])
        self._taken[self._now] += 1
        self.clock_us += us + OVERHEAD_US
        self.samples += 1
        return Sample(us)

    def load(self) -> Mapping[str, float]:
        return {}


_SCHEME = QuantScheme(4, 128, True)
_ANY = Problem(1, 1, 1, 128, 128, _SCHEME, _SCHEME)


def _measurement(
    cell: Cell,
    candidate: Candidate,
    times_us: Sequence[float],
    timing: tuple[tuple[str, Scalar], ...],
) -> Measurement:
    device = Device(cell.kind, "recorded")  # type: ignore[arg-type]
    return Measurement(
        problem=_ANY,
        num_tokens=1,
        routing="recorded",
        candidate=candidate,
        device=device,
        status="ok",
        times_us=tuple(times_us),
        timing=timing,
        # Canonical order is the cell's own: decide's first criterion after the accuracy.
        weight_bytes=cell.candidates.index(candidate),
    )


def in_order(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Measurements in canonical order, as a :class:`Cell` wants its candidates."""
    return sorted(measurements, key=canonical_order)
