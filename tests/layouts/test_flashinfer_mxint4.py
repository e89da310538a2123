"""FlashInfer's MxInt4 layout against its index formulas, written out a second time."""

from __future__ import annotations

import pytest
import torch

from autosel.canonical import expert_codes
from autosel.core import Problem
from autosel.errors import UnsupportedError
from autosel.layouts.flashinfer_mxint4 import FlashInferMxInt4, row_sources, scale_positions
from tests.layouts import make

PROBLEM = make.problem(512, 256, group=32)


def test_round_trip_is_exact_and_pure() -> None:
    packed = make.assert_round_trip(FlashInferMxInt4(), make.experts(PROBLEM))
    assert tuple(packed.tensors["gemm1_weights"].shape) == (2, 2, 512, 128)
    assert tuple(packed.tensors["gemm2_weights"].shape) == (2, 1, 512, 128)
    assert tuple(packed.tensors["gemm1_weights_scale"].shape) == (2, 512 * 16)


def test_row_map_inside_32_rows() -> None:
    expected = [0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29,
                2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31]  # fmt: skip
    assert row_sources(64, gated=False).tolist() == expected + [32 + r for r in expected]


def test_gated_rows_start_with_up() -> None:
    rows = row_sources(128, gated=True)
    # stored rows 0, 1, 2 take interleaved rows 0, 4, 8 = up 0, up 2, up 4; row 8 is gate 0
    assert rows[:3].tolist() == [64, 66, 68]
    assert int(rows[8]) == 0
    assert sorted(rows.tolist()) == list(range(128))


def test_golden_scale_positions() -> None:
    places = scale_positions(256, 8)
    for (m, j), expected in {
        (0, 0): 0, (1, 0): 16, (0, 1): 1, (32, 0): 4, (33, 2): 22, (5, 5): 593, (130, 7): 1571,
    }.items():  # fmt: skip
        assert int(places[m, j]) == expected
    assert sorted(places.flatten().tolist()) == list(range(256 * 8))


@pytest.mark.parametrize(("gemm", "name"), [("gemm1", "w13"), ("gemm2", "w2")])
def test_the_steps_of_the_package(gemm: str, name: str) -> None:
    """The package's own order of steps: swap halves, interleave, shuffle, cut into blocks."""
    experts = make.experts(PROBLEM, seed=5)
    packed = FlashInferMxInt4().pack(experts)
    weight = getattr(experts, name)
    e = 1
    signed = (expert_codes(weight, e).to(torch.int16) - 8) & 0xF  # [N, K]
    scales = weight.scales[e]
    rows = list(range(signed.shape[0]))
    if name == "w13":
        half = len(rows) // 2
        swapped = rows[half:] + rows[:half]  # up rows, then gate rows
        rows = [swapped[i // 2 + (half if i % 2 else 0)] for i in range(len(rows))]
    # the MMA tile's rows: 32 at a time, position of each source row
    shuffled = [-1] * len(rows)
    for source, row in enumerate(rows):
        block, inside = divmod(source, 32)
        shuffled[32 * block + inside % 4 * 8 + inside // 4] = row
    stored = packed.tensors[f"{gemm}_weights"][e]
    flat = packed.tensors[f"{gemm}_weights_scale"][e]
    groups = scales.shape[1]
    padded = flat.reshape(len(rows) // 128, groups // 4, 32, 4, 4)  # tiles of 32 x 4 x 4
    for r in range(0, len(rows), 7):
        row = signed[shuffled[r]]
        expected = (row[0::2] | row[1::2] << 4).to(torch.uint8).reshape(-1, 128)
        assert torch.equal(stored[:, r], expected)
        for j in range(groups):
            found = padded[r // 128, j // 4, r % 32, r % 128 // 32, j % 4]
            assert found == scales[shuffled[r], j]


@pytest.mark.parametrize("tensor", ["gemm1_weights", "gemm2_weights", "gemm1_weights_scale"])
def test_planted_faults_are_seen(tensor: str) -> None:
    experts = make.experts(PROBLEM)
    packed = FlashInferMxInt4().pack(experts)
    packed.tensors[tensor][1].view(torch.uint8).flatten()[77] ^= 0x10
    with pytest.raises(AssertionError):
        make.assert_same(FlashInferMxInt4().unpack(packed), experts)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (make.problem(512, 256, group=64), "symmetric 4 bit with groups of 32"),
        (make.problem(512, 256, symmetric=False), "symmetric 4 bit with groups of 32"),
        (make.problem(512, 256, bits=8), "symmetric 4 bit with groups of 32"),
        (make.problem(512, 256, act_order="w2"), "symmetric 4 bit with groups of 32"),
        (make.problem(384, 256), "hidden_size: found 384, expected a multiple of 256"),
        (make.problem(512, 128), "intermediate_size: found 128, expected a multiple of 256"),
        (make.problem(512, 256, activation="relu2_no_mul"), "activation"),
        (make.problem(512, 256, bias=True), "bias: found present, expected none"),
    ],
)
def test_refusals(problem: Problem, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        FlashInferMxInt4().pack(make.experts(problem))
