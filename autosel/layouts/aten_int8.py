"""PyTorch's own int8 weights, one scale a row, as ``aten::_weight_int8pack_mm`` reads them.

w13, w2     int8 [E, N, K]      code - 128
w*_scales   ``dtype`` [E, N]
w*_bias     float32 [E, N]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from autosel.canonical import expert_codes
from autosel.core import CanonicalExperts, Problem, QuantScheme, QuantWeight
from autosel.dtypes import torch_dtype
from autosel.errors import UnsupportedError, field_error
from autosel.interfaces import Layout, PackedExperts
from autosel.layouts import _common as common
from autosel.layouts import _gemms as gemms
from autosel.packing import pack_last

_SIGN = 0x80


@dataclass(frozen=True)
class AtenInt8(Layout):
    """See the module's text. ``dtype`` is also that of the activations handed to the operator."""

    name: ClassVar[str] = "aten_int8"
    dtype: str = "bfloat16"

    @property
    def key(self) -> str:
        return f"{self.name}-{self.dtype}"

    def nbytes(self, problem: Problem) -> int:
        total, width = 0, torch_dtype(self.dtype).itemsize
        for _, _, (experts, outputs, inputs) in gemms.schemes(problem):
            total += experts * outputs * (inputs + width + 4 * problem.has_bias)
        return total

    def pack(self, experts: CanonicalExperts) -> PackedExperts:
        """Raises UnsupportedError unless both GEMMs are symmetric 8 bit with one scale a row."""
        count, dtype = experts.problem.num_local_experts, torch_dtype(self.dtype)
        tensors: common.Parts = {}
        meta: dict[str, Any] = {"rounded": common.rounded(experts, dtype)}
        for name, weight in gemms.weights(experts):
            self._check(name, weight)
            for e in range(count):
                where = f"{name}.scales of expert {e}"
                parts = {
                    name: (expert_codes(weight, e) ^ _SIGN).view(torch.int8),  # [N, K]
                    f"{name}_scales": common.cast_scales(weight.scales[e], dtype, where)[:, 0],
                }
                common.fill(tensors, e, count, parts)
            gemms.keep_bias(tensors, meta, name, weight.bias)
        return PackedExperts(self.key, experts.problem, tensors, meta)

    def unpack(self, packed: PackedExperts) -> CanonicalExperts:
        def expert(
            name: str, scheme: QuantScheme, shape: tuple[int, int, int], e: int
        ) -> common.Parts:
            scales = packed.tensors[f"{name}_scales"][e, :, None]  # [N, 1]
            return {
                "codes": pack_last(packed.tensors[name][e].view(torch.uint8) ^ _SIGN, 8),
                "scales": scales.to(common.scale_dtype(scheme)),
                **gemms.kept_bias(packed, name, e),
            }

        return gemms.unpacked(packed, expert)

    def _check(self, name: str, weight: QuantWeight) -> None:
        scheme = weight.scheme
        groups = scheme.num_groups(weight.num_inputs)
        plain = scheme.num_bits == 8 and scheme.symmetric and not scheme.has_g_idx and groups == 1
        if not plain:
            raise UnsupportedError(
                field_error(
                    f"layout {self.key}, {name}",
                    "scheme",
                    f"{scheme.key} with {groups} groups",
                    "symmetric 8 bit, one scale a row, no act-order",
                )
            )
