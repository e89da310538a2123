"""Global expert ids and the ones this rank holds: expert parallelism in one place."""

from __future__ import annotations

import torch

from autosel.core import Problem, Routing
from autosel.errors import RoutingError, field_error

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


def local_range(problem: Problem, rank: int = 0) -> range:
    """Global ids of the experts that ``rank`` holds when they are dealt out in equal runs."""
    start = rank * problem.num_local_experts
    stop = start + problem.num_local_experts
    if rank < 0 or stop > problem.num_experts:
        ranks = problem.num_experts // problem.num_local_experts
        raise RoutingError(field_error("local_map", "rank", rank, f"0 to {ranks - 1}"))
    return range(start, stop)


def local_map(
    problem: Problem, rank: int = 0, *, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """Expert map of a contiguous split: int32 ``[num_experts]``, the local id or -1."""
    held = local_range(problem, rank)
    ids = torch.full((problem.num_experts,), -1, dtype=torch.int32)
    ids[held.start : held.stop] = torch.arange(len(held), dtype=torch.int32)
    return ids.to(device)


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


def localize(
    routing: Routing,
    problem: Problem,
    expert_map: torch.Tensor | None = None,
    *,
    device: torch.device | None = None,
) -> Routing:
    """Global routing to local: contiguous int32 ids ``[M, top_k]`` in ``[-1, num_local_experts)``
    and float32 weights, 0 where the id is -1.

    ``expert_map`` is an integer ``[num_experts]``: the local id of each expert, negative where it
    is elsewhere. Ids are compared in their own type before they are narrowed, so an int64 id of
    ``2**32`` does not become expert 0. Tensors on a device are never read back. Raises
    RoutingError for shapes, types and devices that do not fit.
    """
    ids, weights = routing.topk_ids, routing.topk_weights
    _check_routing(ids, weights, problem, device)
    ids = _widened(ids)
    here = (ids >= 0) & (ids < problem.num_experts)  # [M, top_k]
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
        if expert_map.device != ids.device:
            raise RoutingError(field_error("expert_map", "device", expert_map.device, ids.device))
        local = _widened(expert_map)[torch.where(here, ids, 0).long()]  # [M, top_k]
        here &= (local >= 0) & (local < problem.num_local_experts)
    local = torch.where(here, local, -1).to(torch.int32)
    # A kernel may multiply before it masks, and 0 times a stray NaN weight is NaN.
    weights = torch.where(here, weights.to(torch.float32), 0.0)
    return Routing(local.contiguous(), weights.contiguous())


def _widened(ids: torch.Tensor) -> torch.Tensor:
    # Small and unsigned types lack comparisons in torch; uint64 above 2**63 turns negative, which
    # is out of range as well.
    return ids if ids.dtype in (torch.int32, torch.int64) else ids.to(torch.int64)


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
