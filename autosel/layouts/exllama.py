"""The exllama shuffle, K first: the weight layout of vLLM's RDNA3 MoE kernel (symmetric 4 bit).

    w13, w2     int32 [E, K/8, N]   8 inputs a word, even inputs in the low half, odd in the high
    w*_scales   act dtype [E, G, N]
    w*_zeros    int32 [E, G, N/8]   every nibble 7: the kernel adds one to a stored zero point

Nibble ``i`` of a word holds input ``(0, 2, 4, 6, 1, 3, 5, 7)[i]`` of its eight. Source: vLLM's
``gptq_shuffle`` (Apache-2.0), after exllama by turboderp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from autosel.canonical import check_experts
from autosel.core import CanonicalExperts, Problem, QuantScheme, QuantWeight
from autosel.dtypes import torch_dtype
from autosel.errors import AutoselError, field_error
from autosel.interfaces import Layout, PackedExperts
from autosel.layouts import _common as common
from autosel.layouts import _gemms as gemms

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_STORED_ZEROS = 0x77777777


def shuffle_words(words: torch.Tensor) -> torch.Tensor:
    """int32 words with nibbles in natural order to shuffled ones."""
    out = torch.zeros_like(words)
    for i, source in enumerate(_ORDER):
        out |= ((words >> (4 * source)) & 0xF) << (4 * i)
    return out


def unshuffle_words(words: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`shuffle_words`."""
    out = torch.zeros_like(words)
    for i, source in enumerate(_ORDER):
        out |= ((words >> (4 * i)) & 0xF) << (4 * source)
    return out


@dataclass(frozen=True)
class Exllama(Layout):
    """See the module's text; casts and exactness as :class:`autosel.layouts.marlin.Marlin`."""

    name: ClassVar[str] = "exllama"
    act_dtype: str = "float16"

    @property
    def key(self) -> str:
        return f"{self.name}-{self.act_dtype}"

    def nbytes(self, problem: Problem) -> int:
        total = 0
        for scheme, (_, outputs, inputs) in (
            (problem.w13, problem.w13_shape),
            (problem.w2, problem.w2_shape),
        ):
            groups = scheme.num_groups(inputs)
            total += outputs * inputs // 2 + outputs * groups * 2 + outputs // 8 * groups * 4
        return total * problem.num_local_experts

    def pack(self, experts: CanonicalExperts) -> PackedExperts:
        """Raises UnsupportedError for anything but symmetric 4 bit without act-order and bias."""
        check_experts(experts)
        problem, count = experts.problem, experts.problem.num_local_experts
        dtype = torch_dtype(self.act_dtype)
        stacks: common.Parts = {}
        for name, weight in (("w13", experts.w13), ("w2", experts.w2)):
            self._check(name, weight)
            for e in range(count):
                scales = common.cast_scales(weight.scales[e], dtype, f"{name}.scales of expert {e}")
                groups, outputs = scales.shape[1], scales.shape[0]
                parts = {
                    name: shuffle_words(weight.codes[e].T.contiguous()),
                    f"{name}_scales": scales.T,
                    f"{name}_zeros": torch.full(
                        (groups, outputs // 8),
                        _STORED_ZEROS,
                        dtype=torch.int32,
                        device=scales.device,
                    ),
                }
                common.fill(stacks, e, count, parts)
        meta: dict[str, Any] = {"rounded": common.rounded(experts, dtype)}
        return PackedExperts(self.key, problem, stacks, meta)

    def unpack(self, packed: PackedExperts) -> CanonicalExperts:
        """Raises AutoselError for zero points that are not the ones of symmetric weights."""

        def expert(
            name: str, scheme: QuantScheme, shape: tuple[int, int, int], e: int
        ) -> common.Parts:
            other = int((packed.tensors[f"{name}_zeros"][e] != _STORED_ZEROS).sum())
            if other:
                where = f"layout {self.name}, {name} of expert {e}"
                raise AutoselError(
                    field_error(where, "zero points", f"{other} words of others", "7 everywhere")
                )
            scales = packed.tensors[f"{name}_scales"][e].T.to(common.scale_dtype(scheme))
            return {"codes": unshuffle_words(packed.tensors[name][e].T), "scales": scales}

        return gemms.unpacked(packed, expert)

    def _check(self, name: str, weight: QuantWeight) -> None:
        scheme = weight.scheme
        plain = scheme.num_bits == 4 and scheme.symmetric and not scheme.has_g_idx
        common.require(
            f"layout {self.name}, {name}",
            ("scheme", scheme.key, "symmetric 4 bit without act-order", plain),
            ("bias", "present", "none", weight.bias is None),
            ("outputs", weight.num_outputs, "a multiple of 8", weight.num_outputs % 8 == 0),
            ("inputs", weight.num_inputs, "a multiple of 8", weight.num_inputs % 8 == 0),
        )
