"""Describes the machine as a :class:`~autosel.core.Device`; asks nothing at import time.

CPU facts come from ``/proc`` and ``/sys`` where Linux has them, otherwise from torch. Accelerator
facts come from torch alone, so that a machine with no driver, or with every device hidden, is
described like any other: as its CPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any, Literal, cast

import torch

from autosel import cpuinfo, kernel_identity
from autosel.core import Device
from autosel.errors import AutoselError, field_error
from autosel.failures import ignored

Kind = Literal["cpu", "cuda", "rocm", "xpu"]

_pretended: list[Device] = []


def detect(kind: str | None = None, index: int = 0) -> Device:
    """Describe device ``index`` of ``kind``; the best accelerator, else the CPU, when not named.

    ``kind`` is ``cpu``, ``cuda``, ``rocm`` or ``xpu``. A Device is a description: what runs, runs
    on torch's current device, so select another one with ``torch.cuda.set_device`` first. Raises
    AutoselError, in one line, when that kind or index is not on this machine (no driver, hidden
    devices, a torch without it).
    """
    if kind is not None and kind not in _DETECTORS:
        expected = "one of " + ", ".join(_DETECTORS)
        raise AutoselError(field_error("device", "kind", repr(kind), expected))
    if _pretended:
        return _check_pretended(_pretended[-1], kind)
    chosen = cast(Kind, kind) if kind else available_kinds()[0]
    count = _count(chosen)
    if not count:
        found = f"none ({_why_absent(chosen)})"
        raise AutoselError(field_error(f"device {chosen}", "devices", found, "at least 1"))
    if not 0 <= index < count:
        raise AutoselError(field_error(f"device {chosen}", "index", index, f"0 to {count - 1}"))
    return _DETECTORS[chosen](index)


def available_kinds() -> tuple[Kind, ...]:
    """The kinds that have a visible device here, best first; the CPU is always the last."""
    return tuple(kind for kind in ("cuda", "rocm", "xpu", "cpu") if _count(kind))


def detect_all() -> tuple[Device, ...]:
    """Every visible device, the CPU last."""
    if _pretended:
        return (_pretended[-1],)
    return tuple(detect(k, i) for k in available_kinds() for i in range(_count(k)))


@contextmanager
def pretend(device: Device) -> Iterator[Device]:
    """Make :func:`detect` answer ``device`` inside the ``with`` block, in every thread."""
    _pretended.append(device)
    try:
        yield device
    finally:
        _pretended.remove(device)


def fingerprint(device: Device) -> str:
    """16 hexadecimal digits that differ when any field of ``device`` does; versions included."""
    text = json.dumps(device.to_dict(), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def free_memory_bytes(device: Device) -> int | None:
    """Bytes a new allocation on ``device`` could get now, or None where nobody says."""
    if device.kind in ("cuda", "rocm") and _count(device.kind):
        free, _ = torch.cuda.mem_get_info()
        # Blocks that torch has cached but not handed out are free to us as well.
        return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
    if device.kind == "cpu":
        return cpuinfo.available_memory()
    return None


def _check_pretended(device: Device, kind: str | None) -> Device:
    if kind is not None and kind != device.kind:
        raise AutoselError(field_error("device", "kind", device.kind, kind))
    return device


def _count(kind: str) -> int:
    """Visible devices of a kind. torch warns where a driver is broken; the count says enough."""
    if kind == "cpu":
        return 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if kind == "xpu":
                return torch.xpu.device_count() if torch.xpu.is_available() else 0
            if (kind == "rocm") != (torch.version.hip is not None):
                return 0
            return torch.cuda.device_count() if torch.cuda.is_available() else 0
        except (RuntimeError, AssertionError, AttributeError):
            return 0


def _why_absent(kind: str) -> str:
    built = {"cuda": torch.version.cuda, "rocm": torch.version.hip, "xpu": torch.version.xpu}
    if not built.get(kind):
        return f"torch {torch.__version__} is built without {kind}"
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        if variable in os.environ:
            return f"no device is visible ({variable}={os.environ[variable]!r})"
    return "no driver or no device"


def _cpu(index: int) -> Device:
    facts = cpuinfo.cpuinfo()
    flags = cpuinfo.isa(facts.get("flags") or facts.get("features", ""))
    return Device(
        kind="cpu",
        name=cpuinfo.cpu_name(facts),
        memory_bytes=cpuinfo.total_memory(),
        cache_bytes=cpuinfo.last_level_cache(),
        flags=flags or cpuinfo.torch_capabilities(),
        threads=torch.get_num_threads(),
        versions=package_versions("cpu"),
        max_clock_mhz=cpuinfo.max_clock_mhz(),
    )


def _cuda(index: int) -> Device:
    props: Any = torch.cuda.get_device_properties(index)
    hip = torch.version.hip is not None
    arch = str(getattr(props, "gcnArchName", "")).split(":")[0]
    block = getattr(props, "shared_memory_per_block_optin", None)
    kind: Kind = "rocm" if hip else "cuda"
    name = " ".join(str(props.name).split())
    return Device(
        kind=kind,
        name=name,
        # ROCm fills these with numbers of its own that mean something else than CUDA's.
        capability=None if hip else (int(props.major), int(props.minor)),
        multiprocessors=int(props.multi_processor_count),
        memory_bytes=int(props.total_memory),
        cache_bytes=int(getattr(props, "L2_cache_size", 0)) or None,
        shared_memory_bytes=int(block) if block else None,
        flags=(arch,) if hip and arch else (),
        threads=None,
        driver=_cuda_driver(hip),
        versions=package_versions(kind),
        max_clock_mhz=_max_clock_mhz(props, index, hip),
        mig_slice=_mig_slice(name),
    )


def _mig_slice(name: str) -> str | None:
    """The profile in the name that the driver gives a MIG instance: ``... MIG 1g.10gb``."""
    found = re.search(r"\bMIG (\d\S*)", name)
    return found[1] if found else None


def _max_clock_mhz(props: Any, index: int, hip: bool) -> int | None:
    """The highest clock of the multiprocessors, which torch's properties lack in some versions."""
    rate_khz = getattr(props, "clock_rate", None)
    if not rate_khz and not hip:
        rate_khz = _cuda_clock_rate(index)
    return round(rate_khz / 1000) if rate_khz else None


