"""Where a layer lives: its device, the experts it holds, and which weights those are."""

from __future__ import annotations

import torch

from autosel.core import CanonicalExperts, Device, Problem
from autosel.device import detect
from autosel.errors import AutoselError, RoutingError, field_error
from autosel.expert_map import check_expert_map
from autosel.sharding import expert_range
from autosel.verify import fingerprint


def place(device: str | torch.device) -> tuple[torch.device, Device]:
    """The torch device, its index spelt out, and what is known of it."""
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise AutoselError(
            field_error("FusedMoE", "device", repr(device), "a torch device")
        ) from error
    index = where.index or 0
    if where.type != "cpu" and where.index is None:
        index = torch.accelerator.current_device_index() if torch.accelerator.is_available() else 0
    kind = "rocm" if where.type == "cuda" and torch.version.hip else where.type
    described = detect(kind, index)
    return (where if where.type == "cpu" else torch.device(where.type, index)), described


def expert_map_of(
    problem: Problem, rank: int, size: int, given: torch.Tensor | None
) -> torch.Tensor | None:
    """int32 ``[num_experts]`` or None where every expert is here; refuses a map that misses one."""
    if given is not None:
        check_expert_map(given, problem)
        local = sorted(i for i in given.tolist() if i >= 0)
        if local != list(range(problem.num_local_experts)):
            raise RoutingError(
                field_error(
                    "expert_map",
                    "local ids",
                    local,
                    f"each of 0 to {problem.num_local_experts - 1} once (no replicas)",
                )
            )
        return given.to(torch.int32)
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


def weights_id(experts: CanonicalExperts) -> str:
    """Tells one layer's weights from another's of the same shape, at the cost of two experts."""
    parts = [
        f"{fingerprint(tensor[expert]):016x}"
        for weight in (experts.w13, experts.w2)
        for tensor in (weight.codes, weight.scales)
        for expert in (0, -1)
    ]
    return "-".join(parts)
