"""One layer on one device, with everything needed to try a candidate on it and to time it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from autosel import routing_file
from autosel.bench_compile import FirstCallCompiles
from autosel.certify import certify
from autosel.compare import Verdict
from autosel.core import (
    Candidate,
    CanonicalExperts,
    Certificate,
    Device,
    Level,
    Measurement,
    Params,
    Status,
)
from autosel.errors import AutoselError, field_error
from autosel.failures import CAUGHT, failed, is_machine_fault, is_poison
from autosel.interfaces import Backend, Layout, PackedExperts
from autosel.process_state import ProcessState
from autosel.residency import Residency
from autosel.sources import WeightSource
from autosel.timing import TimedSamples, Timer, TimingSettings, first_call_ms, time_candidates
from autosel.trial_call import Call, Tame
from autosel.trial_rows import JudgedInputs, Known, blank_row
from autosel.tune_inputs import judged_inputs
from autosel.tune_types import Observer, SweepSettings
from autosel.verify import verify_candidate
from autosel.verify_suite import Suite
from autosel.worker_beat import WatchedTimer


class Bench(FirstCallCompiles):
    """Loads the weights when the first candidate needs them; keeps packed layouts and verdicts.

    watch          told whose call comes next while several are timed
    interruptible  a KeyboardInterrupt is the user's and passes through; else whoever raises it did
    cases          where to take the judged inputs from, when something before worked them out
    known          what earlier benches of the same sweep found out
    """

    def __init__(
        self,
        source: WeightSource,
        settings: SweepSettings,
        device: Device,
        tokens: Sequence[int],
        timer: Timer,
        observer: Observer,
        *,
        watch: Callable[[Candidate], None] = lambda candidate: None,
        interruptible: bool = True,
        cases: Callable[[Callable[[], JudgedInputs]], JudgedInputs] = lambda make: make(),
        known: Known | None = None,
    ) -> None:
        self._source = source
        self._settings = settings
        self._device = device
        self._tokens = tokens
        self._timer = timer
        self._observer = observer
        self._watch = watch
        self._interruptible = interruptible
        self._take_cases = cases
        self._residency = Residency(
            lambda: self.experts, device, timer, interruptible=interruptible
        )
        self._layouts: dict[Candidate, Layout] = {}
        self._backends: dict[str, Backend] = {}
        self.known = known or Known()
        #: The step that ran last, and the one to blame for what failed in it.
        self.step = ""
        #: Who made the device unusable while several were timed: the others' rows mean nothing.
        self.poisoner: Candidate | None = None
        #: Why the process that this runs in cannot be trusted any more; "" while it can.
        self.spoiled = ""

    @cached_property
    def experts(self) -> CanonicalExperts:
        """The layer's weights on the device."""
        experts = self._source.load(self._device.torch_device)
        if experts.problem != self._source.problem:
            raise AutoselError(
                field_error("weights", "layer", experts.problem.key, self._source.problem.key)
            )
        return experts

    @cached_property
    def _inputs(self) -> JudgedInputs:
        return self._take_cases(self._judge)

    def _judge(self) -> JudgedInputs:
        settings = self._settings
        if settings.routing_file:  # this may be another process than the one that was asked
            routing_file.load(settings.routing_file)
        return judged_inputs(self.experts, settings.routing, self._tokens, seed=settings.seed)

    @cached_property
    def _suite(self) -> Suite:
        settings = self._settings
        return Suite(self.experts, seed=settings.seed, edges=self._tokens, quick=self._inputs[1])

    @cached_property
    def _state(self) -> ProcessState:
        """How the process was before the first candidate ran in it."""
        return ProcessState.now()

    def load(self) -> None:
        """Load the weights and judge the cases; what cannot be read is the caller's error."""
        if "experts" not in self.__dict__:
            self._begin("load", self._tokens[0])
        _ = self.experts, self._inputs, self._state

    def candidate(self, backend: Backend, params: Params) -> Candidate:
        """The candidate with the layout it reads; raises what the backend raises."""
        layout = backend.layout(self._source.problem, params)
        candidate = Candidate.of(backend.name, params, layout.key)
        self._layouts[candidate] = layout
        self._backends[backend.name] = Tame.of(backend, interruptible=self._interruptible)
        return candidate

    def row(self, candidate: Candidate, num_tokens: int, status: Status, why: str) -> Measurement:
        """A measurement without figures."""
        return blank_row(
            self._source.problem, self._settings, self._device, candidate, num_tokens, status, why
        )

    def attempt(self, candidate: Candidate, num_tokens: int, *, verify: bool = True) -> Measurement:
        """Pack, call once and verify; "ok" means ready for :meth:`time`, without times yet.

        Without ``verify`` only the first call's own output is judged: enough for a search, which
        has what it found verified afterwards. A candidate that does not fit is tried once more
        after everything else was freed.
        """
        tried = self._attempt(candidate, num_tokens, verify)
        if tried.status == "oom":
            self._residency.clear()
            tried = self._attempt(candidate, num_tokens, verify)
        if tried.status == "oom":
            self._residency.drop(self._layouts[candidate])
            self._residency.clean_up()
        return tried

    def _attempt(self, candidate: Candidate, num_tokens: int, verify: bool) -> Measurement:
        row = self.row(candidate, num_tokens, "ok", "")
        self.load()
        try:
            backend, layout = self._backends[candidate.backend], self._layouts[candidate]
            row = replace(row, accuracy=backend.accuracy(candidate.params_dict))
            self._begin("pack", num_tokens, candidate)
            resident = self._residency.get(layout)
            packed = resident.packed
            row = replace(row, pack_ms=resident.pack_ms, weight_bytes=packed.nbytes)
            self._begin("first call", num_tokens, candidate)
            call = Call(backend, packed, candidate.params_dict, self._inputs[0][num_tokens])
            row = replace(row, first_call_ms=first_call_ms(call, self._timer))
            # The first call's own output counts too: kernels change their path with the size.
            verdict = call.verdict()
            row = replace(row, errors=verdict.errors)
            is_new = candidate not in self.known.verdicts
            if verdict and (verify or not is_new):
                if is_new:
                    self._begin("verify", num_tokens, candidate)
                began = self._timer.now()
                verdict = self._verified(backend, packed, candidate, layout)
                if is_new:
                    row = replace(row, verify_ms=(self._timer.now() - began) * 1e3)
                if is_new and verdict.status != "oom" and not is_poison(verdict.reason):
                    certificate = self._certified(row, packed, "quick", verdict)
                    row = replace(row, certificate=certificate)
        except CAUGHT as error:
            return self._failed(row, error, self.step)
        finally:
            self._state.put_back()
        if verdict.weights_changed:
            self._residency.drop(layout)
        if not verdict:
            if verdict.fault == "writes_in_bounds":
                self.spoiled = self.spoiled or "memory of others may be overwritten"
            self._judge_process(verdict.reason)
            status: Status = "crashed" if is_poison(verdict.reason) else verdict.status
            errors = verdict.errors or row.errors
            return replace(row, status=status, reason=verdict.reason, errors=errors)
        return row

    def _verified(
        self,
        backend: Backend,
        packed: PackedExperts,
        candidate: Candidate,
        layout: Layout,
        *,
        audit: bool = False,
    ) -> Verdict:
        """The verdict over all judged cases, which depends on no token count of the sweep.

        The audit of single weights is one more pass over all of them, seconds for a layer of 128
        experts on an H200: only for who is to be chosen, and once a layout.
        """
        audit = audit and layout.key not in self.known.audited
        known = self.known.verdicts.get(candidate)
        if known is not None and not (known and audit):
            return known
        verdict = verify_candidate(
            backend,
            packed,
            candidate.params_dict,
            self._inputs[1],
            experts=self.experts if audit else None,
        )
        if verdict.status == "oom":  # perhaps only now
            return verdict
        if verdict.audit_score is not None and verdict:
            self.known.audited[layout.key] = verdict.audit_score
        elif verdict:
            verdict = replace(verdict, audit_score=self.known.audited.get(layout.key))
        self.known.verdicts[candidate] = verdict
        return verdict

    def prove(self, row: Measurement) -> Measurement:
        """Judge a candidate that is to be chosen on the full set; its row with the certificate.

        Where that finds a fault, the row has the fault's status and no times any more.
        """
        self.load()
        backend, layout = self._backends[row.candidate.backend], self._layouts[row.candidate]
        self._begin("prove", row.num_tokens, row.candidate)
        try:
            packed = self._residency.get(layout).packed
            verdict = self._verified(backend, packed, row.candidate, layout, audit=True)
            certificate = self._certified(row, packed, "full", verdict)
        except CAUGHT as error:
            return self._failed(replace(row, times_us=()), error, "prove")
        finally:
            self._state.put_back()
        row = replace(row, certificate=certificate)
        if certificate.status == "ok":
            return row
        self._residency.drop(layout)  # it may have written there
        self._judge_process(certificate.reason)
        return replace(row, status=certificate.status, reason=certificate.reason, times_us=())

    def _certified(
        self, row: Measurement, packed: PackedExperts, level: Level, verified: Verdict
    ) -> Certificate:
        return certify(
            self._backends[row.candidate.backend],
            packed,
            row.candidate.params_dict,
            self._suite,
            device=self._device,
            level=level,
            verified=verified,
        )

    def time(
        self, ready: Sequence[Measurement], settings: TimingSettings, num_tokens: int
    ) -> list[Measurement]:
        """Time verified candidates against each other and judge their last output again.

        All are interleaved as far as their packed weights fit in memory together.
        """
        self.load()
        rows = {row.candidate: row for row in ready}
        wanted = [(candidate, self._layouts[candidate]) for candidate in rows]
        for group in self._residency.together(wanted):
            rows |= self._time_group({c: rows[c] for c in group}, settings, num_tokens)
            if self.poisoner is not None:
                break
        return list(rows.values())

    def _time_group(
        self, rows: dict[Candidate, Measurement], settings: TimingSettings, num_tokens: int
    ) -> dict[Candidate, Measurement]:
        self._begin("time", num_tokens)
        keep = {self._layouts[candidate] for candidate in rows}
        calls: dict[Candidate, Call] = {}
        for candidate, row in rows.items():
            self._watch(candidate)
            try:
                packed = self._residency.get(self._layouts[candidate], keep).packed
                calls[candidate] = Call(
                    self._backends[candidate.backend],
                    packed,
                    candidate.params_dict,
                    self._inputs[0][num_tokens],
                )
            except CAUGHT as error:
                rows[candidate] = self._failed(row, error, "pack")
        blocks, most = 0, settings.rounds * len(calls)

        def progress(candidate: Candidate, number: int) -> None:
            nonlocal blocks
            blocks += 1
            self._observer.timed(num_tokens, blocks, most)

        timer = WatchedTimer(self._timer, {c: k for k, c in calls.items()}, self._announcer())
        # 8-bit activations end no exact candidate's race unless they may be chosen.
        whole = self._settings.allow_a8
        classes = {c: "any" if whole else rows[c].accuracy for c in calls}
        try:
            timed = time_candidates(calls, settings, timer, progress, classes)
            if blocks < most:  # the race was settled before
                self._observer.timed(num_tokens, most, most)
            if timer.poisoner is not None:
                self.poisoner = timer.poisoner[0]
            for candidate, samples in timed.items():
                self._watch(candidate)
                rows[candidate] = self._with_times(rows[candidate], samples, calls[candidate])
        finally:
            self._state.put_back()
        return rows

    def _announcer(self) -> Callable[[Candidate], None]:
        """What happens ahead of a timed call: it is announced, and others' settings are undone."""
        last: Candidate | None = None

        def announce(candidate: Candidate) -> None:
            nonlocal last
            if candidate is not last:
                last = candidate
                self._state.put_back(all_settings=False)
            self._watch(candidate)

        return announce

    def close(self) -> None:
        """Free everything that was packed."""
        self._residency.clear()

    def _begin(self, step: str, num_tokens: int, candidate: Candidate | None = None) -> None:
        self.step = step
        self._observer.step(step, num_tokens, candidate)

    def _failed(self, row: Measurement, error: BaseException, step: str) -> Measurement:
        status, reason = failed(error, f"{row.candidate.backend} {step}")
        self._judge_process(reason, machine=is_machine_fault(error))
        if is_poison(reason):
            status = "crashed"
        return replace(row, status=status, reason=reason)

    def _judge_process(self, reason: str, *, machine: bool = False) -> None:
        """Note whether others may go on in this process after a failure for ``reason``."""
        if is_poison(reason) or machine:
            self.spoiled = self.spoiled or reason
        elif self._device.torch_device != "cpu":
            try:
                torch.accelerator.synchronize()
            except RuntimeError as error:
                self.spoiled = self.spoiled or str(error)

    def _with_times(self, row: Measurement, samples: TimedSamples, call: Call) -> Measurement:
        row = replace(row, timing=samples.timing)
        if samples.error is not None:
            return self._failed(row, samples.error, "time")
        try:
            verdict = call.verdict()
        except CAUGHT as error:
            return self._failed(row, error, "time")
        if not verdict:
            reason = f"after {len(samples.times_us)} timed calls, {verdict.reason}"
            return replace(row, status=verdict.status, reason=reason, errors=verdict.errors)
        return replace(row, times_us=samples.times_us)