def _cuda_clock_rate(index: int) -> int | None:
    """CU_DEVICE_ATTRIBUTE_CLOCK_RATE (13) in kHz; torch has initialised the driver already."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        device, rate = ctypes.c_int(), ctypes.c_int()
        if driver.cuDeviceGet(ctypes.byref(device), index):
            return None
        return None if driver.cuDeviceGetAttribute(ctypes.byref(rate), 13, device) else rate.value
    except (OSError, AttributeError):
        return None


def _cuda_driver(hip: bool) -> str | None:
    if hip:
        return cpuinfo.read_text("/sys/module/amdgpu/version").strip() or None
    text = cpuinfo.read_text("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", text)
    if found:
        return found[1]
    try:
        bindings: Any = torch._C
        return f"CUDA {bindings._cuda_getDriverVersion()}"
    except (AttributeError, RuntimeError):
        return None


def _xpu(index: int) -> Device:
    props: Any = torch.xpu.get_device_properties(index)
    return Device(
        kind="xpu",
        name=" ".join(str(props.name).split()),
        multiprocessors=getattr(props, "gpu_subslice_count", None),
        memory_bytes=int(props.total_memory),
        cache_bytes=getattr(props, "last_level_cache_size", None),
        shared_memory_bytes=getattr(props, "local_mem_size", None),
        driver=str(getattr(props, "driver_version", "")) or None,
        versions=package_versions("xpu"),
    )


_DETECTORS: dict[str, Callable[[int], Device]] = {
    "cpu": _cpu,
    "cuda": _cuda,
    "rocm": _cuda,
    "xpu": _xpu,
}


def package_versions(kind: Kind) -> tuple[tuple[str, str], ...]:
    """Versions of torch, Triton, the toolkit and every backend's distributions; absent ones not,
    unless a backend runs their code from elsewhere: then its hash stands for the version.

    Our own kernels for ``kind`` stand among them with a hash of their sources.
    """
    # Here, because the registry loads backends and they may want a device of their own.
    from autosel.registry import all_backends

    backends = all_backends()
    names = {"torch", "triton", *(d for b in backends for d in b.distributions)}
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    for backend in backends:
        if not found.keys() >= {*backend.distributions}:
            with ignored():  # a plugin's mistake is not the device's
                found = {**backend.unpackaged(), **found}
    found["torch"] = torch.__version__
    toolkit = torch.version.hip or torch.version.cuda
    if toolkit:
        found["hip" if torch.version.hip else "cuda"] = toolkit
    found |= kernel_identity.versions(kind)
    return tuple(sorted(found.items()))
