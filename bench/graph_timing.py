"""Times whole layers as CUDA graphs, and compiles kernels on all cores beforehand."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


def capture(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """One graph of all calls. The first call runs once before, so that everything is compiled."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph


def replays_us(graph: torch.cuda.CUDAGraph, replays: int, warm: int = 2) -> list[float]:
    for _ in range(warm):
        graph.replay()
    events = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


# ------------------------------------------------------------------ compilation
def _compile(job: tuple[str, str, tuple[Any, ...], dict[str, Any]]) -> tuple[str | None, float]:
    import importlib

    module, name, signature, options = job
    start = time.time()
    try:
        kernel = getattr(importlib.import_module(module), name)
        kernel.warmup(*signature, grid=(1,), **options)
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        return str(error)[-300:].replace("\n", " "), time.time() - start
    return None, time.time() - start


class Compiler:
    """A pool of processes; make it before the parent touches CUDA."""

    def __init__(self, processes: int | None = None) -> None:
        count = processes or max(1, (os.cpu_count() or 2) - 1)
        self.pool = multiprocessing.get_context("fork").Pool(count)
        self.failed: dict[str, str] = {}

    @staticmethod
    def key(launch: Any) -> str:
        return repr((launch.kernel.fn.__name__, launch.signature(), sorted(launch.options.items())))

    def compile(self, launches: Iterable[Any]) -> str:
        jobs = {
            self.key(x): (
                x.kernel.fn.__module__,
                x.kernel.fn.__name__,
                x.signature(),
                dict(x.options),
            )
            for x in launches
        }
        start = time.time()
        results = self.pool.map(_compile, jobs.values(), chunksize=1)
        for key, (error, _) in zip(jobs, results, strict=True):
            if error:
                self.failed[key] = error
        slowest = max((seconds for _, seconds in results), default=0.0)
        bad = sum(1 for error, _ in results if error)
        return (
            f"{len(jobs)} kernels in {time.time() - start:.0f} s "
            f"(slowest {slowest:.1f} s), {bad} failed"
        )

    def usable(self, launches: Iterable[Any]) -> str | None:
        """Why these launches cannot run, or None."""
        for launch in launches:
            error = self.failed.get(self.key(launch))
            if error:
                return error
        return None
