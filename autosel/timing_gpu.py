"""Timing on a GPU: events around a call inside a CUDA graph, the L2 cache flushed before it.

A graph takes the launch overhead out, which otherwise hides differences between small kernels; an
operator that cannot be captured is timed eagerly and its samples say so. Where the device has
event nodes, the graph holds the flush, an event, the call and another event, so that the start of
a graph (about 5 us on an H200, half of a small layer) is not measured either, as it is not paid by
a layer inside a model's graph. Elsewhere the events stand around the replay. The flush is never
inside the timed part; while it runs, the host has time to queue what follows, so that no gap is
measured. It reads and does not write: dirty lines would be written back while the candidate runs.

Clocks, temperature and throttling stand beside each sample where they can be read
(:mod:`autosel.timing_nvml`). What two events with nothing between them measure, some microseconds,
is no part of a call: it is subtracted from every sample and recorded as ``overhead_us``, the one of
events inside a graph as ``graph_overhead_us``. A sample is therefore what the call adds to a graph.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from autosel import stats
from autosel.core import Device, Scalar
from autosel.timing_nvml import Conditions
from autosel.timing_types import Call, Prepared, Sample, TimingSettings

#: Samples of nothing, the middle one of which is the events' own time.
EMPTY_SAMPLES = 15
#: No sample is shorter than this: CUDA's events resolve about half of it.
LEAST_US = 1.0
#: Larger than any L2 cache by some factor, and long enough (tens of microseconds at several TB/s)
#: to cover the host's launch of what follows.
FLUSH_FACTOR = 4
MIN_FLUSH_BYTES = 256 << 20


@functools.cache
def _capture_stream(api: Any, index: int) -> Any:
    """One side stream a device: cuBLAS keeps a workspace (32 MiB on Hopper) for every stream."""
    return api.Stream(index)


def flush_bytes(device: Device) -> int:
    """Bytes to read so that nothing useful stays in L2; at most an eighth of the memory."""
    wanted = max(MIN_FLUSH_BYTES, FLUSH_FACTOR * (device.cache_bytes or 0))
    return min(wanted, device.memory_bytes // 8) if device.memory_bytes else wanted


class GpuTimer:
    """:class:`~autosel.timing.Timer` for the current CUDA, ROCm or XPU device.

    ``api`` is torch's module for the device; tests hand in one of their own.
    """

    quantile = stats.ranking_quantile("cuda")
    #: Nothing carries over from one sample to the next but clocks and heat, which pairing cancels.
    block = 1

    def __init__(self, device: Device, settings: TimingSettings, api: Any = None) -> None:
        self._api = api or getattr(torch, device.torch_device)
        cold = settings.cache == "cold"
        wanted = flush_bytes(device) if settings.flush_bytes is None else settings.flush_bytes
        where = device.torch_device if api is None else "cpu"
        self._buffer = torch.ones(wanted // 4 if cold else 0, dtype=torch.float32, device=where)
        self._sink = torch.empty((), dtype=torch.float32, device=where)
        self._index = int(self._api.current_device())
        self._conditions = Conditions(self._uuid() if device.kind == "cuda" else None)
        self._facts: dict[str, Scalar] = {
            "cache": settings.cache,
            "flush_bytes": self._buffer.numel() * 4,
            # Another name than when their own time was part of every sample.
            "clock": "device events, net",
            "graph": settings.graph,
        }
        self._graph_us = 0.0  # of two events with nothing between them, inside a graph
        self._eager_us = 0.0  # and outside
        self._eager_us = self._facts["overhead_us"] = self._empty_us(lambda: None)
        if self._conditions.missing:
            self._facts["clocks"] = self._conditions.missing

    @property
    def facts(self) -> Mapping[str, Scalar]:
        return self._facts

    def now(self) -> float:
        return time.perf_counter()

    def run(self, call: Call) -> None:
        call()
        self._api.synchronize()

    def prepare(self, call: Call, settings: TimingSettings) -> Prepared:
        if not settings.graph:
            return Prepared(call, {"captured": False})
        if not hasattr(self._api, "CUDAGraph"):
            missing = f"torch.{self._api.__name__.rpartition('.')[2]} has no graphs"
            return Prepared(call, {"captured": False, "capture_error": missing})
        try:
            replay = self._capture(call, marked=settings.cache == "cold")
            facts: dict[str, Scalar] = {"captured": True}
            facts["event_nodes"] = isinstance(replay, _Marked)
            if isinstance(replay, _Marked):
                facts["graph_overhead_us"] = self._graph_us
            return Prepared(replay, facts)
        except (RuntimeError, NotImplementedError) as error:
            # A poisoned context raises again here and is the candidate's failure; an operator
            # that only refuses capture (it synchronises, or allocates) is timed as it is.
            self.run(call)
            reason = " ".join(str(error).split())
            return Prepared(call, {"captured": False, "capture_error": reason})

    def sample(self, call: Call, repeats: int) -> Sample:
        seen = self._conditions.read()
        inside = isinstance(call, _Marked) and repeats == 1
        empty_us = self._graph_us if inside else self._eager_us
        between_us = self._between_us(call, repeats)
        # Events that were not in order, or not recorded, are no short time.
        us = max(between_us - empty_us, LEAST_US) / repeats if between_us > 0 else math.nan
        # Lower clocks than the others had are no property of the candidate. All of a round are
        # hit alike, so nothing is left out; the report says so.
        return Sample(us, False, seen)

    def _between_us(self, call: Call, repeats: int) -> float:
        """Microseconds between two events around ``repeats`` calls, or inside the graph of one."""
        if isinstance(call, _Marked) and repeats == 1:
            call()
            self._api.synchronize()
            return call.us()
        start = self._api.Event(enable_timing=True)
        end = self._api.Event(enable_timing=True)
        self._flush()
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        self._api.synchronize()
        return float(start.elapsed_time(end) * 1e3)

    def load(self) -> Mapping[str, float]:
        return {}

    def _flush(self) -> None:
        if self._buffer.numel():
            torch.sum(self._buffer, dim=0, out=self._sink)

    def _empty_us(self, nothing: Call) -> float:
        """The middle one of some samples of nothing."""
        found = sorted(self._between_us(nothing, 1) for _ in range(EMPTY_SAMPLES))
        return max(0.0, round(found[EMPTY_SAMPLES // 2], 3))

    def _uuid(self) -> str | None:
        try:
            uuid = str(self._api.get_device_properties(self._index).uuid)
        except (AttributeError, RuntimeError):
            return None
        return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"

    def _capture(self, call: Call, *, marked: bool) -> Call:
        """A graph's replay, with flush and events inside where ``marked`` and the device can."""
        # Capture needs a few calls on a side stream first, for handles and workspaces.
        stream = _capture_stream(self._api, self._index)
        stream.wait_stream(self._api.current_stream())
        with self._api.stream(stream):
            for _ in range(3):
                call()
        self._api.current_stream().wait_stream(stream)
        self._api.synchronize()
        if marked and self._has_event_nodes:
            return self._marked(call)
        replay: Call = self._graph_of(call).replay
        return replay

    def _marked(self, call: Call) -> _Marked:
        """A graph of flush and call with two events around the call, recorded at every run."""
        start, end = (self._api.Event(enable_timing=True, external=True) for _ in range(2))

        def between_events() -> None:
            self._flush()
            start.record()
            call()
            end.record()

        return _Marked(self._graph_of(between_events), start, end)

    def _graph_of(self, call: Call) -> Any:
        """What ``call`` launches, captured and replayed once."""
        graph = self._api.CUDAGraph()
        stream = _capture_stream(self._api, self._index)
        # Other threads (a watchdog, a progress bar) may use the device meanwhile.
        with self._api.graph(graph, stream=stream, capture_error_mode="thread_local"):
            call()
        graph.replay()
        self._api.synchronize()
        return graph

    @functools.cached_property
    def _has_event_nodes(self) -> bool:
        """Whether torch and the device can time between events inside a graph; tried once."""
        try:
            self._graph_us = self._empty_us(self._marked(lambda: None))
        except (TypeError, RuntimeError, ValueError):
            return False
        return True


class _Marked:
    """A graph of flush, event, call and event."""

    def __init__(self, graph: Any, start: Any, end: Any) -> None:
        self._graph, self._start, self._end = graph, start, end

    def __call__(self) -> None:
        self._graph.replay()

    def us(self) -> float:
        """Microseconds between the events of the last replay, which must have finished."""
        return float(self._start.elapsed_time(self._end) * 1e3)
