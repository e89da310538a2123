"""Codes into 32-bit words and back, first code in the low bits.

The one place that knows how int32 wraps. Words are plain int32; the top code may set the sign.
"""

from __future__ import annotations

import sys

import torch

_TO_SIGNED = 1 << 32


def as_int32(words: torch.Tensor) -> torch.Tensor:
    """Unsigned words held in int64 (0 .. 2**32 - 1) as the int32 with the same bits."""
    return torch.where(words >= 1 << 31, words - _TO_SIGNED, words).to(torch.int32)


def pack_last(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Pack unsigned codes ``[..., K]`` into int32 ``[..., ceil(K / pf)]``, ``pf = 32 / num_bits``.

    A partial last word is filled with zero codes.
    """
    factor = 32 // num_bits
    count = codes.shape[-1]
    words = -(-count // factor)
    if words * factor != count:
        codes = torch.nn.functional.pad(codes, (0, words * factor - count))
    grouped = codes.reshape(*codes.shape[:-1], words, factor)  # [..., W, pf]
    packed = torch.zeros(grouped.shape[:-1], dtype=torch.int32, device=codes.device)
    for i in range(factor):
        packed |= grouped[..., i].to(torch.int32) << (num_bits * i)
    return packed


def unpack_last(words: torch.Tensor, num_bits: int, count: int) -> torch.Tensor:
    """Inverse of :func:`pack_last`: int32 ``[..., W]`` to uint8 ``[..., count]``."""
    factor = 32 // num_bits
    mask = (1 << num_bits) - 1
    if num_bits == 4 and words.dtype == torch.int32 and sys.byteorder == "little":
        # A byte at a time, five times faster.
        if not words.is_contiguous() or words.stride(-1) != 1:  # of a single word a row: any
            words = words.clone(memory_format=torch.contiguous_format)
        pairs = words.view(torch.uint8)  # [..., 4 W]
        codes = torch.empty(*pairs.shape, 2, dtype=torch.uint8, device=words.device)
        torch.bitwise_and(pairs, mask, out=codes[..., 0])
        torch.bitwise_right_shift(pairs, num_bits, out=codes[..., 1])
    else:
        codes = torch.empty(*words.shape, factor, dtype=torch.uint8, device=words.device)
        for i in range(factor):
            codes[..., i] = ((words >> (num_bits * i)) & mask).to(torch.uint8)
    return codes.reshape(*words.shape[:-1], words.shape[-1] * factor)[..., :count]
