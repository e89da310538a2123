"""What the kernel layouts share: filling stacks expert by expert, casts that refuse, act-order.

Every layout packs one expert at a time into stacks that are allocated once, so that the extra
memory is one unpacked expert.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from autosel.core import CanonicalExperts, QuantScheme, QuantWeight
from autosel.dtypes import torch_dtype
from autosel.errors import UnsupportedError, field_error

Parts = dict[str, torch.Tensor]

#: Relative error above which a scale is not merely rounded by a cast but lost: half a step of
#: bfloat16 is 2**-9, so this passes every rounding and no underflow, overflow or subnormal ruin.
_LOST = 2.0**-8


def fill(stacks: Parts, expert: int, num_experts: int, parts: Parts) -> None:
    """Put one expert's tensors into stacks ``[E, ...]``, allocated when first met."""
    for name, part in parts.items():
        if name not in stacks:
            stacks[name] = torch.empty(
                (num_experts, *part.shape), dtype=part.dtype, device=part.device
            )
        stacks[name][expert] = part


def pad2(values: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Zero-pad a matrix at its end to ``[rows, cols]``."""
    return torch.nn.functional.pad(values, (0, cols - values.shape[1], 0, rows - values.shape[0]))


def pad_shards(values: torch.Tensor, shards: int, rows: int, cols: int) -> torch.Tensor:
    """Zero-pad each of the stacked shards: ``[shards * r, c]`` to ``[shards * rows, cols]``."""
    return torch.cat([pad2(part, rows, cols) for part in values.chunk(shards, 0)])


def cut_shards(values: torch.Tensor, shards: int, rows: int, cols: int) -> torch.Tensor:
    """Inverse of :func:`pad_shards`."""
    return torch.cat([part[:rows, :cols] for part in values.chunk(shards, 0)])


def cast_scales(values: torch.Tensor, dtype: torch.dtype, where: str) -> torch.Tensor:
    """Scales or bias in the kernel's dtype; UnsupportedError if the range, not just the last
    bits, is lost (1e-8 becomes 0 in float16, 70000 infinite, 1e-5 keeps 7 bits).
    """
    if values.dtype == dtype:
        return values
    cast = values.to(dtype)
    wide, back = values.double(), cast.double()
    lost = ~((back - wide).abs() <= wide.abs() * _LOST)
    if bool(lost.any()):
        value = float(wide[lost].flatten()[0])
        raise UnsupportedError(
            field_error(
                where,
                f"values that {_name(dtype)} cannot hold",
                f"{int(lost.sum())} (first {value:g})",
                f"none, or activations in {_name(values.dtype)}",
            )
        )
    return cast


def rounded(experts: CanonicalExperts, dtype: torch.dtype) -> list[str]:
    """Names of the GEMMs whose scales lose bits when cast to ``dtype``."""
    found = []
    for name, weight in (("w13", experts.w13), ("w2", experts.w2)):
        if weight.scales.dtype == dtype:
            continue
        for expert in weight.scales:
            if not torch.equal(expert.to(dtype).to(expert.dtype), expert):
                found.append(name)
                break
    return found


def single_group(scheme: QuantScheme, num_inputs: int) -> bool:
    """Whether one scale serves all inputs, by declaration or because the group is that long."""
    return scheme.num_groups(num_inputs) == 1


def sorted_inputs(weight: QuantWeight, expert: int, where: str) -> torch.Tensor | None:
    """Stable order of one expert's inputs by group, int64 ``[K]``; None without act-order.

    Once sorted, input ``k`` belongs to group ``k // group_size``, which needs full groups; a
    tensor-parallel share of an act-order layer has uneven ones and is refused.
    """
    if weight.g_idx is None:
        return None
    groups = weight.g_idx[expert].long()
    if single_group(weight.scheme, weight.num_inputs):
        expected = torch.zeros_like(groups)
    else:
        expected = torch.arange(len(groups), device=groups.device) // weight.scheme.group_size
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], expected):
        raise UnsupportedError(
            field_error(
                f"{where}.g_idx of expert {expert}",
                "group lengths",
                "uneven",
                f"{weight.scheme.group_size} inputs in every group but the last",
            )
        )
    return order


def keeps_order(scheme: QuantScheme, num_inputs: int) -> bool:
    """Whether sorting changes anything: with one group there is nothing to sort."""
    return scheme.has_g_idx and not single_group(scheme, num_inputs)


def kept_order(weight: QuantWeight, expert: int, where: str) -> torch.Tensor | None:
    """As :func:`sorted_inputs`, and None where there is one group."""
    order = sorted_inputs(weight, expert, where)
    return order if keeps_order(weight.scheme, weight.num_inputs) else None


def group_index_of(order: torch.Tensor, scheme: QuantScheme, num_inputs: int) -> torch.Tensor:
    """The g_idx int32 ``[K]`` whose stable sort gave ``order``."""
    if single_group(scheme, num_inputs):
        return torch.zeros(num_inputs, dtype=torch.int32, device=order.device)
    return (torch.argsort(order.long()) // scheme.group_size).to(torch.int32)


def fold_w2_order(values: torch.Tensor, order: torch.Tensor | None, shards: int) -> torch.Tensor:
    """Reorder w13's output rows, shard by shard, to the sorted order of w2's inputs.

    The activation works row by row (gate row and up row move together), so this is exact and
    costs nothing at run time.
    """
    if order is None:
        return values
    return torch.cat([part[order] for part in values.chunk(shards, 0)])


def require(where: str, *rules: tuple[str, object, object, bool]) -> None:
    """Refuse by the first ``(what, found, required, ok)`` that is not ok."""
    for what, found, required, ok in rules:
        if not ok:
            raise UnsupportedError(field_error(where, what, found, required))


def require_little_endian(layout: str) -> None:
    """Views of words as bytes assume that the low byte comes first."""
    if sys.byteorder != "little":
        raise UnsupportedError(
            field_error(f"layout {layout}", "byte order", sys.byteorder, "little")
        )


def bias_dtypes(experts: CanonicalExperts) -> dict[str, str]:
    """Name of the dtype in which each bias came, by GEMM."""
    found = {"w13": experts.w13.bias, "w2": experts.w2.bias}
    return {name: _name(bias.dtype) for name, bias in found.items() if bias is not None}


def restored(
    scheme: QuantScheme, num_inputs: int, fields: Parts, bias_dtype: str | None
) -> QuantWeight:
    """Unpacked ``fields`` as a weight, with what the layouts on tiles do not store."""
    weight = with_single_group_index(QuantWeight(scheme, num_inputs, **fields))
    return with_bias_dtype(weight, bias_dtype)


def with_bias_dtype(weight: QuantWeight, dtype: str | None) -> QuantWeight:
    """Give a bias back in the dtype it came in."""
    if weight.bias is None or dtype is None:
        return weight
    return replace(weight, bias=weight.bias.to(getattr(torch, dtype)))


def with_single_group_index(weight: QuantWeight) -> QuantWeight:
    """The all-zero g_idx of an act-order weight with one group, which layouts do not store."""
    if not weight.scheme.has_g_idx or weight.g_idx is not None:
        return weight
    shape = (weight.num_experts, weight.num_inputs)
    zeros = torch.zeros(shape, dtype=torch.int32, device=weight.codes.device)
    return replace(weight, g_idx=zeros)


def scale_dtype(scheme: QuantScheme) -> torch.dtype:
    return torch_dtype(scheme.scale_dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
