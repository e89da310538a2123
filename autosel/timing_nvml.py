"""What an NVIDIA GPU says about its clocks, temperature and throttling while it is timed.

Needs the optional package ``nvidia-ml-py`` (module ``pynvml``); where it, the driver's library or
a figure is missing, the figure is left out and :attr:`Conditions.missing` says why. Figures are
asked for between samples, at most every :data:`INTERVAL_S`, since a query takes up to a
millisecond.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from autosel.core import Scalar

#: NVML refreshes its own figures no more often than about this.
INTERVAL_S = 0.1

#: Reasons for lower clocks that make times incomparable: bits of NVML's clocks event reasons
#: (nvml.h: SW power cap 0x4, HW slowdown 0x8, SW thermal 0x20, HW thermal 0x40, power brake 0x80).
THROTTLED = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


class Conditions:
    """Reads one device's state. ``uuid`` is torch's, which survives ``CUDA_VISIBLE_DEVICES``."""

    def __init__(self, uuid: str | None, nvml: Any = None) -> None:
        self.missing = ""
        self._queries: dict[str, Callable[[], float]] = {}
        self._seen: dict[str, float] = {}
        self._asked = float("-inf")
        try:
            self._queries = _queries(uuid, nvml)
        except Exception as error:  # NVML's errors have no common base with a missing library's
            self.missing = f"not readable: {type(error).__name__}: {' '.join(str(error).split())}"

    def read(self) -> dict[str, float]:
        """``sm_mhz``, ``memory_mhz``, ``celsius``, ``watts``, ``throttle`` (bits) and
        ``other_processes`` (that use the device beside this one and its parent), if known."""
        now = time.perf_counter()
        if now - self._asked >= INTERVAL_S:
            self._asked = now
            for name, query in list(self._queries.items()):
                try:
                    self._seen[name] = query()
                except Exception:  # this device does not tell; do not ask again
                    del self._queries[name]
                    self._seen.pop(name, None)
        return dict(self._seen)


def throttled(timing: Mapping[str, Scalar]) -> str:
    """Why clocks were lowered while these samples were taken, in words; empty if they were not."""
    text = timing.get("throttle")
    bits = 0
    for part in text.split(",") if isinstance(text, str) else ():
        if part.isdecimal():
            bits |= int(part)
    return ", ".join(word for bit, word in THROTTLED.items() if bits & bit)


def _queries(uuid: str | None, nvml: Any) -> dict[str, Callable[[], float]]:
    nvml = nvml or importlib.import_module("pynvml")
    if not uuid:
        raise LookupError("torch does not tell the device's UUID")
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    # Older packages know the older name.
    reasons = getattr(
        nvml,
        "nvmlDeviceGetCurrentClocksEventReasons",
        getattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None),
    )
    ours = {os.getpid(), os.getppid()}  # a worker's parent may have a context there as well

    def others() -> float:
        pids = {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        if os.getpid() not in pids:
            raise LookupError("process numbers are another name space's")
        return float(len(pids - ours))

    found: dict[str, Callable[[], float]] = {
        "other_processes": others,
        "sm_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "memory_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        "celsius": lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        "watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
    }
    if reasons is not None:
        found["throttle"] = lambda: float(reasons(handle))
    return found
