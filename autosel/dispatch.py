"""From what a caller has to what :meth:`autosel.interfaces.Backend.run` is promised.

Every call of a backend goes through :func:`apply`: a kernel never sees a view with gaps, an expert
id that could be used as a wild index, or an empty batch.
"""

from __future__ import annotations

import torch

from autosel import workspace
from autosel.core import Params, Problem, Routing
from autosel.dtypes import torch_dtype
from autosel.errors import AutoselError, RoutingError, field_error
from autosel.expert_map import check_expert_map, is_plain, local_map, localize
from autosel.interfaces import Backend, PackedExperts

__all__ = [
    "apart",
    "apply",
    "check_expert_map",
    "check_result",
    "check_strided",
    "check_writable",
    "local_map",
    "localize",
]


def apply(
    backend: Backend,
    packed: PackedExperts,
    x: torch.Tensor,
    routing: Routing,
    params: Params,
    *,
    expert_map: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    checked_map: bool = False,
) -> torch.Tensor:
    """Run one MoE layer with ``backend`` and return ``[M, H]`` in the problem's act dtype.

    x           ``[M, H]`` in the act dtype; any strides
    routing     GLOBAL ids, any integer dtype, ``[M, top_k]``; weights ``[M, top_k]``, any float
                dtype; any strides. A slot whose id is outside ``[0, num_experts)``, or whose
                expert is elsewhere, is not served here and adds nothing, whatever its weight.
    expert_map  integer ``[num_experts]``: local id of each global expert, negative where it is
                elsewhere. It may be left out only where this rank holds all experts.
    out         written and returned when given (any strides; it may share memory with the others)

    checked_map  the map has been through :func:`check_expert_map` before

    With M = 0 nothing is launched. Raises RoutingError for ids, weights or a map of the wrong
    shape or type, and AutoselError for ``x``, ``out`` or a backend that ignores ``out``.
    """
    problem = packed.problem
    _check_activations(x, problem)
    device = next((t.device for t in packed.tensors.values()), x.device)
    if x.device != device:
        raise AutoselError(field_error("x", "device", x.device, device))
    if out is not None:
        _check_out(out, x)
    with torch.no_grad():
        local = localize(
            routing,
            problem,
            expert_map,
            device=x.device,
            any_ids=backend.reads_any_ids,
            checked=checked_map,
        )
        if local.num_tokens != x.shape[0]:
            raise RoutingError(
                field_error("topk_ids", "tokens", local.num_tokens, f"{x.shape[0]} as in x")
            )
        if x.shape[0] == 0:
            return torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        if not is_plain(x):
            x = workspace.empty(tuple(x.shape), x.dtype, x.device).copy_(x)
        read = (x, local.topk_ids, local.topk_weights)
        if out is not None and is_plain(out) and apart(out, *read):
            buffer = out
        else:
            # Without `out` the result is the caller's; else it is copied there from planned memory.
            make = torch.empty if out is None else workspace.empty
            buffer = make(tuple(x.shape), dtype=x.dtype, device=x.device)
        result = backend.run(packed, x, local, params, buffer)
        check_result(backend, result, buffer)
        return buffer if out is None or out is buffer else out.copy_(buffer)


def _check_activations(x: torch.Tensor, problem: Problem) -> None:
    if x.dim() != 2 or x.shape[1] != problem.hidden_size:
        raise AutoselError(
            field_error("x", "shape", list(x.shape), f"[tokens, {problem.hidden_size}]")
        )
    if x.dtype != torch_dtype(problem.act_dtype):
        raise AutoselError(field_error("x", "dtype", x.dtype, torch_dtype(problem.act_dtype)))


def _check_out(out: torch.Tensor, x: torch.Tensor) -> None:
    for what, found, expected in (
        ("shape", list(out.shape), list(x.shape)),
        ("dtype", out.dtype, x.dtype),
        ("device", out.device, x.device),
    ):
        if found != expected:
            raise AutoselError(field_error("out", what, found, expected))
    check_writable(out)


def check_writable(out: torch.Tensor) -> None:
    """AutoselError where several elements of ``out`` are one place in memory."""
    sizes = zip(out.shape, out.stride(), strict=True)
    if any(size > 1 and step == 0 for size, step in sizes):
        found = f"strides {list(out.stride())} (expanded)"
        raise AutoselError(field_error("out", "memory", found, "a place for each element"))


def apart(out: torch.Tensor, *read: torch.Tensor) -> bool:
    """Whether no byte of ``out``, which is contiguous, belongs to the span of another tensor."""
    start, size = out.data_ptr(), out.nbytes
    for tensor in read:
        ahead = tensor.data_ptr() - start  # bytes
        if ahead < size and -ahead < _span(tensor):
            return False
    return True


def _span(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first value to the end of its last one."""
    if tensor.is_contiguous():
        return tensor.nbytes
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def check_strided(**tensors: torch.Tensor | None) -> None:
    """AutoselError for what is laid out in another way than by strides: sparse, nested."""
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.layout != torch.strided or tensor.is_nested):
            found = "nested" if tensor.is_nested else tensor.layout
            raise AutoselError(field_error(name, "layout", found, torch.strided))


def check_result(backend: Backend, result: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """``buffer``, which a backend returned. One that returns memory of its own left ``out``
    unwritten: garbage, never an answer."""
    if result is not buffer and (
        not isinstance(result, torch.Tensor)
        or result.data_ptr() != buffer.data_ptr()
        or result.shape != buffer.shape
    ):
        raise AutoselError(
            field_error(f"backend {backend.name}", "returned", "something else", "out itself")
        )
    return buffer
