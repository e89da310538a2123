"""The straight line: weights, supports, pack, verify, time, store, decide.

No backend is known by name here. Whatever happens to a candidate becomes a
:class:`~autosel.core.Measurement` with a status and a reason; nothing is timed that did not
verify; what is measured is stored as soon as its token count is done, so that an interrupted
sweep goes on where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import asdict, replace

from autosel import registry
from autosel.buckets import buckets
from autosel.ceilings import ceilings
from autosel.core import Candidate, Decision, Device, Measurement, TokenBucket
from autosel.deadline import Deadline
from autosel.decide import NothingUsable, decide
from autosel.device import detect
from autosel.interfaces import Backend
from autosel.proofs import UNDECIDED, Proofs
from autosel.routing_synthetic import make_routing
from autosel.sources import WeightSource
from autosel.standing import standing, timed_alike, timed_otherwise
from autosel.store import Store
from autosel.timing import Timer, timer_for
from autosel.tune_trials import Trials
from autosel.tune_types import Cut, Observer, SweepResult, SweepSettings
from autosel.worker_bench import bench_for


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
        backends = _chosen(settings.backends)
        # A clock of the caller's own says nothing about this machine's rates.
        self.rates = ceilings if timer is None else None
        # Only an isolated sweep's worker samples; here the timer just says how it will.
        isolate = settings.isolate and timer is None
        own = replace(settings.timing, flush_bytes=0) if isolate else settings.timing
        self.timer = timer or timer_for(device, own)
        self.bench = bench_for(
            source, settings, device, self.tokens, self.timer, observer, isolate=isolate
        )
        self.sweep_id: int | None = None
        self.proofs = Proofs(store, self.problem, device)
        self.deadline = Deadline(
            settings.budget_s, len(self.buckets), timer.now if timer else time.monotonic
        )
        self.cuts: list[Cut] = []
        self.standing: list[tuple[int, tuple[Candidate, ...]]] = []
        self.unsearched: list[tuple[int, tuple[str, ...]]] = []
        self.aside: list[tuple[int, tuple[str, ...]]] = []
        self.trials = Trials(
            self.problem, device, settings, store, observer, self.bench, self.deadline, backends
        )

    def run(self) -> SweepResult:
        """Everything, token count by token count."""
        self.observer.started(self.problem, self.device, self.tokens, len(self.trials.backends))
        counts = [bucket.measured for bucket in self.buckets]
        found: dict[int, tuple[list[Measurement], Decision | NothingUsable]] = {}
        try:
            if self.device.torch_device != "cpu":  # there it would disturb what follows
                self.bench.prepare()
                for bucket in self.buckets[:1]:
                    self.trials.prepare_own(bucket.measured, self._stored(bucket.measured))
            rates = self.rates(self.device, self.problem.act_dtype) if self.rates else None
            if self.store:
                self.sweep_id = self.store.begin_sweep(
                    self.device,
                    asdict(self.settings),
                    label=self.source.label,
                    ceilings=asdict(rates) if rates else None,
                )
            for bucket, later in zip(self.buckets, [*counts[1:], None], strict=True):
                rows = self._measure(bucket.measured, later)
                found[bucket.measured] = rows, self._decide(bucket, rows)
            cut = [b for b in self.buckets if b.measured in {c.num_tokens for c in self.cuts}]
            if self.deadline.again(len(cut)):
                for bucket in cut:
                    self._forget(bucket.measured)
                    rows = self._measure(bucket.measured, None)
                    found[bucket.measured] = rows, self._decide(bucket, rows)
        finally:
            self.bench.close()
        if self.store and self.sweep_id is not None:
            self.store.finish_sweep(self.sweep_id)
        return SweepResult(
            problem=self.problem,
            device=self.device,
            label=self.source.label,
            routing=self.settings.routing,
            measurements=tuple(row for count in counts for row in found[count][0]),
            outcomes=tuple(found[count][1] for count in counts),
            ceilings=rates,
            cuts=tuple(self.cuts),
            standing=tuple(self.standing),
            unsearched=tuple(self.unsearched),
            aside=tuple(self.aside),
        )

    def _forget(self, num_tokens: int) -> None:
        """What was noted of a token count that gets another turn."""
        self.cuts = [cut for cut in self.cuts if cut.num_tokens != num_tokens]
        self.standing = [note for note in self.standing if note[0] != num_tokens]
        self.unsearched = [note for note in self.unsearched if note[0] != num_tokens]
        self.aside = [note for note in self.aside if note[0] != num_tokens]

    def _measure(self, num_tokens: int, later: int | None) -> list[Measurement]:
        """Every candidate at one token count: stored ones as they are, the others now."""
        self.deadline.begin()
        if words := timed_otherwise(self._of_any_mode(num_tokens), tuple(self.timer.facts.items())):
            self.aside.append((num_tokens, words))
        stored = self._stored(num_tokens)
        following = None if later is None else (later, self._stored(later))
        rows = self.trials.at(num_tokens, stored, following)
        if self.trials.unsearched:
            self.unsearched.append((num_tokens, tuple(self.trials.unsearched)))
        ready = [row for row in rows if row.status == "ok" and not row.times_us]
        if ready:
            ready += self.trials.rejoining(rows, num_tokens)
        timing = replace(self.settings.timing, budget_s=self.deadline.timing_s())
        timed = self.trials.time(ready, timing, num_tokens) if ready else []
        final = {
            row.candidate: row if stored.get(row.candidate) is row else self.trials.noted(row)
            for row in (*rows, *timed)
        }
        unsettled = any(dict(row.timing).get("cut") for row in final.values())
        if self.trials.untried or unsettled:
            self.cuts.append(Cut(num_tokens, tuple(self.trials.untried), unsettled))
        if self.deadline.is_set:
            self.trials.learn(list(final.values()))
        fresh = [row for row in final.values() if stored.get(row.candidate) is not row]
        if self.store:
            # Without a time, where the clock gave none, there is nothing to store.
            timed_or_failed = (row for row in fresh if row.times_us or row.status != "ok")
            self.store.add_measurements(timed_or_failed, self.sweep_id)
        for row in fresh:
            self.proofs.keep(row)
        for row in final.values():
            self.observer.measured(row, stored.get(row.candidate) is row)
        return [*final.values(), *self._standing(num_tokens, final.values())]

    def _standing(self, num_tokens: int, rows: Collection[Measurement]) -> list[Measurement]:
        """What earlier sweeps measured and this one did not try."""
        kept, defaults = standing(self._known(num_tokens), rows, self.device)
        self.trials.defaults |= defaults
        for row in kept:
            self.observer.measured(row, True)
        if competing := tuple(row.candidate for row in kept if row.status == "ok"):
            self.standing.append((num_tokens, competing))
        return kept

    def _stored(self, num_tokens: int) -> dict[Candidate, Measurement]:
        """What the store has of this token count; correct ones without times are to be timed again.

        A race that a time budget ended is run again as a whole, since rounds of two do not pair up.
        """
        if not self.settings.resume:
            return {}
        rows = self._known(num_tokens)
        if any(dict(row.timing).get("cut") is True for row in rows):
            rows = [row if row.status != "ok" else replace(row, times_us=()) for row in rows]
        return {row.candidate: row for row in rows}

    def _known(self, num_tokens: int) -> list[Measurement]:
        """What the store has of this layer, machine, routing and way of timing."""
        timing = tuple(self.timer.facts.items())
        return [row for row in self._of_any_mode(num_tokens) if timed_alike(row, timing)]

    def _of_any_mode(self, num_tokens: int) -> list[Measurement]:
        if not self.store or not self.device.name.strip():
            return []
        key = (self.problem, self.device, self.settings.routing)
        return self.store.measurements(*key, num_tokens=num_tokens)

    def _decide(self, bucket: TokenBucket, rows: list[Measurement]) -> Decision | NothingUsable:
        """Choose, prove the choice on the full set, and choose again where that finds a fault."""
        while True:
            required = self.proofs.required(
                self.settings.require, self.trials.code, final=self.deadline.is_over()
            )
            outcome = decide(
                rows,
                bucket=bucket,
                defaults=self.trials.defaults,
                allow_a8=self.settings.allow_a8,
                require=[required] if required else (),
            )
            if not isinstance(outcome, Decision):
                break
            tried = self.proofs.needs(outcome.winner, self.trials.code(outcome.winner))
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

    def _refuted(self, winner: Candidate, rows: list[Measurement]) -> Measurement | None:
        """The winner's new row where the full set finds a fault; None where it stands."""
        code = self.trials.code(winner)
        if not self.proofs.needs(winner, code) or self.deadline.is_over():
            return None
        # It may have come from the store.
        self.bench.candidate(self.trials.backend(winner), winner.params_dict)
        proven = self.bench.prove(next(row for row in rows if row.candidate == winner))
        self.proofs.keep(proven)
        if proven.status in ("ok", *UNDECIDED):
            self.proofs.give_up(winner, code)
            return None
        self.trials.quarantine.note(proven, code, "prove")
        if self.store:
            self.store.add_measurement(proven, self.sweep_id)
        self.observer.measured(proven, False)
        return proven


def _chosen(names: tuple[str, ...]) -> tuple[Backend, ...]:
    """The named backends, or all; AutoselError, with close names, for one that there is not."""
    if not names:
        return registry.all_backends()
    return tuple({backend.name: backend for backend in map(registry.get, names)}.values())
