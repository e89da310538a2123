"""The search of one backend's settings at one token count.

Settings are searched on short timings, with no more checked than the timed call's own output; what
a search finds is verified before it may be compared with anything. Verifying each of thirty
settings instead of the few that are kept cost more than searching them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from autosel import neighbours, studies
from autosel.core import Candidate, Device, Measurement, Params, Problem
from autosel.engine_export import read_tuned
from autosel.interfaces import Backend, Space
from autosel.search import Search, first_points
from autosel.store import Store
from autosel.timing import TimingSettings
from autosel.tune_searched import Searched, digest
from autosel.tune_types import Observer, SweepSettings

#: Parameter settings of one backend that are timed in full. A larger space is searched first.
FINALISTS = 4
#: A searched setting whose first sample takes this many times the best one's gets no second.
HOPELESS = 1.5
#: A search ends after this many settings in a row, known good ones aside, without a better one ...
PATIENCE = 9
#: ... or this many where another token count's search has told what is good ...
PATIENCE_AFTER = 3
#: ... better by at least this much.
GAIN = 0.03

#: Stored settings that a search begins with, those of the token count before included.
NEARBY = 4

Rows = list[Measurement]


class Attempts(Protocol):
    """What a search asks of the trials that it is part of."""

    def attempt(
        self, backend: Backend, params: Params, num_tokens: int, *, verify: bool
    ) -> Measurement | None:
        """A ready candidate, or why it is none; None when there is no time left."""

    def prepare(self, backend: Backend, points: Sequence[Params], num_tokens: int) -> None:
        """Begin to compile what verifying these settings needs."""

    def time(self, ready: Rows, timing: TimingSettings, num_tokens: int) -> Rows:
        """Time candidates together."""

    def is_over(self) -> bool:
        """Whether nothing further is tried at this token count."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The rows of a search, how far it went, and how many settings it tried where time ended it.

    ``best_us`` is the shortest sample of a setting that is right; infinite where none is.
    """

    rows: Rows
    searched: Searched
    cut_after: int | None = None
    best_us: float = math.inf


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest settings that a search found, and the space that they are of."""

    space: Space
    points: tuple[Params, ...] = ()


