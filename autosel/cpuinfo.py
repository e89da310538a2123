"""What Linux says about its processor, caches and memory; torch's word where it says nothing.

Nothing here fails on a missing or odd file: the fact is then None or left out.
"""

from __future__ import annotations

import functools
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

#: Only instruction sets a kernel may be built for. The rest of ``/proc/cpuinfo`` (mitigations,
#: virtualisation, power) changes with a kernel update and would make every stored timing stale.
_ISA = re.compile(
    r"(sse|ssse|avx|amx|fma|f16c|bmi|gfni|vaes|vnni|vpclmul|pni$|"
    r"neon|asimd|sve|sme(?!p)|bf16|i8mm|fphp|dotprod|lasx|lsx)"
)


def cpu_name(facts: dict[str, str]) -> str:
    """The processor's marketing name with single spaces; Arm gives only numbers, so those."""
    for key in ("model name", "cpu model", "cpu"):
        if facts.get(key):
            return " ".join(facts[key].split())
    if "cpu part" in facts:
        return f"CPU implementer {facts.get('cpu implementer', '?')} part {facts['cpu part']}"
    return platform.processor() or platform.machine()


def cpuinfo() -> dict[str, str]:
    """``key: value`` lines of the first processor in ``/proc/cpuinfo``, keys in lower case."""
    first = read_text("/proc/cpuinfo").split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip().lower(): value.strip() for key, value in pairs}


def isa(words: str) -> tuple[str, ...]:
    return tuple(sorted({word for word in words.lower().split() if _ISA.match(word)}))


def torch_capabilities() -> tuple[str, ...]:
    """torch's own list, where there is no ``/proc``, under the names that Linux uses."""
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    linux = {"avx512_f": "avx512f", "fma3": "fma", "bmi": "bmi1", "sse3": "pni"}
    linux |= {f"avx512_{x}": f"avx512{x}" for x in ("bw", "cd", "dq", "ifma", "vl", "vbmi")}
    return isa(" ".join(linux.get(name, name) for name, has in found.items() if has is True))


def last_level_cache(root: str = "/sys/devices/system/cpu") -> int | None:
    """Bytes of all last-level caches that this process's CPUs reach; None when unknown.

    A chip of several dies has one such cache a die. They are told apart by the CPUs that share
    each, and added up, since the threads use them all.
    """
    caches: dict[str, tuple[int, int]] = {}  # CPUs that share it -> (level, bytes)
    for cpu in sorted(usable_cpus()):
        levels: list[tuple[int, int, str]] = []
        for folder in Path(root).glob(f"cpu{cpu}/cache/index*"):
            size = re.fullmatch(r"(\d+)([KMG]?)", read_text(folder / "size").strip())
            level = read_text(folder / "level").strip()
            if size and level.isdigit() and read_text(folder / "type").strip() != "Instruction":
                scale = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[size[2]]
                shared = read_text(folder / "shared_cpu_list").strip() or str(cpu)
                levels.append((int(level), int(size[1]) * scale, shared))
        if levels:
            level_number, num_bytes, shared = max(levels)
            caches[shared] = (level_number, num_bytes)
    if caches:
        last = max(level for level, _ in caches.values())
        return sum(size for level, size in caches.values() if level == last)
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return capabilities.get("l3_cache_size") or capabilities.get("l2_cache_size")


def usable_cpus() -> set[int]:
    """The CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def total_memory() -> int | None:
    """Physical memory, or the container's limit where that is smaller; in steps of 256 MiB.

    A kernel update moves the exact figure by some megabytes, which makes no other machine.
    """
    limits = []
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    container = cgroup("memory.max", "memory/memory.limit_in_bytes")
    if container is not None:
        limits.append(container)
    step = 1 << 28
    return max(step, round(min(limits) / step) * step) if limits else None


def cgroup(*names: str) -> int | None:
    """A number from the container's control group, version 2 or 1; ``max`` counts as none."""
    for name in names:
        text = read_text(f"/sys/fs/cgroup/{name}").strip()
        if text.isdigit() and int(text) < 1 << 60:  # version 1 writes a huge number for no limit
            return int(text)
    return None


@functools.cache
def max_clock_mhz(root: str = "/sys/devices/system/cpu/cpufreq") -> int | None:
    """The highest clock that any core is built for; None where nobody says (most virtual machines).

    It is fixed while the machine runs, and a server has hundreds of cores to ask.
    """
    texts = (read_text(path).strip() for path in Path(root).glob("policy*/cpuinfo_max_freq"))
    rates_khz = [int(text) for text in texts if text.isdecimal()]
    return round(max(rates_khz) / 1000) if rates_khz else None


def read_text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def available_memory() -> int | None:
    """Bytes a new allocation in host memory could get now, within the container's limit."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", read_text("/proc/meminfo"), re.MULTILINE)
    limits = [] if not found else [int(found[1]) * 1024]
    limit = cgroup("memory.max", "memory/memory.limit_in_bytes")
    used = cgroup("memory.current", "memory/memory.usage_in_bytes")
    if limit is not None and used is not None:
        limits.append(max(0, limit - used))
    return min(limits, default=None)
