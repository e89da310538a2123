"""The processes that belong to a worker: itself, what it started, and what those left behind.

A worker leads a session of its own, and its environment carries a mark. The session finds what it
started, even after the parent of such a process is gone; the mark finds what left the session.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator

import psutil

from autosel import cpuinfo

#: Environment variable that marks a worker and all that it starts; its value is the worker's own.
MARK = "AUTOSEL_WORKER_MARK"

_HELD = re.compile(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)

#: Seconds in which the processes of a killed session are expected to be gone. A process inside a
#: driver's call dies when that call returns.
PATIENCE_S = 30.0


def members(leader: int) -> list[int]:
    """The processes of the session that ``leader`` began, ``leader`` included."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # gone meanwhile, or somebody else's
            if os.getsid(pid) == leader:
                found.append(pid)
    return found


def send(number: int, pids: Iterable[int]) -> None:
    """Send a signal to those of the processes that are there."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def resident_bytes(pids: list[int]) -> int:
    """Memory that these processes hold; of files that are only mapped nothing counts (Linux)."""
    total = 0
    for pid in pids:
        found = _HELD.findall(cpuinfo.read_text(f"/proc/{pid}/status"))
        if found:
            total += sum(map(int, found)) << 10
            continue
        with contextlib.suppress(psutil.Error):
            total += int(psutil.Process(pid).memory_info().rss)
    return total


def end(leader: int, mark: str) -> bool:
    """Kill the worker and everything of its own; whether all of it is gone.

    Nothing is asked to end by itself, since nothing in a worker is worth saving and a request may
    be ignored. What forks faster than it is killed is stopped first.
    """
    deadline = time.monotonic() + PATIENCE_S
    rounds = 0
    while True:
        left = [pid for pid in _everything(leader, mark, rounds) if _alive(pid)]
        if not left:
            return True
        if time.monotonic() > deadline:
            return False
        for number in (signal.SIGSTOP, signal.SIGKILL):
            send(number, left)
        rounds += 1
        time.sleep(0.002 if rounds < 20 else 0.05)


def end_busy(leader: int, spared: set[int]) -> int:
    """Kill processes that work on although nobody asks them to; how many there were.

    Others of the session are left alone: a compiler's helpers wait for the next request.
    """
    others = [pid for pid in members(leader) if pid not in spared]
    if not others:
        return 0
    before = {pid: _cpu_seconds(pid) for pid in others}
    time.sleep(0.05)
    busy = [pid for pid in others if _cpu_seconds(pid) - before[pid] > 0.02]
    send(signal.SIGKILL, busy)
    return len(busy)


def _everything(leader: int, mark: str, rounds: int) -> Iterator[int]:
    in_session = members(leader)
    yield from in_session
    # Reading every environment is slow; after the session is gone once is enough.
    if rounds == 0 or not in_session:
        for pid in psutil.pids():
            if pid not in in_session and pid != os.getpid():
                with contextlib.suppress(psutil.Error, OSError):
                    if psutil.Process(pid).environ().get(MARK) == mark:
                        yield pid


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def _cpu_seconds(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    except psutil.Error:
        return 0.0
