"""How slowly the machine went in each round of a race, against the race's first rounds.

Who is beaten leaves a race early, and a device under load does not stay as it was: on an H200 with
four settings of one kernel left in a race (Mixtral 8x7B, 2,048 tokens), the clock fell from 1,980
to 1,785 MHz and each of them from 2,100 to 2,290 us. Pairs of a round are compared all the same,
but a median over all rounds said that the winner takes 8 % more than it did beside its rivals.
Figures are therefore given at the pace of the rounds that everyone ran; samples stay as they were
taken.

Candidates and rounds are told apart as in a two-way table, by median polish (Tukey, "Exploratory
Data Analysis", 1977): the log of a block's figure is that of its candidate plus that of its round.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: Name in :attr:`Measurement.timing`: one factor for each round, as ``blocks`` has one size.
PACE = "pace"
#: Rounds that stand for the race's beginning, and the width of the smoothing: single rounds differ
#: by noise, which has to stay in the samples.
WINDOW = 5
#: No factor is given where the smoothed pace stays this near to 1: in races of 200 rounds at a
#: steady clock, noise alone moved it by up to 1.7 %.
LEAST = 0.02
_STEPS = 20


def pace(logs: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """A factor for each round from ``[candidates, rounds]`` logarithms of blocks' figures.

    NaN is a round that a candidate did not run. Empty where the machine kept its pace, or where
    too few rounds had two candidates to tell it from a candidate's own noise.
    """
    table = np.asarray(logs, dtype=np.float64)
    if table.ndim != 2 or len(table) < 2 or table.shape[1] <= WINDOW:
        return ()
    shared = (~np.isnan(table)).sum(0) >= 2  # [R]
    if shared.sum() <= WINDOW:
        return ()
    found = np.where(shared, table, np.nan)
    rounds = np.zeros(table.shape[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # medians of nothing
        for _ in range(_STEPS):
            own = np.nanmedian(found - rounds, axis=1, keepdims=True)  # [C, 1]
            rounds = np.nanmedian(found - own, axis=0)  # [R]
            rounds = _smooth(np.interp(np.arange(len(rounds)), *_known(rounds)))
            rounds -= np.median(rounds[:WINDOW])
    if np.abs(rounds).max() < LEAST:
        return ()
    return tuple(float(factor) for factor in np.exp(rounds))


def _known(rounds: Floats) -> tuple[npt.NDArray[np.intp], Floats]:
    places = np.flatnonzero(~np.isnan(rounds))
    return places, rounds[places]


def _smooth(rounds: Floats) -> Floats:
    """Running medians; at the ends of the rounds that there are."""
    half = WINDOW // 2
    padded = np.pad(rounds, half, constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)
    return np.asarray(np.nanmedian(windows, axis=1))
