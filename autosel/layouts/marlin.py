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
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from autosel.canonical import dequantize_expert
from autosel.core import CanonicalExperts, Problem, QuantScheme, QuantWeight
from autosel.errors import UnsupportedError, field_error
from autosel.interfaces import PackedExperts
from autosel.layouts import _common as common
from autosel.layouts import _marlin_tiles as tiles
from autosel.layouts._marlin_layer import Gemm, MarlinLayer

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

    def pad(self, values: torch.Tensor, gemm: Gemm, width: int) -> torch.Tensor:
        rows = gemm.stored_outputs // gemm.shards
        return common.pad_shards(values, gemm.shards, rows, width)

    def cut(self, values: torch.Tensor, gemm: Gemm, width: int) -> torch.Tensor:
        return common.cut_shards(values, gemm.shards, gemm.outputs // gemm.shards, width)

    def permute_scales(self, scales: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
        return tiles.permute_scales(scales, self.act_bits)

    def pack_zeros(self, zeros: torch.Tensor, num_bits: int) -> torch.Tensor:
        return tiles.pack_zeros(zeros, num_bits, self.act_bits)

    def unpack_zeros(self, words: torch.Tensor, num_bits: int) -> torch.Tensor:
        return tiles.unpack_zeros(words, num_bits, self.act_bits)


@dataclass(frozen=True)
class MarlinInt8(Marlin):
    """The same for int8 activations and 4-bit weights, in tiles of 32 inputs x 32 outputs.

    Scales of several groups become integers in units of ``meta["factors"][gemm]``; they stand as
    int16 bits in the act dtype, which the operator takes its output's dtype from. This rounds, so
    there is no way back. The unit is the largest scale of all experts over 4096, or more where the
    sum that the kernel keeps in 32 bits could overflow: it adds the products of all groups as
    integers. A scale alone in its row stays as it is and the factor is 1.
    """

    name: ClassVar[str] = "marlin_int8"
    invertible: ClassVar[bool] = False
    act_bits: ClassVar[int] = 8

    def check(self, problem: Problem) -> None:
        super().check(problem)
        for gemm in self.gemms(problem):
            bits = gemm.scheme.num_bits
            common.require(f"layout {self.name}, {gemm.name}", ("bits", bits, 4, bits == 4))

    def pack(self, experts: CanonicalExperts) -> PackedExperts:
        """As :meth:`Marlin.pack`."""
        packed = super().pack(experts)
        tensors, factors = dict(packed.tensors), {}
        weights = (experts.w13, experts.w2)
        for gemm, weight in zip(self.gemms(experts.problem), weights, strict=True):
            key, factors[gemm.name] = f"{gemm.name}_scales", 1.0
            if gemm.stored_groups > 1 and bool(tensors[key].any()):
                unit = least_unit(weight)
                tensors[key], factors[gemm.name] = tiles.int8_scales(tensors[key], unit)
        return replace(packed, tensors=tensors, meta={**packed.meta, "factors": factors})

    def unpack(self, packed: PackedExperts) -> CanonicalExperts:
        raise UnsupportedError(
            field_error(f"layout {self.key}", "unpack", "rounded scales", "an invertible layout")
        )


def least_unit(weight: QuantWeight) -> float:
    """The unit of integer scales from which on no input of int8 overflows a sum of 32 bits.

    An output is at most 127 times the sum of its weights' magnitudes; rounding a scale adds up to
    half a unit times a code of 15 for each input.
    """
    largest = max(
        float(dequantize_expert(weight, e).abs().sum(1).max()) for e in range(weight.num_experts)
    )
    return 127 * largest / ((1 << 31) - 1 - 127 * 8 * weight.num_inputs)
