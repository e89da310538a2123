"""Signed nibbles, outputs first: the int4 layout of zentorch's fused MoE operator.

    w13, w2     int32 [E, N, K/8]   two's-complement nibbles, first input low
    w*_scales   bfloat16 or float32 [E, G, N]
    w*_bias     bfloat16 [E, N]

``code - 8`` as a nibble is the code with its top bit flipped, so a word is the canonical one
``^ 0x88888888``; ``zentorch_woq_repack_weight`` of zentorch 2.13 gives the same words (the tests
compare where it is installed). Scales stay exact: bfloat16 where the checkpoint has them so,
otherwise float32, which the operator takes too. ``interleaved`` orders w13's rows in pairs (gate
0, up 0, gate 1, ..), which the operator reads for ``swigluoai``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from autosel.core import CanonicalExperts, Problem, QuantScheme, QuantWeight
from autosel.interfaces import Layout, PackedExperts
from autosel.layouts import _common as common
from autosel.layouts import _gemms as gemms

_SIGNS = -0x77777778  # 0x88888888 as int32


def scale_dtype(scheme: QuantScheme) -> torch.dtype:
    return torch.bfloat16 if scheme.scale_dtype == "bfloat16" else torch.float32


@dataclass(frozen=True)
class ZenS4(Layout):
    """See the module's text."""

    name: ClassVar[str] = "zen_s4"
    interleaved: bool = False

    @property
    def key(self) -> str:
        return self.name + ("-interleaved" if self.interleaved else "")

    def nbytes(self, problem: Problem) -> int:
        total = 0
        for _, scheme, (experts, outputs, inputs) in gemms.schemes(problem):
            width = scale_dtype(scheme).itemsize
            row = inputs // 2 + scheme.num_groups(inputs) * width + 2 * problem.has_bias
            total += experts * outputs * row
        return total

    def pack(self, experts: CanonicalExperts) -> PackedExperts:
        """Raises UnsupportedError for anything but symmetric 4 bit in whole words and groups."""
        count = experts.problem.num_local_experts
        tensors: common.Parts = {}
        meta: dict[str, Any] = {"rounded": []}
        for name, weight in gemms.weights(experts):
            self._check(name, weight)
            for e in range(count):
                codes, scales = weight.codes[e], weight.scales[e]  # [N, K/8], [N, G]
                bias = None if weight.bias is None else weight.bias[e]
                if self.interleaved and name == "w13":
                    codes, scales = gemms.interleave(codes), gemms.interleave(scales)
                    bias = None if bias is None else gemms.interleave(bias)
                parts = {
                    name: codes ^ _SIGNS,
                    f"{name}_scales": scales.to(scale_dtype(weight.scheme)).T,
                }
                if bias is not None:
                    where = f"{name}.bias of expert {e}"
                    parts[f"{name}_bias"] = common.cast_scales(bias, torch.bfloat16, where)
                common.fill(tensors, e, count, parts)
            if weight.bias is not None:
                meta[f"{name}_bias_dtype"] = weight.bias.dtype
                if not torch.equal(weight.bias.to(torch.bfloat16).to(weight.bias), weight.bias):
                    meta["rounded"].append(f"{name}_bias")
        return PackedExperts(self.key, experts.problem, tensors, meta)

    def unpack(self, packed: PackedExperts) -> CanonicalExperts:
        def expert(
            name: str, scheme: QuantScheme, shape: tuple[int, int, int], e: int
        ) -> common.Parts:
            parts = {
                "codes": packed.tensors[name][e] ^ _SIGNS,
                "scales": packed.tensors[f"{name}_scales"][e].T.to(common.scale_dtype(scheme)),
                **gemms.kept_bias(packed, name, e),
            }
            if self.interleaved and name == "w13":
                parts = {key: gemms.deinterleave(part) for key, part in parts.items()}
            return parts

        return gemms.unpacked(packed, expert)

    def _check(self, name: str, weight: QuantWeight) -> None:
        scheme, inputs = weight.scheme, weight.num_inputs
        group = gemms.group_inputs(scheme, inputs)
        plain = scheme.num_bits == 4 and scheme.symmetric and not scheme.has_g_idx
        common.require(
            f"layout {self.key}, {name}",
            ("scheme", scheme.key, "symmetric 4 bit without act-order", plain),
            ("inputs", inputs, "a multiple of 8", inputs % 8 == 0),
            ("inputs", inputs, f"a multiple of {group}", inputs % group == 0),
        )
