"""Dequantised weights in the tile order of vLLM's fused CPU operator for 16-bit weights.

    w13, w2     [E, N, K] in ``dtype``, each expert in the operator's own order
    w*_bias     ``dtype`` [E, N]

The order depends on ``isa`` and belongs to the package, so ``torch.ops._C.prepack_moe_weight``
makes it; the backend has loaded that operator before it asks for this layout. ``interleaved``
orders w13's rows in pairs before, for ``swigluoai``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from autosel.core import CanonicalExperts, Problem
from autosel.dtypes import torch_dtype
from autosel.errors import UnsupportedError, field_error
from autosel.interfaces import Layout, PackedExperts
from autosel.layouts import _common as common
from autosel.layouts import _gemms as gemms
from autosel.layouts.dense import dense_expert, dense_nbytes

_PREPACK = "prepack_moe_weight"


@dataclass(frozen=True)
class VllmCpuDense(Layout):
    """See the module's text."""

    name: ClassVar[str] = "vllm_cpu_dense"
    invertible: ClassVar[bool] = False
    dtype: str = "bfloat16"
    isa: str = "vec"
    interleaved: bool = False

    @property
    def key(self) -> str:
        pairs = "-interleaved" if self.interleaved else ""
        return f"{self.name}-{self.dtype}-{self.isa}{pairs}"

    def nbytes(self, problem: Problem) -> int:
        width = torch_dtype(self.dtype).itemsize
        return dense_nbytes(problem, width, width)

    def pack(self, experts: CanonicalExperts) -> PackedExperts:
        """Raises UnsupportedError where a value does not fit ``dtype``, or without the operator."""
        if not hasattr(torch.ops._C, _PREPACK):
            where = f"layout {self.key}, operator _C::{_PREPACK}"
            raise UnsupportedError(field_error(where, "value", "missing", "loaded"))
        count, dtype = experts.problem.num_local_experts, torch_dtype(self.dtype)
        tensors: common.Parts = {}
        meta: dict[str, Any] = {}
        for name, weight in gemms.weights(experts):
            pairs = self.interleaved and name == "w13"
            for e in range(count):
                values = dense_expert(name, weight, e, dtype)  # [N, K]
                values = gemms.interleave(values) if pairs else values
                packed = torch.empty((1, *values.shape), dtype=dtype)
                getattr(torch.ops._C, _PREPACK)(values[None], packed, self.isa)
                common.fill(tensors, e, count, {name: packed[0]})
            bias = weight.bias
            if bias is not None and pairs:
                bias = gemms.interleave(bias.T).T
            gemms.keep_bias(tensors, meta, name, bias, dtype)
        return PackedExperts(self.key, experts.problem, tensors, meta)

    def unpack(self, packed: PackedExperts) -> CanonicalExperts:
        raise UnsupportedError(
            field_error(f"layout {self.key}", "unpack", "rounded weights", "an invertible layout")
        )
