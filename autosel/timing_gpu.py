"""Timing on a GPU: events around a CUDA graph's replay, the L2 cache flushed before each sample.

A graph takes the launch overhead out, which otherwise hides differences between small kernels; an
operator that cannot be captured is timed eagerly and its samples say so. The flush runs on the
same stream before the first event, so it is never inside the timed part; while it runs, the host
has time to queue the events and the replay, so that no gap between them is measured either. It
reads and does not write: dirty lines would be written back while the candidate runs.

Clocks, temperature and throttling stand beside each sample where they can be read
(:mod:`autosel.timing_nvml`). What two events with nothing between them measure is recorded as
``overhead_us``; it is part of every sample and is not subtracted.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

import torch

from autosel import stats
from autosel.core import Device, Scalar
from autosel.timing_nvml import Conditions
from autosel.timing_types import Call, Prepared, Sample, TimingSettings

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
            "clock": "device events",
            "graph": settings.graph,
            "overhead_us": self._overhead_us(),
        }
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
            return Prepared(self._capture(call).replay, {"captured": True})
        except (RuntimeError, NotImplementedError) as error:
            # A poisoned context raises again here and is the candidate's failure; an operator
            # that only refuses capture (it synchronises, or allocates) is timed as it is.
            self.run(call)
            reason = " ".join(str(error).split())
            return Prepared(call, {"captured": False, "capture_error": reason})

    def sample(self, call: Call, repeats: int) -> Sample:
        seen = self._conditions.read()
        start = self._api.Event(enable_timing=True)
        end = self._api.Event(enable_timing=True)
        self._flush()
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        self._api.synchronize()
        us = start.elapsed_time(end) * 1e3 / repeats
        # Lower clocks than the others had are no property of the candidate. All of a round are
        # hit alike, so nothing is left out; the report says so.
        return Sample(us, False, seen)

    def load(self) -> Mapping[str, float]:
        return {}

    def _flush(self) -> None:
        if self._buffer.numel():
            torch.sum(self._buffer, dim=0, out=self._sink)

    def _overhead_us(self) -> float:
        """The least that a sample of nothing measured; CUDA's events resolve about 0.5 us."""
        nothing = [self._empty_sample() for _ in range(5)]
        return round(min(nothing), 3)

    def _empty_sample(self) -> float:
        start = self._api.Event(enable_timing=True)
        end = self._api.Event(enable_timing=True)
        self._flush()
        start.record()
        end.record()
        self._api.synchronize()
        return float(start.elapsed_time(end) * 1e3)

    def _uuid(self) -> str | None:
        try:
            uuid = str(self._api.get_device_properties(self._index).uuid)
        except (AttributeError, RuntimeError):
            return None
        return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"

    def _capture(self, call: Call) -> Any:
        # Capture needs a few calls on a side stream first, for handles and workspaces.
        stream = _capture_stream(self._api, self._index)
        stream.wait_stream(self._api.current_stream())
        with self._api.stream(stream):
            for _ in range(3):
                call()
        self._api.current_stream().wait_stream(stream)
        self._api.synchronize()
        graph = self._api.CUDAGraph()
        # Other threads (a watchdog, a progress bar) may use the device meanwhile.
        with self._api.graph(graph, stream=stream, capture_error_mode="thread_local"):
            call()
        graph.replay()
        self._api.synchronize()
        return graph
