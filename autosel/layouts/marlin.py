"""Marlin's weight layout for 16-bit activations, 4 and 8 bit.

    w13         int32 [E, H/16, shards * I' * num_bits / 2]     tiles of 16 inputs x 64 outputs
    w2          int32 [E, I'/16, H * num_bits / 2]
    w*_scales   act dtype [E, G, N]            permuted, see :mod:`autosel.layouts._marlin_tiles`
    w*_zeros    int32 [E, G, N * num_bits / 32]    true zero points (asymmetric only)
    w*_bias     act dtype [E, N]
    w13_order   int32 [E, H]   act-order of w13's inputs: the kernel must be given x in this order
    w2_order    int32 [E, I]   act-order of w2's inputs, folded into the rows of w13; only
                               :meth:`Marlin.unpack` reads it

``I'`` is the intermediate size rounded up to a legal tile. Gate and up rows are padded shard by
shard (so the halves stay halves) with zero codes, scales, zero points and bias, which makes the
padded outputs exactly 0, and every activation maps (0, 0) to 0. Non-gated layers have one shard.
The hidden size is never padded, since it is the width of the caller's tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from autosel.canonical import check_experts, expert_codes
from autosel.core import CanonicalExperts, Problem, QuantScheme, QuantWeight
from autosel.dtypes import torch_dtype
from autosel.errors import UnsupportedError, field_error
from autosel.interfaces import Layout, PackedExperts
from autosel.layouts import _common as common
from autosel.layouts._marlin_tiles import (
    pack_tiles,
    pack_zeros,
    permute_scales,
    permute_single,
    unpack_tiles,
    unpack_zeros,
)
from autosel.packing import pack_last

#: Group lengths the kernels are compiled for; one group over all inputs is per channel.
GROUP_SIZES = (32, 64, 128)


def padded_intermediate(problem: Problem) -> int:
    """``I'``: a multiple of 64 outputs, and of w2's group so that every group is full."""
    size = problem.intermediate_size
    group = 1 if common.single_group(problem.w2, size) else problem.w2.group_size
    multiple = math.lcm(64, group)
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class Gemm:
    """Sizes of one GEMM: ``shards`` blocks of ``rows`` outputs, stored as ``stored_rows``."""

    name: str
    scheme: QuantScheme
    shards: int
    rows: int
    stored_rows: int
    inputs: int
    stored_inputs: int

    @property
    def num_groups(self) -> int:
        return self.scheme.num_groups(self.inputs)

    @property
    def stored_groups(self) -> int:
        """Scale rows handed to the kernel, which divides ``stored_inputs`` by them."""
        if self.num_groups == 1:
            return 1
        return self.stored_inputs // self.scheme.group_size


def gemms(problem: Problem) -> tuple[Gemm, Gemm]:
    hidden, inner, stored = (
        problem.hidden_size,
        problem.intermediate_size,
        padded_intermediate(problem),
    )
    return (
        Gemm("w13", problem.w13, problem.num_shards, inner, stored, hidden, hidden),
        Gemm("w2", problem.w2, 1, hidden, hidden, inner, stored),
    )


@dataclass(frozen=True)
class Marlin(Layout):
    """See the module's text. ``act_dtype`` is also the dtype of scales and bias.

    Scales in another dtype are cast. A cast that only rounds (float16 to bfloat16) is named in
    ``meta["rounded"]`` and :meth:`unpack` then returns the rounded scales; one that would lose
    their range raises UnsupportedError. Otherwise the round trip is exact.
    """

    name: ClassVar[str] = "marlin"
    act_dtype: str = "bfloat16"

    @property
    def key(self) -> str:
        return f"{self.name}-{self.act_dtype}"

    def nbytes(self, problem: Problem) -> int:
        total = 0
        for gemm in gemms(problem):
            outputs = gemm.shards * gemm.stored_rows
            bits = gemm.scheme.num_bits
            total += outputs * gemm.stored_inputs * bits // 8
            total += outputs * gemm.stored_groups * 2
            if not gemm.scheme.symmetric:
                total += outputs * gemm.stored_groups * bits // 8
            if problem.has_bias:
                total += outputs * 2
        for gemm in gemms(problem):
            if common.keeps_order(gemm.scheme, gemm.inputs):
                total += gemm.inputs * 4
        return total * problem.num_local_experts

    def pack(self, experts: CanonicalExperts) -> PackedExperts:
        """Raises UnsupportedError for sizes that are no tile, uneven act-order, lost scales."""
        check_experts(experts)
        problem = experts.problem
        self._check(problem)
        dtype = torch_dtype(self.act_dtype)
        first, second = gemms(problem)
        stacks: common.Parts = {}
        for e in range(problem.num_local_experts):
            order13 = common.kept_order(experts.w13, e, "w13")
            order2 = common.kept_order(experts.w2, e, "w2")
            parts = _pack_gemm(experts.w13, e, first, dtype, rows=order2, cols=order13)
            parts |= _pack_gemm(experts.w2, e, second, dtype, cols=order2)
            for gemm, order in ((first, order13), (second, order2)):
                if order is not None:
                    parts[f"{gemm.name}_order"] = order.to(torch.int32)
            common.fill(stacks, e, problem.num_local_experts, parts)
        meta: dict[str, Any] = {"rounded": common.rounded(experts, dtype)}
        meta["bias_dtypes"] = common.bias_dtypes(experts)
        return PackedExperts(self.key, problem, stacks, meta)

    def unpack(self, packed: PackedExperts) -> CanonicalExperts:
        problem = packed.problem
        first, second = gemms(problem)
        fields: dict[str, common.Parts] = {"w13": {}, "w2": {}}
        for e in range(problem.num_local_experts):
            tensors = {name: stack[e] for name, stack in packed.tensors.items()}
            order13, order2 = tensors.get("w13_order"), tensors.get("w2_order")
            count = problem.num_local_experts
            common.fill(
                fields["w13"], e, count, _unpack_gemm(tensors, first, rows=order2, cols=order13)
            )
            common.fill(fields["w2"], e, count, _unpack_gemm(tensors, second, cols=order2))
        dtypes = packed.meta["bias_dtypes"]
        w13 = QuantWeight(problem.w13, problem.hidden_size, **fields["w13"])
        w2 = QuantWeight(problem.w2, problem.intermediate_size, **fields["w2"])
        w13, w2 = common.with_single_group_index(w13), common.with_single_group_index(w2)
        return CanonicalExperts(
            problem,
            common.with_bias_dtype(w13, dtypes.get("w13")),
            common.with_bias_dtype(w2, dtypes.get("w2")),
        )

    def _check(self, problem: Problem) -> None:
        if problem.hidden_size % 128:
            raise UnsupportedError(
                field_error(
                    "layout marlin", "hidden_size", problem.hidden_size, "a multiple of 128"
                )
            )
        for gemm in gemms(problem):
            if gemm.num_groups > 1 and gemm.scheme.group_size not in GROUP_SIZES:
                raise UnsupportedError(
                    field_error(
                        f"layout marlin, {gemm.name}",
                        "group_size",
                        gemm.scheme.group_size,
                        f"-1 or one of {', '.join(map(str, GROUP_SIZES))}",
                    )
                )


def _pack_gemm(
    weight: QuantWeight,
    e: int,
    gemm: Gemm,
    dtype: torch.dtype,
    rows: torch.Tensor | None = None,
    cols: torch.Tensor | None = None,
) -> common.Parts:
    """One expert's tensors of one GEMM; ``rows`` and ``cols`` reorder outputs and inputs."""

    def place(values: torch.Tensor, width: int) -> torch.Tensor:
        values = common.fold_w2_order(values, rows, gemm.shards)
        return common.pad_shards(values, gemm.shards, gemm.stored_rows, width)  # [N, width]

    codes = expert_codes(weight, e)  # [N, K]
    if cols is not None:
        codes = codes[:, cols]
    bits, name, groups = gemm.scheme.num_bits, gemm.name, gemm.stored_groups
    scales = common.cast_scales(weight.scales[e], dtype, f"{name}.scales of expert {e}")
    parts = {
        name: pack_tiles(place(codes, gemm.stored_inputs), bits),
        f"{name}_scales": permute_scales(place(scales, groups).T.contiguous()),
    }
    if weight.zero_points is not None:
        zeros = place(weight.zero_points[e], groups)
        parts[f"{name}_zeros"] = pack_zeros(zeros.T.contiguous(), bits)
    if weight.bias is not None:
        bias = common.cast_scales(weight.bias[e], dtype, f"{name}.bias of expert {e}")
        parts[f"{name}_bias"] = permute_single(place(bias[:, None], 1)[:, 0])
    return parts


