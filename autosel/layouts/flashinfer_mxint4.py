"""The weight layout of FlashInfer's TensorRT-LLM MxInt4 MoE kernel (symmetric 4 bit, group 32).

    gemm1_weights         uint8 [E, H/256, 2 I, 128]    signed nibbles, blocks of 128 bytes
    gemm1_weights_scale   bfloat16 [E, 2 I * H / 32]    128 x 4 tiles
    gemm2_weights         uint8 [E, I/256, H, 128]
    gemm2_weights_scale   bfloat16 [E, H * I / 32]

Rows are shuffled inside blocks of 32 for the transposed output of the tensor core; w13 rows are
first interleaved up, gate, up, gate ... (:func:`row_sources`). Rows of 256 nibbles are cut into
chunks of 128 bytes, the chunk index outermost. Scales lie in tiles of 128 rows by 4 groups
(:func:`scale_positions`). Source: FlashInfer (Apache-2.0), ``flashinfer/fused_moe/core.py`` and
``flashinfer/utils.py``; the scale order is that of NVIDIA's block-scaled GEMMs (cuBLAS manual,
"1D block scaling factors layout").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from autosel.canonical import check_experts
from autosel.core import CanonicalExperts, Problem, QuantScheme, QuantWeight
from autosel.errors import UnsupportedError, field_error
from autosel.interfaces import Layout, PackedExperts
from autosel.layouts import _common as common

GROUP_SIZE = 32
_BLOCK_BYTES = 128
#: Widths of one block: 256 inputs. Output rows come in tiles of 128 (both GEMMs are covered by
#: asking that hidden and intermediate size be multiples of 256).
MULTIPLE = 256
_SIGN = 0x88


def row_sources(num_rows: int, gated: bool) -> torch.Tensor:
    """int64 ``[num_rows]``: the canonical row that stands at each stored row.

    Stored row ``r`` takes row ``32 B + 4 c + a`` with ``B = r // 32``, ``a = r % 32 // 8``,
    ``c = r % 8``. When ``gated``, that row counts in the interleaved stack: up rows at even
    places, gate rows at odd ones; canonically gate rows come first.
    """
    r = torch.arange(num_rows)
    source = 32 * (r // 32) + 4 * (r % 8) + r % 32 // 8
    if not gated:
        return source
    half = num_rows // 2
    return torch.where(source % 2 == 0, half + source // 2, source // 2)


def scale_positions(num_rows: int, num_groups: int) -> torch.Tensor:
    """int64 ``[num_rows, num_groups]``: where each scale stands in the flat tiled array."""
    m = torch.arange(num_rows)[:, None]
    j = torch.arange(num_groups)[None, :]
    tile = (m // 128) * -(-num_groups // 4) + j // 4
    return tile * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + j % 4


@dataclass(frozen=True)
class FlashInferMxInt4(Layout):
    """See the module's text. Scales are bfloat16, cast as described in :class:`..Marlin`."""

    name: ClassVar[str] = "flashinfer_mxint4"

    def nbytes(self, problem: Problem) -> int:
        total = 0
        for _, outputs, inputs in (problem.w13_shape, problem.w2_shape):
            total += outputs * inputs // 2 + outputs * (inputs // GROUP_SIZE) * 2
        return total * problem.num_local_experts

    def pack(self, experts: CanonicalExperts) -> PackedExperts:
        """Raises UnsupportedError for any scheme, size or extra that the kernel does not read."""
        check_experts(experts)
        problem, count = experts.problem, experts.problem.num_local_experts
        self._check(problem)
        stacks: common.Parts = {}
        for name, weight, gated in (("gemm1", experts.w13, True), ("gemm2", experts.w2, False)):
            device = weight.codes.device
            rows = row_sources(weight.num_outputs, gated).to(device)
            groups = weight.num_inputs // GROUP_SIZE
            places = scale_positions(weight.num_outputs, groups).to(device)
            for e in range(count):
                bytes_ = weight.codes[e].contiguous().view(torch.uint8)[rows] ^ _SIGN  # [N, K/2]
                blocks = bytes_.reshape(len(rows), -1, _BLOCK_BYTES).transpose(0, 1)
                where = f"{name} scales of expert {e}"
                scales = common.cast_scales(weight.scales[e], torch.bfloat16, where)[rows]
                flat = torch.empty(places.numel(), dtype=torch.bfloat16, device=device)
                flat[places.flatten()] = scales.flatten()
                parts = {f"{name}_weights": blocks, f"{name}_weights_scale": flat}
                common.fill(stacks, e, count, parts)
        meta: dict[str, Any] = {"rounded": common.rounded(experts, torch.bfloat16)}
        return PackedExperts(self.key, problem, stacks, meta)

    def unpack(self, packed: PackedExperts) -> CanonicalExperts:
        problem, count = packed.problem, packed.problem.num_local_experts
        weights = []
        for name, scheme, (_, outputs, inputs), gated in (
            ("gemm1", problem.w13, problem.w13_shape, True),
            ("gemm2", problem.w2, problem.w2_shape, False),
        ):
            blocks = packed.tensors[f"{name}_weights"]
            rows = row_sources(outputs, gated).to(blocks.device)
            places = scale_positions(outputs, inputs // GROUP_SIZE).to(blocks.device)
            fields: common.Parts = {}
            for e in range(count):
                shuffled = blocks[e].transpose(0, 1).reshape(outputs, inputs // 2)
                canonical = torch.empty_like(shuffled)
                canonical[rows] = shuffled ^ _SIGN
                scales = torch.empty(places.shape, dtype=torch.bfloat16, device=blocks.device)
                scales[rows] = packed.tensors[f"{name}_weights_scale"][e][places]
                parts = {
                    "codes": canonical.view(torch.int32),
                    "scales": scales.to(common.scale_dtype(scheme)),
                }
                common.fill(fields, e, count, parts)
            weights.append(QuantWeight(scheme, inputs, **fields))
        return CanonicalExperts(problem, *weights)

    def _check(self, problem: Problem) -> None:
        common.require_little_endian(self.name)
        for what, found, required in _refusals(problem):
            raise UnsupportedError(field_error(f"layout {self.name}", what, found, required))


def _refusals(problem: Problem) -> list[tuple[str, object, str]]:
    found: list[tuple[str, object, str]] = []
    wanted = QuantScheme(4, GROUP_SIZE, True)
    for name, scheme in (("w13", problem.w13), ("w2", problem.w2)):
        plain = (scheme.num_bits, scheme.group_size, scheme.symmetric, scheme.has_g_idx)
        if plain != (wanted.num_bits, wanted.group_size, True, False):
            found.append((f"{name} scheme", scheme.key, "symmetric 4 bit with groups of 32"))
    for name in ("hidden_size", "intermediate_size"):
        size = getattr(problem, name)
        if size % MULTIPLE:
            found.append((name, size, f"a multiple of {MULTIPLE}"))
    if not problem.activation.gated:
        found.append(("activation", problem.activation.name, "a gated one"))
    if problem.has_bias:
        found.append(("bias", "present", "none"))
    return found
