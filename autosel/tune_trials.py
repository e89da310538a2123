"""What is tried at a token count, in which order, and what came of it.

Every backend's own setting comes first, so that little time still compares all of them; then the
other settings, the backend first whose own setting was fastest.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice

from autosel import neighbours, studies
from autosel.core import Candidate, Device, Measurement, Params, Problem, Status
from autosel.deadline import Deadline
from autosel.engine_export import read_tuned
from autosel.failures import CAUGHT, failed
from autosel.interfaces import Backend, Space
from autosel.quarantine import Quarantine, code_hash
from autosel.search import Search
from autosel.store import Store
from autosel.timing import TimingSettings
from autosel.tune_types import Observer, SweepSettings
from autosel.vllm_names import priority
from autosel.worker_bench import AnyBench

#: Parameter settings of one backend that are timed in full. A larger space is searched first.
FINALISTS = 8
#: A searched setting whose first sample takes this many times the best one's gets no second.
HOPELESS = 1.5

Rows = list[Measurement]
Stored = Mapping[Candidate, Measurement]


class Trials:
    """The candidates of one layer on one device, token count by token count.

    backends  in the order of trying; the fastest of the token count before come first
    defaults  the backends' own settings, as candidates
    untried   what there was no time for at this token count
    """

    def __init__(
        self,
        problem: Problem,
        device: Device,
        settings: SweepSettings,
        store: Store | None,
        observer: Observer,
        bench: AnyBench,
        deadline: Deadline,
        backends: tuple[Backend, ...],
    ) -> None:
        self.problem, self.device, self.settings = problem, device, settings
        self.store, self.observer, self.bench, self.deadline = store, observer, bench, deadline
        self.quarantine = Quarantine(store, problem, device, retry=settings.retry_failed)
        self.starting = read_tuned(settings.start_from) if settings.start_from else None
        self.backends = _first_guess(backends, device)
        self.defaults: set[Candidate] = set()
        self.untried: list[str] = []
        self.codes: dict[Candidate, str] = {}  # of each candidate that was attempted
        self.best: dict[str, list[Params]] = {}  # of each searched backend
        self.is_ready = False  # whether this token count has a candidate that was right
        self.quick = replace(settings.timing, rounds=1, samples_per_round=3)

    def at(self, num_tokens: int, stored: Stored) -> Rows:
        """Every candidate: refused, failed, taken from the store, or ready for timing."""
        self.untried = []
        self.is_ready = any(row.status == "ok" for row in stored.values())
        walks = {b.name: self._walk(b, num_tokens, stored) for b in self.backends}
        rows = {name: next(walk) for name, walk in walks.items()}
        for name in self._fastest_first(rows, num_tokens):
            for more in walks[name]:
                rows[name] += more
        # A search tries the backend's own setting once more; the later row counts.
        found = (row for backend in self.backends for row in rows[backend.name])
        return list({row.candidate: row for row in found}.values())

    def learn(self, rows: Rows) -> None:
        """Where time is short, what was fast here is tried first at the next token count."""
        best: dict[str, float] = {}
        for row in rows:
            name = row.candidate.backend
            best[name] = min(best.get(name, math.inf), *row.times_us, math.inf)
        self.backends = tuple(
            sorted(self.backends, key=lambda backend: best.get(backend.name, math.inf))
        )

    def time(self, ready: Rows, timing: TimingSettings, num_tokens: int) -> Rows:
        """Time candidates together; what fails in it is quarantined."""
        timed = self.bench.time(ready, timing, num_tokens)
        for row in timed:
            self.quarantine.note(row, self.codes[row.candidate], "time")
        return timed

    def rejoining(self, rows: Rows, num_tokens: int) -> Rows:
        """Stored candidates that no race eliminated, ready to race those that are new.

        Rounds of two sweeps do not pair up, and machines differ by per cents from day to day.
        """
        again = [
            self._attempt(self.backend(row.candidate), row.candidate.params_dict, num_tokens, {})
            for row in rows
            if row.times_us and row.status == "ok" and not dict(row.timing).get("eliminated")
        ]
        return [row for row in again if row is not None and row.status == "ok"]

    def code(self, candidate: Candidate) -> str:
        """Hash of the sources that the candidate runs."""
        backend = self.backend(candidate)
        return code_hash(backend, backend.layout(self.problem, candidate.params_dict))

    def backend(self, candidate: Candidate) -> Backend:
        return next(found for found in self.backends if found.name == candidate.backend)

    def _fastest_first(self, rows: Mapping[str, Rows], num_tokens: int) -> list[str]:
        """Backends by a short timing of their own settings."""
        ready = [r for found in rows.values() for r in found if r.status == "ok" and not r.times_us]
        us = {r.candidate.backend: min(r.times_us) for f in rows.values() for r in f if r.times_us}
        if len(ready) > 1 and self.deadline.is_set:
            for row in self.time(ready, self.quick, num_tokens):
                us[row.candidate.backend] = min(row.times_us, default=math.inf)
        return sorted(rows, key=lambda name: us.get(name, math.inf))

    def _walk(self, backend: Backend, num_tokens: int, stored: Stored) -> Iterator[Rows]:
        """One backend's rows: first of its own setting (or its refusal), then of the others."""
        try:
            support = backend.supports(self.problem, self.device)
            if support:
                space = backend.space(self.problem, num_tokens, self.device)
                illegal = space.constraint(space.default)
                points: list[Params] = list(islice(space, min(FINALISTS + 1, self.settings.trials)))
                if illegal is None:
                    self.defaults.add(self.bench.candidate(backend, space.default))
        except CAUGHT as error:
            outcome = failed(error, f"{backend.name} supports")
            yield [self._unless_known(backend, {}, num_tokens, outcome, stored)]
            return
        if not support:
            outcome = ("unsupported", str(support))
            yield [self._unless_known(backend, {}, num_tokens, outcome, stored)]
            return
        # A token count is stored as a whole, so that any row of a searched backend means done.
        known = [row for row in stored.values() if row.candidate.backend == backend.name]
        searched = len(points) > FINALISTS
        if searched and known and all(self._is_final(row, backend) for row in known):
            yield known
            return
        if illegal is None:
            points = [p for p in points if p != space.default]
            self._compile_ahead(backend, [space.default], num_tokens, stored)
            yield self._attempts(backend, [space.default], num_tokens, stored)
        else:
            outcome = ("unsupported", f"its default setting is illegal here: {illegal}")
            yield [self._unless_known(backend, space.default, num_tokens, outcome, stored)]
        if searched:
            yield self._search(backend, space, num_tokens)
        else:
            self._compile_ahead(backend, points, num_tokens, stored)
            yield self._attempts(backend, points, num_tokens, stored)

    def _compile_ahead(
        self, backend: Backend, points: list[Params], num_tokens: int, stored: Stored
    ) -> None:
        missing = [p for p in points if not self._is_stored(backend, p, stored)]
        if missing and not (self.is_ready and self.deadline.trying_is_over()):
            self.bench.compile_ahead(backend, missing, num_tokens)

    def _attempts(
        self, backend: Backend, points: list[Params], num_tokens: int, stored: Stored
    ) -> Rows:
        tried = (self._attempt(backend, p, num_tokens, stored) for p in points)
        return [row for row in tried if row is not None]

    def _unless_known(
        self,
        backend: Backend,
        params: Params,
        num_tokens: int,
        outcome: tuple[Status, str],
        stored: Stored,
    ) -> Measurement:
        """A row for what never ran; the stored one where it says the same."""
        candidate = Candidate.of(backend.name, params)
        row = self.bench.row(candidate, num_tokens, *outcome)
        # A backend that cannot even say that has its reason in the row already.
        with contextlib.suppress(*CAUGHT):
            row = replace(row, accuracy=backend.accuracy(params))
        known = stored.get(candidate)
        return known if known and (known.status, known.reason) == outcome else row

    def _search(self, backend: Backend, space: Space, num_tokens: int) -> Rows:
        """The default, the fastest few by a short timing, and every one that failed, with why."""
        tried: dict[Candidate, tuple[float, Measurement]] = {}

        def evaluate(params: Params) -> float:
            row = self._attempt(backend, params, num_tokens, {})
            if row is None:
                return math.inf
            best = min((score for score, _ in tried.values()), default=math.inf)
            limit = HOPELESS * best if best < math.inf else None
            timing = replace(self.quick, stop_above_us=limit)
            short = self.time([row], timing, num_tokens)[0] if row.status == "ok" else row
            score = min(short.times_us, default=math.inf)
            tried[row.candidate] = (score, row if short.times_us else short)
            return score

        self.observer.step("search", num_tokens, Candidate.of(backend.name))
        # What was best at the token count before is a good guess at this one, then what is stored.
        seeds = [*self.best.get(backend.name, []), *self._known_good(backend, num_tokens)]
        every = list(islice(space, self.settings.trials + 1))
        known = len(every) <= self.settings.trials and not self.deadline.is_set
        self.bench.compile_ahead(backend, every if known else [space.default, *seeds], num_tokens)
        search = Search(space, self.settings.trials, self.settings.seed, seeds)
        while (params := search.ask()) is not None:
            search.tell(evaluate(params))
            if self.is_ready and self.deadline.trying_is_over():
                self.untried.append(f"{backend.name}: search ended after {len(tried)} settings")
                break
        if self.store:
            words = [self.problem.key, backend.name, f"{num_tokens} tokens", self.settings.routing]
            studies.record(self.store, " ".join(words), space, search.found)
        ranked = sorted(tried.values(), key=lambda pair: pair[0])
        best = [row for score, row in ranked if score < math.inf][:FINALISTS]
        self.best[backend.name] = [row.candidate.params_dict for row in best[:2]]
        kept = [row for _, row in ranked if row.status != "ok" or row.candidate in self.defaults]
        return list({row.candidate: row for row in best + kept}.values())

    def _known_good(self, backend: Backend, num_tokens: int) -> list[Params]:
        """Settings that were good elsewhere: in an engine's tuned file, or nearby in the store."""
        found: list[Params] = []
        if self.starting and self.starting.backend == backend.name:
            found += self.starting.near(num_tokens)
        if self.store:
            where = (self.problem, self.device, num_tokens, self.settings.routing)
            found += neighbours.known_good(self.store, backend, *where)
        return found

    def _attempt(
        self,
        backend: Backend,
        params: Params,
        num_tokens: int,
        stored: Stored,
    ) -> Measurement | None:
        """Pack, call and verify it, or what is known of it; None when there is no time left."""
        try:
            candidate = self.bench.candidate(backend, params)
            code = code_hash(backend, backend.layout(self.problem, params))
        except CAUGHT as error:
            outcome = failed(error, f"{backend.name} layout")
            return self.bench.row(Candidate.of(backend.name, params), num_tokens, *outcome)
        self.codes[candidate] = code
        known = stored.get(candidate)
        held = self.quarantine.find(candidate, code, num_tokens)
        if known and (known.status in ("ok", "unsupported") or held):
            return known
        if held:
            return self.bench.row(candidate, num_tokens, held.incident.status, held.reason)
        if self.is_ready and self.deadline.trying_is_over():
            self.untried.append(candidate.key)
            return None
        self.bench.load()
        row = self.bench.attempt(candidate, num_tokens)
        self.is_ready |= row.status == "ok"
        if row.status != "ok":
            self.quarantine.note(row, code, self.bench.step)
        return row

    def _is_stored(self, backend: Backend, params: Params, stored: Stored) -> bool:
        wanted = Candidate.of(backend.name, params).params
        return any((c.backend, c.params) == (backend.name, wanted) for c in stored)

    def _is_final(self, row: Measurement, backend: Backend) -> bool:
        """Whether another attempt would say the same as the stored ``row``."""
        if row.status in ("ok", "unsupported"):
            return True
        params = row.candidate.params_dict
        try:
            code = code_hash(backend, backend.layout(self.problem, params))
        except CAUGHT:
            return False
        return self.quarantine.find(row.candidate, code, row.num_tokens) is not None


def _first_guess(backends: tuple[Backend, ...], device: Device) -> tuple[Backend, ...]:
    """Our own kernels and what vLLM would take before the others; only an order of trying."""
    order = (*(b.name for b in backends if b.ours), *priority(device))
    place = {name: at for at, name in enumerate(order)}
    return tuple(sorted(backends, key=lambda backend: place.get(backend.name, len(place))))
