"""What a process may have switched on around a layer, and what of it must not reach the kernels.

A model runs under autocast, is built under ``torch.device("meta")`` with another default dtype, or
has its layers on several devices. Each of these changes what torch's operators inside a backend do;
none of them may change the layer's numbers, or have a good candidate withdrawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

__all__ = ["CPU", "capturing", "for_building", "for_calls", "seen_by_torch", "undisturbed"]

CPU = torch.device("cpu")

# Looked up once: both questions below are asked in every call, and take 0.5 us together.
_torch: Any = torch._C
_autocast = _torch._is_any_autocast_enabled
_function_modes = _torch._len_torch_function_stack
_dispatch_modes = _torch._len_torch_dispatch_stack
_tracing = _torch._get_tracing_state
_transforms = _torch._functorch.peek_interpreter_stack


def undisturbed(index: int | None) -> bool:
    """Whether a call may run as things are; ``index`` of its device, None for the CPU."""
    return not (
        _autocast()
        or _function_modes()
        or (index is not None and torch.accelerator.current_device_index() != index)
    )


@contextmanager
def for_calls(device: torch.device) -> Iterator[None]:
    """No autocast, no default device, and ``device`` the current one: kernels are launched there.

    What the caller switched on is on again afterwards, and for the shared experts.
    """
    with ExitStack() as stack:
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(_torch.DisableTorchFunction())
        if device.type != "cpu":
            stack.enter_context(torch.get_device_module(device).device(device.index))
        yield


@contextmanager
def for_building(device: torch.device = CPU) -> Iterator[None]:
    """Reading, packing and the first run of each candidate, as in a fresh process.

    Tensors made in inference mode could not be written outside of it.
    """
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(for_calls(device))
        if before != torch.float32:  # it is the whole process's, so it is only touched if need be
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, before)
        yield


def capturing(device: torch.device) -> bool:
    """Whether a graph of the current stream is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def seen_by_torch(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> bool:
    """Whether somebody follows torch's operators: torch.compile, autograd, ``torch.jit.trace``,
    fake tensors, ``vmap``, a dispatch mode.

    They would miss a kernel that is called with pointers; such calls go through one operator.
    """
    plain = torch.Tensor
    return (
        torch.compiler.is_compiling()
        or type(x) is not plain
        or type(topk_ids) is not plain
        or type(topk_weights) is not plain
        or _dispatch_modes()
        or _tracing() is not None
        or _transforms() is not None
        or (torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad))
    )
