"""A layer as two GEMMs in Marlin's tiles: what the layouts of Marlin and of Humming share.

They differ in how they pad and in how they permute scales and zero points. Here is the rest: one
expert after the other, the act-order of w2's inputs folded into the rows of w13 (and kept as
``w2_order``, which only :meth:`MarlinLayer.unpack` reads), that of w13's inputs kept as
``w13_order`` for the kernel, and casts to the activations' dtype.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from autosel.canonical import check_experts
from autosel.core import CanonicalExperts, Problem, QuantScheme, QuantWeight
from autosel.dtypes import torch_dtype
from autosel.interfaces import Layout, PackedExperts
from autosel.layouts import _common as common


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
    def pack_gemm(
        self,
        weight: QuantWeight,
        e: int,
        gemm: Gemm,
        rows: torch.Tensor | None,
        cols: torch.Tensor | None,
    ) -> common.Parts:
        """One expert's tensors of one GEMM; ``rows`` and ``cols`` reorder outputs and inputs."""

    @abstractmethod
    def unpack_gemm(
        self,
        tensors: common.Parts,
        gemm: Gemm,
        rows: torch.Tensor | None,
        cols: torch.Tensor | None,
    ) -> common.Parts:
        """Inverse of :meth:`pack_gemm`: one expert's fields of QuantWeight."""

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
            parts = self.pack_gemm(experts.w13, e, first, order2, order13)
            parts |= self.pack_gemm(experts.w2, e, second, None, order2)
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
                parts = self.unpack_gemm(tensors, gemm, rows, cols)
                common.fill(fields[gemm.name], e, count, parts)
        dtypes = packed.meta["bias_dtypes"]
        w13, w2 = (
            common.restored(gemm.scheme, gemm.inputs, fields[gemm.name], dtypes.get(gemm.name))
            for gemm in (first, second)
        )
        return CanonicalExperts(problem, w13, w2)
