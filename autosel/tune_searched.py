"""What is stored of a search beside the rows that it leaves: later sweeps know that it is done.

A row of a searched backend does not say that there was a search: a sweep with ``--trials 1``, one
whose time was up, and one that left the backend out as too slow leave rows as well. Therefore each
row that a search brings says how far it went, among the observations in its timing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autosel.core import Measurement, Params, Scalar
from autosel.records import to_json

#: Names in :attr:`Measurement.timing`.
TRIALS, STARTED = "search_trials", "search_start"
BESIDE, WITHIN = "unsearched_beside", "unsearched_within"
#: As a number of trials: every legal setting was tried.
ALL = "all"


@dataclass(frozen=True, slots=True)
class Searched:
    """How far one backend's settings were searched at one token count.

    trials   as many as were allowed where the search came to its own end, those that it tried where
             time ended it; infinite: every legal setting was tried
    started  digest of the settings that it was told to start from (``--start-from``)
    beside   the backend beside which its own setting was too slow for a search, and
    within   the limit (``search_within``) at which it was
    """

    trials: float = 0
    started: str = ""
    beside: str = ""
    within: float = 0.0

    @classmethod
    def of(cls, rows: Iterable[Measurement]) -> Searched:
        """What the stored rows of one backend say; the furthest search counts."""
        found = cls()
        for timing in (dict(row.timing) for row in rows):
            trials, started = timing.get(TRIALS, 0), timing.get(STARTED, "")
            tried = math.inf if trials == ALL else trials
            if isinstance(tried, int | float) and tried >= max(found.trials, 1):
                found = replace(found, trials=tried, started=str(started))
            within = timing.get(WITHIN)
            if isinstance(within, int | float):
                found = replace(found, beside=str(timing.get(BESIDE, "")), within=float(within))
        return found

    def suffices(self, trials: int, started: str) -> bool:
        """Whether a search of at most ``trials`` settings, so started, would find nothing new."""
        return self.trials >= trials and started in ("", self.started)

    def noted(self, row: Measurement) -> Measurement:
        """``row`` with this in its timing."""
        facts: dict[str, Scalar] = {}
        if self.trials:
            facts[TRIALS] = ALL if self.trials == math.inf else int(self.trials)
        if self.started:
            facts[STARTED] = self.started
        if self.beside:
            facts |= {BESIDE: self.beside, WITHIN: self.within}
        return replace(row, timing=tuple(sorted({**dict(row.timing), **facts}.items())))


def digest(points: Sequence[Params]) -> str:
    """A few digits that stand for these settings; "" for none."""
    text = to_json([dict(point) for point in points])
    return hashlib.sha256(text.encode()).hexdigest()[:12] if points else ""
