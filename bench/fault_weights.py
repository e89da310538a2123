"""What a wrong packer packs: changes of a layer's weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from autosel.core import CanonicalExperts, QuantWeight
from autosel.packing import pack_last, unpack_last


def in_w13(change: Callable[[QuantWeight], dict[str, Any]]) -> Callable[..., CanonicalExperts]:
    return lambda experts: replace(experts, w13=replace(experts.w13, **change(experts.w13)))


def in_w2(change: Callable[[QuantWeight], dict[str, Any]]) -> Callable[..., CanonicalExperts]:
    return lambda experts: replace(experts, w2=replace(experts.w2, **change(experts.w2)))


def edited(tensor: torch.Tensor, edit: Callable[[torch.Tensor], None]) -> torch.Tensor:
    copy = tensor.clone()
    edit(copy)
    return copy


def swap_nibbles(weight: QuantWeight) -> dict[str, Any]:
    def edit(words: torch.Tensor) -> None:
        codes = unpack_last(words[1, 5], 4, weight.num_inputs).clone()
        # Neighbours that differ, or the fault would be none.
        place = 2 * int((codes[::2].int() - codes[1::2].int()).abs().argmax())
        codes[[place, place + 1]] = codes[[place + 1, place]]
        words[1, 5] = pack_last(codes, 4)

    return {"codes": edited(weight.codes, edit)}


def shift_code(weight: QuantWeight) -> dict[str, Any]:
    def edit(words: torch.Tensor) -> None:
        codes = unpack_last(words[2, 9], 4, weight.num_inputs).clone()
        codes[7] = codes[7] + 2 if int(codes[7]) < 14 else codes[7] - 2
        words[2, 9] = pack_last(codes, 4)

    return {"codes": edited(weight.codes, edit)}


def flip_signs(weight: QuantWeight) -> dict[str, Any]:
    def edit(words: torch.Tensor) -> None:
        words[3, 4, 2] ^= -0x77777778  # 0x88888888

    return {"codes": edited(weight.codes, edit)}


def zero_off_by_one(weight: QuantWeight) -> dict[str, Any]:
    assert weight.zero_points is not None

    def edit(zeros: torch.Tensor) -> None:
        zeros[5, 20, 1] += 1

    return {"zero_points": edited(weight.zero_points, edit)}


def shift_scale_rows(weight: QuantWeight) -> dict[str, Any]:
    def edit(scales: torch.Tensor) -> None:
        scales[4] = scales[4].roll(1, dims=0)

    return {"scales": edited(weight.scales, edit)}


def exchange_halves(weight: QuantWeight) -> dict[str, Any]:
    half = weight.num_outputs // 2
    return {"codes": weight.codes.roll(half, 1), "scales": weight.scales.roll(half, 1)}


def neighbour(weight: QuantWeight) -> dict[str, Any]:
    def edit(tensor: torch.Tensor) -> None:
        tensor[2] = tensor[3]

    return {"codes": edited(weight.codes, edit), "scales": edited(weight.scales, edit)}


def w13_scales_in_w2(experts: CanonicalExperts) -> CanonicalExperts:
    scales = experts.w2.scales.clone()
    rows, groups = scales.shape[1:]
    scales[1] = experts.w13.scales[1, :rows, :groups]
    return replace(experts, w2=replace(experts.w2, scales=scales))


def wrong_order(weight: QuantWeight) -> dict[str, Any]:
    assert weight.g_idx is not None

    def edit(index: torch.Tensor) -> None:
        index[1] = index[0]

    return {"g_idx": edited(weight.g_idx, edit)}


def no_bias(weight: QuantWeight) -> dict[str, Any]:
    assert weight.bias is not None

    def edit(bias: torch.Tensor) -> None:
        bias[6] = 0

    return {"bias": edited(weight.bias, edit)}
