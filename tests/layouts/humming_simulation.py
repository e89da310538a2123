"""Reads Humming memory (16-bit activations) as its kernel does, from the index formulas."""

from __future__ import annotations

import torch

from tests.layouts import marlin_simulation


def read_gemm(
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bits: int,
    grouped: bool,
    bfloat16: bool,
) -> torch.Tensor:
    """One expert's weights float64 ``[N', K']``."""
    codes = torch.from_numpy(marlin_simulation.read_codes(words, bits)).double()
    groups, size_n = scales.shape
    if grouped:  # also with one row: the simulation decides by rows, so it gets two
        scales = marlin_simulation.read_scales(torch.cat([scales, scales]))[:groups]
    else:
        scales = marlin_simulation.read_scales(scales)
    length = codes.shape[1] // groups
    true_zeros = torch.full((groups, size_n), 1 << (bits - 1)).double()
    if zeros is not None:
        raw = zeros.contiguous().view(torch.uint8)  # [G, bytes]
        per_byte = 8 // bits
        for place in range(size_n):
            # stored place 64 b + 8 i + j holds output 64 b + i + 8 j
            b, i, j = place // 64, place % 64 // 8, place % 8
            value = raw[:, place // per_byte] >> (bits * (place % per_byte)) & ((1 << bits) - 1)
            true_zeros[:, 64 * b + i + 8 * j] = value.double()
    spread = true_zeros.T.repeat_interleave(length, 1)
    if bits == 8 and bfloat16:
        # sign and magnitude: up to 255 - z the value itself, above it minus (z - (255 - v))
        distance = torch.where(codes <= 255 - spread, codes, (255 - codes) - spread)
    else:
        distance = codes - spread
    return distance * scales.double().T.repeat_interleave(length, 1)
