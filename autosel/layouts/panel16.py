"""Sixteen outputs side by side: the layout of our CPU kernel.

    w13_codes   int32 [E, N / 16, K / pf, 16]    one word per output holds pf inputs
    w13_scales  [E, N / 16, G, 16]               in the checkpoint's dtype, never rounded
    w13_zeros   uint8 [E, N / 16, G, 16]         true zero points (asymmetric only)
    w13_bias    float32 [E, N]
    w13_gather  int32 [E, K]                     act-order: input k is x[gather[k]], -1 is padding
    w2_*        the same
    w2_order    int32 [E, I]                     act-order: w13's outputs were put in this order

Inputs ``2p`` and ``2p + 1`` of a word stand at bit ``num_bits * p`` of its low and its high
half-word, so one shift lines up a pair for a bf16 dot product. Outputs are padded to 16 (gate and
up each), inputs to a whole word, with zero codes and zero scales.

Act-order costs nothing on w2: sorting its inputs by group is a reordering of w13's outputs. On w13
it is a gather of the activations, which the kernel copies per expert anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from autosel import hugepages
from autosel.canonical import expert_codes
from autosel.core import CanonicalExperts, Problem, QuantScheme, QuantWeight
from autosel.errors import UnsupportedError, field_error
from autosel.interfaces import Layout, PackedExperts
from autosel.layouts import _gemms as gemms
from autosel.packing import pack_last

LANES = 16


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _padded_inputs(scheme: QuantScheme, num_inputs: int) -> int:
    return _up(num_inputs, scheme.pack_factor)


def _shifts(num_bits: int, device: torch.device) -> torch.Tensor:
    """Bit of each code of a word: int32 ``[pairs, 2]``."""
    pairs = torch.arange(16 // num_bits, device=device, dtype=torch.int32) * num_bits
    return torch.stack([pairs, pairs + 16], dim=-1)


def pack_codes(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """uint8 ``[N, K]`` (N a multiple of 16, K of pf) to int32 ``[N / 16, K / pf, 16]``."""
    outputs, inputs = codes.shape
    factor = 32 // num_bits
    pairs = factor // 2
    grid = codes.view(outputs // LANES, LANES, inputs // factor, pairs, 2)
    words = torch.zeros(grid.shape[:3], dtype=torch.int32, device=codes.device)
    for p in range(pairs):
        for half in range(2):
            words |= grid[..., p, half].to(torch.int32) << (num_bits * p + 16 * half)
    return words.transpose(1, 2)


def unpack_codes(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Inverse of :func:`pack_codes`: uint8 ``[N, K]``."""
    panels, count, _ = words.shape
    shifts = _shifts(num_bits, words.device)  # [pairs, 2]
    fields = (words.transpose(1, 2)[..., None, None] >> shifts) & ((1 << num_bits) - 1)
    return fields.to(torch.uint8).reshape(panels * LANES, count * (32 // num_bits))


def sorted_inputs(weight: QuantWeight, name: str) -> torch.Tensor | None:
    """Order of the inputs that makes groups contiguous: int64 ``[E, K]``, None if they are.

    Refuses when the groups do not have the scheme's size (an act-order layer cut by tensor
    parallelism), since ``k // group_size`` would then name the wrong scale.
    """
    if weight.g_idx is None:
        return None
    scheme, inputs = weight.scheme, weight.num_inputs
    size = inputs if scheme.group_size == -1 else scheme.group_size
    order = torch.argsort(weight.g_idx, dim=1, stable=True)  # [E, K]
    found = weight.g_idx.gather(1, order)  # [E, K]
    expected = (torch.arange(inputs, device=found.device) // size).to(found.dtype)
    whole = weight.scales.shape[-1] == scheme.num_groups(inputs)
    if not whole or not torch.equal(found, expected.expand_as(found)):
        raise UnsupportedError(
            field_error(
                f"{name}.g_idx",
                "inputs of a group",
                "groups of other sizes, as where a rank border cuts an act-order layer",
                f"{size} in every group",
            )
        )
    return order


@dataclass(frozen=True, slots=True)
class Panel16Layout(Layout):
    """See the module's docstring."""

    name: ClassVar[str] = "panel16"

    def pack(self, experts: CanonicalExperts) -> PackedExperts:
        problem = experts.problem
        gather = sorted_inputs(experts.w13, "w13")
        order = sorted_inputs(experts.w2, "w2")
        tensors = _pack_weight(experts.w13, problem.num_shards, gather, order, "w13")
        tensors |= _pack_weight(experts.w2, 1, order, None, "w2")
        if gather is not None:
            padding = _padded_inputs(problem.w13, problem.hidden_size) - problem.hidden_size
            padded = torch.nn.functional.pad(gather, (0, padding), value=-1)
            tensors["w13_gather"] = padded.to(torch.int32)
        if order is not None:
            tensors["w2_order"] = order.to(torch.int32)
        meta = {
            f"{name}_bias_dtype": str(weight.bias.dtype).removeprefix("torch.")
            for name, weight in (("w13", experts.w13), ("w2", experts.w2))
            if weight.bias is not None
        }
        return PackedExperts(self.key, problem, tensors, meta)

    def unpack(self, packed: PackedExperts) -> CanonicalExperts:
        problem, tensors = packed.problem, packed.tensors
        gather = tensors.get("w13_gather")
        order = tensors.get("w2_order")
        if gather is not None:
            gather = gather[:, : problem.hidden_size].long()
        order = None if order is None else order.long()
        w13 = _unpack_weight(
            packed, "w13", problem.w13, problem.w13_shape, problem.num_shards, gather, order
        )
        w2 = _unpack_weight(packed, "w2", problem.w2, problem.w2_shape, 1, order, None)
        return CanonicalExperts(problem, w13, w2)

    def nbytes(self, problem: Problem) -> int:
        total = 0
        for scheme, (experts, outputs, inputs), shards in (
            (problem.w13, problem.w13_shape, problem.num_shards),
            (problem.w2, problem.w2_shape, 1),
        ):
            padded = _up(outputs // shards, LANES) * shards
            groups = scheme.num_groups(inputs)
            width = 4 if scheme.scale_dtype == "float32" else 2
            total += experts * padded * _padded_inputs(scheme, inputs) * scheme.num_bits // 8
            total += experts * padded * groups * (width + (0 if scheme.symmetric else 1))
            total += experts * padded * 4 if problem.has_bias else 0
        if problem.w13.has_g_idx:
            inputs = _padded_inputs(problem.w13, problem.hidden_size)
            total += problem.num_local_experts * inputs * 4
        if problem.w2.has_g_idx:
            total += problem.num_local_experts * problem.intermediate_size * 4
        return total


def _pack_weight(
    weight: QuantWeight,
    shards: int,
    inputs_order: torch.Tensor | None,
    outputs_order: torch.Tensor | None,
    name: str,
) -> dict[str, torch.Tensor]:
    """The tensors of one GEMM, filled expert by expert (one expert is unpacked at a time)."""
    scheme = weight.scheme
    if scheme.group_size != -1 and scheme.group_size % scheme.pack_factor:
        raise UnsupportedError(
            field_error(
                name, "group size", scheme.group_size, f"a multiple of {scheme.pack_factor}"
            )
        )
    experts, outputs, inputs = weight.num_experts, weight.num_outputs, weight.num_inputs
    rows = outputs // shards
    padded_rows = _up(rows, LANES)
    panels, groups = padded_rows * shards // LANES, scheme.num_groups(inputs)
    words = _padded_inputs(scheme, inputs) // scheme.pack_factor

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return hugepages.advise(torch.empty(shape, dtype=dtype, device=weight.codes.device))

    packed = {
        f"{name}_codes": empty(experts, panels, words, LANES, dtype=torch.int32),
        f"{name}_scales": empty(experts, panels, groups, LANES, dtype=weight.scales.dtype),
    }
    if weight.zero_points is not None:
        packed[f"{name}_zeros"] = empty(experts, panels, groups, LANES, dtype=torch.uint8)
    if weight.bias is not None:
        packed[f"{name}_bias"] = empty(experts, padded_rows * shards, dtype=torch.float32)

    def arranged(table: torch.Tensor, expert: int) -> torch.Tensor:
        """Reorder and pad the outputs of ``[N, *]``: gate and up each to a multiple of 16."""
        split = table.view(shards, rows, -1)
        if outputs_order is not None:
            split = split[:, outputs_order[expert]]
        split = torch.nn.functional.pad(split, (0, 0, 0, padded_rows - rows))
        return split.reshape(shards * padded_rows, -1)

    for expert in range(experts):
        codes = expert_codes(weight, expert)  # [N, K]
        if inputs_order is not None:
            codes = codes[:, inputs_order[expert]]
        codes = torch.nn.functional.pad(codes, (0, words * scheme.pack_factor - inputs))
        packed[f"{name}_codes"][expert] = pack_codes(arranged(codes, expert), scheme.num_bits)
        packed[f"{name}_scales"][expert] = gemms.panels(
            arranged(weight.scales[expert], expert), LANES
        )
        if weight.zero_points is not None:
            packed[f"{name}_zeros"][expert] = gemms.panels(
                arranged(weight.zero_points[expert], expert), LANES
            )
        if weight.bias is not None:
            column = weight.bias[expert].to(torch.float32)[:, None]
            packed[f"{name}_bias"][expert] = arranged(column, expert)[:, 0]
    return packed


def _unpack_weight(
    packed: PackedExperts,
    name: str,
    scheme: QuantScheme,
    shape: tuple[int, int, int],
    shards: int,
    inputs_order: torch.Tensor | None,
    outputs_order: torch.Tensor | None,
) -> QuantWeight:
    """Exact inverse of :func:`_pack_weight`."""
    experts, outputs, inputs = shape
    rows = outputs // shards

    def restored(table: torch.Tensor, expert: int) -> torch.Tensor:
        split = table.view(shards, -1, table.shape[1])[:, :rows]
        if outputs_order is not None:
            split = split[:, torch.argsort(outputs_order[expert])]
        return split.reshape(outputs, -1)

    def table(suffix: str) -> torch.Tensor | None:
        panels = packed.tensors.get(f"{name}_{suffix}")
        if panels is None:
            return None
        return torch.stack([restored(gemms.panel_rows(panels[e]), e) for e in range(experts)])

    words = []
    for expert in range(experts):
        codes = unpack_codes(packed.tensors[f"{name}_codes"][expert], scheme.num_bits)
        codes = restored(codes, expert)[:, :inputs]
        if inputs_order is not None:
            codes = codes[:, torch.argsort(inputs_order[expert])]
        words.append(pack_last(codes, scheme.num_bits))
    scales = table("scales")
    assert scales is not None
    bias = packed.tensors.get(f"{name}_bias")
    if bias is not None:
        bias = torch.stack([restored(bias[e][:, None], e)[:, 0] for e in range(experts)])
        bias = bias.to(getattr(torch, packed.meta[f"{name}_bias_dtype"]))
    g_idx = None
    if inputs_order is not None:
        size = inputs if scheme.group_size == -1 else scheme.group_size
        contiguous = torch.arange(inputs, dtype=torch.int32, device=inputs_order.device) // size
        g_idx = torch.empty(experts, inputs, dtype=torch.int32, device=inputs_order.device)
        g_idx.scatter_(1, inputs_order, contiguous.expand(experts, inputs))
    return QuantWeight(scheme, inputs, torch.stack(words), scales, table("zeros"), g_idx, bias)
