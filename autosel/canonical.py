"""What can be said about canonical weights: their groups, their values, one expert at a time."""

from __future__ import annotations

import torch

from autosel.core import CanonicalExperts, QuantWeight
from autosel.errors import CheckpointError, field_error
from autosel.packing import unpack_last


def group_index(weight: QuantWeight, expert: int) -> torch.Tensor:
    """Scale group of every input of one expert: int64 ``[K]``."""
    if weight.g_idx is not None:
        return weight.g_idx[expert].long()
    inputs = torch.arange(weight.num_inputs, device=weight.codes.device)
    if weight.scheme.group_size == -1:
        return torch.zeros_like(inputs)
    return inputs // weight.scheme.group_size


def expert_codes(weight: QuantWeight, expert: int) -> torch.Tensor:
    """Unsigned codes of one expert: uint8 ``[N, K]``."""
    return unpack_last(weight.codes[expert], weight.scheme.num_bits, weight.num_inputs)


def expert_zeros(weight: QuantWeight, expert: int) -> torch.Tensor:
    """True zero points of one expert: uint8 ``[N, G]``, the implicit one where symmetric."""
    if weight.zero_points is not None:
        return weight.zero_points[expert]
    return torch.full(
        weight.scales.shape[1:],
        weight.scheme.implicit_zero,
        dtype=torch.uint8,
        device=weight.codes.device,
    )


def dequantize_expert(
    weight: QuantWeight, expert: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """One expert's weights ``(u - z) * S``: ``[N, K]`` in ``dtype``.

    The difference is an integer of at most 9 bits and the product is formed in float32 (float64
    when asked for), where a 16-bit scale makes it exact; it is rounded once, to ``dtype``.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    codes = expert_codes(weight, expert).to(wide)  # [N, K]
    zeros = expert_zeros(weight, expert).to(wide)  # [N, G]
    scales = weight.scales[expert].to(wide)  # [N, G]
    count = scales.shape[1]
    size = weight.num_inputs if weight.scheme.group_size == -1 else weight.scheme.group_size
    if weight.g_idx is None and size * count == weight.num_inputs:
        # Whole groups in order: a view, ten times faster than gathering a scale for each input.
        blocks = codes.view(len(codes), count, size)  # [N, G, group]
        blocks.sub_(zeros.unsqueeze(-1)).mul_(scales.unsqueeze(-1))
    else:
        groups = group_index(weight, expert)  # [K]
        codes.sub_(zeros[:, groups]).mul_(scales[:, groups])
    return codes.to(dtype)


def check(weight: QuantWeight, where: str) -> None:
    """Refuse a weight whose tensors disagree with its scheme, naming both numbers."""
    experts, outputs = weight.num_experts, weight.num_outputs
    groups = weight.scheme.num_groups(weight.num_inputs)
    if weight.g_idx is not None:
        # A tensor-parallel share of an act-order w2 keeps the scales of all its layer's groups.
        groups = max(groups, int(weight.scales.shape[-1]))
    words = -(-weight.num_inputs // weight.scheme.pack_factor)
    expected: dict[str, tuple[int, ...]] = {
        "codes": (experts, outputs, words),
        "scales": (experts, outputs, groups),
        "zero_points": (experts, outputs, groups),
        "g_idx": (experts, weight.num_inputs),
        "bias": (experts, outputs),
    }
    for name, tensor in weight.tensors.items():
        if tuple(tensor.shape) != expected[name]:
            raise CheckpointError(
                field_error(f"{where}.{name}", "shape", list(tensor.shape), list(expected[name]))
            )
    if (weight.zero_points is None) != weight.scheme.symmetric:
        found = "none" if weight.zero_points is None else "zero points"
        raise CheckpointError(
            field_error(where, f"symmetric={weight.scheme.symmetric}", found, "the opposite")
        )
    if (weight.g_idx is not None) != weight.scheme.has_g_idx:
        found = "none" if weight.g_idx is None else "a group index"
        raise CheckpointError(
            field_error(where, f"has_g_idx={weight.scheme.has_g_idx}", found, "the opposite")
        )


def check_experts(experts: CanonicalExperts) -> None:
    """Refuse experts whose tensors disagree with their problem."""
    problem = experts.problem
    for name, weight, shape, scheme in (
        ("w13", experts.w13, problem.w13_shape, problem.w13),
        ("w2", experts.w2, problem.w2_shape, problem.w2),
    ):
        found = (weight.num_experts, weight.num_outputs, weight.num_inputs)
        if found != shape:
            raise CheckpointError(field_error(name, "[experts, outputs, inputs]", found, shape))
        if weight.scheme != scheme:
            raise CheckpointError(field_error(name, "scheme", weight.scheme, scheme))
        check(weight, name)
