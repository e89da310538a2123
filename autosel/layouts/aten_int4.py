"""PyTorch's own int4 weights for CPUs, as ``aten::_weight_int4pack_mm_for_cpu`` reads them.

    w13, w2                uint8 [E, N, K/2]   in the order of this CPU's build of the operator
    w*_scales_and_zeros    ``dtype`` [E, G, N, 2]
    w*_bias                float32 [E, N]
    w*_gather              int32 [E, K]        act-order: packed input k is input gather[k]

A weight is ``(u - 8) * scale + zero``; a zero point ``z`` becomes ``zero = (8 - z) * S``. In
float32 that product is exact for 16-bit scales; in bfloat16 it is rounded to 8 bits, an error that
all weights of a group share. On 2048 inputs in groups of 128 it raised the relative error of one
bfloat16 GEMM from 1.7e-3 to 1.8e-3, also with inputs of one sign: as much as any 16-bit rounding.

The order of the bytes depends on the instruction set that torch chose, so :meth:`unpack` asks the
operator itself where it puts each code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from autosel.canonical import expert_codes, expert_zeros
from autosel.core import CanonicalExperts, Problem, QuantScheme, QuantWeight
from autosel.dtypes import torch_dtype
from autosel.errors import UnsupportedError, field_error
from autosel.interfaces import Layout, PackedExperts
from autosel.layouts import _common as common
from autosel.layouts import _gemms as gemms
from autosel.packing import pack_last

GROUP_SIZES = (32, 64, 128, 256)
OUTPUTS_MULTIPLE = 16
_MIDDLE = 8


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes ``[N, K]`` to the operator's bytes ``[N, K/2]``."""
    packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
        codes.to(torch.int32), 1
    )
    return packed


