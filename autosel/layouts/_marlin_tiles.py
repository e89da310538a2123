"""Marlin's tile order: the permutations of weights, scales and zero points as pure functions.

One tile is what one warp feeds to the tensor core in one step: 16 inputs by 64 outputs with
16-bit activations (``mma.m16n8k16``), 32 by 32 with 8-bit ones (``mma.m16n8k32``). Inside a tile
every thread's words lie next to each other. Source: the repack kernel ``gptq_marlin_repack`` and
the scale permutations of vLLM (Apache-2.0); the layout is that of Frantar et al., "MARLIN:
Mixed-Precision Auto-Regressive Parallel Inference on Large Language Models" (2024).

Input ``k`` and output ``n`` of a tile are split as follows (16-bit activations):

    k = 16 kt + 8 kh + 2 tr + kl        kh 2, tr 4, kl 2
    n = 64 nt + 16 w + 8 nh + tc        w 4, nh 2, tc 8

Thread ``4 tc + tr`` holds the words of its (tc, tr); ``_ORDER`` names which of the other axes
number the words and which the codes inside a word, the last one fastest.
"""

from __future__ import annotations

import torch

from autosel.packing import pack_last, unpack_last

# axes of codes.reshape(nt, w, nh, tc, kt, kh, tr, kl)
_NT, _W, _NH, _TC, _KT, _KH, _TR, _KL = range(8)
#: (num_bits, act_bits) to the order in which the axes are stored.
_ORDER = {
    (4, 16): (_KT, _NT, _TC, _TR, _W, _KL, _NH, _KH),
    (8, 16): (_KT, _NT, _TC, _TR, _W, _NH, _KL, _KH),
    (4, 8): (_KT, _NT, _TC, _TR, _W, _NH, _KL, _KH),
    (8, 8): (_KT, _NT, _TC, _TR, _W, _NH, _KH, _KL),
}
#: act_bits to (outputs, inputs) of a tile and its inner axis lengths (w, nh, tc) and (kh, tr, kl).
_TILE = {
    16: ((64, 16), (4, 2, 8), (2, 4, 2)),
    8: ((32, 32), (2, 2, 8), (2, 4, 4)),
}


