"""One child process that packs, verifies and times candidates, seen from its parent.

A candidate's code may end its process, hang, or take all memory. Here is where that shows: the
parent waits for messages with a deadline for every step, watches memory and the number of
processes, and turns every way in which a worker can go into a :class:`WorkerDiedError` with a
status and one line. The process is started anew (never forked: neither OpenMP nor CUDA survives
that) and when it ends, everything that it started ends with it.
"""

from __future__ import annotations

import os
import pickle
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Pipe
from typing import IO, Any, NoReturn

from autosel import cpuinfo, worker_tree
from autosel.core import Status
from autosel.errors import AutoselError
from autosel.residency import RESERVE_BYTES
from autosel.worker_beat import Beat
from autosel.worker_last_words import Tail, death
from autosel.worker_limits import StepLimits
from autosel.worker_wire import Done, Job, Message, Raised, Ready, Step, Time, load

#: Seconds between looks at a worker: at its memory, and at all of its processes. While it times,
#: the looks are rarer, since each takes a processor for a moment.
LOOK_S = 0.05
TIMING_LOOK_S = 0.25
COUNT_S = 1.0

#: Seconds given to a hung process to say where it hangs.
TRACE_S = 0.3

#: The largest message that a worker may send: all samples of a layer's candidates are some MB.
MAX_MESSAGE = 256 << 20


