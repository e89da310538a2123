"""What is tried at a token count, in which order, and what came of it.

Every backend's own setting comes first, so that little time still compares all of them; then the
other settings, the backend first whose own setting was fastest. Whose own setting takes more than
``search_within`` times the fastest one's is not searched: it would have to gain more than searches
do. Nor are those searched that may not be chosen. A backend whose own setting is wrong has no time
to be judged by; it is searched until a search finds nothing right within ``search_within`` (one
such backend took 23 settings, a tenth of a second each, at every large token count).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

from autosel import registry
from autosel.core import Candidate, Device, Measurement, Params, Problem, Status
from autosel.deadline import Deadline
from autosel.failures import CAUGHT, failed, ignored
from autosel.handlers import let_through
from autosel.interfaces import Backend
from autosel.quarantine import Quarantine, code_hash
from autosel.store import Store
from autosel.timing import TimingSettings
from autosel.tune_search import FINALISTS, Rows, Searcher
from autosel.tune_searched import Searched
from autosel.tune_turns import Turn, first_guess, is_whole
from autosel.tune_types import Observer, SweepSettings
from autosel.worker_bench import AnyBench

Stored = Mapping[Candidate, Measurement]


class Trials:
    """The candidates of one layer on one device, token count by token count.

    backends  in the order of trying; the fastest of the token count before come first
    defaults  the backends' own settings, as candidates
    untried   what there was no time for at this token count
    unsearched  backends whose own setting alone was tried at this token count: too slow
    fruitless   backends with no usable own setting whose last search found nothing fast enough
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
        self.searcher = Searcher(problem, device, settings, store, observer, self)
        self.backends = first_guess(backends, device)
        self.defaults: set[Candidate] = set()
        self.untried: list[str] = []
        self.unsearched: list[str] = []
        self.fruitless: set[str] = set()
        self.leader_us = math.inf  # of the fastest own setting at this token count
        self.searches: dict[str, Searched] = {}  # of each backend, at this token count
        self.codes: dict[Candidate, str] = {}  # of each candidate that was attempted
        self.is_ready = False  # whether this token count has a candidate that was right

    def prepare_own(self, num_tokens: int, stored: Stored) -> dict[str, Turn]:
        """Each backend's turn. Compilers, which take seconds to start, begin with own settings."""
        turns = {b.name: self._turn(b, num_tokens, stored) for b in self.backends}
        for turn in turns.values():
            self._compile_ahead(turn, turn.own_points, num_tokens, stored)
        return turns

    def at(
        self, num_tokens: int, stored: Stored, following: tuple[int, Stored] | None = None
    ) -> Rows:
        """Every candidate: refused, failed, taken from the store, or ready for timing.

        ``following`` is the next token count, with what is stored for it: while candidates of this
        one are verified, compilers begin with that one's.
        """
        self.untried, self.unsearched, self.searches = [], [], {}
        self.is_ready = any(row.times_us for row in stored.values())
        turns = self.prepare_own(num_tokens, stored)
        self.searches = {name: turn.before for name, turn in turns.items()}
        later = {} if following is None else self.prepare_own(*following)
        rows: dict[str, Rows] = {}
        left = list(turns.values())
        while left:
            left.remove(turn := self._next(left, num_tokens))
            rows[turn.backend.name] = self._own_rows(turn, num_tokens, stored)
        order = [turns[name] for name in self._worth_searching(rows, turns, num_tokens, stored)]
        if not self.deadline.is_set:  # else time may end before the next one's turn comes
            for turn in order:
                self._compile_others(turn, num_tokens, stored)
            if following is not None:
                for turn in order:
                    self._compile_others(later[turn.backend.name], *following)
        for turn in order:
            if self.deadline.is_set:
                self._compile_others(turn, num_tokens, stored)
            own = next((r for r in rows[turn.backend.name] if r.candidate == turn.own), None)
            rows[turn.backend.name] += self._other_rows(turn, own, num_tokens, stored)
            leader = self.searcher.leader(turn.backend)
            if turn is order[0] and leader is not None and not self.deadline.is_set:
                self.bench.compile_proof(self.bench.candidate(turn.backend, leader), num_tokens)
        for name in self.unsearched:
            rows[name] += [r for c, r in stored.items() if c.backend == name and is_whole(r)]
        self.bench.drop_compilations(num_tokens)  # what time did not suffice for
        found = (row for backend in self.backends for row in rows[backend.name])
        return list({row.candidate: row for row in found}.values())

    def noted(self, row: Measurement) -> Measurement:
        """``row`` with how far its backend was searched, for later sweeps."""
        return self.searches.get(row.candidate.backend, Searched()).noted(row)

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
        """Its backend, which is none of :attr:`backends` where only an earlier sweep tried it."""
        return registry.get(candidate.backend)

    def _worth_searching(
        self,
        rows: Mapping[str, Rows],
        turns: Mapping[str, Turn],
        num_tokens: int,
        stored: Stored,
    ) -> list[str]:
        """Backends with further settings, by a short timing of their own ones, fastest first."""
        wanted = [name for name, turn in turns.items() if turn.others or turn.searched]
        ready = [r for found in rows.values() for r in found if r.status == "ok" and not r.times_us]
        owns = [r for name, found in rows.items() for r in found if r.candidate == turns[name].own]
        us = {row.candidate.backend: min(row.times_us) for row in owns if row.times_us}
        fresh = {row.candidate.backend for row in ready}
        if wanted and ready and len(fresh.union(wanted)) > 1:
            for row in self.time(ready, self.searcher.quick, num_tokens):
                us[row.candidate.backend] = min(row.times_us, default=math.inf)
        leader = min(us, key=us.__getitem__, default="")
        self.leader_us = us.get(leader, math.inf)
        within = self.settings.search_within
        barred = () if self.settings.allow_a8 else ("a8",)
        for name in wanted:
            turn, before = turns[name], turns[name].before
            backend = turn.backend
            new = [p for p in turn.others if not self._is_known(backend, p, num_tokens, stored)]
            if not (new or turn.searched):
                continue
            # Judged by the same two settings before: a little noise must not undo that.
            is_far = name not in fresh and before.beside in us and within <= before.within
            has_time = us.get(name, math.inf) < math.inf
            # Without a time of its own (illegal here, or it failed) only the others can tell.
            too_slow = us[name] > within * us[leader] if has_time else name in self.fruitless
            if not is_far and too_slow:
                self.searches[name] = replace(before, beside=leader, within=within)
                is_far = True
            if is_far or (has_time and rows[name][0].accuracy in barred):
                self.unsearched.append(name)
        left = [name for name in wanted if name not in self.unsearched]
        return sorted(left, key=lambda name: us.get(name, math.inf))

    def _turn(self, backend: Backend, num_tokens: int, stored: Stored) -> Turn:
        """What of a backend there is to try."""
        turn = Turn(backend)
        try:
            support = backend.supports(self.problem, self.device)
            if not support:
                turn.refusal = "unsupported", str(support)
                return turn
            space = backend.space(self.problem, num_tokens, self.device)
            illegal = space.constraint(space.default)
            points: list[Params] = list(islice(space, FINALISTS + 1))
            if illegal is None:
                turn.own = self.bench.candidate(backend, space.default)
                self.defaults.add(turn.own)
        except CAUGHT as error:
            turn.refusal = failed(error, f"{backend.name} supports")
            return turn
        known = [row for row in stored.values() if row.candidate.backend == backend.name]
        turn.before = Searched.of(known)
        started = self.searcher.started(backend, num_tokens)
        if turn.before.suffices(self.settings.trials, started) and all(
            self._is_final(row, backend) for row in known
        ):
            turn.known = known
            return turn
        if illegal is not None:
            why = f"its default setting is illegal here: {illegal}"
            turn.refusal, turn.refused = ("unsupported", why), space.default
        if len(points) > FINALISTS and self.settings.trials > 1:
            turn.searched = space
        else:
            others = [p for p in points if illegal is not None or p != space.default]
            turn.others = others[: self.settings.trials - (illegal is None)]
        return turn

    def _next(self, left: Sequence[Turn], num_tokens: int) -> Turn:
        """Whose own setting to try: the first that need not wait for a compiler."""
        own = [turn.to_try for turn in left if turn.to_try is not None]
        if len(own) == len(left):
            ready = self.bench.compiled(own, num_tokens, self.is_over)
            return left[own.index(ready)] if ready is not None else left[0]
        return next(turn for turn in left if turn.to_try is None)

    def _own_rows(self, turn: Turn, num_tokens: int, stored: Stored) -> Rows:
        """The row of the backend's own setting, or of its refusal."""
        if turn.refusal is not None:
            found = turn.refused, num_tokens, turn.refusal
            return [self._unless_known(turn.backend, *found, stored)]
        tried = self._attempts(turn.backend, turn.own_points, num_tokens, stored)
        return [*filter(is_whole, turn.known or []), *tried]

    def _other_rows(
        self, turn: Turn, own: Measurement | None, num_tokens: int, stored: Stored
    ) -> Rows:
        if turn.searched is not None:
            found = self.searcher.run(turn.backend, turn.searched, own, num_tokens)
            has_own = own is not None and own.status == "ok"
            if not has_own and found.best_us > self.settings.search_within * self.leader_us:
                self.fruitless.add(turn.backend.name)
            furthest = max(found.searched, turn.before, key=lambda search: search.trials)
            self.searches[turn.backend.name] = furthest
            if found.cut_after is not None:
                name = turn.backend.name
                self.untried.append(f"{name}: search ended after {found.cut_after} settings")
            return found.rows
        return self._attempts(turn.backend, turn.others, num_tokens, stored)

    def _compile_others(self, turn: Turn, num_tokens: int, stored: Stored) -> None:
        """Begin with what is tried beyond its own setting, as far as no outcome changes it."""
        points, is_searched = turn.others, turn.searched is not None
        if turn.searched is not None:
            points = self.searcher.first_points(turn.backend, turn.searched, num_tokens)
        self._compile_ahead(turn, points, num_tokens, stored, verify=not is_searched)

    def _compile_ahead(
        self,
        turn: Turn,
        points: Sequence[Params],
        num_tokens: int,
        stored: Stored,
        *,
        verify: bool = True,
    ) -> None:
        """Begin with what will be tried: neither what is known nor what there is no time for."""
        if self.is_over():
            return
        missing = [p for p in points if not self._is_known(turn.backend, p, num_tokens, stored)]
        if missing:
            self.bench.compile_ahead(turn.backend, missing, num_tokens, verify=verify)

    def prepare(self, backend: Backend, points: Sequence[Params], num_tokens: int) -> None:
        """Begin to compile what verifying these settings needs."""
        self.bench.compile_ahead(backend, points, num_tokens)

    def is_over(self) -> bool:
        """Whether nothing further is tried at this token count."""
        return self.is_ready and self.deadline.trying_is_over()

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
        with ignored():
            row = replace(row, accuracy=backend.accuracy(params))
        known = stored.get(candidate)
        return known if known and (known.status, known.reason) == outcome else row

    def attempt(
        self, backend: Backend, params: Params, num_tokens: int, *, verify: bool
    ) -> Measurement | None:
        """A ready candidate, or why it is none; None when there is no time left."""
        return self._attempt(backend, params, num_tokens, {}, verify=verify)

    def _attempt(
        self,
        backend: Backend,
        params: Params,
        num_tokens: int,
        stored: Stored,
        *,
        verify: bool = True,
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
        if known and (known.times_us or known.status == "unsupported" or held):
            return known
        if held:
            return self.bench.row(candidate, num_tokens, held.incident.status, held.reason)
        # A compiler may take longer than there is time.
        if self.is_over() or self.bench.compiled([candidate], num_tokens, self.is_over) is None:
            self.untried.append(candidate.key)
            return None
        self.bench.load()
        row = self.bench.attempt(candidate, num_tokens, verify=verify)
        self.is_ready |= row.status == "ok"
        if row.status != "ok":
            self.quarantine.note(row, code, self.bench.step)
        return row

    def _is_known(self, backend: Backend, params: Params, num_tokens: int, stored: Stored) -> bool:
        """Whether :meth:`_attempt` would not call it."""
        wanted = Candidate.of(backend.name, params).params
        same = [r for c, r in stored.items() if (c.backend, c.params) == (backend.name, wanted)]
        if any(map(is_whole, same)):
            return True
        try:
            candidate = self.bench.candidate(backend, params)
            code = code_hash(backend, backend.layout(self.problem, params))
        except CAUGHT as error:
            let_through(error)
            return True
        return self.quarantine.find(candidate, code, num_tokens) is not None

    def _is_final(self, row: Measurement, backend: Backend) -> bool:
        """Whether another attempt would say the same as the stored ``row``."""
        if row.status in ("ok", "unsupported"):
            return True
        params = row.candidate.params_dict
        try:
            code = code_hash(backend, backend.layout(self.problem, params))
        except CAUGHT as error:
            let_through(error)
            return False
        return self.quarantine.find(row.candidate, code, row.num_tokens) is not None
