"""Dequantised weights: what the emulation backend multiplies with.

    w13, w2     [E, N, K] in ``dtype``
    w*_bias     float32 [E, N]

``onednn`` stores one tensor an expert instead (``w13.0`` ..), each already in the order that
oneDNN's matmul reads on this CPU; ``nbytes`` counts them without oneDNN's own padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from autosel.canonical import dequantize_expert
from autosel.core import CanonicalExperts, Problem, QuantWeight
from autosel.dtypes import torch_dtype
from autosel.errors import UnsupportedError, field_error
from autosel.interfaces import Layout, PackedExperts
from autosel.layouts import _common as common
from autosel.layouts import _gemms as gemms


def dense_expert(name: str, weight: QuantWeight, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """One expert's weights ``[N, K]`` in ``dtype``, each rounded once from ``(u - z) * S``.

    Raises UnsupportedError where ``dtype`` cannot hold the range of the scales or of the weights:
    a weight that silently became 0 or infinite would be another model.
    """
    where = f"{name} of expert {expert}"
    common.cast_scales(weight.scales[expert], dtype, f"scales of {where}")
    values = dequantize_expert(weight, expert, dtype)  # [N, K]
    if not bool(values.isfinite().all()):
        largest = dequantize_expert(weight, expert, torch.float32).abs().max().item()
        limit = torch.finfo(dtype).max
        raise UnsupportedError(
            field_error(f"weights of {where}", "largest value", f"{largest:g}", f"at most {limit}")
        )
    return values


def dense_nbytes(problem: Problem, itemsize: int, bias_itemsize: int) -> int:
    """Bytes of both GEMMs' dequantised weights and biases."""
    total = 0
    for _, _, (experts, outputs, inputs) in gemms.schemes(problem):
        total += experts * outputs * inputs * itemsize
        if problem.has_bias:
            total += experts * outputs * bias_itemsize
    return total


@dataclass(frozen=True)
class Dense(Layout):
    """See the module's text."""

    name: ClassVar[str] = "dense"
    invertible: ClassVar[bool] = False
    dtype: str = "bfloat16"
    onednn: bool = False

    @property
    def key(self) -> str:
        return f"{self.name}-{self.dtype}" + ("-onednn" if self.onednn else "")

    def nbytes(self, problem: Problem) -> int:
        return dense_nbytes(problem, torch_dtype(self.dtype).itemsize, 4)

    def pack(self, experts: CanonicalExperts) -> PackedExperts:
        """Raises UnsupportedError where a value does not fit, see :func:`dense_expert`."""
        dtype, count = torch_dtype(self.dtype), experts.problem.num_local_experts
        tensors: common.Parts = {}
        meta: dict[str, Any] = {}
        for name, weight in gemms.weights(experts):
            for e in range(count):
                values = dense_expert(name, weight, e, dtype)  # [N, K]
                if self.onednn:
                    reordered = torch.ops.mkldnn._reorder_linear_weight(values, None)
                    tensors[f"{name}.{e}"] = reordered
                else:
                    common.fill(tensors, e, count, {name: values})
            gemms.keep_bias(tensors, meta, name, weight.bias)
        return PackedExperts(self.key, experts.problem, tensors, meta)

    def unpack(self, packed: PackedExperts) -> CanonicalExperts:
        raise UnsupportedError(
            field_error(f"layout {self.key}", "unpack", "rounded weights", "an invertible layout")
        )
