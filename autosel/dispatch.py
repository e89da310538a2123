"""From what a caller has to what :meth:`autosel.interfaces.Backend.run` is promised.

Every call of a backend goes through :func:`apply`: a kernel never sees a view with gaps, an expert
id that could be used as a wild index, or an empty batch.
"""

from __future__ import annotations

import torch

from autosel.core import Params, Problem, Routing
from autosel.dtypes import torch_dtype
from autosel.errors import AutoselError, RoutingError, field_error
from autosel.interfaces import Backend, PackedExperts


def apply(
    backend: Backend,
    packed: PackedExperts,
    x: torch.Tensor,
    routing: Routing,
    params: Params,
    *,
    expert_map: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one MoE layer with ``backend`` and return ``[M, H]`` in the problem's act dtype.

    x           ``[M, H]`` in the act dtype; any strides
    routing     GLOBAL ids, any integer dtype, ``[M, top_k]``; weights ``[M, top_k]``, any float
                dtype; any strides. A slot whose id is outside ``[0, num_experts)``, or whose
                expert is elsewhere, is not served here and adds nothing, whatever its weight.
    expert_map  integer ``[num_experts]``: local id of each global expert, negative where it is
                elsewhere. It may be left out only where this rank holds all experts.
    out         written and returned when given (any strides; it may share memory with ``x``)

    With M = 0 nothing is launched. Raises RoutingError for ids, weights or a map of the wrong
    shape or type, and AutoselError for ``x``, ``out`` or a backend that ignores ``out``.
    """
    problem = packed.problem
    _check_activations(x, problem)
    for tensor in packed.tensors.values():
        _same_device("x", x, tensor)
        break
    if out is not None:
        _check_out(out, x)
    local = localize(routing, problem, expert_map, device=x.device)
    if local.num_tokens != x.shape[0]:
        raise RoutingError(
            field_error("topk_ids", "tokens", local.num_tokens, f"{x.shape[0]} as in x")
        )
    if x.shape[0] == 0:
        return torch.empty_like(x) if out is None else out

    direct = out is not None and out.is_contiguous() and not _share_memory(out, x)
    buffer = (
        out if direct and out is not None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    )
    with torch.no_grad():
        result = backend.run(packed, x.contiguous(), local, params, buffer)
        _check_result(backend, result, buffer)
        if out is None or direct:
            return buffer
        return out.copy_(buffer)


def localize(
    routing: Routing,
    problem: Problem,
    expert_map: torch.Tensor | None = None,
    *,
    device: torch.device | None = None,
) -> Routing:
    """Global routing to local: contiguous int32 ids ``[M, top_k]`` in ``[-1, num_local_experts)``
    and float32 weights, 0 where the id is -1.

    Ids are compared in their own type before they are narrowed, so an int64 id of ``2**32`` does
    not become expert 0. No device synchronisation unless the tensors are on the CPU.
    """
    ids, weights = routing.topk_ids, routing.topk_weights
    _check_routing(ids, weights, problem, device)
    ids = _widened(ids)
    here = (ids >= 0) & (ids < problem.num_experts)
    if expert_map is None:
        if problem.num_local_experts != problem.num_experts:
            raise RoutingError(
                field_error(
                    "expert_map",
                    "value",
                    "nothing",
                    f"a map of {problem.num_experts} experts, since this rank holds only "
                    f"{problem.num_local_experts} of them",
                )
            )
        local = ids
    else:
        check_expert_map(expert_map, problem)
        _same_device("expert_map", expert_map, ids)
        local = _widened(expert_map)[torch.where(here, ids, 0).long()]
        here &= (local >= 0) & (local < problem.num_local_experts)
    local = torch.where(here, local, -1).to(torch.int32)
    weights = torch.where(here, weights.to(torch.float32), 0.0)
    return Routing(local.contiguous(), weights.contiguous())


def check_expert_map(expert_map: torch.Tensor, problem: Problem) -> None:
    """Refuse a map of the wrong shape or type, or one that leads outside the local experts.

    Values are read only from a map on the CPU: reading them from a device would stall it (and
    break a graph capture). There :func:`localize` treats a local id out of range as elsewhere.
    """
    if expert_map.dtype not in _INTEGERS:
        raise RoutingError(field_error("expert_map", "dtype", expert_map.dtype, "an integer type"))
    if tuple(expert_map.shape) != (problem.num_experts,):
        raise RoutingError(
            field_error("expert_map", "shape", list(expert_map.shape), [problem.num_experts])
        )
    if expert_map.device.type != "cpu":
        return
    top = int(_widened(expert_map).max())
    if top >= problem.num_local_experts:
        raise RoutingError(
            field_error(
                "expert_map", "local id", top, f"at most {problem.num_local_experts - 1}, or -1"
            )
        )


_INTEGERS = frozenset(
    {
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    }
)


def _widened(ids: torch.Tensor) -> torch.Tensor:
    # Small and unsigned types lack comparisons in torch; uint64 above 2**63 turns negative, which
    # is out of range as well.
    return ids if ids.dtype in (torch.int32, torch.int64) else ids.to(torch.int64)


def _check_activations(x: torch.Tensor, problem: Problem) -> None:
    if x.dim() != 2 or x.shape[1] != problem.hidden_size:
        raise AutoselError(
            field_error("x", "shape", list(x.shape), f"[tokens, {problem.hidden_size}]")
        )
    if x.dtype != torch_dtype(problem.act_dtype):
        raise AutoselError(field_error("x", "dtype", x.dtype, torch_dtype(problem.act_dtype)))


def _check_out(out: torch.Tensor, x: torch.Tensor) -> None:
    if out.shape != x.shape:
        raise AutoselError(field_error("out", "shape", list(out.shape), list(x.shape)))
    if out.dtype != x.dtype:
        raise AutoselError(field_error("out", "dtype", out.dtype, x.dtype))
    _same_device("out", out, x)


def _check_routing(
    ids: torch.Tensor, weights: torch.Tensor, problem: Problem, device: torch.device | None
) -> None:
    if ids.dtype not in _INTEGERS:
        raise RoutingError(field_error("topk_ids", "dtype", ids.dtype, "an integer type"))
    if not weights.dtype.is_floating_point:
        raise RoutingError(
            field_error("topk_weights", "dtype", weights.dtype, "a floating-point type")
        )
    if ids.dim() != 2 or ids.shape[1] != problem.top_k:
        raise RoutingError(
            field_error("topk_ids", "shape", list(ids.shape), f"[tokens, {problem.top_k}]")
        )
    if weights.shape != ids.shape:
        raise RoutingError(
            field_error("topk_weights", "shape", list(weights.shape), list(ids.shape))
        )
    for name, tensor in (("topk_ids", ids), ("topk_weights", weights)):
        if device is not None and tensor.device != device:
            raise RoutingError(field_error(name, "device", tensor.device, device))


def _same_device(name: str, tensor: torch.Tensor, other: torch.Tensor) -> None:
    if tensor.device != other.device:
        raise AutoselError(field_error(name, "device", tensor.device, other.device))


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _check_result(backend: Backend, result: torch.Tensor, buffer: torch.Tensor) -> None:
    """A backend that returns memory of its own left ``out`` unwritten: garbage, never an answer."""
    if result is buffer:
        return
    if result.data_ptr() != buffer.data_ptr() or result.shape != buffer.shape:
        raise AutoselError(
            field_error(f"backend {backend.name}", "returned tensor", "another one", "out itself")
        )