class WorkerDiedError(Exception):
    """The process is gone or had to be ended; ``step`` had begun and ``candidate`` was called.

    ``candidate`` is the number of the beat, None where the step says who it was.
    """

    def __init__(self, status: Status, reason: str, step: str, candidate: int | None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.step, self.candidate = status, reason, step, candidate


class _Gone:
    """What the reader puts into the queue when nothing more can come."""


class Worker:
    """A running worker. ``cases`` is a file that workers after each other share."""

    def __init__(self, limits: StepLimits, cases: IO[bytes]) -> None:
        self._limits = limits
        self._mark = secrets.token_hex(16)
        self._beat = Beat()
        self._faults = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        self._messages: queue.SimpleQueue[Message | _Gone] = queue.SimpleQueue()
        self._helpers: set[int] = set()
        self._ended = False
        self._oom_kills = _oom_kills()
        mine, theirs = Pipe()
        lifeline, self._lifeline = os.pipe()
        files = (
            theirs.fileno(),
            self._beat.fileno,
            self._faults.fileno(),
            cases.fileno(),
            lifeline,
        )
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", _START.format(path=sys.path), *map(str, files),
             str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=files,
            start_new_session=True,
            env={**os.environ, worker_tree.MARK: self._mark},
        )  # fmt: skip
        theirs.close()
        os.close(lifeline)
        self._connection = mine
        assert self._process.stdout is not None
        self._tail = Tail(self._process.stdout)
        threading.Thread(target=self._read, daemon=True).start()
        self._stood_s = 0.0  # time in which the process was stopped, which no limit counts
        self._stands_since: float | None = None
        self._started = self.now()

    def now(self) -> float:
        """Seconds that the process could work, from an arbitrary start."""
        until = self._stands_since
        return (time.monotonic() if until is None else until) - self._stood_s

    def stand_still(self) -> None:
        """Stop a process that :meth:`wait_ready` has seen, and all that it started, until told."""
        self._stands_since = time.monotonic()
        # It first, so that it starts nothing more; its guard must see the parent go.
        worker_tree.send(signal.SIGSTOP, [self.pid])
        others = set(worker_tree.members(self.pid)) - self._helpers
        worker_tree.send(signal.SIGSTOP, others)

    def go_on(self) -> None:
        """After :meth:`stand_still`."""
        if self._stands_since is not None:
            self._stood_s += time.monotonic() - self._stands_since
            self._stands_since = None
        worker_tree.send(signal.SIGCONT, worker_tree.members(self.pid))

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until the process has imported what it needs; WorkerDiedError if it never does."""
        if not self._helpers:
            message = self._next("start", self._started + self._limits.start_s, LOOK_S)
            if isinstance(message, Ready):
                self._helpers = {self.pid, *message.helpers}

    def do(self, job: Job, hear: Callable[[Message], None], step: str) -> Done:
        """Have ``job`` done, which begins with ``step``; what it tells meanwhile goes to ``hear``.

        Raises WorkerDiedError, and AutoselError where the fault is no candidate's.
        """
        self.wait_ready()
        timing = isinstance(job, Time)
        self._send(job, step)
        standing = worker_tree.members(self.pid)
        room = self._room(standing)
        limit = self._limits.seconds(step)
        counted = time.monotonic()
        deadline, beat = self.now() + limit, self._beat.read()[0]
        if isinstance(job, Time):
            deadline += job.settings.wait_quiet_s
        while True:
            message = self._next(step, deadline, TIMING_LOOK_S if timing else LOOK_S, once=True)
            if isinstance(message, Done):
                return message
            if isinstance(message, Raised):
                raise message.error
            if message is not None:
                hear(message)
            if isinstance(message, Step):
                step, limit = message.what, self._limits.seconds(message.what)
                deadline = self.now() + limit
            elif timing and self._beat.read()[0] != beat:
                beat, deadline = self._beat.read()[0], self.now() + limit
            counted = self._look(step, room, len(standing), counted)

    def end_leftovers(self) -> int:
        """End processes that a candidate left at work, after it is done; how many there were."""
        return worker_tree.end_busy(self.pid, self._helpers)

    def end(self) -> None:
        """Kill the process and all that it started; once is enough."""
        if self._ended:
            return
        self._ended = True
        gone = worker_tree.end(self.pid, self._mark)
        if gone:
            self._process.wait()
        self._connection.close()
        os.close(self._lifeline)
        self._tail.close()
        self._beat.close()
        self._faults.close()
        if not gone:
            raise AutoselError(
                f"worker process {self.pid}: found alive {worker_tree.PATIENCE_S:g} s after it was "
                f"killed, expected gone: a device driver may hang"
            )

    # inside ------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Messages into the queue: a broken one must not make the parent wait without end."""
        try:
            while True:
                self._messages.put(load(self._connection.recv_bytes(MAX_MESSAGE)))
        except Exception:  # closed, cut short, or bytes that a candidate wrote there
            self._messages.put(_Gone())

    def _send(self, job: Job, step: str) -> None:
        from autosel.worker_wire import dump

        try:
            data = dump(job)
        except (TypeError, AttributeError, pickle.PicklingError, AutoselError) as error:
            raise AutoselError(
                f"weights: cannot be sent to the worker process: {error}; expected a source that "
                f"can be pickled, or isolate=False"
            ) from None
        try:
            self._connection.send_bytes(data)
        except OSError:
            self._died(step)

    def _next(self, step: str, deadline: float, look: float, *, once: bool = False) -> Any:
        """The next message; None after ``look`` seconds without one where ``once``."""
        while True:
            try:
                message = self._messages.get(timeout=look)
            except queue.Empty:
                if self.now() > deadline:
                    self._too_long(step)
                if self._process.poll() is None:
                    if once:
                        return None
                    continue
                message = self._messages.get() if not self._messages.empty() else _Gone()
            if isinstance(message, _Gone):
                self._died(step)
            return message

    def _look(self, step: str, room: int | None, standing: int, counted: float) -> float:
        """Compare memory and processes with their limits; when all were counted last.

        ``standing``: processes that were there when the job began, which are no doing of its.
        """
        now = time.monotonic()
        everybody = now - counted > COUNT_S
        pids = worker_tree.members(self.pid) if everybody else [self.pid]
        if len(pids) - standing > self._limits.processes:
            most = self._limits.processes
            found = f"{len(pids) - standing} processes at once, at most {most} allowed"
            self._give_up("crashed", found, step)
        resident = worker_tree.resident_bytes(pids)
        if room is not None and resident > room:
            self._give_up("oom", f"{resident} bytes resident, at most {room} allowed", step)
        return now if everybody else counted

    def _room(self, standing: list[int]) -> int | None:
        """Bytes that the worker and what it starts may hold during one job."""
        if self._limits.memory_bytes is not None:
            return self._limits.memory_bytes
        free = cpuinfo.available_memory()
        if free is None:
            return None
        held = worker_tree.resident_bytes(standing)
        return held + max(0, free - RESERVE_BYTES // 2)

    def _too_long(self, step: str) -> NoReturn:
        limit = self._limits.seconds(step)
        # The faulthandler writes where it hangs, even inside C code that never returns.
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(TRACE_S)
        self._give_up("timeout", f"no end after {limit:g} s", step)

    def _give_up(self, status: Status, found: str, step: str) -> NoReturn:
        number = self._beat.read()[1]
        text = death(found, self._faults, self._tail)
        self.end()
        raise WorkerDiedError(status, text, step, number)

    def _died(self, step: str) -> NoReturn:
        """The pipe is closed: by an end of the process, or by a candidate that goes on without."""
        number = self._beat.read()[1]
        try:
            code = self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._give_up("crashed", "it closed or spoiled the pipe to its parent", step)
        status: Status = "crashed"
        self._tail.settle()
        if code < 0:
            name = signal.Signals(-code).name if -code in signal.valid_signals() else f"{-code}"
            found = f"took its process down: {name} ({signal.strsignal(-code) or 'a signal'})"
        else:
            found = f"ended its process: exit status {code}"
        if code == -signal.SIGKILL and _oom_kills() > self._oom_kills:
            status, found = "oom", "killed by the system for want of memory (SIGKILL)"
        elif code == -signal.SIGABRT and self._tail.out_of_memory:
            status = "oom"
        text = death(found, self._faults, self._tail)
        self.end()
        raise WorkerDiedError(status, text, step, number)


#: The worker's program: it finds modules where its parent does.
_START = """\
import sys
sys.path[:] = {path!r}
from autosel.worker_child import main
main(*map(int, sys.argv[1:]))
"""


def _oom_kills() -> int:
    """Processes that the system has killed for want of memory since it started (Linux)."""
    for line in cpuinfo.read_text("/proc/vmstat").splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0
