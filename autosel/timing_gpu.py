"""Timing on a GPU: events around a CUDA graph's replay, the L2 cache flushed before each sample.

A graph takes the launch overhead out, which otherwise hides differences between small kernels; an
operator that cannot be captured is timed eagerly and its samples say so. The flush runs on the
same stream before the first event, so it is never inside the timed part; while it runs, the host
has time to queue the events and the replay, so that no gap between them is measured either.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from autosel.core import Device, Scalar
from autosel.timing import Call, Prepared, Sample, TimingSettings

#: Larger than any L2 cache by some factor, and long enough (tens of microseconds at several TB/s)
#: to cover the host's launch of what follows.
FLUSH_FACTOR = 4
MIN_FLUSH_BYTES = 256 << 20


def flush_bytes(device: Device) -> int:
    """Bytes to read so that nothing useful stays in L2; at most an eighth of the memory."""
    wanted = max(MIN_FLUSH_BYTES, FLUSH_FACTOR * (device.cache_bytes or 0))
    return min(wanted, device.memory_bytes // 8) if device.memory_bytes else wanted


class GpuTimer:
    """:class:`~autosel.timing.Timer` for the current CUDA, ROCm or XPU device.

    ``api`` is torch's module for the device; tests hand in one of their own.
    """

    def __init__(self, device: Device, settings: TimingSettings, api: Any = None) -> None:
        self._api = api or getattr(torch, device.torch_device)
        cold = settings.cache == "cold"
        wanted = flush_bytes(device) if settings.flush_bytes is None else settings.flush_bytes
        where = device.torch_device if api is None else "cpu"
        self._buffer = torch.ones(wanted // 4 if cold else 0, dtype=torch.float32, device=where)
        self._sink = torch.empty((), dtype=torch.float32, device=where)
        self._facts: dict[str, Scalar] = {
            "cache": settings.cache,
            "flush_bytes": self._buffer.numel() * 4,
            "clock": "device events",
            "graph": settings.graph,
        }

    @property
    def facts(self) -> Mapping[str, Scalar]:
        return self._facts

    def now(self) -> float:
        return time.perf_counter()

    def run(self, call: Call) -> None:
        call()
        self._api.synchronize()

    def prepare(self, call: Call, settings: TimingSettings) -> Prepared:
        if not settings.graph or not hasattr(self._api, "CUDAGraph"):
            return Prepared(call, {"captured": False})
        try:
            return Prepared(self._capture(call).replay, {"captured": True})
        except (RuntimeError, NotImplementedError) as error:
            # A poisoned context raises again here and is the candidate's failure; an operator
            # that only refuses capture (it synchronises, or allocates) is timed as it is.
            self.run(call)
            reason = " ".join(str(error).split())
            return Prepared(call, {"captured": False, "capture_error": reason})

    def sample(self, call: Call, repeats: int) -> Sample:
        start = self._api.Event(enable_timing=True)
        end = self._api.Event(enable_timing=True)
        if self._buffer.numel():
            torch.sum(self._buffer, dim=0, out=self._sink)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        self._api.synchronize()
        return Sample(start.elapsed_time(end) * 1e3 / repeats)

    def load(self) -> Mapping[str, float]:
        return {}

    def _capture(self, call: Call) -> Any:
        # Capture needs a few calls on a side stream first, for handles and workspaces.
        stream = self._api.Stream()
        stream.wait_stream(self._api.current_stream())
        with self._api.stream(stream):
            for _ in range(3):
                call()
        self._api.current_stream().wait_stream(stream)
        self._api.synchronize()
        graph = self._api.CUDAGraph()
        with self._api.graph(graph):
            call()
        graph.replay()
        self._api.synchronize()
        return graph
