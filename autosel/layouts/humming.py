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
    permute_grouped,
    permute_single,
    unpack_tiles,
)
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


@dataclass(frozen=True)
class Gemm:
    """Logical and stored sizes of one GEMM."""

    name: str
    scheme: QuantScheme
    shards: int
    outputs: int
    inputs: int

    @property
    def stored_outputs(self) -> int:
        return -(-self.outputs // PAD_N) * PAD_N

    @property
    def stored_inputs(self) -> int:
        return -(-self.inputs // PAD_K) * PAD_K

    @property
    def stored_groups(self) -> int:
        group = self.scheme.group_size
        return 1 if group == -1 else self.stored_inputs // group


def gemms(problem: Problem) -> tuple[Gemm, Gemm]:
    shards, hidden, inner = problem.num_shards, problem.hidden_size, problem.intermediate_size
    return (
        Gemm("w13", problem.w13, shards, shards * inner, hidden),
        Gemm("w2", problem.w2, 1, hidden, inner),
    )


@dataclass(frozen=True)
class Humming(Layout):
    """See the module's text; casts and exactness as :class:`autosel.layouts.marlin.Marlin`."""

    name: ClassVar[str] = "humming"
    act_dtype: str = "bfloat16"

    @property
    def key(self) -> str:
        return f"{self.name}-{self.act_dtype}"

    def nbytes(self, problem: Problem) -> int:
        total = 0
        for gemm in gemms(problem):
            outputs, bits = gemm.stored_outputs, gemm.scheme.num_bits
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
        """Raises UnsupportedError for groups that don't tile K', uneven act-order, lost scales."""
        check_experts(experts)
        problem = experts.problem
        first, second = gemms(problem)
        for gemm in (first, second):
            group = gemm.scheme.group_size
            if group != -1 and gemm.stored_inputs % group:
                raise UnsupportedError(
                    field_error(
                        f"layout humming, {gemm.name}",
                        "group_size",
                        group,
                        f"-1 or a divisor of the padded input size {gemm.stored_inputs}",
                    )
                )
        stacks: common.Parts = {}
        for e in range(problem.num_local_experts):
            order13 = common.kept_order(experts.w13, e, "w13")
            order2 = common.kept_order(experts.w2, e, "w2")
            parts = self._pack_gemm(experts.w13, e, first, rows=order2, cols=order13)
            parts |= self._pack_gemm(experts.w2, e, second, cols=order2)
            for gemm, order in ((first, order13), (second, order2)):
                if order is not None:
                    parts[f"{gemm.name}_order"] = order.to(torch.int32)
            common.fill(stacks, e, problem.num_local_experts, parts)
        meta: dict[str, Any] = {"rounded": common.rounded(experts, torch_dtype(self.act_dtype))}
        meta["bias_dtypes"] = common.bias_dtypes(experts)
        return PackedExperts(self.key, problem, stacks, meta)

    def _pack_gemm(
        self,
        weight: QuantWeight,
        e: int,
        gemm: Gemm,
        rows: torch.Tensor | None = None,
        cols: torch.Tensor | None = None,
    ) -> common.Parts:
        dtype, name, scheme = torch_dtype(self.act_dtype), gemm.name, gemm.scheme

        def place(values: torch.Tensor, width: int) -> torch.Tensor:
            values = common.fold_w2_order(values, rows, gemm.shards)
            return common.pad2(values, gemm.stored_outputs, width)

        groups = gemm.stored_groups
        codes = expert_codes(weight, e)  # [N, K]
        codes = place(codes if cols is None else codes[:, cols], gemm.stored_inputs)  # [N', K']
        zeros = None
        if weight.zero_points is not None:
            zeros = place(weight.zero_points[e], groups)  # [N', G']
        if is_wide(scheme, self.act_dtype):
            codes = wide_codes(codes, _per_input(zeros, gemm, codes.device))
        scales = common.cast_scales(weight.scales[e], dtype, f"{name}.scales of expert {e}")
        parts = {
            name: pack_tiles(codes, scheme.num_bits),
            f"{name}_scales": _permute(place(scales, groups).T.contiguous(), scheme),
        }
        if zeros is not None:
            permuted = permute_grouped(zeros.T.contiguous())
            parts[f"{name}_zeros"] = pack_last(permuted, scheme.num_bits)
        if weight.bias is not None:
            bias = common.cast_scales(weight.bias[e], dtype, f"{name}.bias of expert {e}")
            parts[f"{name}_bias"] = permute_single(place(bias[:, None], 1)[:, 0])
        return parts

    def unpack(self, packed: PackedExperts) -> CanonicalExperts:
        problem, count = packed.problem, packed.problem.num_local_experts
        fields: dict[str, common.Parts] = {"w13": {}, "w2": {}}
        for e in range(count):
            tensors = {name: stack[e] for name, stack in packed.tensors.items()}
            order13, order2 = tensors.get("w13_order"), tensors.get("w2_order")
            first, second = gemms(problem)
            common.fill(
                fields["w13"],
                e,
                count,
                self._unpack_gemm(tensors, first, rows=order2, cols=order13),
            )
            common.fill(fields["w2"], e, count, self._unpack_gemm(tensors, second, cols=order2))
        dtypes = packed.meta["bias_dtypes"]
        w13 = QuantWeight(problem.w13, problem.hidden_size, **fields["w13"])
        w2 = QuantWeight(problem.w2, problem.intermediate_size, **fields["w2"])
        w13, w2 = common.with_single_group_index(w13), common.with_single_group_index(w2)
        return CanonicalExperts(
            problem,
            common.with_bias_dtype(w13, dtypes.get("w13")),
            common.with_bias_dtype(w2, dtypes.get("w2")),
        )

    def _unpack_gemm(
        self,
        tensors: common.Parts,
        gemm: Gemm,
        rows: torch.Tensor | None = None,
        cols: torch.Tensor | None = None,
    ) -> common.Parts:
        name, scheme, bits = gemm.name, gemm.scheme, gemm.scheme.num_bits
        back = None if rows is None else torch.argsort(rows.long())
        groups = scheme.num_groups(gemm.inputs)

        def place(values: torch.Tensor, width: int) -> torch.Tensor:
            return common.fold_w2_order(values[: gemm.outputs, :width], back, gemm.shards)

        out: common.Parts = {}
        zeros = None
        if f"{name}_zeros" in tensors:
            words = tensors[f"{name}_zeros"]
            values = unpack_last(words, bits, words.shape[-1] * 32 // bits)
            zeros = permute_grouped(values).T  # [N', G']
            out["zero_points"] = place(zeros, groups)
        codes = unpack_tiles(tensors[name], bits)  # [N', K']
        if is_wide(scheme, self.act_dtype):
            codes = codes_from_wide(codes, _per_input(zeros, gemm, codes.device))
        codes = place(codes, gemm.inputs)
        if cols is not None:
            codes = codes[:, torch.argsort(cols.long())]
            out["g_idx"] = common.group_index_of(cols, scheme, gemm.inputs)
        out["codes"] = pack_last(codes, bits)
        scales = _permute(tensors[f"{name}_scales"], scheme).T
        out["scales"] = place(scales, groups).to(common.scale_dtype(scheme))
        if f"{name}_bias" in tensors:
            out["bias"] = place(permute_single(tensors[f"{name}_bias"])[:, None], 1)[:, 0]
        return out


def _permute(scales: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    return permute_single(scales) if scheme.group_size == -1 else permute_grouped(scales)


def _per_input(zeros: torch.Tensor | None, gemm: Gemm, device: torch.device) -> torch.Tensor:
    """Zero point of every stored weight: uint8, ``[N', K']`` or broadcasting against it."""
    if zeros is None:
        return torch.tensor(gemm.scheme.implicit_zero, dtype=torch.uint8, device=device)
    return zeros.repeat_interleave(gemm.stored_inputs // gemm.stored_groups, 1)
