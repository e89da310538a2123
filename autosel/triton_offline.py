"""Compiles Triton kernels for a device without touching it, as a compiler on another machine would.

What is built lands in Triton's own cache, where the process that launches the kernel finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autosel.core import Device, Problem, Routing
from autosel.dtypes import torch_dtype

#: Threads that run in step: 64 on AMD's GCN and CDNA (gfx9), 32 elsewhere.
_WIDE = "gfx9"


class _Driver:
    """Answers what compilation asks of a device, and nothing else."""

    utils = None

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def launcher_cls(self, *args: object) -> None:
        return None


def compile_for(device: Device) -> None:
    """From now on ``kernel.warmup`` compiles for ``device``, a CUDA or ROCm one.

    For helper processes: nothing can be launched in this process any more.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    if device.kind == "rocm":
        arch = device.flags[0] if device.flags else ""
        target = GPUTarget("hip", arch, 64 if arch.startswith(_WIDE) else 32)
    else:
        major, minor = device.capability or (0, 0)
        target = GPUTarget("cuda", 10 * major + minor, 32)
    driver.set_active(_Driver(target))


def launches_compile(device: Device) -> None:
    """From now on ``kernel[grid](...)`` compiles for ``device`` instead of launching.

    With it, code that launches Triton kernels on tensors of the ``meta`` device, which have types
    and shapes and no contents, compiles just what it would launch.
    """
    from triton.runtime.jit import JITFunction

    compile_for(device)
    if getattr(JITFunction.run, "compiles", False):
        return
    launch: Callable[..., Any] = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    run.compiles = True  # type: ignore[attr-defined]
    JITFunction.run = run


def meta_call(problem: Problem, num_tokens: int) -> tuple[torch.Tensor, Routing, torch.Tensor]:
    """Activations, routing and output of a call without contents."""
    dtype = torch_dtype(problem.act_dtype)
    x = torch.empty((num_tokens, problem.hidden_size), dtype=dtype, device="meta")
    ids = torch.empty((num_tokens, problem.top_k), dtype=torch.int32, device="meta")
    weights = torch.empty(ids.shape, dtype=torch.float32, device="meta")
    return x, Routing(ids, weights), torch.empty_like(x)
