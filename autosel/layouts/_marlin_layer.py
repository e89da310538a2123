"""A layer as two GEMMs in Marlin's tiles: what the layouts of Marlin and of Humming share.

They differ in how they pad, permute scales and zero points, and encode codes. Here is the rest: one
expert after the other, the act-order of w2's inputs folded into the rows of w13 (and kept as
``w2_order``, which only :meth:`MarlinLayer.unpack` reads), that of w13's inputs kept as
``w13_order`` for the kernel, and casts to the activations' dtype.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from autosel.canonical import check_experts, expert_codes
from autosel.core import CanonicalExperts, Problem, QuantScheme, QuantWeight
from autosel.dtypes import torch_dtype
from autosel.interfaces import Layout, PackedExperts
from autosel.layouts import _common as common
from autosel.layouts._marlin_tiles import pack_tiles, permute_single, unpack_tiles
from autosel.packing import pack_last


@dataclass(frozen=True)
class Gemm:
    """Logical and stored sizes of one GEMM; ``shards`` blocks of outputs stand in one stack."""

    name: str
    scheme: QuantScheme
    shards: int
    outputs: int
    stored_outputs: int
    inputs: int
    stored_inputs: int
    #: Rows of scales handed to the kernel.
    stored_groups: int


@dataclass(frozen=True)
class MarlinLayer(Layout):
    """See the module's text. ``act_dtype`` is also the dtype of scales and bias.

    Scales in another dtype are cast. A cast that only rounds (float16 to bfloat16) is named in
    ``meta["rounded"]`` and :meth:`unpack` then returns the rounded scales; one that would lose
    their range raises UnsupportedError. Otherwise the round trip is exact.
    """

    act_dtype: str = "bfloat16"
    #: Width of the activations in the kernel, which the order inside a tile depends on.
    act_bits: ClassVar[int] = 16

    @property
    def key(self) -> str:
        return f"{self.name}-{self.act_dtype}"

    @abstractmethod
    def gemms(self, problem: Problem) -> tuple[Gemm, Gemm]:
        """w13 and w2."""

    @abstractmethod
    def check(self, problem: Problem) -> None:
        """Raise UnsupportedError where sizes or groups do not fit."""

    @abstractmethod
    def pad(self, values: torch.Tensor, gemm: Gemm, width: int) -> torch.Tensor:
        """``[N, *]`` with zeros to the stored ``[N', width]``."""

    @abstractmethod
    def cut(self, values: torch.Tensor, gemm: Gemm, width: int) -> torch.Tensor:
        """Inverse of :meth:`pad`: ``[N', *]`` to ``[N, width]``."""

    @abstractmethod
    def permute_scales(self, scales: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
        """Stored scales ``[G', N']`` in the order the kernel reads them; its own inverse."""

    @abstractmethod
    def pack_zeros(self, zeros: torch.Tensor, num_bits: int) -> torch.Tensor:
        """True zero points uint8 ``[G', N']`` to int32 ``[G', N' * num_bits / 32]``."""

    @abstractmethod
    def unpack_zeros(self, words: torch.Tensor, num_bits: int) -> torch.Tensor:
        """Inverse of :meth:`pack_zeros`."""

    def encode(self, codes: torch.Tensor, zeros: torch.Tensor | None, gemm: Gemm) -> torch.Tensor:
        """Codes ``[N', K']`` as the kernel wants them, with zero points ``[N', G']``."""
        return codes

    def decode(self, codes: torch.Tensor, zeros: torch.Tensor | None, gemm: Gemm) -> torch.Tensor:
        """Inverse of :meth:`encode`."""
        return codes

    def nbytes(self, problem: Problem) -> int:
        total = 0
        for gemm in self.gemms(problem):
            outputs, bits = gemm.stored_outputs, gemm.scheme.num_bits
            total += outputs * gemm.stored_inputs * bits // 8
            total += outputs * gemm.stored_groups * 2
            if not gemm.scheme.symmetric:
                total += outputs * gemm.stored_groups * bits // 8
            if problem.has_bias:
                total += outputs * 2
            if common.keeps_order(gemm.scheme, gemm.inputs):
                total += gemm.inputs * 4
        return total * problem.num_local_experts

    def pack(self, experts: CanonicalExperts) -> PackedExperts:
        """Raises UnsupportedError for sizes that do not fit, uneven act-order, lost scales."""
        check_experts(experts)
        problem, count = experts.problem, experts.problem.num_local_experts
        self.check(problem)
        first, second = self.gemms(problem)
        stacks: common.Parts = {}
        for e in range(count):
            order13 = common.kept_order(experts.w13, e, "w13")
            order2 = common.kept_order(experts.w2, e, "w2")
            parts = self._pack_gemm(experts.w13, e, first, order2, order13)
            parts |= self._pack_gemm(experts.w2, e, second, None, order2)
            for gemm, order in ((first, order13), (second, order2)):
                if order is not None:
                    parts[f"{gemm.name}_order"] = order.to(torch.int32)
            common.fill(stacks, e, count, parts)
        meta: dict[str, Any] = {
            "rounded": common.rounded(experts, torch_dtype(self.act_dtype)),
            "bias_dtypes": common.bias_dtypes(experts),
        }
        return PackedExperts(self.key, problem, stacks, meta)

    def unpack(self, packed: PackedExperts) -> CanonicalExperts:
        problem, count = packed.problem, packed.problem.num_local_experts
        first, second = self.gemms(problem)
        fields: dict[str, common.Parts] = {"w13": {}, "w2": {}}
        for e in range(count):
            tensors = {name: stack[e] for name, stack in packed.tensors.items()}
            order13, order2 = tensors.get("w13_order"), tensors.get("w2_order")
            for gemm, rows, cols in ((first, order2, order13), (second, None, order2)):
                parts = self._unpack_gemm(tensors, gemm, rows, cols)
                common.fill(fields[gemm.name], e, count, parts)
        dtypes = packed.meta["bias_dtypes"]
        w13, w2 = (
            common.restored(gemm.scheme, gemm.inputs, fields[gemm.name], dtypes.get(gemm.name))
            for gemm in (first, second)
        )
        return CanonicalExperts(problem, w13, w2)

    def _pack_gemm(
        self,
        weight: QuantWeight,
        e: int,
        gemm: Gemm,
        rows: torch.Tensor | None,
        cols: torch.Tensor | None,
    ) -> common.Parts:
        """One expert's tensors of one GEMM; ``rows`` and ``cols`` reorder outputs and inputs."""
        name, bits, groups = gemm.name, gemm.scheme.num_bits, gemm.stored_groups

        def place(values: torch.Tensor, width: int) -> torch.Tensor:
            return self.pad(common.fold_w2_order(values, rows, gemm.shards), gemm, width)

        def cast(values: torch.Tensor, field: str) -> torch.Tensor:
            where = f"{name}.{field} of expert {e}"
            return common.cast_scales(values[e], torch_dtype(self.act_dtype), where)

        codes = expert_codes(weight, e)  # [N, K]
        codes = place(codes if cols is None else codes[:, cols], gemm.stored_inputs)  # [N', K']
        zeros = None
        if weight.zero_points is not None:
            zeros = place(weight.zero_points[e], groups)  # [N', G']
        scales = place(cast(weight.scales, "scales"), groups)  # [N', G']
        parts = {
            name: pack_tiles(self.encode(codes, zeros, gemm), bits, self.act_bits),
            f"{name}_scales": self.permute_scales(scales.T.contiguous(), gemm.scheme),
        }
        if zeros is not None:
            parts[f"{name}_zeros"] = self.pack_zeros(zeros.T.contiguous(), bits)
        if weight.bias is not None:
            bias = place(cast(weight.bias, "bias")[:, None], 1)[:, 0]  # [N']
            parts[f"{name}_bias"] = permute_single(bias)
        return parts

    def _unpack_gemm(
        self,
        tensors: common.Parts,
        gemm: Gemm,
        rows: torch.Tensor | None,
        cols: torch.Tensor | None,
    ) -> common.Parts:
        """Inverse of :meth:`_pack_gemm`: one expert's fields of QuantWeight."""
        name, scheme, bits = gemm.name, gemm.scheme, gemm.scheme.num_bits
        groups = scheme.num_groups(gemm.inputs)
        back = None if rows is None else torch.argsort(rows.long())

        def place(values: torch.Tensor, width: int) -> torch.Tensor:
            return common.fold_w2_order(self.cut(values, gemm, width), back, gemm.shards)

        out: common.Parts = {}
        zeros = None
        if f"{name}_zeros" in tensors:
            zeros = self.unpack_zeros(tensors[f"{name}_zeros"], bits).T  # [N', G']
            out["zero_points"] = place(zeros, groups)
        words = unpack_tiles(tensors[name], bits, self.act_bits)
        codes = self.decode(words, zeros, gemm)  # [N', K']
        codes = place(codes, gemm.inputs)
        if cols is not None:
            codes = codes[:, torch.argsort(cols.long())]
            out["g_idx"] = common.group_index_of(cols, scheme, gemm.inputs)
        out["codes"] = pack_last(codes, bits)
        scales = self.permute_scales(tensors[f"{name}_scales"], scheme).T
        out["scales"] = place(scales, groups).to(common.scale_dtype(scheme))
        if f"{name}_bias" in tensors:
            out["bias"] = place(permute_single(tensors[f"{name}_bias"])[:, None], 1)[:, 0]
        return out
