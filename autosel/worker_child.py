"""The worker's side: a process in which candidates may do what they like.

Started by :mod:`autosel.worker` as the leader of a session of its own. It reads jobs from a pipe,
hands them to a :class:`~autosel.trial.Bench` and answers; every step is announced before it begins,
so that the parent knows whom to blame when nothing more comes.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import BinaryIO

import torch

from autosel import cpuinfo, handlers, registry
from autosel.core import Candidate, Measurement
from autosel.errors import AutoselError, field_error
from autosel.failures import one_line
from autosel.interfaces import Backend
from autosel.residency import RESERVE_BYTES
from autosel.timing import timer_for
from autosel.trial import Bench
from autosel.trial_rows import JudgedInputs, Known
from autosel.tune_types import Observer
from autosel.verify_cases import Case
from autosel.worker_beat import NOBODY, Beat
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
    Raised,
    Ready,
    Setup,
    Step,
    Time,
    Timed,
    load,
    portable,
)

try:
    import resource
except ImportError:  # not on Windows, where there are no workers
    resource = None  # type: ignore[assignment]

#: Bytes a second that :func:`torch.save` writes (330 MB on a server's disk).
SAVED_PER_S = 3e8
#: Seconds between two messages on how far timing is: each wakes the parent.
TELL_S = 0.5

_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h


def main(channel: int, beat: int, faults: int, cases: int, lifeline: int, parent: int) -> None:
    """Serve the parent on these open files until it is gone; see :class:`autosel.worker.Worker`."""
    _die_with(parent)
    handlers.no_user()
    guard = _guard(lifeline)
    fault_file = os.fdopen(faults, "wb", buffering=0)
    faulthandler.enable(fault_file)
    faulthandler.register(signal.SIGUSR1, fault_file, all_threads=False)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if somebody must go, then not the parent
    server = _Server(Connection(channel), Beat(beat), os.fdopen(cases, "r+b"))
    server.tell(Ready(() if guard is None else (guard,)))
    server.serve()


def _held(case: Case) -> Iterator[torch.Tensor]:
    judged = case.judged
    yield from (case.x, judged.reference, *judged.scales.values(), *judged.shifts)


def _die_with(parent: int) -> None:
    """Have the system kill this process when its parent ends, however that happens (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _guard(lifeline: int) -> int | None:
    """A process that kills this one and all it started when the parent closes the lifeline.

    It needs neither this interpreter, which a candidate may hold for ever, nor Linux.
    """
    try:
        command = ["/bin/sh", "-c", "read nothing; kill -9 0"]
        guard = subprocess.Popen(
            command, stdin=lifeline, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except OSError:
        return None
    os.close(lifeline)
    return guard.pid


class _Told(Observer):
    """Sends what it hears to the parent."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._told = 0.0

    def step(self, what: str, num_tokens: int, candidate: Candidate | None = None) -> None:
        self._server.tell(Step(what, num_tokens, candidate))

    def timed(self, num_tokens: int, done: int, total: int) -> None:
        if done == total or time.monotonic() - self._told > TELL_S:
            self._told = time.monotonic()
            self._server.tell(Timed(num_tokens, done, total))


class _Server:
    def __init__(self, connection: Connection, beat: Beat, cases: BinaryIO) -> None:
        self._pid = os.getpid()
        self._connection = connection
        self._beat = beat
        self._cases = cases
        self._streams = _Streams()
        self._setup: Setup
        self._bench: Bench
        self._backends: dict[str, Backend] = {}
        self._refused: dict[str, str] = {}
        self._numbers: dict[Candidate, int] = {}

    def tell(self, message: Message) -> None:
        if os.getpid() != self._pid:
            os._exit(1)  # a candidate forked, and this copy of the worker has come back from it
        self._connection.send_bytes(pickle.dumps(message))

    def serve(self) -> None:
        while True:
            try:
                data = self._connection.recv_bytes()
            except (EOFError, OSError):
                os._exit(0)  # the parent is gone, or a candidate closed the pipe
            # Whatever runs on in the background, answers are told here alone.
            self.tell(self._answer(load(data)))

    def _answer(self, job: Job) -> Message:
        try:
            value = self._do(job)
            bench = getattr(self, "_bench", None)
            return Done(value, bench.step, bench.spoiled) if bench else Done(value)
        except BaseException as error:
            # In a worker there is no user: even a KeyboardInterrupt is somebody's mistake.
            return Raised(portable(error))
        finally:
            self._streams.put_back()

    def _do(self, job: Job) -> object:
        if isinstance(job, Setup):
            return self._prepare(job)
        if isinstance(job, Compile):
            backend = load(job.data) if job.data else registry.get(job.backend)
            return backend.compile_ahead(job.problem, job.params, job.num_tokens, job.device)
        if isinstance(job, Load):
            self._bench.load()
            return None
        self._limit_memory()
        if isinstance(job, Attempt):
            candidate = self._bench.candidate(self._backend(job.backend), job.params)
            row = self._bench.attempt(candidate, job.num_tokens, verify=job.verify)
            known = self._bench.known
            new = {k: v for k, v in known.verdicts.items() if k == candidate}
            return Attempted(row, Known(new, known.audited))
        if isinstance(job, Prove):
            self._know(job.row)
            return self._bench.prove(job.row)
        return self._time(job)

    def _prepare(self, setup: Setup) -> dict[str, str]:
        """Make everything as it is in the parent; which backends could not be loaded, and why."""
        self._setup = setup
        setup.state.put_back()
        if setup.device_index is not None:
            torch.accelerator.set_device_index(setup.device_index)
            # Beside compilers each parallel loop waits for the thread that they displaced, and the
            # others spin: making weights and judging inputs took 25 s for 128 experts on a machine
            # of 32 cores and an H200 that 32 compilers shared, and 39 s for 384.
            torch.set_num_threads(1)
        for name, data in setup.backends.items():
            try:
                backend = load(data)
                registry.register(backend)
                self._backends[name] = backend
            except BaseException as error:
                self._refused[name] = (
                    f"it cannot be loaded in the worker process: "
                    f"{type(error).__name__}: {one_line(error)}"
                )
        self._bench = Bench(
            setup.source,
            setup.settings,
            setup.device,
            setup.tokens,
            timer_for(setup.device, setup.settings.timing, owns_process=True),
            _Told(self),
            watch=self._watch,
            interruptible=False,
            cases=self._judged,
            known=setup.known,
        )
        return self._refused

    def _backend(self, name: str) -> Backend:
        return self._backends[name] if name in self._backends else registry.get(name)

    def _know(self, row: Measurement) -> None:
        """Have the bench know the candidate of a row that another worker may have made."""
        backend = self._backend(row.candidate.backend)
        made = self._bench.candidate(backend, row.candidate.params_dict)
        if made != row.candidate:
            expected = f"{row.candidate} as in the parent"
            raise AutoselError(field_error("worker", "candidate", made, expected))

    def _time(self, job: Time) -> list[Measurement] | Poisoned:
        for row in job.rows:
            self._know(row)
        self._numbers = {row.candidate: number for number, row in enumerate(job.rows)}
        self._beat.write(NOBODY)
        timed = self._bench.time(job.rows, job.settings, job.num_tokens)
        culprit = self._bench.poisoner
        if culprit is None:
            return timed
        row = next(row for row in timed if row.candidate == culprit)
        return Poisoned(self._numbers[culprit], row.status, row.reason)

    def _watch(self, candidate: Candidate) -> None:
        number = self._numbers.get(candidate, NOBODY)
        if number != self._beat.read()[1]:
            self._streams.put_back()  # the one before may have closed them
        self._beat.write(number)

    def _judged(self, make: object) -> JudgedInputs:
        """The judged inputs of an earlier worker, else made now and left for the next one.

        Where that is quicker: a GPU works 3 GB of right results out in 3 s, and writing them took
        30 s of a sweep.
        """
        if self._setup.cases_saved:
            with contextlib.suppress(Exception):
                self._cases.seek(0)
                # Our own objects, in a file without a name that only our own processes can open.
                found: JudgedInputs = torch.load(self._cases, weights_only=False)
                return found
        began = time.monotonic()
        made: JudgedInputs = make()  # type: ignore[operator]
        tensors = [tensor for case in (*made[0].values(), *made[1]) for tensor in _held(case)]
        if self._setup.device.torch_device != "cpu":
            torch.accelerator.synchronize()
        if sum(t.nbytes for t in tensors) > SAVED_PER_S * (time.monotonic() - began):
            return made
        with contextlib.suppress(OSError, RuntimeError):  # no room: the next one works it out
            self._cases.seek(0)
            torch.save(made, self._cases)
            self._cases.flush()
        return made

    def _limit_memory(self) -> None:
        """Let an allocation fail that the system would answer by killing (processors only).

        A GPU's driver reserves address space without end, so there the parent watches instead.
        """
        if resource is None or self._setup.device.torch_device != "cpu":
            return
        status = cpuinfo.read_text("/proc/self/status")
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        free = cpuinfo.available_memory()
        try:
            data, resident = (int(fields[name].split()[0]) << 10 for name in ("VmData", "RssAnon"))
        except (KeyError, ValueError, IndexError):
            return
        rooms = [] if free is None else [max(0, free - RESERVE_BYTES)]
        if self._setup.settings.limits.memory_bytes is not None:
            rooms.append(max(0, self._setup.settings.limits.memory_bytes - resident))
        if rooms:
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            wanted = data + min(rooms)
            with contextlib.suppress(OSError, ValueError):
                soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
                resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


class _Streams:
    """The standard streams as they were: a candidate may have closed them or put files there."""

    def __init__(self) -> None:
        self._kept = [os.dup(number) for number in range(3)]

    def put_back(self) -> None:
        for number, kept in enumerate(self._kept):
            with contextlib.suppress(OSError):
                if not _same_file(number, kept):
                    os.dup2(kept, number)


def _same_file(a: int, b: int) -> bool:
    try:
        return os.path.sameopenfile(a, b)
    except OSError:
        return False


if __name__ == "__main__":
    main(*map(int, sys.argv[1:7]))
