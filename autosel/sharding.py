"""Cuts canonical experts for tensor and expert parallelism, in logical sizes.

Tensor parallelism cuts the intermediate size: rows of gate and of up, each for itself, and inputs
of w2. Where a border cuts a group of w2, all ranks go over to a finer group that divides both, and
the scales repeat; no weight changes. Each rank's outputs sum to the uncut result.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from autosel.canonical import group_index
from autosel.core import CanonicalExperts, QuantWeight
from autosel.packing import pack_last, unpack_last
from autosel.rank_problem import expert_range, tp_share


def shard_tp(experts: CanonicalExperts, rank: int, size: int) -> CanonicalExperts:
    """The part of tensor-parallel ``rank`` of ``size``.

    The bias of w2 stays on rank 0 alone, as the ranks' outputs are summed. Raises UnsupportedError
    when the intermediate size does not divide.
    """
    if size == 1 and rank == 0:
        return experts
    problem = experts.problem
    shards = problem.num_shards
    parts = [
        tp_outputs(
            slice_outputs(experts.w13, i * problem.intermediate_size, problem.intermediate_size),
            rank,
            size,
        )
        for i in range(shards)
    ]
    w13 = _join_outputs(parts)
    w2 = tp_inputs(experts.w2, rank, size)
    return CanonicalExperts(
        replace(
            problem,
            intermediate_size=problem.intermediate_size // size,
            w13=w13.scheme,
            w2=w2.scheme,
        ),
        w13,
        w2,
    )


def shard_ep(experts: CanonicalExperts, rank: int, size: int) -> CanonicalExperts:
    """The experts of expert-parallel ``rank`` of ``size``: one contiguous range, as views."""
    local = expert_range(experts.problem.num_local_experts, rank, size)

    def cut(weight: QuantWeight) -> QuantWeight:
        kept: dict[str, Any] = {n: t[local.start : local.stop] for n, t in weight.tensors.items()}
        return replace(weight, **kept)

    return CanonicalExperts(
        replace(experts.problem, num_local_experts=len(local)), cut(experts.w13), cut(experts.w2)
    )


def tp_outputs(weight: QuantWeight, rank: int, size: int) -> QuantWeight:
    """A rank's share of the outputs of one matrix (gate or up)."""
    count = tp_share(weight.num_outputs, rank, size)
    return slice_outputs(weight, rank * count, count)


def tp_inputs(weight: QuantWeight, rank: int, size: int) -> QuantWeight:
    """A rank's share of the inputs of w2, with the scale groups that belong to them.

    With act-order an input may belong to any group, so the rank keeps every scale and its part of
    the group index.
    """
    if size == 1 and rank == 0:
        return weight
    count = tp_share(weight.num_inputs, rank, size)
    start = rank * count
    codes = _slice_codes(weight, start, count)
    bias = weight.bias
    if bias is not None and rank:
        bias = torch.zeros_like(bias)
    if weight.g_idx is not None:
        g_idx = weight.g_idx[:, start : start + count]
        return replace(weight, num_inputs=count, codes=codes, g_idx=g_idx, bias=bias)
    size_now = weight.scheme.group_size
    if size_now == -1:
        return replace(weight, num_inputs=count, codes=codes, bias=bias)
    finer = math.gcd(size_now, count)
    groups = (start + torch.arange(count // finer) * finer) // size_now  # [G'] original groups
    zeros = weight.zero_points
    return replace(
        weight,
        scheme=replace(weight.scheme, group_size=finer),
        num_inputs=count,
        codes=codes,
        scales=weight.scales[..., groups.to(weight.scales.device)],
        zero_points=None if zeros is None else zeros[..., groups.to(zeros.device)],
        bias=bias,
    )


def spell_out_order(weight: QuantWeight) -> QuantWeight:
    """The same weight with its group index, also where that is just ``k // group_size``.

    Cut with it, the weight keeps all scales, like the experts of its layer that have an order.
    """
    if weight.g_idx is not None:
        return weight
    rows = [group_index(weight, expert).to(torch.int32) for expert in range(weight.num_experts)]
    scheme = replace(weight.scheme, has_g_idx=True)
    return replace(weight, scheme=scheme, g_idx=torch.stack(rows))


def slice_outputs(weight: QuantWeight, start: int, count: int) -> QuantWeight:
    """Rows ``start`` to ``start + count`` of every expert, as views; a group index is per input."""
    kept: dict[str, Any] = {
        name: tensor if name == "g_idx" else tensor[:, start : start + count]
        for name, tensor in weight.tensors.items()
    }
    return replace(weight, **kept)


def _join_outputs(parts: list[QuantWeight]) -> QuantWeight:
    first = parts[0]
    joined: dict[str, Any] = {
        name: tensor if name == "g_idx" else torch.cat([part.tensors[name] for part in parts], 1)
        for name, tensor in first.tensors.items()
    }
    return replace(first, **joined)


def _slice_codes(weight: QuantWeight, start: int, count: int) -> torch.Tensor:
    factor = weight.scheme.pack_factor
    if start % factor == 0 and count % factor == 0:
        return weight.codes[..., start // factor : (start + count) // factor]
    # The border lies inside a word: unpack and pack expert by expert, so that the unpacked codes
    # of one expert are all that is held besides.
    packed = [
        pack_last(
            unpack_last(expert, weight.scheme.num_bits, weight.num_inputs)[
                :, start : start + count
            ],
            weight.scheme.num_bits,
        )
        for expert in weight.codes
    ]
    return torch.stack(packed)
