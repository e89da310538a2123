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
from typing import ClassVar

import torch

from autosel.canonical import expert_codes
from autosel.core import Problem, QuantScheme, QuantWeight
from autosel.dtypes import torch_dtype
from autosel.layouts import _common as common
from autosel.layouts._marlin_layer import Gemm, MarlinLayer
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
class Marlin(MarlinLayer):
    """See the module's text; casts and exactness as its base class."""

    name: ClassVar[str] = "marlin"

    def gemms(self, problem: Problem) -> tuple[Gemm, Gemm]:
        hidden, inner = problem.hidden_size, problem.intermediate_size
        shards, stored = problem.num_shards, padded_intermediate(problem)

        def groups(scheme: QuantScheme, inputs: int, stored_inputs: int) -> int:
            """The kernel divides the stored inputs by this."""
            single = common.single_group(scheme, inputs)
            return 1 if single else stored_inputs // scheme.group_size

        g13, g2 = groups(problem.w13, hidden, hidden), groups(problem.w2, inner, stored)
        return (
            Gemm("w13", problem.w13, shards, shards * inner, shards * stored, hidden, hidden, g13),
            Gemm("w2", problem.w2, 1, hidden, hidden, inner, stored, g2),
        )

    def check(self, problem: Problem) -> None:
        hidden = problem.hidden_size
        common.require(
            "layout marlin", ("hidden_size", hidden, "a multiple of 128", hidden % 128 == 0)
        )
        required = f"-1 or one of {', '.join(map(str, GROUP_SIZES))}"
        for gemm in self.gemms(problem):
            size = gemm.scheme.group_size
            fits = common.single_group(gemm.scheme, gemm.inputs) or size in GROUP_SIZES
            common.require(f"layout marlin, {gemm.name}", ("group_size", size, required, fits))

    def pack_gemm(
        self,
        weight: QuantWeight,
        e: int,
        gemm: Gemm,
        rows: torch.Tensor | None,
        cols: torch.Tensor | None,
    ) -> common.Parts:
        dtype, stored_rows = torch_dtype(self.act_dtype), gemm.stored_outputs // gemm.shards

        def place(values: torch.Tensor, width: int) -> torch.Tensor:
            values = common.fold_w2_order(values, rows, gemm.shards)
            return common.pad_shards(values, gemm.shards, stored_rows, width)  # [N, width]

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

    def unpack_gemm(
        self,
        tensors: common.Parts,
        gemm: Gemm,
        rows: torch.Tensor | None,
        cols: torch.Tensor | None,
    ) -> common.Parts:
        back = None if rows is None else torch.argsort(rows.long())

        def place(values: torch.Tensor, width: int) -> torch.Tensor:
            values = common.cut_shards(values, gemm.shards, gemm.outputs // gemm.shards, width)
            return common.fold_w2_order(values, back, gemm.shards)

        bits, name, scheme = gemm.scheme.num_bits, gemm.name, gemm.scheme
        groups = scheme.num_groups(gemm.inputs)
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
