"""Global expert ids and the ones this rank holds: expert parallelism in one place."""

from __future__ import annotations

import functools

import torch

from autosel import workspace
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


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a kernel finds the values at their places, with their own sign."""
    return tensor.is_contiguous() and not tensor.is_neg()


def check_expert_map(expert_map: torch.Tensor, problem: Problem) -> None:
    """Refuse a map of the wrong shape or type, or one that leads outside the local experts.

    Values are read only from a map on the CPU: reading them from a device would stall it (and
    break a graph capture). There :func:`localize` treats a local id out of range as elsewhere.
    """
    if not isinstance(expert_map, torch.Tensor):
        raise RoutingError(
            field_error("expert_map", "type", type(expert_map).__name__, "an integer tensor")
        )
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
    any_ids: bool = False,
    checked: bool = False,
) -> Routing:
    """Global routing to local: contiguous int32 ids ``[M, top_k]`` in ``[-1, num_local_experts)``
    and float32 weights, 0 where the id is -1.

    ``expert_map`` is an integer ``[num_experts]``: the local id of each expert, negative where it
    is elsewhere. Ids are compared in their own type before they are narrowed, so an int64 id of
    ``2**32`` does not become expert 0. With ``any_ids`` and no map, ids that are no expert may
    stay as they are, and so may their weights (:attr:`autosel.interfaces.Backend.reads_any_ids`).
    ``checked`` says that the map has been through :func:`check_expert_map`.
    Tensors on a device are never read back. Raises
    RoutingError for shapes, types and devices that do not fit.
    """
    ids, weights = routing.topk_ids, routing.topk_weights
    _check_routing(ids, weights, problem, device)
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
        if any_ids:
            return Routing(_narrowed(ids, problem.num_experts), _plain_floats(weights))
        local, gone = _within(_widened(ids), problem.num_experts)
    else:
        if not checked:
            check_expert_map(expert_map, problem)
        if expert_map.device != ids.device:
            raise RoutingError(field_error("expert_map", "device", expert_map.device, ids.device))
        known, gone = _within(_widened(ids), problem.num_experts)
        placed = _widened(expert_map)
        found = workspace.empty(tuple(ids.shape), placed.dtype, ids.device)
        torch.index_select(placed, 0, known.view(-1), out=found.view(-1))
        local, elsewhere = _within(found, problem.num_local_experts)
        gone.logical_or_(elsewhere)
    if local.dtype != torch.int32:
        local = workspace.empty(tuple(ids.shape), torch.int32, ids.device).copy_(local)
    local.masked_fill_(gone, _constant(-1, torch.int32))
    # A kernel may multiply before it masks, and 0 times a stray NaN weight is NaN.
    served = workspace.empty(tuple(ids.shape), torch.float32, ids.device)
    return Routing(local, served.copy_(weights).masked_fill_(gone, _constant(0, torch.float32)))


@functools.cache
def _constant(value: int, dtype: torch.dtype) -> torch.Tensor:
    """On the CPU for every device: a number would become a new tensor in each call."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype)


def _within(ids: torch.Tensor, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``ids`` held between 0 and ``stop - 1``, and whether that changed them. In planned memory:
    steady state allocates nothing, and two operators are fewer than four comparisons."""
    shape = tuple(ids.shape)
    held = workspace.empty(shape, ids.dtype, ids.device)
    torch.clamp(ids, 0, stop - 1, out=held)
    changed = workspace.empty(shape, torch.bool, ids.device)
    return held, torch.ne(held, ids, out=changed)


def local_ids(ids: torch.Tensor, problem: Problem, expert_map: torch.Tensor | None) -> torch.Tensor:
    """int32 ids for kernels that take any (:attr:`autosel.interfaces.Backend.reads_any_ids`).

    ids int32 or int64 ``[M, top_k]``; expert_map int32, checked, on the device of ids. Half as many
    operators as :func:`localize`, since weights need no change.
    """
    if expert_map is None:
        return _narrowed(ids, problem.num_experts)
    known, gone = _within(ids, problem.num_experts)
    found = workspace.empty(tuple(ids.shape), torch.int32, ids.device)
    torch.index_select(expert_map, 0, known.view(-1), out=found.view(-1))
    return found.masked_fill_(gone, _constant(-1, torch.int32))


def _narrowed(ids: torch.Tensor, stop: int) -> torch.Tensor:
    """As contiguous int32; what is no expert stays none."""
    shape = tuple(ids.shape)
    if ids.dtype == torch.int32:
        if is_plain(ids):
            return ids
        return workspace.empty(shape, torch.int32, ids.device).copy_(ids)
    ids = _widened(ids)
    held = workspace.empty(shape, ids.dtype, ids.device)
    torch.clamp(ids, -1, stop, out=held)
    return workspace.empty(shape, torch.int32, ids.device).copy_(held)


def _plain_floats(weights: torch.Tensor) -> torch.Tensor:
    if weights.dtype == torch.float32 and is_plain(weights):
        return weights
    return workspace.empty(tuple(weights.shape), torch.float32, weights.device).copy_(weights)


def _widened(ids: torch.Tensor) -> torch.Tensor:
    # Small and unsigned types lack comparisons in torch; uint64 above 2**63 turns negative, which
    # is out of range as well.
    if ids.dtype in (torch.int32, torch.int64):
        return ids
    return workspace.empty(tuple(ids.shape), torch.int64, ids.device).copy_(ids)


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
