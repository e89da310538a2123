"""A :class:`~autosel.trial.Bench` whose candidates run in a worker process.

The parent holds no weights and calls no candidate. When a worker goes, the candidate in flight gets
its status and reason, the next worker takes over where the last one was, and nobody else's result
is lost: what was being timed together is timed again without the culprit.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from autosel import registry
from autosel.core import Candidate, Device, Measurement, Params, Problem, Status
from autosel.errors import AutoselError
from autosel.failures import ignored
from autosel.interfaces import Backend
from autosel.process_state import ProcessState
from autosel.sources import WeightSource
from autosel.timing import Timer, TimingSettings
from autosel.trial import Bench
from autosel.trial_rows import Known, blank_row
from autosel.tune_types import Observer, SweepSettings
from autosel.verify_sizes import extreme_counts, full_counts, verified_counts
from autosel.verify_suite import extreme_problem
from autosel.worker import Worker, WorkerDiedError
from autosel.worker_beat import NOBODY
from autosel.worker_compile import Compilation, CompilePool, compiles_ahead
from autosel.worker_limits import StepLimits
from autosel.worker_wire import (
    Attempt,
    Attempted,
    Compile,
    Done,
    Job,
    Load,
    Message,
    Poisoned,
    Prove,
    Setup,
    Step,
    Time,
    Timed,
    pack_backend,
)


def bench_for(
    source: WeightSource,
    settings: SweepSettings,
    device: Device,
    tokens: Sequence[int],
    timer: Timer,
    observer: Observer,
    *,
    isolate: bool,
) -> Bench | WorkerBench:
    """Where candidates run: in a worker process, or in this one where that is asked for.

    A system without sessions (Windows) has no workers; one warning says so.
    """
    if isolate and os.name == "posix":
        return WorkerBench(source, settings, device, tokens, observer)
    if isolate:
        warnings.warn(
            "no worker processes on this system: a candidate that crashes ends the sweep",
            RuntimeWarning,
            stacklevel=3,
        )
    return Bench(source, settings, device, tokens, timer, observer)


class WorkerBench:
    """The same methods as :class:`~autosel.trial.Bench`; see there."""

    def __init__(
        self,
        source: WeightSource,
        settings: SweepSettings,
        device: Device,
        tokens: Sequence[int],
        observer: Observer,
    ) -> None:
        self._source = source
        self._problem = source.problem
        self._settings = settings
        self._device = device
        self._tokens = tuple(tokens)
        self._observer = observer
        self._worker: Worker | None = None
        self._spare: Worker | None = None
        self._loaded = False
        self._deaths = 0
        self._cases = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._cases_saved = False
        self._pool: CompilePool | None = None
        self._backends: dict[str, Backend] = {}
        self._jobs: dict[tuple[Candidate, Problem, int], Compilation] = {}
        self._wanted: dict[int, list[Compilation]] = {}  # by the token count that is being tried
        self._known = Known()
        self._unsendable: dict[str, str] = {}
        #: The step that ran last.
        self.step = ""

    def candidate(self, backend: Backend, params: Params) -> Candidate:
        """The candidate with the layout it reads; raises what the backend raises."""
        self._backends[backend.name] = backend
        return Candidate.of(backend.name, params, backend.layout(self._problem, params).key)

    def row(self, candidate: Candidate, num_tokens: int, status: Status, why: str) -> Measurement:
        """A measurement without figures."""
        return blank_row(
            self._problem, self._settings, self._device, candidate, num_tokens, status, why
        )

    def prepare(self) -> None:
        """Start a worker in the background: its imports take seconds."""
        if self._worker is None and self._spare is None:
            self._spare = Worker(self._limits, self._cases)

    def load(self) -> None:
        """Have a worker with weights ready; what cannot be read is the caller's error."""
        if not self._loaded:
            self._open()
            self._ask(Load(), "load")
            self._loaded = self._cases_saved = True

    def compile_ahead(
        self, backend: Backend, points: Sequence[Params], num_tokens: int, *, verify: bool = True
    ) -> None:
        """Begin to compile several settings' kernels, where the backend can do so ahead of time.

        ``verify``: also those that only the quick set's calls need.
        """
        if not compiles_ahead(backend):
            return
        for params in points:
            with ignored():  # the attempt will tell
                candidate = self.candidate(backend, params)
                counts: Sequence[int] = [num_tokens]
                if verify and candidate not in self._known.verdicts:  # else never again
                    counts = verified_counts(self._problem, num_tokens)
                self._compile(candidate, self._problem, counts, num_tokens)

    def compile_proof(self, candidate: Candidate, num_tokens: int) -> None:
        """Begin to compile what :meth:`prove` needs of it: it may well be the one to choose."""
        if not compiles_ahead(self._backends[candidate.backend]):
            return
        with ignored():  # the proof will tell
            counts = [num_tokens, *full_counts(self._problem, self._tokens)]
            self._compile(candidate, self._problem, counts, num_tokens)
            small = extreme_problem(self._problem)
            self._compile(candidate, small, [*extreme_counts(self._problem)], num_tokens)

    def compiled(
        self,
        candidates: Sequence[Candidate],
        num_tokens: int,
        give_up: Callable[[], bool] = lambda: False,
    ) -> Candidate | None:
        """The first of ``candidates`` with nothing left to compile, waiting for one if need be.

        None where ``give_up`` says that waiting is no use any more.
        """

        def found() -> Candidate | None:
            return next((c for c in candidates if all(j.is_over for j in self._jobs_of(c))), None)

        if self._pool is not None and candidates and found() is None:
            self.load()  # meanwhile
            self._pool.first(self._jobs_of(candidates[0]))
            self._observer.step("compile", num_tokens, candidates[0])
            self._pool.wait(lambda: found() is not None, give_up)
        return found()

    def drop_compilations(self, num_tokens: int) -> None:
        """What was wanted at this token count and has not begun to compile is not any more."""
        if self._pool is not None:
            self._pool.drop(self._wanted.pop(num_tokens, []))

    def attempt(self, candidate: Candidate, num_tokens: int, *, verify: bool = True) -> Measurement:
        """Pack, call once and verify; "ok" means ready for :meth:`time`, without times yet."""
        self.load()
        if candidate.backend in self._unsendable:
            return self.row(
                candidate, num_tokens, "unsupported", self._unsendable[candidate.backend]
            )
        self.compiled([candidate], num_tokens)
        if late := self._late(candidate, num_tokens):
            self.step = "first call"
            reason = f"{candidate.backend} compile: {late}"
            return self.row(candidate, num_tokens, "timeout", reason)
        job = Attempt(candidate.backend, candidate.params_dict, num_tokens, verify)
        try:
            done = self._ask(job, "pack")
        except WorkerDiedError as death:
            self._bury()
            return self.row(candidate, num_tokens, death.status, self._reason(candidate, death))
        self._after(done)
        attempted: Attempted = done.value
        row = attempted.row
        self._known.verdicts |= attempted.known.verdicts
        self._known.audited |= attempted.known.audited
        ahead = self._jobs.get((candidate, self._problem, num_tokens))
        if ahead is not None and ahead.ms is not None and row.first_call_ms is not None:
            row = replace(row, first_call_ms=row.first_call_ms + ahead.ms)
        return row

    def prove(self, row: Measurement) -> Measurement:
        """Judge a candidate that is to be chosen on the full set; its row with the certificate."""
        self.load()
        candidate = row.candidate
        self.compile_proof(candidate, row.num_tokens)
        with ignored():
            self.compiled([candidate], row.num_tokens)
        try:
            done = self._ask(Prove(row), "prove")
        except WorkerDiedError as death:
            self._bury()
            reason = self._reason(row.candidate, death)
            return replace(row, status=death.status, reason=reason, times_us=())
        self._after(done)
        proven: Measurement = done.value
        return proven

    def time(
        self, ready: Sequence[Measurement], settings: TimingSettings, num_tokens: int
    ) -> list[Measurement]:
        """Time verified candidates against each other; who takes the worker down is left out."""
        rows = {row.candidate: row for row in ready}
        left = list(rows.values())
        while left:
            try:
                rows |= {row.candidate: row for row in self._time(left, settings, num_tokens)}
                break
            except WorkerDiedError as death:
                self._bury()
                if death.candidate in (None, NOBODY) and len(left) > 1:
                    # Nobody was being called: apart, the half with the culprit shows.
                    half = len(left) // 2
                    for part in (left[:half], left[half:]):
                        found = self.time(part, settings, num_tokens)
                        rows |= {row.candidate: row for row in found}
                    break
                number = max(death.candidate or 0, 0)
                culprit = left.pop(number)
                reason = self._reason(culprit.candidate, death)
                rows[culprit.candidate] = replace(culprit, status=death.status, reason=reason)
        return list(rows.values())

    def _time(
        self, rows: list[Measurement], settings: TimingSettings, num_tokens: int
    ) -> list[Measurement]:
        self.load()
        if self._spare is not None:
            self._spare.wait_ready()  # its imports would disturb
        # Compilers would take cores, caches and bandwidth from what is timed on a CPU, and from the
        # launches of an eager call; a graph's replay asks nothing of the host.
        replayed = self._device.torch_device != "cpu" and settings.graph
        pool = None if replayed else self._pool
        still = contextlib.nullcontext() if pool is None else pool.standing_still()
        with still:
            done = self._ask(Time(tuple(rows), settings, num_tokens), "time")
        if isinstance(done.value, Poisoned):
            found: Poisoned = done.value
            raise WorkerDiedError(found.status, found.reason, "time", found.number)
        self._after(done)
        return list(done.value)

    def close(self) -> None:
        """End the workers; the memory that they held is free again."""
        workers, self._worker, self._spare = (self._worker, self._spare), None, None
        self._loaded = False
        try:
            if self._pool is not None:
                self._pool.close()
            for worker in workers:
                if worker is not None:
                    worker.end()
        finally:
            self._cases.close()

    # inside ------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._worker is not None:
            return
        self._worker = self._spare or Worker(self._limits, self._cases)
        # A sweep in which one candidate took its worker down often has more of them.
        self._spare = Worker(self._limits, self._cases) if self._deaths else None
        on_cpu = self._device.torch_device == "cpu"
        if not on_cpu:  # what this process has cached there, the worker could not get
            getattr(torch, self._device.torch_device).empty_cache()
        setup = Setup(
            source=self._source,
            settings=self._settings,
            device=self._device,
            device_index=None if on_cpu else torch.accelerator.current_device_index(),
            tokens=self._tokens,
            state=ProcessState.now(to_send=True),
            backends=self._registered(),
            cases_saved=self._cases_saved,
            known=self._known,
        )
        refused: dict[str, str] = self._ask(setup, "start").value
        self._unsendable |= refused

    def _compile(
        self, candidate: Candidate, problem: Problem, counts: Sequence[int], num_tokens: int
    ) -> None:
        """Hand to the pool what the backend wants compiled for these token counts."""
        backend, params = self._backends[candidate.backend], candidate.params_dict
        data = pack_backend(backend) if backend in registry.registered() else None
        wanted = backend.compiled_counts(problem, params, counts, self._device)
        known = {m: self._jobs.get((candidate, problem, m)) for m in wanted}
        new = [m for m, one in known.items() if one is None or one.was_dropped]
        if self._pool is None:
            self._pool = CompilePool(self._limits, self._cases)
        made = self._pool.submit(
            Compile(backend.name, data, problem, params, m, self._device) for m in new
        )
        self._jobs |= {(candidate, problem, m): one for m, one in zip(new, made, strict=True)}
        self._wanted.setdefault(num_tokens, []).extend(made)

    def _jobs_of(self, candidate: Candidate) -> list[Compilation]:
        return [one for (owner, _, _), one in self._jobs.items() if owner == candidate]

    def _late(self, candidate: Candidate, num_tokens: int) -> str:
        """Why a compiler was ended that the candidate's calls at this token count need; else ""."""
        counts = verified_counts(self._problem, num_tokens)
        ours = (one for one in self._jobs_of(candidate) if one.job.problem == self._problem)
        return next((one.late for one in ours if one.late and one.job.num_tokens in counts), "")

    @property
    def _limits(self) -> StepLimits:
        return self._settings.limits

    def _registered(self) -> dict[str, bytes]:
        """The backends that only this process knows; what cannot be sent is refused with why."""
        packed = {}
        for backend in registry.registered():
            try:
                packed[backend.name] = pack_backend(backend)
            except AutoselError as error:
                self._unsendable[backend.name] = str(error)
        return packed

    def _ask(self, job: Job, step: str) -> Done:
        assert self._worker is not None
        self.step = step
        try:
            done = self._worker.do(job, self._hear, step)
        except WorkerDiedError as death:
            if isinstance(job, Setup | Load):
                # No candidate has run: this is the machine, or the weights do not fit.
                raise AutoselError(f"worker process: {death.step}: {death.reason}") from None
            self.step = death.step
            raise
        self.step = done.step or step
        return done

    def _hear(self, message: Message) -> None:
        if isinstance(message, Step):
            self.step = message.what
            self._observer.step(message.what, message.num_tokens, message.candidate)
        elif isinstance(message, Timed):
            self._observer.timed(message.num_tokens, message.done, message.total)

    def _after(self, done: Done) -> None:
        """What follows a job: nothing of it may go on, and a spoiled process ends."""
        assert self._worker is not None
        if done.spoiled:
            self._bury()
        else:
            self._worker.end_leftovers()

    def _bury(self) -> None:
        """End the worker, start the next one, and see that the device is still there."""
        self._deaths += 1
        worker, self._worker, self._loaded = self._worker, None, False
        if worker is not None:
            worker.end()
        if self._spare is None:
            self._spare = Worker(self._limits, self._cases)
        if self._device.torch_device != "cpu":
            self._open()  # raises where the driver is gone, which is not the candidate's doing

    def _reason(self, candidate: Candidate, death: WorkerDiedError) -> str:
        where = f"{candidate.backend} {death.step}: "
        return death.reason if death.reason.startswith(where) else where + death.reason


#: Where candidates run.
AnyBench = Bench | WorkerBench
