"""Where a layer lives: its device, the experts it holds, and which weights those are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from autosel.core import CanonicalExperts, Device, Problem
from autosel.device import detect
from autosel.errors import AutoselError, RoutingError, field_error
from autosel.expert_map import check_expert_map
from autosel.rank_problem import expert_range
from autosel.sources import CheckpointSource
from autosel.verify import fingerprint


def place(device: str | torch.device, asked: str = "FusedMoE") -> tuple[torch.device, Device]:
    """The torch device, its index spelt out, and what is known of it."""
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise AutoselError(field_error(asked, "device", repr(device), "a torch device")) from error
    index = where.index or 0
    if where.type != "cpu" and where.index is None:
        index = torch.accelerator.current_device_index() if torch.accelerator.is_available() else 0
    kind = "rocm" if where.type == "cuda" and torch.version.hip else where.type
    described = detect(kind, index)
    return (where if where.type == "cpu" else torch.device(where.type, index)), described


def expert_map_of(
    problem: Problem, rank: int, size: int, given: torch.Tensor | None
) -> torch.Tensor | None:
    """int32 ``[num_experts]`` or None where every expert is here in its own place; refuses a map
    that misses an expert held here."""
    if given is not None:
        held_experts(given, problem, problem.num_local_experts)
        # The caller's tensor may change later; this layer's map does not.
        return given.resolve_neg().to(torch.int32, copy=True)
    held = expert_range(problem.num_experts, rank, size)
    if len(held) != problem.num_local_experts:
        raise RoutingError(
            field_error(
                f"rank {rank} of {size}", "experts held", problem.num_local_experts, len(held)
            )
        )
    if size == 1:
        return None
    ids = torch.full((problem.num_experts,), -1, dtype=torch.int32)
    ids[held.start : held.stop] = torch.arange(len(held), dtype=torch.int32)
    return ids


def held_experts(
    expert_map: torch.Tensor, problem: Problem, count: int | None = None
) -> tuple[int, ...]:
    """Global ids of the experts that a map places here, in the order in which they lie.

    ``count`` is how many there must be; without it any number but none. RoutingError for another
    number, two in one place, a gap, and a map of another shape or type.
    """
    check_expert_map(expert_map, problem)
    if expert_map.device.type == "meta":
        raise RoutingError(field_error("expert_map", "device", "meta", "one that holds its values"))
    placed = sorted((place, e) for e, place in enumerate(expert_map.tolist()) if place >= 0)
    local = [place for place, _ in placed]
    count = max(len(local), 1) if count is None else count
    if local != list(range(count)):
        wanted = f"each of 0 to {count - 1} once (no replicas)"
        raise RoutingError(field_error("expert_map", "local ids", local, wanted))
    return tuple(expert for _, expert in placed)


def check_held(source: CheckpointSource, options: Mapping[str, Any]) -> None:
    """RoutingError where options of the layer place other experts here than the source reads."""
    problem = source.problem
    experts = problem.num_experts
    read = source.held or tuple(expert_range(experts, source.ep_rank, source.ep_size))
    given = options.get("expert_map")
    if given is None:
        said = tuple(expert_range(experts, options.get("ep_rank", 0), options.get("ep_size", 1)))
    else:
        said = held_experts(given, replace(problem, num_local_experts=experts))
    if read != said:
        raise RoutingError(field_error(source.label, "experts read", list(read), list(said)))


def weights_id(experts: CanonicalExperts) -> str:
    """Tells one layer's weights from another's of the same shape, at the cost of two experts."""
    parts = [
        f"{fingerprint(tensor[expert].resolve_neg()):016x}"
        for weight in (experts.w13, experts.w2)
        for tensor in weight.tensors.values()
        for expert in (0, -1)
    ]
    return "-".join(parts)
