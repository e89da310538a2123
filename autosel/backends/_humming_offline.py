"""Fills the cache of humming-kernels without the device, in a process that will never launch.

The package compiles with NVRTC in a process of its own and keeps the cubin under a hash of the
source, the flags (compute capability, include folders), the compiler's version and the times of
its headers; none of it depends on who asks. Its configurations come from heuristics that read a
record of the device, which is pretended here from what is known: what it asks for beyond that
raises, and the candidate's own first call compiles instead.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from types import SimpleNamespace
from typing import Any

import torch

from autosel.backends._package import member
from autosel.core import Device, Problem
from autosel.errors import UnsupportedError, field_error
from autosel.interfaces import PackedExperts

#: Threads that a multiprocessor holds at most, by capability (CUDA C++ Programming Guide, table
#: "Technical Specifications per Compute Capability"); 2,048 elsewhere.
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
#: 32-bit registers of a multiprocessor, there: the same for all of capability 7.5 to 12.1.
_REGISTERS = 64 << 10
#: What the record below tells of a device.
KNOWN = (
    "name",
    "is_ppu",
    "sm_count",
    "sm_major",
    "sm_minor",
    "sm_version",
    "max_smem_size",
    "max_threads_per_sm",
    "max_registers_per_sm",
)
#: What it was asked for beyond that: a caller that survives the answer has gone another way than
#: it would with the device, and what it made must not be kept.
missed: set[str] = set()


class _Record(SimpleNamespace):
    def __getattr__(self, name: str) -> Any:
        missed.add(name)
        raise AttributeError(f"{name} of the device is not known before it is opened")


def record(device: Device) -> SimpleNamespace:
    """The package's record of a device, as far as it is known without opening it."""
    for name in ("capability", "multiprocessors", "shared_memory_bytes"):
        if getattr(device, name) is None:
            raise UnsupportedError(field_error("humming", f"device's {name}", None, "a number"))
    major, minor = device.capability or (0, 0)
    return _Record(
        index=0,
        name=device.name,
        is_ppu=False,
        sm_count=device.multiprocessors,
        sm_major=major,
        sm_minor=minor,
        sm_version=10 * major + minor,
        max_smem_size=device.shared_memory_bytes,
        max_threads_per_sm=_THREADS.get((major, minor), 2048),
        max_registers_per_sm=_REGISTERS,
    )


@functools.cache
def pretend(device: Device) -> None:
    """From now on the package sees ``device`` and compiles instead of launching."""
    made = record(device)
    extension = SimpleNamespace(_DeviceInfo=lambda index=0: made)
    where = "package humming-kernels, humming.device"
    member(where, "humming.device", "_get_device_info_extension", "a function")
    kernel: Any = member(where, "humming.kernel.humming", "HummingKernel", "a class")
    from autosel.backends.humming import package

    module: Any = importlib.import_module("humming.device")
    module._get_device_info_extension = lambda: extension
    cuda: Any = torch.cuda
    cuda.current_device = lambda: 0
    cuda.device = lambda index=None: contextlib.nullcontext()
    kernel.register_kernel = lambda self: setattr(self, "kernel_id", 0)
    used = package()
    prepare = used["prepare_layer_config"]
    used["prepare_layer_config"] = lambda **options: prepare(**{**options, "device": 0})

    def compiles(layer: Any, *, compute_config: str, tuning_config: str, **_: Any) -> None:
        kernel.prepare_kernels(layer.to_str(), compute_config, tuning_config, 0)

    used["humming_forward"] = compiles


def meta_packed(layout: str, problem: Problem) -> PackedExperts:
    """The layer's packed weights without contents; who compiles asks the layer, not its tensors."""
    names = [f"{gemm}{part}" for gemm in ("w13", "w2") for part in ("", "_scales")]
    tensors = {name: torch.empty(1, dtype=torch.int32, device="meta") for name in names}
    if problem.w13.has_g_idx:
        order = (1, problem.hidden_size)
        tensors["w13_order"] = torch.empty(order, dtype=torch.int32, device="meta")
    return PackedExperts(layout, problem, tensors)
