"""Threads of torch's pool, each bound to a processor of its own while a sample is taken (Linux).

Only in a process that nobody else uses: the sweep's worker. Bound for the sample and free again
after it, so that what a library starts in between may run anywhere, and so that no other process
and nothing that the worker starts later inherits the binding. Setting ``OMP_PROC_BIND`` for the
worker instead would bind its first thread for good: compilers that it starts, and the threads of
every other pool, would all run on that one processor.

Who the pool's threads are is asked of the OpenMP runtime itself, by a parallel region in which each
says its number; they are asked again when the process has other threads than before. Left alone is
who has decided where threads run (``OMP_PROC_BIND``, ``OMP_PLACES`` and the like).

Bound are only as many threads as there are processors. Free ones then end up two on a processor
now and then, where one waits for the other's time slice at every barrier. With fewer threads a
free one can leave a busy processor and a bound one cannot. On two cores of an AMD EPYC with other
work on them (a load of 3 to 6), decisions with free and bound threads in turns
(``python -m bench.binding --shape A --tokens 4 --busy 0,1,2 --decisions 10``): with one more busy
process, bound threads gave the lower ranking figure in 26 of 30 pairs (the median of torch_int4's
was 15 ms bound, 246 ms free, of 1.8 ms on a quiet machine), with two more in 15 of 30, with none in
14 of 30. With one thread (``--threads 1 --busy 0,1 --decisions 8``) bound was lower in 9 of 48.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from autosel import cpuinfo

#: Whoever sets one of these has decided where threads run.
CHOSEN_BY_USER = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")

_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_TASKS = "/proc/self/task"


def chosen_by_user() -> str:
    """How the environment binds threads; "" where it says nothing."""
    return ",".join(f"{n}={os.environ[n]}" for n in CHOSEN_BY_USER if os.environ.get(n))


class Binding:
    """Binds the pool of the calling thread; ``words`` say how the last sample was taken."""

    def __init__(self, *, wanted: bool) -> None:
        self.words = chosen_by_user() or "none"
        self._runtime = _runtime() if wanted and self.words == "none" else None
        self._team: list[int] = []
        self._asked: tuple[int, frozenset[str]] | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Threads are bound inside, if they may be."""
        if self._runtime is None:
            yield
            return
        free = os.sched_getaffinity(0)
        team = self._threads()
        if len(team) != len(free):
            self.words = f"none: threads {len(team)}, processors {len(free)}"
            yield
            return
        try:
            self._bind(team, sorted(free))
            yield
        finally:
            for thread in team:
                with contextlib.suppress(OSError):  # it is gone, or its processors are
                    os.sched_setaffinity(thread, free)

    def _bind(self, team: Sequence[int], processors: Sequence[int]) -> None:
        try:
            for thread, processor in zip(team, processors, strict=True):
                os.sched_setaffinity(thread, {processor})
        except OSError as error:  # a processor went offline, or out of the control group
            self.words = f"none: {error.strerror}"
            return
        self.words = "one thread a processor: " + ",".join(map(str, processors))

    def _threads(self) -> list[int]:
        """The native ids of the pool's threads, the calling one's among them."""
        now = torch.get_num_threads(), frozenset(os.listdir(_TASKS))
        if now != self._asked:
            self._team = _team(self._runtime, now[0])
            self._asked = now[0], frozenset(os.listdir(_TASKS))
        return self._team


def _team(runtime: Any, threads: int) -> list[int]:
    """Every thread of a parallel region says its native id."""
    found: list[int] = []
    body = _BODY(lambda _: found.append(threading.get_native_id()))
    runtime.GOMP_parallel(body, None, ctypes.c_uint(threads), ctypes.c_uint(0))
    return found


def _runtime() -> Any:
    """The OpenMP runtime that torch uses; None where it cannot be told, or nothing can be bound.

    ``GOMP_parallel(fn, data, num_threads, flags)`` is GCC's interface (libgomp), which LLVM's and
    Intel's runtimes have as well.
    """
    if not hasattr(os, "sched_setaffinity"):
        return None
    maps = cpuinfo.read_text("/proc/self/maps")
    found = set(re.findall(r"/\S*lib(?:gomp|iomp5|omp)[-.\w]*\.so[.\w]*", maps))
    own = str(Path(torch.__file__).parent)
    paths = [path for path in found if path.startswith(own)] or list(found)
    try:
        runtime = ctypes.CDLL(paths[0]) if len(paths) == 1 else None
        return runtime if hasattr(runtime, "GOMP_parallel") else None
    except OSError:
        return None