def nibble_sources(outputs: int, inputs: int) -> torch.Tensor:
    """Which code, counted row by row, each nibble of the packed bytes is: int32 ``[N * K]``.

    The operator moves nibbles without looking at them, so packing the hexadecimal digits of every
    position, one digit at a time, tells from where each nibble came, whatever order this CPU's
    build uses.
    """
    position = torch.arange(outputs * inputs, dtype=torch.int32).view(outputs, inputs)
    source = torch.zeros(outputs * inputs, dtype=torch.int32)
    for digit in range(-(-(outputs * inputs - 1).bit_length() // 4)):
        moved = pack_codes((position >> (4 * digit)) & 0xF)
        source |= _nibbles(moved).to(torch.int32) << (4 * digit)
    return source


def unpack_codes(packed: torch.Tensor, sources: torch.Tensor | None = None) -> torch.Tensor:
    """Inverse of :func:`pack_codes`: uint8 ``[N, K]``; ``sources`` of that shape, if at hand."""
    outputs, inputs = packed.shape[0], packed.shape[1] * 2
    sources = nibble_sources(outputs, inputs) if sources is None else sources
    codes = torch.empty(outputs * inputs, dtype=torch.uint8, device=packed.device)
    codes[sources] = _nibbles(packed)
    return codes.view(outputs, inputs)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    flat = packed.flatten()
    return torch.stack((flat & 0xF, flat >> 4), -1).flatten()


@dataclass(frozen=True)
class AtenInt4(Layout):
    """See the module's text. ``dtype`` is also that of the activations handed to the operator."""

    name: ClassVar[str] = "aten_int4"
    dtype: str = "bfloat16"

    @property
    def key(self) -> str:
        return f"{self.name}-{self.dtype}"

    def nbytes(self, problem: Problem) -> int:
        total, width = 0, torch_dtype(self.dtype).itemsize
        for _, scheme, (experts, outputs, inputs) in gemms.schemes(problem):
            row = inputs // 2 + scheme.num_groups(inputs) * 2 * width + 4 * problem.has_bias
            total += experts * (outputs * row + 4 * inputs * scheme.has_g_idx)
        return total

    def pack(self, experts: CanonicalExperts) -> PackedExperts:
        """Raises UnsupportedError for sizes, schemes or values that the operator cannot express."""
        count, dtype = experts.problem.num_local_experts, torch_dtype(self.dtype)
        tensors: common.Parts = {}
        meta: dict[str, Any] = {"lone_zeros": {}, "rounded": common.rounded(experts, dtype)}
        for name, weight in gemms.weights(experts):
            self._check(name, weight)
            for e in range(count):
                where = f"{name}.scales of expert {e}"
                scales = common.cast_scales(weight.scales[e], dtype, where)  # [N, G]
                zeros = expert_zeros(weight, e)  # [N, G]
                term = ((_MIDDLE - zeros.float()) * scales.float()).to(dtype)
                self._check_finite(term, f"{name} of expert {e}")
                codes = expert_codes(weight, e)  # [N, K]
                parts = {
                    f"{name}_scales_and_zeros": torch.stack((scales, term), -1).transpose(0, 1)
                }
                order = common.sorted_inputs(weight, e, name)
                if order is not None:
                    codes = codes[:, order]
                    parts[f"{name}_gather"] = order.to(torch.int32)
                parts[name] = pack_codes(codes)
                common.fill(tensors, e, count, parts)
                lone = (scales == 0) & (zeros != _MIDDLE)
                if bool(lone.any()):
                    # 0 * (8 - z) forgets z; the weights are 0 either way, the inverse needs it
                    meta["lone_zeros"][name, e] = (lone, zeros[lone])
            gemms.keep_bias(tensors, meta, name, weight.bias)
        return PackedExperts(self.key, experts.problem, tensors, meta)

    def unpack(self, packed: PackedExperts) -> CanonicalExperts:
        shapes = [shape[1:] for _, _, shape in gemms.schemes(packed.problem)]
        sources = {shape: nibble_sources(*shape) for shape in set(shapes)}

        def expert(
            name: str, scheme: QuantScheme, shape: tuple[int, int, int], e: int
        ) -> common.Parts:
            pairs = packed.tensors[f"{name}_scales_and_zeros"][e].transpose(0, 1)  # [N, G, 2]
            scales, term = pairs[..., 0], pairs[..., 1]
            codes = unpack_codes(packed.tensors[name][e], sources[shape[1:]])  # [N, K]
            parts = {
                "scales": scales.to(common.scale_dtype(scheme)),
                **gemms.kept_bias(packed, name, e),
            }
            if scheme.has_g_idx:
                order = packed.tensors[f"{name}_gather"][e].long()
                codes = codes[:, torch.argsort(order)]
                parts["g_idx"] = common.group_index_of(order, scheme, shape[2])
            parts["codes"] = pack_last(codes, 4)
            if not scheme.symmetric:
                ratio = torch.where(scales == 0, 0, term.double() / scales.double())
                zeros = (_MIDDLE - ratio).round().to(torch.uint8)
                if (name, e) in packed.meta["lone_zeros"]:
                    lone, values = packed.meta["lone_zeros"][name, e]
                    zeros[lone] = values
                parts["zero_points"] = zeros
            return parts

        return gemms.unpacked(packed, expert)

    def _check_finite(self, term: torch.Tensor, where: str) -> None:
        """``8 * S`` may pass float16's range where ``S`` does not."""
        if not bool(term.isfinite().all()):
            raise UnsupportedError(
                field_error(f"zero terms of {where}", f"in {self.dtype}", "infinite", "finite")
            )

    def _check(self, name: str, weight: QuantWeight) -> None:
        scheme, inputs = weight.scheme, weight.num_inputs
        group = gemms.group_inputs(scheme, inputs)
        common.require(
            f"layout {self.key}, {name}",
            ("bits", scheme.num_bits, 4, scheme.num_bits == 4),
            ("inputs of a group", group, f"one of {GROUP_SIZES}", group in GROUP_SIZES),
            ("inputs", inputs, f"a multiple of {group}", inputs % group == 0),
            (
                "outputs",
                weight.num_outputs,
                f"a multiple of {OUTPUTS_MULTIPLE}",
                weight.num_outputs % OUTPUTS_MULTIPLE == 0,
            ),
        )