class Searcher:
    """Searches the spaces of one layer's backends, token count by token count."""

    def __init__(
        self,
        problem: Problem,
        device: Device,
        settings: SweepSettings,
        store: Store | None,
        observer: Observer,
        attempts: Attempts,
    ) -> None:
        self.problem, self.device, self.settings = problem, device, settings
        self.store, self.observer, self.attempts = store, observer, attempts
        self.starting = read_tuned(settings.start_from) if settings.start_from else None
        self.best: dict[str, Best] = {}  # of each backend, at the token count before
        self.nearby: dict[tuple[str, int], list[Params]] = {}  # good ones that are stored
        self.quick = replace(settings.timing, rounds=1, samples_per_round=3)

    def first_points(self, backend: Backend, space: Space, num_tokens: int) -> list[Params]:
        """What will be tried, as far as no outcome changes it."""
        trials = self.settings.trials
        if self.settings.budget_s is None:
            every = list(islice(space, trials + 1))
            if len(every) <= trials:
                return [*every]
        seeds = self._seeds(backend, space, num_tokens)
        return [*first_points(space, trials, self.settings.seed, seeds)]

    def run(
        self, backend: Backend, space: Space, own: Measurement | None, num_tokens: int
    ) -> Outcome:
        """The fastest few settings that are right, and all that failed.

        ``own`` is the row of the backend's own setting, which was verified before.
        """
        self.observer.step("search", num_tokens, Candidate.of(backend.name))
        seeds = self._seeds(backend, space, num_tokens)
        search = Search(space, self.settings.trials, self.settings.seed, seeds)
        tried, cut = self._explore(backend, search, num_tokens)
        trials: float = self.settings.trials if cut is None else cut
        if cut is None and search.ask() is None and len(search.found.tried) < trials:
            trials = math.inf  # there are no more
        searched = Searched(trials, self.started(backend, num_tokens))
        if self.store:
            words = [self.problem.key, backend.name, f"{num_tokens} tokens", self.settings.routing]
            studies.record(self.store, " ".join(words), space, search.found)
        ranked = sorted(tried.values(), key=lambda pair: pair[0])
        kept = [row for _, row in ranked if row.status != "ok"]
        right = [row for us, row in ranked if us < math.inf]
        best = self._verified(backend, right, own, num_tokens)
        good = [row for row in best if row.status == "ok"]
        points = [row.candidate.params_dict for row in good[:2]]
        self.best[backend.name] = Best(space, tuple(points))
        rows = list({row.candidate: row for row in (*kept, *best)}.values())
        best_us = min((tried[row.candidate][0] for row in good), default=math.inf)
        return Outcome(rows, searched, cut, best_us)

    def started(self, backend: Backend, num_tokens: int) -> str:
        """Digest of the settings that the caller has a search of this backend start from."""
        return digest(self._told(backend, num_tokens))

    def leader(self, backend: Backend) -> Params | None:
        """The fastest setting of the backend's last search, if it found any."""
        best = self.best.get(backend.name)
        return best.points[0] if best and best.points else None

    def _explore(
        self, backend: Backend, search: Search, num_tokens: int
    ) -> tuple[dict[Candidate, tuple[float, Measurement]], int | None]:
        """Every setting tried with its shortest sample, infinite where it failed."""
        tried: dict[Candidate, tuple[float, Measurement]] = {}
        best, since = math.inf, 0
        while (params := search.ask()) is not None:
            row = self.attempts.attempt(backend, params, num_tokens, verify=self._verifies_each)
            us = math.inf
            if row is not None:
                limit = HOPELESS * best if best < math.inf else None
                short = row
                if row.status == "ok":
                    timing = replace(self.quick, stop_above_us=limit)
                    short = self.attempts.time([row], timing, num_tokens)[0]
                us = min(short.times_us, default=math.inf)
                tried[row.candidate] = (us, row if short.times_us else short)
            search.tell(us)
            since = 0 if us < (1 - GAIN) * best or len(tried) <= search.known else since + 1
            best = min(best, us)
            if self.attempts.is_over():
                return tried, len(tried)
            if since >= (PATIENCE_AFTER if backend.name in self.best else PATIENCE):
                break
        return tried, None

    @property
    def _verifies_each(self) -> bool:
        """Where time may end at any setting, nothing is left for verifying afterwards."""
        return self.settings.budget_s is not None

    def _verified(
        self, backend: Backend, ranked: Rows, own: Measurement | None, num_tokens: int
    ) -> Rows:
        """The fastest few that are right, and those that were found wrong on the way."""
        if self._verifies_each:
            return ranked[:FINALISTS]
        points = [row.candidate.params_dict for row in ranked[:FINALISTS]]
        self.attempts.prepare(backend, points, num_tokens)
        found: Rows = []
        for row in ranked:
            if sum(judged.status == "ok" for judged in found) == FINALISTS:
                break
            if own is not None and row.candidate == own.candidate:
                found.append(own)
                continue
            params = row.candidate.params_dict
            judged = self.attempts.attempt(backend, params, num_tokens, verify=True)
            if judged is None:
                break
            # The kernels were built and loaded by the search's call.
            first = row.first_call_ms if judged.status == "ok" else judged.first_call_ms
            found.append(replace(judged, first_call_ms=first))
        return found

    def _seeds(self, backend: Backend, space: Space, num_tokens: int) -> list[Params]:
        """What was best at the token count before, then settings that were good elsewhere: in an
        engine's tuned file, or nearby in the store."""
        before = self.best.get(backend.name, Best(space))
        found: list[Params] = [space.carried(point, before.space) for point in before.points]
        found += self._told(backend, num_tokens)
        if self.store:
            wanted = backend.name, num_tokens
            if wanted not in self.nearby:
                where = (self.problem, self.device, num_tokens, self.settings.routing)
                self.nearby[wanted] = [*neighbours.known_good(self.store, backend, *where)]
            # Each is a setting more to compile at every token count.
            found += self.nearby[wanted][: NEARBY - len(before.points)]
        return found

    def _told(self, backend: Backend, num_tokens: int) -> list[Params]:
        """Settings of an engine's tuned file that are for this backend."""
        if self.starting is None or self.starting.backend != backend.name:
            return []
        return [*self.starting.near(num_tokens)]
