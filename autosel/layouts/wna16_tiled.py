"""Fragment-major 16 x 64 tiles: the weight layout of our own WNA16 kernels.

The kernels multiply ``y^T = W x^T``: weights are the A operand of the tensor core, tokens its
columns. One tile of 16 outputs and 64 inputs is stored in the order in which the 32 lanes of a
warp hold the A fragment of ``mma.m16n8k16`` (``wgmma.m64nNk16`` uses the same one, 16 rows a
warp), so a lane reads its words with 16-byte loads and unpacks them in place: no shuffle and no
pass through shared memory.

    codes   int32 [E, R/16, K/64, 32 lanes, 4 or 8 words]
            row = 16 r16 + 8 i0 + lane // 4
            k   = 64 k64 + 16 j + 8 i1 + 2 (lane % 4) + p
            4 bit  word j        code (i0, i1, p) at bit 4 (i0 + 2 i1) + 16 p
            8 bit  word 2 j + i1 code (i0, p)     at bit 8 i0 + 16 p
    scales  int32 [E, R/16, G, 8]   16-bit pairs: row g in the low half, row g + 8 in the high half
    zeros   int32 [E, R/16, G, 8]   the same pairs, true zero points (asymmetric only)

Gated w13 rows are interleaved, 8 gate then 8 up, so that the gate and the up value of a column
meet in one thread and the activation needs no exchange. Sizes are padded with zero codes and zero
scales: outputs of w13 to 64 (per shard), hidden size and inputs to 128 or the group.

Act-order: inputs are sorted by group once. The order of w2's inputs moves into the rows of w13
and costs nothing at run time; the order of w13's inputs is kept in ``x_order`` and becomes a
gather of ``x``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from autosel.canonical import check_experts, expert_codes
from autosel.core import CanonicalExperts, Problem, QuantScheme
from autosel.dtypes import torch_dtype
from autosel.interfaces import Layout, PackedExperts
from autosel.layouts import _common as common
from autosel.packing import pack_last

TILE_ROWS, TILE_K = 16, 64


# ------------------------------------------------------------------ tiles (pure functions)
def _bit(num_bits: int, i0: int, i1: int, p: int) -> int:
    """Bit position of a code inside its word."""
    return 4 * (i0 + 2 * i1) + 16 * p if num_bits == 4 else 8 * i0 + 16 * p


def pack_codes(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Codes uint8 ``[R, K]`` to words int32 ``[R/16, K/64, 32, num_bits]``."""
    rows, inputs = codes.shape
    tiles = codes.reshape(rows // 16, 2, 8, inputs // 64, 4, 2, 4, 2)  # r16 i0 g k64 j i1 t p
    tiles = tiles.permute(0, 3, 2, 6, 4, 5, 1, 7).to(torch.int32)  # r16 k64 g t j i1 i0 p
    words = torch.zeros(
        (*tiles.shape[:5], num_bits // 4), dtype=torch.int32, device=codes.device
    )  # r16 k64 g t j w
    for i1 in range(2):
        word = 0 if num_bits == 4 else i1
        for i0 in range(2):
            for p in range(2):
                words[..., word] |= tiles[..., i1, i0, p] << _bit(num_bits, i0, i1, p)
    return words.reshape(rows // 16, inputs // 64, 32, num_bits)


def unpack_codes(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Inverse of :func:`pack_codes`: int32 ``[R/16, K/64, 32, num_bits]`` to uint8 ``[R, K]``."""
    r16, k64 = words.shape[:2]
    words = words.reshape(r16, k64, 8, 4, 4, num_bits // 4)  # r16 k64 g t j w
    out = torch.empty((r16, 2, 8, k64, 4, 2, 4, 2), dtype=torch.uint8, device=words.device)
    mask = (1 << num_bits) - 1
    for i1 in range(2):
        word = words[..., 0 if num_bits == 4 else i1]
        for i0 in range(2):
            for p in range(2):
                code = (word >> _bit(num_bits, i0, i1, p)) & mask  # r16 k64 g t j
                out[:, i0, :, :, :, i1, :, p] = code.permute(0, 2, 1, 4, 3).to(torch.uint8)
    return out.reshape(r16 * 16, k64 * 64)


def pack_pairs(values: torch.Tensor) -> torch.Tensor:
    """16-bit values ``[R, G]`` to int32 pairs ``[R/16, G, 8]``: row g low, row g + 8 high."""
    rows, groups = values.shape
    pairs = values.reshape(rows // 16, 2, 8, groups).permute(0, 3, 2, 1).contiguous()
    return pairs.view(torch.int32).reshape(rows // 16, groups, 8)


def unpack_pairs(pairs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of :func:`pack_pairs`."""
    r16, groups, _ = pairs.shape
    values = pairs.contiguous().view(dtype).reshape(r16, groups, 8, 2)
    return values.permute(0, 3, 2, 1).reshape(r16 * 16, groups).contiguous()


def interleave_shards(rows: torch.Tensor) -> torch.Tensor:
    """Gate rows then up rows ``[2 I, ...]`` to blocks of 8 gate rows and 8 up rows."""
    half = rows.shape[0] // 2
    blocks = rows.reshape(2, half // 8, 8, *rows.shape[1:])
    return blocks.transpose(0, 1).reshape(rows.shape)


def split_shards(rows: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`interleave_shards`."""
    half = rows.shape[0] // 2
    blocks = rows.reshape(half // 8, 2, 8, *rows.shape[1:])
    return blocks.transpose(0, 1).reshape(rows.shape)


# ------------------------------------------------------------------ sizes
def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _k_multiple(scheme: QuantScheme, base: int) -> int:
    return base if scheme.group_size == -1 else math.lcm(base, scheme.group_size)


@dataclass(frozen=True)
class Sizes:
    """Padded sizes: ``hidden`` and ``intermediate``, and each GEMM's group length and count."""

    hidden: int
    intermediate: int
    group13: int
    group2: int

    @staticmethod
    def of(problem: Problem) -> Sizes:
        hidden = _round_up(problem.hidden_size, _k_multiple(problem.w13, 128))
        inner = _round_up(problem.intermediate_size, _k_multiple(problem.w2, 64))
        g13, g2 = problem.w13.group_size, problem.w2.group_size
        return Sizes(hidden, inner, hidden if g13 == -1 else g13, inner if g2 == -1 else g2)


# ------------------------------------------------------------------ the layout
@dataclass(frozen=True)
class Wna16Tiled(Layout):
    """See the module's text. ``act_dtype`` is also the dtype of scales.

    Scales in another dtype are cast. A cast that only rounds (float16 to bfloat16) is named in
    ``meta["rounded"]`` and :meth:`unpack` then returns the rounded scales; one that would lose
    their range raises UnsupportedError. Otherwise the round trip is exact.
    """

    name: ClassVar[str] = "wna16_tiled"
    act_dtype: str = "bfloat16"

    @property
    def key(self) -> str:
        return f"{self.name}-{self.act_dtype}"

    def nbytes(self, problem: Problem) -> int:
        sizes, experts = Sizes.of(problem), problem.num_local_experts
        rows13 = problem.num_shards * sizes.intermediate
        total = 0
        for scheme, rows, inputs, group, logical in (
            (problem.w13, rows13, sizes.hidden, sizes.group13, problem.hidden_size),
            (problem.w2, sizes.hidden, sizes.intermediate, sizes.group2, problem.intermediate_size),
        ):
            pair_bytes = 2 if scheme.symmetric else 4  # scales, and zero points as 16-bit
            total += rows * inputs * scheme.num_bits // 8 + rows * (inputs // group) * pair_bytes
            if problem.has_bias:
                total += rows * 4
            if common.keeps_order(scheme, logical):
                total += logical * 4
        return total * experts

    def pack(self, experts: CanonicalExperts) -> PackedExperts:
        check_experts(experts)
        problem = experts.problem
        sizes, count = Sizes.of(problem), problem.num_local_experts
        dtype = torch_dtype(self.act_dtype)
        stacks: common.Parts = {}
        for e in range(count):
            common.fill(stacks, e, count, _pack_expert(experts, e, sizes, dtype))
        meta: dict[str, Any] = {
            "sizes": sizes,
            "rounded": common.rounded(experts, dtype),
            "bias_dtypes": common.bias_dtypes(experts),
        }
        return PackedExperts(self.key, problem, stacks, meta)

    def unpack(self, packed: PackedExperts) -> CanonicalExperts:
        problem, sizes = packed.problem, packed.meta["sizes"]
        count, dtype = problem.num_local_experts, torch_dtype(self.act_dtype)
        fields: dict[str, common.Parts] = {"13": {}, "2": {}}
        for e in range(count):
            tensors = {name: t[e] for name, t in packed.tensors.items()}
            for name, parts in fields.items():
                common.fill(parts, e, count, _unpack_gemm(problem, sizes, name, tensors, dtype))
        dtypes = packed.meta["bias_dtypes"]
        weights = []
        for name, scheme, inputs in (
            ("13", problem.w13, problem.hidden_size),
            ("2", problem.w2, problem.intermediate_size),
        ):
            bias_dtype = dtypes.get(f"w{name}")
            weights.append(common.restored(scheme, inputs, fields[name], bias_dtype))
        return CanonicalExperts(problem, *weights)


def _pack_expert(
    experts: CanonicalExperts, e: int, sizes: Sizes, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    shards = experts.problem.num_shards
    order13 = common.kept_order(experts.w13, e, "w13")
    order2 = common.kept_order(experts.w2, e, "w2")
    for name, order in (("x_order", order13), ("inner_order", order2)):
        if order is not None:
            out[name] = order.to(torch.int32)

    def rows13(t: torch.Tensor, cols: int) -> torch.Tensor:
        """w13 rows: reorder to w2's inputs, pad each shard, interleave gate and up."""
        t = common.fold_w2_order(t, order2, shards)
        t = common.pad_shards(t, shards, sizes.intermediate, cols)
        return interleave_shards(t) if shards == 2 else t

    def rows2(t: torch.Tensor, cols: int) -> torch.Tensor:
        return common.pad2(t, sizes.hidden, cols)

    for name, weight, place, inputs, group, order in (
        ("13", experts.w13, rows13, sizes.hidden, sizes.group13, order13),
        ("2", experts.w2, rows2, sizes.intermediate, sizes.group2, order2),
    ):
        codes = expert_codes(weight, e)  # [N, K]
        if order is not None:
            codes = codes[:, order]
        groups = inputs // group
        scales = common.cast_scales(weight.scales[e], dtype, f"w{name}.scales of expert {e}")
        out[f"w{name}"] = pack_codes(place(codes, inputs), weight.scheme.num_bits)
        out[f"s{name}"] = pack_pairs(place(scales, groups))
        if weight.zero_points is not None:
            out[f"z{name}"] = pack_pairs(place(weight.zero_points[e].to(torch.int16), groups))
        if weight.bias is not None:
            out[f"b{name}"] = place(weight.bias[e].float()[:, None], 1)[:, 0]
    return out


def _unpack_gemm(
    problem: Problem,
    sizes: Sizes,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    first = name == "13"
    scheme = problem.w13 if first else problem.w2
    inputs = problem.hidden_size if first else problem.intermediate_size
    outputs = problem.intermediate_size if first else problem.hidden_size
    shards, inner = problem.num_shards if first else 1, tensors.get("inner_order")
    order = tensors.get("x_order") if first else inner
    back = torch.argsort(inner.long()) if first and inner is not None else None

    def place(t: torch.Tensor, cols: int) -> torch.Tensor:
        if shards == 2:
            t = split_shards(t)
        t = common.cut_shards(t, shards, outputs, cols)
        return common.fold_w2_order(t, back, shards)

    codes = place(unpack_codes(tensors[f"w{name}"], scheme.num_bits), inputs)
    groups = scheme.num_groups(inputs)
    out: dict[str, torch.Tensor] = {}
    if order is not None:
        codes = codes[:, torch.argsort(order.long())]
        out["g_idx"] = common.group_index_of(order, scheme, inputs)
    out["codes"] = pack_last(codes, scheme.num_bits)
    scales = place(unpack_pairs(tensors[f"s{name}"], dtype), groups)
    out["scales"] = scales.to(common.scale_dtype(scheme))
    if f"z{name}" in tensors:
        zeros = place(unpack_pairs(tensors[f"z{name}"], torch.int16), groups)
        out["zero_points"] = zeros.to(torch.uint8)
    if f"b{name}" in tensors:
        out["bias"] = place(tensors[f"b{name}"][:, None], 1)[:, 0]
    return out
