"""write then read gives back every bit, for every format and all schemes it can express."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autosel.canonical import dequantize_expert
from autosel.core import CanonicalExperts, Problem, QuantScheme, QuantWeight
from autosel.errors import CheckpointError
from autosel.formats import all_formats, awq, compressed_tensors, gptq, moe_wna16
from autosel.formats.base import Format, LinearQuant, Origin
from tests.checkpoint_builder import random_weight, shuffled_g_idx


def assert_same(found: QuantWeight, expected: QuantWeight) -> None:
    assert found.scheme == expected.scheme
    assert found.num_inputs == expected.num_inputs
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype, name
        assert torch.equal(found.tensors[name], tensor), name


def roundtrip(fmt: Format, weight: QuantWeight, quant: LinearQuant) -> QuantWeight:
    tensors = fmt.write(weight, quant)
    return fmt.read(tensors, quant, weight.num_outputs, weight.num_inputs, Origin("linear"))


@given(
    fmt=st.sampled_from([gptq.FORMAT, awq.FORMAT, compressed_tensors.FORMAT]),
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([-1, 8, 16, 32, 64]),
    words=st.integers(1, 6),
    blocks=st.integers(1, 5),
    symmetric=st.booleans(),
    act_order=st.booleans(),
    minus_one=st.booleans(),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    seed=st.integers(0, 2**31),
)
def test_every_scheme_of_every_format(
    fmt: Format,
    bits: int,
    group_size: int,
    words: int,
    blocks: int,
    symmetric: bool,
    act_order: bool,
    minus_one: bool,
    bias: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    inputs, outputs = 8 * words, 8 * blocks
    bits = 4 if fmt is awq.FORMAT else bits
    g_idx = None
    if act_order and group_size != -1 and fmt is not awq.FORMAT and inputs > group_size:
        g_idx = shuffled_g_idx(inputs, group_size, seed)
        if torch.equal(g_idx, (torch.arange(inputs) // group_size).int()):
            g_idx = None
    weight = random_weight(
        outputs,
        inputs,
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        g_idx=g_idx,
        scale_dtype=dtype,
        bias=bias,
        seed=seed,
    )
    quant = LinearQuant(bits, group_size, symmetric, g_idx is not None, minus_one)
    assert_same(roundtrip(fmt, weight, quant), weight)


@given(
    bits=st.sampled_from([4, 8]),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 20),
    symmetric=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_odd_sizes_of_compressed_tensors(
    bits: int, inputs: int, outputs: int, symmetric: bool, seed: int
) -> None:
    """Its shapes are padded to whole words, so any size can be stored."""
    weight = random_weight(
        outputs, inputs, bits=bits, group_size=16, symmetric=symmetric, seed=seed
    )
    quant = LinearQuant(bits, 16, symmetric)
    assert_same(roundtrip(compressed_tensors.FORMAT, weight, quant), weight)


def test_padding_bits_of_the_last_word_do_not_matter() -> None:
    weight = random_weight(4, 13)
    tensors = compressed_tensors.FORMAT.write(weight, LinearQuant(4, 32, True))
    tensors["weight_packed"] = tensors["weight_packed"].clone()
    tensors["weight_packed"][:, -1] |= -1 << 20
    found = compressed_tensors.FORMAT.read(tensors, LinearQuant(4, 32, True), 4, 13, Origin("x"))
    assert_same(found, weight)


def test_reading_changes_no_input() -> None:
    for fmt in all_formats():
        weight = random_weight(16, 64, symmetric=False)
        tensors = fmt.write(weight, LinearQuant(4, 32, False))
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        fmt.read(tensors, LinearQuant(4, 32, False), 16, 64, Origin("linear"))
        assert all(torch.equal(before[name], tensors[name]) for name in before)


def test_a_flipped_bit_is_seen() -> None:
    """The comparison above would be worth nothing if it could not fail."""
    weight = random_weight(16, 64)
    tensors = gptq.FORMAT.write(weight, LinearQuant(4, 32, True))
    tensors["qweight"][3, 5] ^= 1 << 13
    found = gptq.FORMAT.read(tensors, LinearQuant(4, 32, True), 16, 64, Origin("linear"))
    with pytest.raises(AssertionError):
        assert_same(found, weight)


def experts(bits: int, symmetric: bool, hidden: int, inter: int, group: int) -> CanonicalExperts:
    scheme = QuantScheme(bits, group, symmetric, scale_dtype="float16")
    problem = Problem(3, 3, 2, hidden, inter, scheme, scheme)

    def stacked(outputs: int, inputs: int, seed: int) -> QuantWeight:
        parts = [
            random_weight(
                outputs, inputs, bits=bits, group_size=group, symmetric=symmetric, seed=seed + e
            )
            for e in range(3)
        ]
        tensors = {
            name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors
        }
        return QuantWeight(scheme, inputs, **tensors)

    return CanonicalExperts(problem, stacked(2 * inter, hidden, 1), stacked(hidden, inter, 9))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_moe_wna16_bytes(bits: int, symmetric: bool) -> None:
    made = experts(bits, symmetric, 128, 64, 32)
    tensors = moe_wna16.write(made)
    assert tensors["w13_qweight"].shape == (3, 128, 128 * bits // 8)
    assert tensors["w2_qweight"].dtype == torch.uint8
    # low bits first: the first byte of 4-bit weights holds inputs 0 (low) and 1 (high)
    word = int(made.w2.codes[0, 0, 0])
    assert int(tensors["w2_qweight"][0, 0, 0]) == word & 0xFF
    assert ("w2_qzeros" in tensors) == (not symmetric)
    back = moe_wna16.read(tensors, made.problem)
    assert_same(back.w13, made.w13)
    assert_same(back.w2, made.w2)


@pytest.mark.parametrize("symmetric", [True, False])
def test_moe_wna16_repeats_scales_where_the_group_does_not_divide(symmetric: bool) -> None:
    """192 inputs in groups of 128 go over to groups of 64: groups 0, 0, 1."""
    made = experts(4, symmetric, 256, 192, 128)
    back = moe_wna16.read(moe_wna16.write(made), made.problem)
    assert back.problem.w2.group_size == 64
    assert torch.equal(back.w2.scales, made.w2.scales[..., [0, 0, 1]])
    for half in ("w13", "w2"):
        for expert in range(3):
            left = dequantize_expert(getattr(back, half), expert)
            assert torch.equal(left, dequantize_expert(getattr(made, half), expert))


def test_moe_wna16_refuses_what_it_cannot_hold() -> None:
    made = experts(4, True, 128, 64, 32)
    ordered = replace(made.problem, w2=replace(made.problem.w2, has_g_idx=True))
    for problem in (
        ordered,
        replace(made.problem, has_bias=True),
        replace(made.problem, w13=replace(made.problem.w13, group_size=-1)),
    ):
        with pytest.raises(CheckpointError, match="moe_wna16"):
            moe_wna16.write(CanonicalExperts(problem, made.w13, made.w2))
    with pytest.raises(CheckpointError, match="at least 32"):
        moe_wna16.write(experts(4, True, 128, 48, 32))


def test_moe_wna16_names_a_missing_or_misshapen_tensor() -> None:
    made = experts(4, False, 128, 64, 32)
    tensors = moe_wna16.write(made)
    del tensors["w2_qzeros"]
    with pytest.raises(CheckpointError, match=r"moe_wna16\.w2_qzeros: shape: found no tensor"):
        moe_wna16.read(tensors, made.problem)
    tensors = moe_wna16.write(made)
    tensors["w13_scales"] = tensors["w13_scales"][..., :1]
    with pytest.raises(CheckpointError, match=r"w13_scales: shape: found \(3, 128, 1\)"):
        moe_wna16.read(tensors, made.problem)
