"""Humming's weight layout for 16-bit activations and unsigned 4- or 8-bit weights.

    w13, w2     int32 [E, K'/16, N' * num_bits / 2]   Marlin's 16 x 64 tiles
    w*_scales   act dtype [E, G', N']                 Marlin's scale permutations
    w*_zeros    int32 [E, G', N' * num_bits / 32]     grouped permutation, packed plainly along N
    w*_bias     act dtype [E, N']                     Marlin's single permutation
    w*_order    int32 [E, K]                          act-order, as in :mod:`..marlin`

N' is N rounded up to 256 at the end of the whole stack (not shard by shard, unlike Marlin) and K'
is K rounded up to 128, with zero codes, scales, zero points and bias. The kernels predicate their
loads and stores by the unpadded sizes. The scale permutation follows the declared group size (one
group of length K is still a group), not the number of rows as in Marlin.

8-bit codes for bfloat16 activations are stored as offsets from the zero point in both directions,
see :func:`wide_codes`. Source: ``humming.transform`` of humming-kernels (Apache-2.0) 0.1.19.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from autosel.core import Problem, QuantScheme
from autosel.layouts import _common as common
from autosel.layouts._marlin_layer import Gemm, MarlinLayer
from autosel.layouts._marlin_tiles import (
    permute_grouped,
    permute_single,
)
from autosel.layouts.marlin import Marlin
from autosel.packing import pack_last, unpack_last

PAD_N, PAD_K = 256, 128


def wide_codes(codes: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """8-bit codes for bfloat16: ``c - z`` from the zero point up, ``255 - c`` below it.

    bfloat16 has 8 significant bits, so the kernel builds ``c - z`` from sign and magnitude.
    """
    return torch.where(codes >= zeros, codes - zeros, 255 - codes)


def codes_from_wide(values: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`wide_codes`: values up to ``255 - z`` came from above the zero point."""
    return torch.where(values <= 255 - zeros, values + zeros, 255 - values)


def is_wide(scheme: QuantScheme, act_dtype: str) -> bool:
    return scheme.num_bits == 8 and act_dtype == "bfloat16"


def gemms(problem: Problem) -> tuple[Gemm, Gemm]:
    """Sizes of w13 and w2, as the package's kernels are told them."""
    shards, hidden, inner = problem.num_shards, problem.hidden_size, problem.intermediate_size

    def gemm(name: str, scheme: QuantScheme, shards: int, outputs: int, inputs: int) -> Gemm:
        stored_outputs, stored_inputs = -(-outputs // PAD_N) * PAD_N, -(-inputs // PAD_K) * PAD_K
        groups = 1 if scheme.group_size == -1 else stored_inputs // scheme.group_size
        return Gemm(name, scheme, shards, outputs, stored_outputs, inputs, stored_inputs, groups)

    return (
        gemm("w13", problem.w13, shards, shards * inner, hidden),
        gemm("w2", problem.w2, 1, hidden, inner),
    )


def same_as_marlin(problem: Problem, act_dtype: str) -> bool:
    """Whether Marlin's layout of this layer is the same tensors, bit for bit.

    So it is for symmetric weights, unless codes are re-encoded (:func:`is_wide`), where both pad
    alike and read the scales' rows alike. One packed copy then serves both backends.
    """
    for mine, other in zip(gemms(problem), Marlin(act_dtype).gemms(problem), strict=True):
        one_place = mine.shards == 1 or mine.stored_outputs == mine.outputs
        sizes = ("stored_outputs", "stored_inputs", "stored_groups")
        alike = all(getattr(mine, size) == getattr(other, size) for size in sizes)
        scales_alike = (mine.stored_groups == 1) == (mine.scheme.group_size == -1)
        encoded = is_wide(mine.scheme, act_dtype) or not mine.scheme.symmetric
        if not (one_place and alike and scales_alike) or encoded:
            return False
    return True


@dataclass(frozen=True)
class Humming(MarlinLayer):
    """See the module's text; casts and exactness as its base class."""

    name: ClassVar[str] = "humming"

    def gemms(self, problem: Problem) -> tuple[Gemm, Gemm]:
        return gemms(problem)

    def check(self, problem: Problem) -> None:
        for gemm in gemms(problem):
            group, inputs = gemm.scheme.group_size, gemm.stored_inputs
            required = f"-1 or a divisor of the padded input size {inputs}"
            fits = group == -1 or inputs % group == 0
            common.require(f"layout humming, {gemm.name}", ("group_size", group, required, fits))

    def pad(self, values: torch.Tensor, gemm: Gemm, width: int) -> torch.Tensor:
        return common.pad2(values, gemm.stored_outputs, width)

    def cut(self, values: torch.Tensor, gemm: Gemm, width: int) -> torch.Tensor:
        return values[: gemm.outputs, :width]

    def permute_scales(self, scales: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
        return permute_single(scales) if scheme.group_size == -1 else permute_grouped(scales)

    def pack_zeros(self, zeros: torch.Tensor, num_bits: int) -> torch.Tensor:
        return pack_last(permute_grouped(zeros), num_bits)

    def unpack_zeros(self, words: torch.Tensor, num_bits: int) -> torch.Tensor:
        return permute_grouped(unpack_last(words, num_bits, words.shape[-1] * 32 // num_bits))

    def encode(self, codes: torch.Tensor, zeros: torch.Tensor | None, gemm: Gemm) -> torch.Tensor:
        if not is_wide(gemm.scheme, self.act_dtype):
            return codes
        return wide_codes(codes, _per_input(zeros, gemm, codes.device))

    def decode(self, codes: torch.Tensor, zeros: torch.Tensor | None, gemm: Gemm) -> torch.Tensor:
        if not is_wide(gemm.scheme, self.act_dtype):
            return codes
        return codes_from_wide(codes, _per_input(zeros, gemm, codes.device))


def _per_input(zeros: torch.Tensor | None, gemm: Gemm, device: torch.device) -> torch.Tensor:
    """Zero point of every stored weight: uint8, ``[N', K']`` or broadcasting against it."""
    if zeros is None:
        return torch.tensor(gemm.scheme.implicit_zero, dtype=torch.uint8, device=device)
    return zeros.repeat_interleave(gemm.stored_inputs // gemm.stored_groups, 1)
