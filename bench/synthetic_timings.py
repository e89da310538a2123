"""Made-up timings with known truth: what machines do to samples, in the shape of a replay's cell.

The machine has a state of its own (clock, load) that goes on from sample to sample, whoever is
timed; candidates of a round are timed in an order drawn for it, one after the other. The true time
of a candidate is what it takes on the undisturbed machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from autosel.core import Candidate
from autosel.replay import Cell

Floats = npt.NDArray[np.float64]
#: Logarithms added to the samples ``[slots, n]``, given the size of ordinary noise.
Machine = Callable[[np.random.Generator, int, int, float], Floats]


def quiet(rng: np.random.Generator, slots: int, n: int, noise: float) -> Floats:
    """Independent noise and nothing else."""
    return noise * rng.standard_normal((slots, n))


def drifting(rng: np.random.Generator, slots: int, n: int, noise: float) -> Floats:
    """The machine gets 10 % slower as it warms up, and wanders by 0.2 % from slot to slot."""
    warm = 0.1 * (1 - np.exp(-np.arange(slots) / 300))
    walk = np.cumsum(0.002 * rng.standard_normal(slots))
    return quiet(rng, slots, n, noise) + (warm + walk)[:, None]


def two_clocks(rng: np.random.Generator, slots: int, n: int, noise: float) -> Floats:
    """Two clocks 13 % apart (1,755 and 1,980 MHz); each holds for 25 slots on average."""
    state = np.cumsum(rng.random(slots) < 1 / 25) % 2
    return quiet(rng, slots, n, noise) + (0.12 * state)[:, None]


def heavy_tails(rng: np.random.Generator, slots: int, n: int, noise: float) -> Floats:
    """One sample in twenty is longer by a Pareto factor without a variance."""
    spikes = (rng.random((slots, n)) < 0.05) * np.log1p(0.2 * rng.pareto(1.5, (slots, n)))
    return quiet(rng, slots, n, noise) + spikes


def preempted(rng: np.random.Generator, slots: int, n: int, noise: float) -> Floats:
    """Bursts of load: while one lasts (a fifth of the time), most samples take 2 to 40 times."""
    change = rng.random(slots)
    busy = np.zeros(slots, dtype=bool)
    for slot in range(1, slots):
        busy[slot] = change[slot] > 0.1 if busy[slot - 1] else change[slot] < 0.025
    hit = busy[:, None] & (rng.random((slots, n)) < 0.7)
    return quiet(rng, slots, n, noise) + hit * rng.uniform(np.log(2), np.log(40), (slots, n))


def correlated(rng: np.random.Generator, slots: int, n: int, noise: float) -> Floats:
    """Noise that remembers: each slot keeps 95 % of the last one's deviation (its size: noise)."""
    state = np.empty(slots)
    level = 0.0
    for slot in range(slots):
        level = 0.95 * level + noise * np.sqrt(1 - 0.95**2) * rng.standard_normal()
        state[slot] = level
    return quiet(rng, slots, n, noise / 2) + state[:, None]


MACHINES: dict[str, Machine] = {
    "quiet": quiet,
    "drifting": drifting,
    "two clocks": two_clocks,
    "heavy tails": heavy_tails,
    "preempted": preempted,
    "correlated": correlated,
}


def cell(
    name: str,
    truth_us: Sequence[float],
    machine: Machine,
    noise: float,
    *,
    block: int = 1,
    kind: str = "cuda",
    quantile: float = 0.5,
) -> Cell:
    """Candidates with these true times, in canonical order, on a machine of this kind."""
    count = len(truth_us)

    def draw(rng: np.random.Generator, rounds: int) -> Floats:
        logs = machine(rng, rounds * count, block, noise).reshape(rounds, count, block)
        order = np.argsort(rng.random((rounds, count)), axis=1)  # [R, K] slot of each candidate
        mine = np.take_along_axis(logs, order[:, :, None], axis=1)
        times: Floats = np.asarray(truth_us)[None, :, None] * np.exp(mine)
        return times

    candidates = tuple(Candidate(f"c{place:02d}") for place in range(count))
    return Cell(name, candidates, tuple(truth_us), draw, kind, quantile)


def near_tie(gap: float, others: int, rng: np.random.Generator, base_us: float) -> list[float]:
    """True times: the best, one slower by ``gap``, and others 5 % to 4 times slower; shuffled."""
    rest = np.exp(rng.uniform(np.log(1.05), np.log(4), others))
    truth = base_us * np.array([1.0, 1 + gap, *rest])
    rng.shuffle(truth)
    return [float(time) for time in truth]
