"""Runs independent tasks in processes that may die: a fault on a GPU ends the process it is in.

A worker reports each step of its task before it begins. When it dies, or runs past the limit, that
step is blamed and what is left of the task goes to a fresh worker.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

#: Seconds for a process to start and to make its task's inputs.
START_S = 60.0
#: ``(task, steps)`` to ``(step, row)``; a row of None says that the step begins.
Work = Callable[[Any, Sequence[str]], Iterator[tuple[str, dict[str, Any] | None]]]


@dataclass(eq=False)
class _Worker:
    process: Any
    connection: Connection
    task: Any = None
    left: list[str] = field(default_factory=list)
    step: str = ""
    reported: bool = False
    began: float = 0.0


def run(
    work: Work, tasks: Sequence[Any], steps: Sequence[str], jobs: int, limit_s: float
) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """``(task, step, row)`` as they come. ``work`` must be importable.

    A step that took its process down gives a row with status ``crashed`` unless it had given one
    already; one past ``limit_s`` seconds a row with status ``timeout``.
    """
    queue = deque((task, list(steps)) for task in tasks)
    workers: list[_Worker] = []
    try:
        while queue or any(worker.task is not None for worker in workers):
            while queue and len(workers) < jobs:
                workers.append(_start(work))
            for worker in workers:
                if worker.task is None and queue:
                    worker.task, worker.left = queue.popleft()
                    worker.step, worker.began = "", time.monotonic()
                    worker.connection.send((worker.task, worker.left))
            busy = {w.connection: w for w in workers if w.task is not None}
            for connection in wait(list(busy), timeout=1.0):
                yield from _receive(busy[connection], queue, workers)  # type: ignore[index]
            for worker in [w for w in workers if w.task is not None]:
                if time.monotonic() - worker.began > limit_s + START_S * (not worker.step):
                    reason = f"past {limit_s:g} s"
                    yield from _bury(worker, "timeout", reason, queue, workers)
    finally:
        for worker in workers:
            worker.process.kill()


def _receive(
    worker: _Worker, queue: deque[Any], workers: list[_Worker]
) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    try:
        message = worker.connection.recv()
    except (EOFError, ConnectionError):
        worker.process.join(10)
        reason = f"process ended, exit status {worker.process.exitcode}"
        yield from _bury(worker, "crashed", reason, queue, workers)
        return
    if message is None:
        worker.task = None
        return
    step, row = message
    if row is None:
        worker.step, worker.reported, worker.began = step, False, time.monotonic()
        worker.left.remove(step)
    else:
        worker.reported = True
        yield worker.task, step, row


def _bury(
    worker: _Worker, status: str, reason: str, queue: deque[Any], workers: list[_Worker]
) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    worker.process.kill()
    workers.remove(worker)
    if not worker.step:  # it never got to a step: trying again would go on for ever
        for step in worker.left:
            yield worker.task, step, {"status": status, "reason": f"before it began: {reason}"}
        return
    if not worker.reported or status == "timeout":
        yield worker.task, worker.step, {"status": status, "reason": reason}
    if worker.left:
        queue.append((worker.task, worker.left))


def _start(work: Work) -> _Worker:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, work), daemon=True)
    process.start()
    there.close()
    return _Worker(process, here)


def _serve(connection: Connection, work: Work) -> None:
    while True:
        try:
            task, steps = connection.recv()
        except EOFError:
            os._exit(0)
        for message in work(task, steps):
            connection.send(message)
        connection.send(None)
