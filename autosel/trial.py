"""One layer on one device, with everything needed to try a candidate on it and to time it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch

from autosel.compare import Verdict, compare
from autosel.core import Candidate, CanonicalExperts, Device, Measurement, Params, Status
from autosel.errors import AutoselError, field_error
from autosel.expert_map import localize
from autosel.failures import CAUGHT, failed
from autosel.interfaces import Backend, Layout, PackedExperts
from autosel.residency import Residency
from autosel.sources import WeightSource
from autosel.timing import TimedSamples, Timer, TimingSettings, first_call_ms, time_candidates
from autosel.tune_inputs import timed_cases
from autosel.tune_types import Observer, SweepSettings
from autosel.verify import make_cases, verify_candidate
from autosel.verify_cases import Case


class Call:
    """A backend on one case, with an input and an output of its own, as a layer would call it."""

    def __init__(self, backend: Backend, packed: PackedExperts, params: Params, case: Case) -> None:
        # What autosel.dispatch.apply establishes, once: its checks are no part of the kernel.
        self.backend, self.packed, self.params, self.case = backend, packed, params, case
        self.x = case.x.clone()
        self.routing = localize(case.routing, packed.problem, case.expert_map, device=case.x.device)
        self.out = torch.full_like(case.x, torch.nan)

    def __call__(self) -> None:
        self.backend.run(self.packed, self.x, self.routing, self.params, self.out)

    def verdict(self) -> Verdict:
        """Judge what the last call left in the output."""
        problem, judged = self.packed.problem, self.case.judged
        accuracy = self.backend.accuracy(self.params)
        if not torch.equal(self.x, self.case.x):
            return Verdict("wrong", f"{self.case.name}: it changed its input x")
        verdict = compare(
            self.out,
            judged.reference,
            accuracy=accuracy,
            act_dtype=problem.act_dtype,
            scale=judged.scales[accuracy],
            overflows=judged.overflows,
        )
        return (
            verdict if verdict else replace(verdict, reason=f"{self.case.name}: {verdict.reason}")
        )


class Bench:
    """Loads the weights when the first candidate needs them; keeps packed layouts and verdicts."""

    def __init__(
        self,
        source: WeightSource,
        settings: SweepSettings,
        device: Device,
        tokens: Sequence[int],
        timer: Timer,
        observer: Observer,
    ) -> None:
        self._source = source
        self._settings = settings
        self._device = device
        self._tokens = tokens
        self._timer = timer
        self._observer = observer
        self._residency = Residency(lambda: self.experts, device, timer)
        self._layouts: dict[Candidate, Layout] = {}
        self._backends: dict[str, Backend] = {}
        self._verdicts: dict[Candidate, Verdict] = {}
        self._step = ""

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
    def _cases(self) -> dict[int, Case]:
        settings = self._settings
        return timed_cases(self.experts, settings.routing, self._tokens, seed=settings.seed)

    @cached_property
    def _judged(self) -> list[Case]:
        return make_cases(self.experts, seed=self._settings.seed)

    def load(self) -> None:
        """Load the weights and judge the cases; what cannot be read is the caller's error."""
        if "experts" not in self.__dict__:
            self._begin("load", self._tokens[0])
        _ = self._cases, self._judged

    def candidate(self, backend: Backend, params: Params) -> Candidate:
        """The candidate with the layout it reads; raises what the backend raises."""
        layout = backend.layout(self._source.problem, params)
        candidate = Candidate.of(backend.name, params, layout.key)
        self._layouts[candidate] = layout
        self._backends[backend.name] = backend
        return candidate

    def row(self, candidate: Candidate, num_tokens: int, status: Status, why: str) -> Measurement:
        """A measurement without figures."""
        return Measurement(
            problem=self._source.problem,
            num_tokens=num_tokens,
            routing=self._settings.routing,
            candidate=candidate,
            device=self._device,
            status=status,
            reason=why,
        )

    def attempt(self, candidate: Candidate, num_tokens: int) -> Measurement:
        """Pack, call once and verify; "ok" means ready for :meth:`time`, without times yet.

        A candidate that does not fit is tried once more after everything else was freed.
        """
        tried = self._attempt(candidate, num_tokens)
        if tried.status == "oom":
            self._residency.clear()
            tried = self._attempt(candidate, num_tokens)
        if tried.status == "oom":
            self._residency.drop(self._layouts[candidate])
            self._residency.clean_up()
        return tried

    def _attempt(self, candidate: Candidate, num_tokens: int) -> Measurement:
        row = self.row(candidate, num_tokens, "ok", "")
        try:
            backend, layout = self._backends[candidate.backend], self._layouts[candidate]
            row = replace(row, accuracy=backend.accuracy(candidate.params_dict))
            self._begin("pack", num_tokens, candidate)
            resident = self._residency.get(layout)
            packed = resident.packed
            row = replace(row, pack_ms=resident.pack_ms, weight_bytes=packed.nbytes)
            self._begin("first call", num_tokens, candidate)
            call = Call(backend, packed, candidate.params_dict, self._cases[num_tokens])
            row = replace(row, first_call_ms=first_call_ms(call, self._timer))
            self._begin("verify", num_tokens, candidate)
            # The first call's own output counts too: kernels change their path with the size.
            verdict = call.verdict()
            row = replace(row, errors=verdict.errors)
            if verdict:
                verdict = self._verified(backend, packed, candidate)
        except CAUGHT as error:
            status, reason = failed(error, f"{candidate.backend} {self._step}")
            return replace(row, status=status, reason=reason)
        if verdict.weights_changed:
            self._residency.drop(layout)
        if not verdict:
            errors = verdict.errors or row.errors
            return replace(row, status=verdict.status, reason=verdict.reason, errors=errors)
        return row

    def _verified(self, backend: Backend, packed: PackedExperts, candidate: Candidate) -> Verdict:
        """The verdict over all judged cases, which depends on no token count of the sweep."""
        if candidate not in self._verdicts:
            verdict = verify_candidate(backend, packed, candidate.params_dict, self._judged)
            if verdict.status == "oom":  # perhaps only now
                return verdict
            self._verdicts[candidate] = verdict
        return self._verdicts[candidate]

    def time(
        self, ready: Sequence[Measurement], settings: TimingSettings, num_tokens: int
    ) -> list[Measurement]:
        """Time verified candidates against each other and judge their last output again.

        All are interleaved as far as their packed weights fit in memory together.
        """
        rows = {row.candidate: row for row in ready}
        wanted = [(candidate, self._layouts[candidate]) for candidate in rows]
        for group in self._residency.together(wanted):
            rows |= self._time_group({c: rows[c] for c in group}, settings, num_tokens)
        return list(rows.values())

    def _time_group(
        self, rows: dict[Candidate, Measurement], settings: TimingSettings, num_tokens: int
    ) -> dict[Candidate, Measurement]:
        self._begin("time", num_tokens)
        keep = {self._layouts[candidate] for candidate in rows}
        calls: dict[Candidate, Call] = {}
        for candidate, row in rows.items():
            try:
                packed = self._residency.get(self._layouts[candidate], keep).packed
                calls[candidate] = Call(
                    self._backends[candidate.backend],
                    packed,
                    candidate.params_dict,
                    self._cases[num_tokens],
                )
            except CAUGHT as error:
                status, reason = failed(error, f"{candidate.backend} pack")
                rows[candidate] = replace(row, status=status, reason=reason)
        blocks = 0

        def progress(candidate: Candidate, number: int) -> None:
            nonlocal blocks
            blocks += 1
            self._observer.timed(num_tokens, blocks, settings.rounds * len(calls))

        timed = time_candidates(calls, settings, self._timer, progress)
        for candidate, samples in timed.items():
            rows[candidate] = _with_times(rows[candidate], samples, calls[candidate])
        return rows

    def close(self) -> None:
        """Free everything that was packed."""
        self._residency.clear()

    def _begin(self, step: str, num_tokens: int, candidate: Candidate | None = None) -> None:
        self._step = step
        self._observer.step(step, num_tokens, candidate)


def _with_times(row: Measurement, samples: TimedSamples, call: Call) -> Measurement:
    row = replace(row, timing=samples.timing)
    if samples.error is not None:
        status, reason = failed(samples.error, f"{row.candidate.backend} time")
        return replace(row, status=status, reason=reason)
    verdict = call.verdict()
    if not verdict:
        reason = f"after {len(samples.times_us)} timed calls, {verdict.reason}"
        return replace(row, status=verdict.status, reason=reason, errors=verdict.errors)
    return replace(row, times_us=samples.times_us)
