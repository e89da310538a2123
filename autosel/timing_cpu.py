"""Timing on the processor: monotonic clock, cache flush, and what else was running.

The flush reads a buffer larger than the last-level cache; its rate is kept beside each sample, so
it is a bandwidth probe as well: when the host gives less memory bandwidth, the probe shows it.
Involuntary context switches (``getrusage``), CPU pressure (``/proc/pressure/cpu``), steal
(``/proc/stat``) and the time in which a container's quota held its threads back (``cpu.stat``) tell
a busy machine from a quiet one; where the system lacks one, it is left out. In a worker process
threads are bound while a sample is taken (:mod:`autosel.timing_threads`).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from autosel import cpuinfo, stats
from autosel.core import Device, Scalar
from autosel.samples import spoiled
from autosel.timing_threads import Binding
from autosel.timing_types import Call, Prepared, Sample, TimingSettings

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

#: Twice the caches, since replacement is not strictly least recently used and a victim cache
#: holds what was pushed out; never less than this where the cache's size is unknown.
FLUSH_FACTOR = 2
MIN_FLUSH_BYTES = 64 << 20

#: A flush at less than this share of the best rate seen was disturbed, and so would the sample
#: after it be; it is repeated a few times. The choice looks at the flush alone, never at the
#: sample, and so favours no candidate.
QUIET_SHARE = 0.6
FLUSH_TRIES = 4


def flush_bytes(device: Device) -> int:
    """Bytes to read so that nothing useful stays cached; at most a quarter of the memory."""
    wanted = max(MIN_FLUSH_BYTES, FLUSH_FACTOR * (device.cache_bytes or 0))
    return min(wanted, device.memory_bytes // 4) if device.memory_bytes else wanted


class CpuTimer:
    """:class:`~autosel.timing.Timer` for the processor this runs on."""

    quantile = stats.ranking_quantile("cpu")
    #: Libraries that take turns call by call evict each other's data and put each other's threads
    #: to sleep; the low quantile of a few samples in a row is what each does by itself.
    block = 3

    def __init__(
        self, device: Device, settings: TimingSettings, *, owns_process: bool = False
    ) -> None:
        cold = settings.cache == "cold"
        wanted = flush_bytes(device) if settings.flush_bytes is None else settings.flush_bytes
        self._flush_bytes = wanted if cold else 0
        # Ones, not empty: pages that were never written all map to one page of zeros.
        self._buffer = torch.ones(self._flush_bytes // 4, dtype=torch.float32)
        self._best_rate = 0.0
        self._binding = Binding(wanted=owns_process and settings.bind)
        self._quotas = quota_files()
        self._facts: dict[str, Scalar] = {
            "cache": settings.cache,
            "flush_bytes": self._buffer.numel() * 4,
            "clock": "perf_counter",
            "threads": torch.get_num_threads(),
            "cpus": ",".join(map(str, sorted(cpuinfo.usable_cpus()))),
            "huge_pages": os.environ.get("THP_MEM_ALLOC_ENABLE", "0") == "1",
        }

    @property
    def facts(self) -> Mapping[str, Scalar]:
        return {**self._facts, "binding": self._binding.words}

    def now(self) -> float:
        return time.perf_counter()

    def run(self, call: Call) -> None:
        call()

    def prepare(self, call: Call, settings: TimingSettings) -> Prepared:
        return Prepared(call)

    def sample(self, call: Call, repeats: int) -> Sample:
        with self._binding.held():
            rate = self._flush()
            switches, held_back = _involuntary_switches(), held_back_us(self._quotas)
            start = time.perf_counter_ns()
            for _ in range(repeats):
                call()
            elapsed = time.perf_counter_ns() - start
        seen = {} if rate is None else {"flush_gbps": round(rate, 2)}
        if switches is not None:
            seen["switches"] = (_involuntary_switches() or 0) - switches
        if held_back is not None:
            seen["held_back_us"] = round((held_back_us(self._quotas) or 0.0) - held_back, 1)
        us = elapsed / 1e3 / repeats
        return Sample(us, spoiled(us, seen.get("switches", 0)), seen)

    def load(self) -> Mapping[str, float]:
        held_back = held_back_us(self._quotas)
        found = {
            "pressure": _pressure_seconds(),
            "steal": _steal_seconds(),
            "held_back": held_back and held_back / 1e6 / max(1, len(cpuinfo.usable_cpus())),
        }
        return {name: seconds for name, seconds in found.items() if seconds is not None}

    def _flush(self) -> float | None:
        """Push everything out of the caches; GB/s of the read, None where nothing is flushed."""
        if not self._buffer.numel():
            return None
        rate = 0.0
        for _ in range(FLUSH_TRIES):
            start = time.perf_counter_ns()
            self._buffer.sum()
            rate = self._buffer.numel() * 4 / max(1, time.perf_counter_ns() - start)
            self._best_rate = max(self._best_rate, rate)
            if rate >= QUIET_SHARE * self._best_rate:
                break
        return rate


def _involuntary_switches() -> int | None:
    """Times that the system took the processor from one of this process's threads."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource else None


def quota_files(root: str = "/sys/fs/cgroup", groups: str = "/proc/self/cgroup") -> list[Path]:
    """``cpu.stat`` of this process's control group and of those above it that have a quota.

    Of version 2, or of version 1's controller ``cpu``. Inside a container the names may be those of
    the host, of which only the upper part is not there.
    """
    found: list[Path] = []
    for line in cpuinfo.read_text(groups).splitlines():
        _, controllers, name = (*line.split(":", 2), "", "")[:3]
        if "cpu" in controllers.split(","):
            mounts = [controllers, "cpu"]
        elif not controllers:
            mounts = ["", "unified"]
        else:
            continue
        parts = [part for part in name.split("/") if part not in ("", "..")]
        for mount in dict.fromkeys(mounts):
            for depth in range(len(parts), -1, -1):
                found.append(Path(root, mount, *parts[:depth], "cpu.stat"))
    files = dict.fromkeys(path.resolve() for path in found)  # version 1 has several names for one
    return [path for path in files if _HELD_BACK.search(cpuinfo.read_text(path))]


#: Microseconds in version 2, nanoseconds in version 1, summed over the processors.
_HELD_BACK = re.compile(r"^throttled_(usec|time) (\d+)$", re.MULTILINE)


def held_back_us(files: Sequence[Path]) -> float | None:
    """Microseconds in which a quota kept threads from running, summed over the processors."""
    found = [_HELD_BACK.search(cpuinfo.read_text(path)) for path in files]
    scale = {"usec": 1.0, "time": 1e-3}
    return sum(scale[one[1]] * int(one[2]) for one in found if one) if files else None


def _pressure_seconds() -> float | None:
    """Seconds in which some task on the machine waited for a processor."""
    found = re.search(r"^some .*total=(\d+)", cpuinfo.read_text("/proc/pressure/cpu"), re.MULTILINE)
    return int(found[1]) / 1e6 if found else None


def _steal_seconds() -> float | None:
    """Seconds that the hypervisor gave to other guests, averaged over the processors."""
    fields = cpuinfo.read_text("/proc/stat").split("\n", 1)[0].split()
    if len(fields) < 9 or not hasattr(os, "sysconf"):
        return None
    return int(fields[8]) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
