"""The straight line: weights, supports, pack, verify, time, store, decide.

No backend is known by name here. Whatever happens to a candidate becomes a
:class:`~autosel.core.Measurement` with a status and a reason; nothing is timed that did not
verify; what is measured is stored as soon as its token count is done, so that an interrupted
sweep goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import islice

from autosel import neighbours, registry, studies
from autosel.buckets import buckets
from autosel.ceilings import measure_ceilings
from autosel.core import Candidate, Decision, Device, Measurement, Params, Status, TokenBucket
from autosel.deadline import Deadline
from autosel.decide import NothingUsable, decide
from autosel.device import detect
from autosel.engine_export import read_tuned
from autosel.failures import CAUGHT, failed
from autosel.interfaces import Backend, Space
from autosel.proofs import UNDECIDED, Proofs
from autosel.quarantine import Quarantine, code_hash
from autosel.routing_synthetic import make_routing
from autosel.search import Search
from autosel.sources import WeightSource
from autosel.store import Store
from autosel.timing import Timer, TimingSettings, timer_for
from autosel.tune_types import Cut, Observer, SweepResult, SweepSettings
from autosel.worker_bench import bench_for

#: Parameter settings of one backend that are timed in full. A larger space is searched first.
FINALISTS = 8
#: A searched setting whose first sample takes this many times the best one's gets no second.
HOPELESS = 1.5


def sweep(
    source: WeightSource,
    settings: SweepSettings | None = None,
    *,
    device: Device | None = None,
    store: Store | None = None,
    observer: Observer | None = None,
    timer: Timer | None = None,
) -> SweepResult:
    """Tune one MoE layer on one device and return what was measured and decided.

    ``device`` defaults to the best one here; ``store``, when given, is read to resume and gets
    every measurement and decision. A KeyboardInterrupt passes through and leaves what is stored.
    Candidates run in a worker process unless ``settings.isolate`` is off or a ``timer`` is given,
    whose clock cannot be sent.
    Raises AutoselError for an unknown backend or routing kind, or weights that cannot be read.
    """
    settings = settings or SweepSettings()
    device = device or detect()
    return _Sweep(source, settings, device, store, observer or Observer(), timer).run()


class _Sweep:
    def __init__(
        self,
        source: WeightSource,
        settings: SweepSettings,
        device: Device,
        store: Store | None,
        observer: Observer,
        timer: Timer | None,
    ) -> None:
        self.source, self.settings, self.device = source, settings, device
        self.store, self.observer = store, observer
        self.problem = source.problem
        self.tokens = settings.tokens(device)
        self.buckets = buckets(self.tokens)
        make_routing(settings.routing, 0, self.problem)  # refuses an unknown kind before any work
        self.backends = _chosen(settings.backends)
        self.starting = read_tuned(settings.start_from) if settings.start_from else None
        # A clock of the caller's own says nothing about this machine's rates.
        self.rates = measure_ceilings if timer is None else None
        # Only an isolated sweep's worker samples; here the timer just says how it will.
        isolate = settings.isolate and timer is None
        own = replace(settings.timing, flush_bytes=0) if isolate else settings.timing
        self.timer = timer or timer_for(device, own)
        self.bench = bench_for(
            source, settings, device, self.tokens, self.timer, observer, isolate=isolate
        )
        self.quarantine = Quarantine(store, self.problem, device, retry=settings.retry_failed)
        self.sweep_id: int | None = None
        self.defaults: set[Candidate] = set()
        self.codes: dict[Candidate, str] = {}  # of each candidate that was attempted
        self.proofs = Proofs(store, self.problem, device)
        self.best: dict[str, list[Params]] = {}  # of each searched backend
        self.deadline = Deadline(
            settings.budget_s, len(self.buckets), timer.now if timer else time.monotonic
        )
        self.cuts: list[Cut] = []
        self.untried: list[str] = []  # at this token count, for want of time
        self.is_ready = False  # whether this token count has a candidate that was right

    def run(self) -> SweepResult:
        """Everything, token count by token count."""
        self.observer.started(self.problem, self.device, self.tokens, len(self.backends))
        ceilings = self.rates(self.device, self.problem.act_dtype) if self.rates else None
        if self.store:
            self.sweep_id = self.store.begin_sweep(
                self.device,
                asdict(self.settings),
                label=self.source.label,
                ceilings=asdict(ceilings) if ceilings else None,
            )
        measurements: list[Measurement] = []
        outcomes: list[Decision | NothingUsable] = []
        try:
            for bucket in self.buckets:
                found = self._measure(bucket.measured)
                outcomes.append(self._decide(bucket, found))
                measurements += found
        finally:
            self.bench.close()
        if self.store and self.sweep_id is not None:
            self.store.finish_sweep(self.sweep_id)
        return SweepResult(
            problem=self.problem,
            device=self.device,
            label=self.source.label,
            routing=self.settings.routing,
            measurements=tuple(measurements),
            outcomes=tuple(outcomes),
            ceilings=ceilings,
            cuts=tuple(self.cuts),
        )

    def _measure(self, num_tokens: int) -> list[Measurement]:
        """Every candidate at one token count: stored ones as they are, the others now."""
        self.deadline.begin()
        stored = self._stored(num_tokens)
        self.is_ready = any(row.status == "ok" for row in stored.values())
        self.untried = []
        rows = [
            row
            for backend in self.backends
            for row in self._candidates(backend, num_tokens, stored)
        ]
        ready = [row for row in rows if row.status == "ok" and not row.times_us]
        timing = replace(self.settings.timing, budget_s=self.deadline.timing_s())
        timed = self._time(ready, timing, num_tokens) if ready else []
        final = {row.candidate: row for row in (*rows, *timed)}
        self._learn(num_tokens, list(final.values()))
        fresh = [row for row in final.values() if stored.get(row.candidate) is not row]
        if self.store:
            self.store.add_measurements(fresh, self.sweep_id)
        for row in fresh:
            self.proofs.keep(row)
        for row in final.values():
            self.observer.measured(row, stored.get(row.candidate) is row)
        return list(final.values())

    def _learn(self, num_tokens: int, rows: list[Measurement]) -> None:
        """Note what was cut; where time is short, what was fast here is tried first at the next."""
        unsettled = any(dict(row.timing).get("cut") for row in rows)
        if self.untried or unsettled:
            self.cuts.append(Cut(num_tokens, tuple(self.untried), unsettled))
        if self.deadline.is_set:
            best: dict[str, float] = {}
            for row in rows:
                name = row.candidate.backend
                best[name] = min(best.get(name, math.inf), *row.times_us, math.inf)
            order = sorted(self.backends, key=lambda b: best.get(b.name, math.inf))
            self.backends = tuple(order)

    def _candidates(
        self, backend: Backend, num_tokens: int, stored: Mapping[Candidate, Measurement]
    ) -> list[Measurement]:
        """One backend's candidates: refused, failed, taken from the store, or ready for timing."""
        try:
            support = backend.supports(self.problem, self.device)
            if support:
                space = backend.space(self.problem, num_tokens, self.device)
                illegal = space.constraint(space.default)
                points = list(islice(space, min(FINALISTS + 1, self.settings.trials)))
                if illegal is None:
                    self.defaults.add(self.bench.candidate(backend, space.default))
        except CAUGHT as error:
            outcome = failed(error, f"{backend.name} supports")
            return [self._unless_known(backend, {}, num_tokens, outcome, stored)]
        if not support:
            outcome = ("unsupported", str(support))
            return [self._unless_known(backend, {}, num_tokens, outcome, stored)]
        rows = []
        if illegal is not None:
            outcome = ("unsupported", f"its default setting is illegal here: {illegal}")
            rows.append(self._unless_known(backend, space.default, num_tokens, outcome, stored))
        if len(points) <= FINALISTS:
            missing = [p for p in points if not self._is_stored(backend, p, stored)]
            self.bench.compile_ahead(backend, missing, num_tokens)
            tried = (self._attempt(backend, p, num_tokens, stored) for p in points)
            return rows + [row for row in tried if row is not None]
        # A token count is stored as a whole, so that any row of a searched backend means done.
        known = [row for row in stored.values() if row.candidate.backend == backend.name]
        if known and all(self._is_final(row, backend) for row in known):
            return known
        return rows + self._search(backend, space, num_tokens)

    def _unless_known(
        self,
        backend: Backend,
        params: Params,
        num_tokens: int,
        outcome: tuple[Status, str],
        stored: Mapping[Candidate, Measurement],
    ) -> Measurement:
        """A row for what never ran; the stored one where it says the same."""
        candidate = Candidate.of(backend.name, params)
        row = self.bench.row(candidate, num_tokens, *outcome)
        # A backend that cannot even say that has its reason in the row already.
        with contextlib.suppress(*CAUGHT):
            row = replace(row, accuracy=backend.accuracy(params))
        known = stored.get(candidate)
        return known if known and (known.status, known.reason) == outcome else row

    def _search(self, backend: Backend, space: Space, num_tokens: int) -> list[Measurement]:
        """The default, the fastest few by a short timing, and every one that failed, with why."""
        quick = replace(self.settings.timing, rounds=1, samples_per_round=3)
        tried: dict[Candidate, tuple[float, Measurement]] = {}

        def evaluate(params: Params) -> float:
            row = self._attempt(backend, params, num_tokens, {})
            if row is None:
                return math.inf
            best = min((score for score, _ in tried.values()), default=math.inf)
            limit = HOPELESS * best if best < math.inf else None
            timing = replace(quick, stop_above_us=limit)
            short = self._time([row], timing, num_tokens)[0] if row.status == "ok" else row
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
        stored: Mapping[Candidate, Measurement],
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

    def _is_stored(
        self, backend: Backend, params: Params, stored: Mapping[Candidate, Measurement]
    ) -> bool:
        wanted = Candidate.of(backend.name, params).params
        return any((c.backend, c.params) == (backend.name, wanted) for c in stored)

    def _time(
        self, ready: list[Measurement], timing: TimingSettings, num_tokens: int
    ) -> list[Measurement]:
        timed = self.bench.time(ready, timing, num_tokens)
        for row in timed:
            self.quarantine.note(row, self.codes[row.candidate], "time")
        return timed

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

    def _stored(self, num_tokens: int) -> dict[Candidate, Measurement]:
        """What the store has of this layer, machine, routing and way of timing."""
        if not self.store or not self.settings.resume or not self.device.name.strip():
            return {}
        rows = self.store.measurements(
            self.problem,
            self.device,
            self.settings.routing,
            num_tokens=num_tokens,
            timing=tuple(self.timer.facts.items()),
        )
        return {row.candidate: row for row in rows}

    def _decide(self, bucket: TokenBucket, rows: list[Measurement]) -> Decision | NothingUsable:
        """Choose, prove the choice on the full set, and choose again where that finds a fault."""
        while True:
            required = self.proofs.required(
                self.settings.require, self._code, final=self.deadline.is_over()
            )
            outcome = decide(
                rows,
                bucket=bucket,
                defaults=self.defaults,
                allow_a8=self.settings.allow_a8,
                require=[required] if required else (),
            )
            if not isinstance(outcome, Decision):
                break
            tried = self.proofs.needs(outcome.winner, self._code(outcome.winner))
            refuted = self._refuted(outcome.winner, rows)
            if refuted is None and not (tried and required):
                break  # else the proof says whether the winner has what is required
            if refuted is not None:
                rows[:] = [refuted if row.candidate == outcome.winner else row for row in rows]
        if isinstance(outcome, Decision):
            if self.store:
                timing = tuple(self.timer.facts.items())
                self.store.add_decision(outcome, self.device, timing, self.sweep_id)
            self.observer.decided(outcome)
        return outcome

    def _code(self, candidate: Candidate) -> str:
        backend = next(found for found in self.backends if found.name == candidate.backend)
        return code_hash(backend, backend.layout(self.problem, candidate.params_dict))

    def _refuted(self, winner: Candidate, rows: list[Measurement]) -> Measurement | None:
        """The winner's new row where the full set finds a fault; None where it stands."""
        backend = next(found for found in self.backends if found.name == winner.backend)
        params, code = winner.params_dict, self._code(winner)
        if not self.proofs.needs(winner, code) or self.deadline.is_over():
            return None
        self.bench.candidate(backend, params)  # it may have come from the store
        proven = self.bench.prove(next(row for row in rows if row.candidate == winner))
        self.proofs.keep(proven)
        if proven.status in ("ok", *UNDECIDED):
            self.proofs.give_up(winner, code)
            return None
        self.quarantine.note(proven, code, "prove")
        if self.store:
            self.store.add_measurement(proven, self.sweep_id)
        self.observer.measured(proven, False)
        return proven


def _chosen(names: tuple[str, ...]) -> tuple[Backend, ...]:
    """The named backends, or all; AutoselError, with close names, for one that there is not."""
    if not names:
        return registry.all_backends()
    return tuple({backend.name: backend for backend in map(registry.get, names)}.values())