def _split(num_outputs: int, num_inputs: int, act_bits: int) -> tuple[int, ...]:
    (tile_n, tile_k), inner_n, inner_k = _TILE[act_bits]
    return (num_outputs // tile_n, *inner_n, num_inputs // tile_k, *inner_k)


def pack_tiles(codes: torch.Tensor, num_bits: int, act_bits: int = 16) -> torch.Tensor:
    """Unsigned codes uint8 ``[N, K]`` to Marlin words int32 ``[K/16, N * num_bits / 2]``.

    N must be a multiple of 64 and K of 16; both of 32 with 8-bit activations.
    """
    num_outputs, num_inputs = codes.shape
    axes = codes.reshape(_split(num_outputs, num_inputs, act_bits))
    stored = axes.permute(_ORDER[num_bits, act_bits]).reshape(-1, 32 // num_bits)  # [words, pf]
    return pack_last(stored, num_bits).reshape(num_inputs // 16, num_outputs * num_bits // 2)


def unpack_tiles(words: torch.Tensor, num_bits: int, act_bits: int = 16) -> torch.Tensor:
    """Inverse of :func:`pack_tiles`: int32 ``[K/16, N * num_bits / 2]`` to uint8 ``[N, K]``."""
    num_inputs, num_outputs = words.shape[0] * 16, words.shape[1] * 2 // num_bits
    order = _ORDER[num_bits, act_bits]
    split = _split(num_outputs, num_inputs, act_bits)
    factor = 32 // num_bits
    stored = unpack_last(words.reshape(-1, 1), num_bits, factor)  # [words, pf]
    axes = stored.reshape([split[axis] for axis in order])
    back = [order.index(axis) for axis in range(len(order))]
    return axes.permute(back).reshape(num_outputs, num_inputs)


def permute_grouped(values: torch.Tensor) -> torch.Tensor:
    """Scales of several groups ``[..., N]``: transpose each 8 x 8 block of 64 outputs.

    Its own inverse.
    """
    blocks = values.reshape(*values.shape[:-1], -1, 8, 8)
    return blocks.transpose(-1, -2).reshape(values.shape)


def permute_single(values: torch.Tensor) -> torch.Tensor:
    """Scales of one group, and biases, ``[..., N]``: the order of the accumulators.

    Each 32 outputs are 4 x 4 pairs; the two fours change places. Its own inverse.
    """
    blocks = values.reshape(*values.shape[:-1], -1, 4, 4, 2)
    return blocks.transpose(-2, -3).reshape(values.shape)


def permute_scales(values: torch.Tensor, act_bits: int = 16) -> torch.Tensor:
    """Scales ``[G, N]`` in the order the kernel reads them.

    The kernel takes the number of rows it is given, never the declared group size: one row is
    its per-channel path. With 8-bit activations every scale is applied to accumulators.
    """
    return (
        permute_single(values) if values.shape[0] == 1 or act_bits == 8 else permute_grouped(values)
    )


_ZERO_ORDER = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}


def _interleave(num_bits: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(_ZERO_ORDER[num_bits], device=device)


def pack_zeros(zeros: torch.Tensor, num_bits: int, act_bits: int = 16) -> torch.Tensor:
    """True zero points uint8 ``[G, N]`` to int32 ``[G, N * num_bits / 32]``.

    Always the grouped permutation, also where scales use the single one; with 16-bit
    activations the codes inside a word are interleaved like those of the weights.
    """
    values = permute_grouped(zeros)
    if act_bits == 16:
        order = _interleave(num_bits, zeros.device)
        values = values.reshape(*values.shape[:-1], -1, len(order))[..., order]
    return pack_last(values.reshape(zeros.shape), num_bits)


def unpack_zeros(words: torch.Tensor, num_bits: int, act_bits: int = 16) -> torch.Tensor:
    """Inverse of :func:`pack_zeros`: int32 ``[G, N * num_bits / 32]`` to uint8 ``[G, N]``."""
    values = unpack_last(words, num_bits, words.shape[-1] * 32 // num_bits)
    shape = values.shape
    if act_bits == 16:
        back = torch.argsort(_interleave(num_bits, words.device))
        values = values.reshape(*shape[:-1], -1, len(back))[..., back]
    return permute_grouped(values.reshape(shape))


# ------------------------------------------------------- extras of the 8-bit activation variants
def fp8_codes(codes: torch.Tensor, zeros: torch.Tensor | int = 8) -> torch.Tensor:
    """4-bit codes as the kernel for fp8 activations expects them.

    Codes at or above the zero point become their distance from it, codes below it ``15 - code``,
    which the kernel expands to sign and magnitude. All scales must be multiplied by 512.
    ``zeros`` is one number or broadcasts against ``codes``.
    """
    return torch.where(codes >= zeros, codes - zeros, 15 - codes).to(torch.uint8)


def codes_from_fp8(values: torch.Tensor, zeros: torch.Tensor | int = 8) -> torch.Tensor:
    """Inverse of :func:`fp8_codes`.

    ``v >= z`` gave ``v - z`` in ``0 .. 15 - z``; ``v < z`` gave ``15 - v`` in ``16 - z .. 15``.
    """
    return torch.where(values <= 15 - zeros, values + zeros, 15 - values).to(torch.uint8)


def int8_scales(scales: torch.Tensor, least: float = 0.0) -> tuple[torch.Tensor, float]:
    """Grouped scales of one GEMM (all experts) for int8 activations.

    Returns int16 integers ``round(s / max * 4096)`` whose bits stand in the 16-bit float type of
    ``scales``, and the factor ``max / 4096`` that the per-token activation scale must be
    multiplied with; a factor below ``least`` becomes that. This rounds: it is not invertible.
    """
    factor = max(float(scales.float().max()) / 4096, least)
    return (scales.float() / factor).round().to(torch.int16).view(scales.dtype), factor