def _unpack_gemm(
    tensors: common.Parts,
    gemm: Gemm,
    rows: torch.Tensor | None = None,
    cols: torch.Tensor | None = None,
) -> common.Parts:
    back = None if rows is None else torch.argsort(rows.long())

    def place(values: torch.Tensor, width: int) -> torch.Tensor:
        values = common.cut_shards(values, gemm.shards, gemm.rows, width)
        return common.fold_w2_order(values, back, gemm.shards)

    bits, name, scheme = gemm.scheme.num_bits, gemm.name, gemm.scheme
    groups = gemm.num_groups
    codes = place(unpack_tiles(tensors[name], bits), gemm.inputs)
    out: common.Parts = {}
    if cols is not None:
        codes = codes[:, torch.argsort(cols.long())]
        out["g_idx"] = common.group_index_of(cols, scheme, gemm.inputs)
    out["codes"] = pack_last(codes, bits)
    scales = permute_scales(tensors[f"{name}_scales"]).T  # its own inverse
    out["scales"] = place(scales, groups).to(common.scale_dtype(scheme))
    if f"{name}_zeros" in tensors:
        out["zero_points"] = place(unpack_zeros(tensors[f"{name}_zeros"], bits).T, groups)
    if f"{name}_bias" in tensors:
        out["bias"] = place(permute_single(tensors[f"{name}_bias"])[:, None], 1)[:, 0]
    return out
