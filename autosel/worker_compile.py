"""Compiles kernels in helper processes, as many at once as there are cores, before they are called.

A compiler keeps one core busy for seconds, and a sweep tries tens of settings one after another.
Helpers touch no device and hold no weights. What they build lies in the compiler's cache on disk;
what they fail to build is told when the candidate itself is tried, so their ends count for nothing;
but what takes longer than a first call may is not begun once more.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from autosel import cpuinfo
from autosel.interfaces import Backend
from autosel.worker import Worker, WorkerDiedError
from autosel.worker_limits import StepLimits
from autosel.worker_wire import Compile

#: Helpers at once, each of which takes five seconds of a core to import torch and compilers,
#: and the memory that each may need.
MOST = 16
HELPER_BYTES = 1 << 30

#: Of what computes, whoever is waited for goes first: beside as many helpers as cores the worker's
#: own host code (right results of 128 experts on an H200) took 9 s instead of 1.5.
NICE = 10

#: Seconds between looks at whether it is still worth waiting, and for Ctrl-C.
LOOK_S = 0.2


def compiles_ahead(backend: Backend) -> bool:
    """Whether the backend can compile without a device."""
    return type(backend).compile_ahead is not Backend.compile_ahead


class Compilation:
    """One job of the pool; ``ms`` is what it took, None before and where it came to no end.

    ``late``: why it was ended, where it took longer than a first call may.
    """

    def __init__(self, job: Compile) -> None:
        self.job = job
        self.ms: float | None = None
        self.late = ""
        self.is_over = False
        self.was_dropped = False


class CompilePool:
    """Jobs are begun in the order in which they come; :meth:`close` ends the helpers.

    Each helper has a thread of its own that outlives its jobs: Linux ends a process with the
    thread that started it (PR_SET_PDEATHSIG).
    """

    def __init__(self, limits: StepLimits, cases: IO[bytes], most: int = MOST) -> None:
        self._limits, self._cases, self._most = limits, cases, most
        self._changed = threading.Condition()
        self._waiting: deque[Compilation] = deque()
        self._ready: set[Worker] = set()  # they have imported what they need
        self._starting: set[Worker] = set()
        self._threads = self._free = 0
        self._stands = self._closed = False

    def submit(self, jobs: Iterable[Compile]) -> list[Compilation]:
        """Have jobs done in the background."""
        made = [Compilation(job) for job in jobs]
        with self._changed:
            self._waiting.extend(made)
            while self._threads < min(self._helpers(), self._threads + self._missing()):
                self._threads += 1
                self._free += 1
                threading.Thread(target=self._serve, daemon=True).start()
            self._changed.notify_all()
        return made

    def wait(self, until: Callable[[], bool], give_up: Callable[[], bool] = lambda: False) -> None:
        """Return when ``until`` holds, asked after each job, or it is not worth it any longer."""
        with self._changed:
            while not (until() or self._closed or give_up()):
                self._changed.wait(LOOK_S)

    def first(self, wanted: Sequence[Compilation]) -> None:
        """Begin these before others that wait."""
        ahead = set(wanted)
        with self._changed:
            self._waiting = deque(sorted(self._waiting, key=lambda one: one not in ahead))

    def drop(self, which: Iterable[Compilation]) -> None:
        """Forget those that have not begun."""
        with self._changed:
            dropped = set(which).intersection(self._waiting)
            for one in dropped:
                one.is_over = one.was_dropped = True
            self._waiting = deque(one for one in self._waiting if one not in dropped)
            self._changed.notify_all()

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Meanwhile no helper computes: what is being timed has the machine to itself."""
        with self._changed:
            self._stands = True
            # One that starts has nobody yet who ends it with its parent, were it stopped.
            self._changed.wait_for(lambda: not self._starting)
            for worker in self._ready:
                worker.stand_still()
        try:
            yield
        finally:
            with self._changed:
                self._stands = False
                for worker in self._ready:
                    worker.go_on()
                self._changed.notify_all()

    def close(self) -> None:
        """End all helpers, at work or not."""
        self.drop(list(self._waiting))
        with self._changed:
            self._closed = True
            workers = self._ready | self._starting
            self._ready = set()
            self._changed.notify_all()
        for worker in workers:
            worker.end()

    # inside ------------------------------------------------------------------------------------

    def _missing(self) -> int:
        return max(0, len(self._waiting) - self._free)

    def _helpers(self) -> int:
        free = cpuinfo.available_memory()
        room = self._most if free is None else max(1, free // (2 * HELPER_BYTES))
        return min(self._most, len(cpuinfo.usable_cpus()), room)

    def _serve(self) -> None:
        worker: Worker | None = None
        while (one := self._next()) is not None:
            worker = worker or self._start()
            if worker is not None:
                worker, one.ms = self._run(worker, one)
            with self._changed:
                one.is_over = True
                self._free += 1
                self._changed.notify_all()
        if worker is not None:
            self._end(worker)
        with self._changed:
            self._threads -= 1
            self._free -= 1

    def _next(self) -> Compilation | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._waiting and not self._stands))
            if self._closed:
                return None
            self._free -= 1
            return self._waiting.popleft()

    def _start(self) -> Worker | None:
        """A helper that is ready; None where there is none to be had."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._stands)
            if self._closed:
                return None
            try:
                worker = Worker(self._limits, self._cases)
            except OSError:
                return None
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, worker.pid, NICE)
            self._starting.add(worker)
        is_there = False
        try:
            worker.wait_ready()
            is_there = True
        except Exception:  # it died, or close() was quicker
            worker.end()
        with self._changed:
            self._starting.discard(worker)
            if is_there and not self._closed:
                self._ready.add(worker)
            self._changed.notify_all()
        return worker if is_there else None

    def _run(self, worker: Worker, one: Compilation) -> tuple[Worker | None, float | None]:
        """The helper, if it is still there, and the job's milliseconds, if it came to its end."""
        began = worker.now()
        try:
            worker.do(one.job, lambda message: None, "first call")
            return worker, (worker.now() - began) * 1e3
        except WorkerDiedError as death:
            if death.status == "timeout":
                one.late = death.reason
            self._end(worker)
            return None, None
        except Exception:  # refused, or the compiler's own error: the attempt will tell
            return worker, None

    def _end(self, worker: Worker) -> None:
        with self._changed:
            self._ready.discard(worker)
        worker.end()
