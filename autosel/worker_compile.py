"""Compiles kernels of several settings at once, each in a helper process, before they are tried.

A compiler keeps one core busy for seconds, and a search tries tens of settings one after another.
Helpers touch no device and hold no weights. What they build lies in the compiler's cache on disk;
what they fail to build is told when the candidate itself is tried, so their ends count for nothing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import IO

from autosel import cpuinfo
from autosel.core import Device, Params, Problem
from autosel.interfaces import Backend
from autosel.worker import Worker, WorkerDiedError
from autosel.worker_limits import StepLimits
from autosel.worker_wire import Compile

#: Helpers at once, and the memory that each may need.
MOST = 8
HELPER_BYTES = 1 << 30


def compiles_ahead(backend: Backend) -> bool:
    """Whether the backend can compile without a device."""
    return type(backend).compile_ahead is not Backend.compile_ahead


class CompilePool:
    """Helpers that stay from one token count to the next; :meth:`close` ends them."""

    def __init__(self, limits: StepLimits, cases: IO[bytes], most: int = MOST) -> None:
        self._limits, self._cases, self._most = limits, cases, most
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._closed = False
        self._lock = threading.Lock()

    def compile(
        self,
        backend: str,
        data: bytes | None,
        problem: Problem,
        device: Device,
        points: Sequence[Params],
        num_tokens: int,
    ) -> list[float | None]:
        """Milliseconds that each point's compilation took; None where it came to no end.

        ``data`` are the bytes of a backend that only this process knows.
        """
        found: list[float | None] = [None] * len(points)
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(len(points)):
            waiting.put(number)

        def work() -> None:
            while not self._closed:
                try:
                    number = waiting.get_nowait()
                except queue.Empty:
                    return
                job = Compile(backend, data, problem, points[number], num_tokens, device)
                found[number] = self._run(job)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(self._helpers(points))]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():  # in pieces, so that Ctrl-C is heard
                thread.join(timeout=0.2)
        return found

    def close(self) -> None:
        """End all helpers, at work or not."""
        self._closed = True
        with self._lock:
            workers, self._idle, self._busy = [*self._idle, *self._busy], [], set()
        for worker in workers:
            worker.end()

    def _helpers(self, points: Sequence[Params]) -> int:
        free = cpuinfo.available_memory()
        room = self._most if free is None else max(1, free // (2 * HELPER_BYTES))
        return min(self._most, len(cpuinfo.usable_cpus()), len(points), room)

    def _run(self, job: Compile) -> float | None:
        with self._lock:
            if self._closed:
                return None
            worker = self._idle.pop() if self._idle else Worker(self._limits, self._cases)
            self._busy.add(worker)
        try:
            worker.wait_ready()
            began = time.monotonic()
            worker.do(job, lambda message: None, "first call")
            return (time.monotonic() - began) * 1e3
        except WorkerDiedError:
            worker.end()
            return None
        except Exception:  # refused, or the compiler's own error: the attempt will tell
            return None
        finally:
            with self._lock:
                if worker in self._busy:
                    self._busy.discard(worker)
                    if not worker.is_ended:
                        self._idle.append(worker)
