"""Rows of packed bytes, outputs first: the layout of the plain Triton kernel and of XPU.

    w13, w2     uint8 [E, N, K * num_bits / 8]     4 bit: low nibble = even input
    w*_scales   [E, N, G]
    w*_zeros    uint8 [E, N * num_bits / 8, G]     4 bit: low nibble = even output; true zero
                                                   points (asymmetric only)
    w*_bias     float32 [E, N]
    w*_g_idx    int32 [E, K]                       act-order, as in the checkpoint

These are the bytes that vLLM's MoeWNA16 keeps. On a little-endian machine the weight is the
canonical one seen as bytes (K is a multiple of a whole word; a partial word is cut).

``signed`` stores int8 instead, with ``code - 8`` as two's-complement nibbles (every byte
``^ 0x88``), the form in which the XPU kernel reads symmetric 4-bit weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from autosel.canonical import check_experts
from autosel.core import CanonicalExperts, Problem, QuantScheme, QuantWeight
from autosel.dtypes import torch_dtype
from autosel.errors import UnsupportedError, field_error
from autosel.interfaces import Layout, PackedExperts
from autosel.layouts import _common as common

_SIGN = 0x88


def pack_bytes_last(values: torch.Tensor, num_bits: int) -> torch.Tensor:
    """uint8 codes ``[..., N]`` to bytes ``[..., ceil(N * num_bits / 8)]``, first code low."""
    if num_bits == 8:
        return values
    if values.shape[-1] % 2:
        values = torch.nn.functional.pad(values, (0, 1))
    return values[..., 0::2] | (values[..., 1::2] << 4)


def unpack_bytes_last(values: torch.Tensor, num_bits: int, count: int) -> torch.Tensor:
    """Inverse of :func:`pack_bytes_last`: uint8 ``[..., count]``."""
    if num_bits == 8:
        return values[..., :count]
    pairs = torch.stack((values & 0xF, values >> 4), -1)
    return pairs.flatten(-2)[..., :count]


@dataclass(frozen=True)
class NFirstBytes(Layout):
    """See the module's text.

    ``scale_dtype`` casts scales and bias (the XPU kernel wants the act dtype); empty keeps scales
    in the checkpoint's own and bias in float32, so that the round trip is exact whatever they are.
    ``fits`` names a dtype that scales must survive although they are not stored in it: the one in
    which the kernel multiplies.
    """

    name: ClassVar[str] = "nfirst_bytes"
    signed: bool = False
    scale_dtype: str = ""
    fits: str = ""

    @property
    def key(self) -> str:
        fits = f"fits_{self.fits}" if self.fits else ""
        parts = [self.name, "signed" if self.signed else "", self.scale_dtype, fits]
        return "-".join(part for part in parts if part)

    def nbytes(self, problem: Problem) -> int:
        total = 0
        for scheme, (_, outputs, inputs) in (
            (problem.w13, problem.w13_shape),
            (problem.w2, problem.w2_shape),
        ):
            groups = scheme.num_groups(inputs)
            width = torch_dtype(self.scale_dtype or scheme.scale_dtype).itemsize
            bias_width = torch_dtype(self.scale_dtype or "float32").itemsize
            total += outputs * _row_bytes(inputs, scheme) + outputs * groups * width
            if not scheme.symmetric:
                total += -(-outputs * scheme.num_bits // 8) * groups
            if scheme.has_g_idx:
                total += inputs * 4
            if problem.has_bias:
                total += outputs * bias_width
        return total * problem.num_local_experts

    def pack(self, experts: CanonicalExperts) -> PackedExperts:
        """Raises UnsupportedError for signed storage of anything but symmetric 4 bit."""
        check_experts(experts)
        common.require_little_endian(self.name)
        problem, count = experts.problem, experts.problem.num_local_experts
        stacks: common.Parts = {}
        meta: dict[str, Any] = {"bias_dtypes": common.bias_dtypes(experts)}
        for name, weight in (("w13", experts.w13), ("w2", experts.w2)):
            self._check(name, weight.scheme)
            for e in range(count):
                common.fill(stacks, e, count, self._pack_expert(name, weight, e))
        if self.scale_dtype:
            meta["rounded"] = common.rounded(experts, torch_dtype(self.scale_dtype))
        return PackedExperts(self.key, problem, stacks, meta)

    def _check(self, name: str, scheme: QuantScheme) -> None:
        if self.signed and (scheme.num_bits != 4 or not scheme.symmetric):
            raise UnsupportedError(
                field_error(f"layout {self.key}, {name}", "scheme", scheme.key, "symmetric 4 bit")
            )

    def _pack_expert(self, name: str, weight: QuantWeight, e: int) -> common.Parts:
        rows = weight.codes[e].contiguous().view(torch.uint8)  # [N, words * 4]
        rows = rows[:, : _row_bytes(weight.num_inputs, weight.scheme)]
        parts = {
            name: (rows ^ _SIGN).view(torch.int8) if self.signed else rows,
            f"{name}_scales": self._cast(weight.scales[e], f"{name}.scales of expert {e}"),
        }
        if weight.zero_points is not None:
            zeros = pack_bytes_last(weight.zero_points[e].T, weight.scheme.num_bits)  # [G, bytes]
            parts[f"{name}_zeros"] = zeros.T
        if weight.bias is not None:
            dtype = torch_dtype(self.scale_dtype or "float32")
            where = f"{name}.bias of expert {e}"
            parts[f"{name}_bias"] = common.cast_scales(weight.bias[e], dtype, where)
        if weight.g_idx is not None:
            parts[f"{name}_g_idx"] = weight.g_idx[e]
        return parts

    def _cast(self, values: torch.Tensor, where: str) -> torch.Tensor:
        if self.fits:
            common.cast_scales(values, torch_dtype(self.fits), where)
        if not self.scale_dtype:
            return values
        return common.cast_scales(values, torch_dtype(self.scale_dtype), where)

    def unpack(self, packed: PackedExperts) -> CanonicalExperts:
        problem = packed.problem
        weights = []
        for name, scheme, (_, outputs, inputs) in (
            ("w13", problem.w13, problem.w13_shape),
            ("w2", problem.w2, problem.w2_shape),
        ):
            fields: common.Parts = {}
            for e in range(problem.num_local_experts):
                tensors = {key: stack[e] for key, stack in packed.tensors.items()}
                parts = self._unpack_expert(name, scheme, outputs, inputs, tensors)
                common.fill(fields, e, problem.num_local_experts, parts)
            weight = QuantWeight(scheme, inputs, **fields)
            weights.append(common.with_bias_dtype(weight, packed.meta["bias_dtypes"].get(name)))
        return CanonicalExperts(problem, *weights)

    def _unpack_expert(
        self, name: str, scheme: QuantScheme, outputs: int, inputs: int, tensors: common.Parts
    ) -> common.Parts:
        rows = tensors[name]
        if self.signed:
            rows = rows.view(torch.uint8) ^ _SIGN
        missing = -rows.shape[1] % 4
        words = torch.nn.functional.pad(rows, (0, missing)).contiguous().view(torch.int32)
        out = {
            "codes": words,
            "scales": tensors[f"{name}_scales"].to(common.scale_dtype(scheme)),
        }
        if f"{name}_zeros" in tensors:
            zeros = unpack_bytes_last(tensors[f"{name}_zeros"].T, scheme.num_bits, outputs)
            out["zero_points"] = zeros.T
        for field in ("bias", "g_idx"):
            if f"{name}_{field}" in tensors:
                out[field] = tensors[f"{name}_{field}"]
        return out


def _row_bytes(inputs: int, scheme: QuantScheme) -> int:
    return -(-inputs * scheme.num_bits // 8)
