"""Compiles what later lines of a file of sweeps will need, beside the sweeps that run.

A sweep on a GPU waits for compilers more than half of its time, and keeps about half of 16 cores
busy. Helpers of the lowest priority fill the compilers' caches for the lines that come next:
kernels of each backend's own setting, of the known good ones that a search begins with, and those
that verifying needs. On two H200 with 32 cores a sweep of 14 token counts and eight settings then
took 110 to 166 s instead of 140 to 240.

A helper touches no device. What it builds lies in caches on disk, as in a sweep's own
(:mod:`autosel.worker_compile`); what it fails to build is told by the sweep.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path

from autosel import neighbours, registry
from autosel.core import Device, Params, Problem
from autosel.failures import CAUGHT
from autosel.interfaces import Backend
from autosel.records import to_json
from autosel.search import first_points
from autosel.store import Store, snapshot
from autosel.storefile import is_there
from autosel.tune_search import NEARBY
from autosel.tune_types import SweepSettings
from autosel.verify_sizes import extreme_counts, full_counts, verified_counts
from autosel.verify_suite import extreme_problem
from autosel.worker_compile import compiles_ahead
from bench.device_results_lines import Line, read_words

#: Settings of a backend and token count that are compiled, at most; those with all that verifying
#: calls, since more are seldom among the fastest four; and those with all that a proof calls.
SETTINGS, VERIFIED, PROVEN = 8, 4, 2
#: Jobs that wait for each helper: enough to keep it busy, few enough to follow what sweeps store.
WAITING = 4


@dataclass(frozen=True)
class Job:
    """One call of :meth:`~autosel.interfaces.Backend.compile_ahead`."""

    backend: str
    problem: Problem
    params: Params
    num_tokens: int


def start(
    lines: Sequence[Line],
    db: Path,
    device: Device,
    environment: Mapping[str, str],
    *,
    helpers: int,
    skip: int,
) -> subprocess.Popen[bytes]:
    """Begin in a process of its own, in its own session; the first ``skip`` lines with anything
    left to do run already. End it with :func:`end`."""
    told = {
        "lines": [line.words for line in lines],
        "db": str(db), "device": device.to_dict(), "helpers": helpers, "skip": skip,
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.device_results_ahead"], env=dict(environment),
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    if process.stdin:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(told).encode())
            process.stdin.close()
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    """End it with its helpers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def jobs(line: Line, store: Store, device: Device) -> Iterator[Job]:
    """What a sweep of this line will want compiled, each once, in about that order."""
    seen = set()
    for job in _every_job(line, store, device):
        key = (job.backend, job.problem, to_json(dict(job.params)), job.num_tokens)
        if key not in seen:
            seen.add(key)
            yield job


def _every_job(line: Line, store: Store, device: Device) -> Iterator[Job]:
    names = line.asked.get("backends") or [b.name for b in registry.all_backends()]
    for problem in line.problems:
        counts = SweepSettings(token_counts=line.tokens).tokens(device)
        proven = full_counts(problem, counts)
        for num_tokens, name in product(counts, names):
            backend = registry.get(name)
            points = _points(backend, problem, line, store, device, num_tokens)
            for place, params in enumerate(points):
                wanted = [num_tokens]
                if place < VERIFIED:
                    wanted = [*verified_counts(problem, num_tokens)]
                if place < PROVEN:
                    wanted += [count for count in proven if count not in wanted]
                yield from _jobs(backend, problem, params, wanted, device)
                if place < PROVEN:
                    small, least = extreme_problem(problem), extreme_counts(problem)
                    yield from _jobs(backend, small, params, least, device)


def _points(
    backend: Backend, problem: Problem, line: Line, store: Store, device: Device, num_tokens: int
) -> list[Params]:
    """The settings that a search would try first."""
    if not compiles_ahead(backend):
        return []
    try:
        if not backend.supports(problem, device):
            return []
        space = backend.space(problem, num_tokens, device)
        good = neighbours.known_good(store, backend, problem, device, num_tokens, line.routing)
        trials = min(SETTINGS, int(line.asked.get("trials", SETTINGS)))
        return [*first_points(space, trials, int(line.asked.get("seed", 0)), good[:NEARBY])]
    except CAUGHT:  # the sweep will tell
        return []


def _jobs(
    backend: Backend, problem: Problem, params: Params, counts: Sequence[int], device: Device
) -> Iterator[Job]:
    with contextlib.suppress(*CAUGHT):
        for count in backend.compiled_counts(problem, params, counts, device):
            yield Job(backend.name, problem, params, count)


def _compile(job: Job, device: Device) -> None:
    with contextlib.suppress(*CAUGHT):
        backend = registry.get(job.backend)
        backend.compile_ahead(job.problem, job.params, job.num_tokens, device)


def _least() -> None:
    os.nice(19)


def main() -> int:
    told = json.load(sys.stdin)
    device = Device.from_dict(told["device"])
    lines = [read_words(tuple(words), "line") for words in told["lines"]]
    helpers = told["helpers"]
    waiting: set[Future[None]] = set()
    # A copy, since sweeps write to the database.
    known = snapshot(told["db"]) if is_there(told["db"]) else Store.open(":memory:")
    with known as store, ProcessPoolExecutor(helpers, initializer=_least) as pool:
        left = [line for line in lines if line.decided(store, device) < line.counts(device)]
        for job in chain.from_iterable(jobs(line, store, device) for line in left[told["skip"] :]):
            if len(waiting) >= helpers * WAITING:
                _, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            waiting.add(pool.submit(_compile, job, device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
