"""Humming's layout, read by a simulation of its kernel's index formulas."""

from __future__ import annotations

import pytest
import torch

from autosel.canonical import dequantize_expert
from autosel.errors import UnsupportedError
from autosel.layouts import humming
from autosel.layouts.humming import Humming
from autosel.layouts.marlin import Marlin
from tests.layouts import make, marlin_simulation
from tests.layouts.humming_simulation import read_gemm

CASES = {
    "plain": make.problem(),
    "no padding": make.problem(256, 128, group=128),
    "channel": make.problem(group=-1, symmetric=False),
    "H == g": make.problem(128, 256, group=128),
    "I < g": make.problem(512, 64, group=128),
    "asymmetric": make.problem(symmetric=False, group=64),
    "8 bit bf16": make.problem(bits=8, group=64),
    "8 bit bf16 asymmetric": make.problem(bits=8, group=64, symmetric=False),
    "8 bit bf16 channel asymmetric": make.problem(bits=8, group=-1, symmetric=False),
    "8 bit fp16": make.problem(bits=8, act_dtype="float16", scale_dtype="float16"),
    "odd sizes": make.problem(160, 96, symmetric=False, bias=True),
    "odd sizes, 8 bit": make.problem(160, 96, bits=8, symmetric=False, bias=True),
    "non-gated": make.problem(160, 72, activation="relu2_no_mul"),
    "act-order w2": make.problem(256, 96, act_order="w2", symmetric=False, bits=8),
    "act-order both": make.problem(256, 96, act_order="w13+w2", symmetric=False, bits=8),
    "act-order, one group": make.problem(group=-1, act_order="w13+w2"),
}


@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_exact_and_pure(case: str) -> None:
    problem = CASES[case]
    make.assert_round_trip(Humming(problem.act_dtype), make.experts(problem))


@pytest.mark.parametrize("case", CASES)
def test_what_the_kernel_computes(case: str) -> None:
    problem = CASES[case]
    experts = make.experts(problem, seed=3)
    packed = Humming(problem.act_dtype).pack(experts)
    shards, hidden, inner = problem.num_shards, problem.hidden_size, problem.intermediate_size
    e = 1
    tensors = {name: stack[e] for name, stack in packed.tensors.items()}
    wide = problem.act_dtype == "bfloat16"
    w13, w2 = (
        read_gemm(
            tensors[name],
            tensors[f"{name}_scales"],
            tensors.get(f"{name}_zeros"),
            scheme.num_bits,
            scheme.group_size != -1,
            wide,
        )
        for name, scheme in (("w13", problem.w13), ("w2", problem.w2))
    )
    assert w13.shape[0] % 256 == 0
    assert w2.shape[1] % 128 == 0
    assert not w13[shards * inner :].any()
    assert not w13[:, hidden:].any()
    order = tensors["w2_order"].long() if "w2_order" in tensors else torch.arange(inner)
    rows = torch.cat([order + shard * inner for shard in range(shards)])
    inputs = tensors["w13_order"].long() if "w13_order" in tensors else torch.arange(hidden)
    expected13 = dequantize_expert(experts.w13, e, torch.float64)[rows][:, inputs]
    expected2 = dequantize_expert(experts.w2, e, torch.float64)[:, order]
    assert torch.equal(w13[: shards * inner, :hidden], expected13)
    assert torch.equal(w2[:hidden, :inner], expected2)
    if problem.has_bias:
        bias = marlin_simulation.read_bias(tensors["w13_bias"])
        assert torch.equal(bias[: shards * inner], experts.w13.bias[e][rows])


def test_weight_words_equal_marlins_where_nothing_is_padded() -> None:
    problem = make.problem(256, 128, group=32)
    experts = make.experts(problem)
    ours, marlin = Humming().pack(experts), Marlin().pack(experts)
    for name in ("w13", "w2", "w13_scales", "w2_scales"):
        assert torch.equal(ours.tensors[name], marlin.tensors[name])


def test_golden_zero_points_are_not_interleaved() -> None:
    """The order that Humming shares with Marlin's layout for 8-bit activations."""
    problem = make.problem(128, 128, group=128, symmetric=False, experts=1, top_k=1)
    experts = make.experts(problem)
    experts.w2.zero_points[0, :64, 0] = ((5 * torch.arange(64) + 1) % 16).to(torch.uint8)
    words = Humming().pack(experts).tensors["w2_zeros"][0, 0, :4]
    assert [int(w) & 0xFFFFFFFF for w in words] == [0x91919191, 0xE6E6E6E6, 0x3B3B3B3B, 0x80808080]


@pytest.mark.parametrize("zero", [0, 1, 127, 128, 200, 255])
def test_wide_codes_invert(zero: int) -> None:
    codes = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    z = torch.tensor(zero, dtype=torch.uint8)
    assert torch.equal(humming.codes_from_wide(humming.wide_codes(codes, z), z), codes)


def test_wide_codes_of_symmetric_weights() -> None:
    codes = torch.tensor([0, 1, 127, 128, 129, 255], dtype=torch.uint8)
    z = torch.tensor(128, dtype=torch.uint8)
    assert humming.wide_codes(codes, z).tolist() == [255, 254, 128, 0, 1, 127]


@pytest.mark.parametrize(
    "tensor", ["w13", "w2", "w13_scales", "w2_scales", "w13_zeros", "w2_zeros"]
)
def test_planted_faults_are_seen(tensor: str) -> None:
    problem = CASES["asymmetric"]
    experts = make.experts(problem)
    packed = Humming().pack(experts)
    stack = packed.tensors[tensor]
    stack[[0, 1]] = stack[[1, 0]]
    with pytest.raises(AssertionError):
        make.assert_same(Humming().unpack(packed), experts)


def test_refuses_what_the_kernel_lacks() -> None:
    with pytest.raises(UnsupportedError, match="group_size: found 48"):
        Humming().pack(make.experts(make.problem(192, 96, group=48)))


#: Layers that both pad alike, and those that miss one condition each.
SHARED = {
    "4 bit": (make.problem(256, 128, group=32), True),
    "4 bit group 128": (make.problem(512, 256, group=128, bias=True), True),
    "4 bit channel": (make.problem(256, 128, group=-1), True),
    "4 bit fp16": (make.problem(256, 128, act_dtype="float16", scale_dtype="float16"), True),
    "8 bit fp16": (
        make.problem(256, 128, bits=8, act_dtype="float16", scale_dtype="float16"), True,
    ),
    "act-order": (make.problem(256, 128, group=64, act_order="w13+w2"), True),
    "non-gated": (make.problem(256, 256, activation="relu2_no_mul"), True),
    "asymmetric": (make.problem(256, 128, symmetric=False), False),
    "8 bit bf16": (make.problem(256, 128, bits=8), False),
    "shards padded": (make.problem(256, 96), False),
    "outputs of w2 padded": (make.problem(128, 128), False),
    "inputs of w2 padded": (make.problem(256, 192), False),
    "one declared group": (make.problem(512, 128, group=128), False),
}  # fmt: skip


@pytest.mark.parametrize("case", SHARED)
def test_marlins_tensors_where_they_are_said_to_be_the_same(case: str) -> None:
    """And only there: each other case differs in a shape or a bit."""
    problem, same = SHARED[case]
    assert humming.same_as_marlin(problem, problem.act_dtype) is same
    experts = make.experts(problem)
    mine = Humming(problem.act_dtype).pack(experts).tensors
    other = Marlin(problem.act_dtype).pack(experts).tensors
    equal = mine.keys() == other.keys() and all(torch.equal(mine[k], other[k]) for k in mine)
    assert equal is same
