"""Reads Marlin memory as the kernel does: word by word from the thread and lane formulas.

Written from the table of the layout (thread, word and nibble to row and column), not from the
reshapes of the code under test, so that the two can only agree by both being right.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import torch


def _bits(word: np.ndarray, num_bits: int, i: int) -> np.ndarray:
    return (word >> (num_bits * i)) & ((1 << num_bits) - 1)


def read_codes(words: torch.Tensor, num_bits: int, act_bits: int = 16) -> np.ndarray:
    """int32 ``[K/16, N * b / 2]`` to codes ``[N, K]``."""
    size_k, size_n = words.shape[0] * 16, words.shape[1] * 2 // num_bits
    tile_k, tile_n = (16, 64) if act_bits == 16 else (32, 32)
    tile_words = tile_k * tile_n * num_bits // 32
    flat = words.flatten().numpy().astype(np.int64) & 0xFFFFFFFF
    kt, nt = (axis.flatten() for axis in np.indices((size_k // tile_k, size_n // tile_n)))
    base = (kt * (size_n // tile_n) + nt) * tile_words
    address, i, k, n = _table(num_bits, act_bits)
    values = (flat[base[:, None] + address] >> (num_bits * i)) & ((1 << num_bits) - 1)
    out = np.full((size_n, size_k), -1)
    out[tile_n * nt[:, None] + n, tile_k * kt[:, None] + k] = values
    assert out.min() >= 0  # every place was visited
    return out


@cache
def _table(num_bits: int, act_bits: int) -> tuple[np.ndarray, ...]:
    places = [place for t in range(32) for place in _places(t, num_bits, act_bits)]
    return tuple(np.array(column) for column in zip(*places, strict=True))


def _places(t: int, num_bits: int, act_bits: int) -> Iterator[tuple[int, int, int, int]]:
    """Of thread ``t``: word in the tile, code in the word, input and output in the tile."""
    if act_bits == 16:
        for w in range(4):
            if num_bits == 4:
                for i in range(8):
                    v = [0, 2, 4, 6, 1, 3, 5, 7][i]
                    n = 16 * w + t // 4 + 8 * (v // 4)
                    k = 2 * (t % 4) + [0, 1, 8, 9][v % 4]
                    yield 4 * t + w, i, k, n
            else:
                for h in range(2):
                    for i in range(4):
                        v = [0, 2, 1, 3][i]
                        n = 16 * w + t // 4 + 8 * h
                        k = 2 * (t % 4) + [0, 1, 8, 9][v]
                        yield 8 * t + 2 * w + h, i, k, n
        return
    for w in range(2):
        for nh in range(2):
            n = 16 * w + 8 * nh + t // 4
            if num_bits == 4:
                for i in range(8):
                    v = [0, 4, 1, 5, 2, 6, 3, 7][i]
                    yield 4 * t + 2 * w + nh, i, 4 * (t % 4) + v % 4 + 16 * (v // 4), n
            else:
                for kh in range(2):
                    for i in range(4):
                        yield 8 * t + 2 * (2 * w + nh) + kh, i, 16 * kh + 4 * (t % 4) + i, n


def read_scales(scales: torch.Tensor) -> torch.Tensor:
    """``[G, N]`` in kernel order to natural order, by the index lists; one row is per channel."""
    out = torch.empty_like(scales)
    groups, size_n = scales.shape
    if groups == 1:
        sources = [
            32 * b + 2 * i + off
            for b in range(size_n // 32)
            for i in range(4)
            for off in (0, 1, 8, 9, 16, 17, 24, 25)
        ]
    else:
        sources = [
            64 * b + i + 8 * j for b in range(size_n // 64) for i in range(8) for j in range(8)
        ]
    out[:, sources] = scales
    return out


def read_int8_scales(scales: torch.Tensor) -> torch.Tensor:
    """``[G, N]`` of an int8 kernel to natural order: every row as if alone; integers if several."""
    rows = torch.cat([read_scales(row[None]) for row in scales])
    return rows if len(rows) == 1 else rows.view(torch.int16)


def read_bias(bias: torch.Tensor) -> torch.Tensor:
    return read_scales(bias[None])[0]


def read_zeros(words: torch.Tensor, num_bits: int, act_bits: int = 16) -> np.ndarray:
    """int32 ``[G, N * b / 32]`` to true zero points ``[G, N]``; 8-bit activations: 4 bit only."""
    groups, count = words.shape
    size_n = count * 32 // num_bits
    values = words.numpy().astype(np.int64) & 0xFFFFFFFF
    out = np.full((groups, size_n), -1)
    for b in range(size_n // 64):
        for i in range(8):
            if num_bits == 4:
                word = values[:, 8 * b + i]
                for t in range(8):
                    column = [0, 2, 4, 6, 1, 3, 5, 7][t] if act_bits == 16 else t
                    out[:, 64 * b + i + 8 * column] = _bits(word, 4, t)
            else:
                for h in range(2):
                    word = values[:, 16 * b + 2 * i + h]
                    for t in range(4):
                        n = 64 * b + i + 8 * (4 * h + [0, 2, 1, 3][t])
                        out[:, n] = _bits(word, 8, t)
    assert out.min() >= 0
    return out


def read_gemm(
    tensors: dict[str, torch.Tensor], name: str, num_bits: int, act_bits: int = 16
) -> torch.Tensor:
    """The weights float64 ``[N, K]`` that the kernel multiplies with, for one expert.

    The group length is what the kernel derives: stored inputs divided by scale rows.
    """
    codes = torch.from_numpy(read_codes(tensors[name], num_bits, act_bits)).double()
    read = read_scales if act_bits == 16 else read_int8_scales
    scales = read(tensors[f"{name}_scales"]).double().T  # [N, G]
    length = codes.shape[1] // scales.shape[1]
    assert length * scales.shape[1] == codes.shape[1]
    if f"{name}_zeros" in tensors:
        zeros = (
            torch.from_numpy(read_zeros(tensors[f"{name}_zeros"], num_bits, act_bits)).double().T
        )
    else:
        zeros = torch.full_like(scales, 1 << (num_bits - 1))
    return (codes - zeros.repeat_interleave(length, 1)) * scales.repeat_interleave(length, 1)
