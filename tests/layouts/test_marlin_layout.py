"""Marlin's layout: golden words, an independent simulation of the kernel's reads, the traps."""

from __future__ import annotations

import itertools

import pytest
import torch

from autosel.canonical import dequantize_expert
from autosel.core import Problem
from autosel.errors import UnsupportedError
from autosel.layouts import _marlin_tiles as tiles
from autosel.layouts.marlin import Marlin, padded_intermediate
from tests.layouts import make, marlin_simulation


def unsigned(words: torch.Tensor) -> list[int]:
    return [int(w) & 0xFFFFFFFF for w in words.flatten()]


def golden_codes(bits: int) -> torch.Tensor:
    """q(k, n) = 7k + 3n + floor(kn / 5), as codes [N, K] with N = 64, K = 32."""
    k, n = torch.arange(32)[None, :], torch.arange(64)[:, None]
    return ((7 * k + 3 * n + k * n // 5) % (1 << bits)).to(torch.uint8)


# Computed once with a simulation of the CUDA repack kernel; not produced by the code under test.
GOLDEN = {
    (4, 16): ([0x50F7C880, 0x23BA6810, 0xF78D08B0, 0xBA509840], [0x96F9951A, 0xCF339C11],
              590106435266),
    (8, 16): ([0x3F073800, 0x65205C18, 0x8B3A8130, 0xB253A648], [0xD343C131, 0x1C7F096C],
              1131346643457),
    (4, 8): ([0x55EE7700, 0xB129A018, 0x1E74DA30, 0x8BCF0348], [0x3311FFDD, 0xC39F5B18],
             552834883136),
    (8, 8): ([0x150E0700, 0x857E7770, 0x31292018, 0xBBB2AAA1], [0xE3CFBBA8, 0x1C09F5E1],
             1127496311757),
}  # fmt: skip


@pytest.mark.parametrize(("bits", "act_bits"), GOLDEN)
def test_golden_words(bits: int, act_bits: int) -> None:
    first, last, total = GOLDEN[bits, act_bits]
    words = tiles.pack_tiles(golden_codes(bits), bits, act_bits)
    assert tuple(words.shape) == (2, 64 * bits // 2)
    found = unsigned(words)
    assert found[:4] == first
    assert found[-2:] == last
    assert sum(found) == total
    assert torch.equal(tiles.unpack_tiles(words, bits, act_bits), golden_codes(bits))


@pytest.mark.parametrize(
    ("bits", "act_bits", "expected"),
    [
        (4, 16, [0x99991111, 0xEEEE6666, 0x3333BBBB, 0x88880000]),
        (8, 16, [0x79295101, 0x19C9F1A1, 0x7E2E5606, 0x1ECEF6A6]),
        (4, 8, [0x91919191, 0xE6E6E6E6, 0x3B3B3B3B, 0x80808080]),
        (8, 8, [0x79512901, 0x19F1C9A1, 0x7E562E06, 0x1EF6CEA6]),
    ],
)
def test_golden_zero_points(bits: int, act_bits: int, expected: list[int]) -> None:
    zeros = ((5 * torch.arange(64) + 1) % (1 << bits)).to(torch.uint8)[None]
    words = tiles.pack_zeros(zeros, bits, act_bits)
    assert unsigned(words)[:4] == expected
    assert torch.equal(tiles.unpack_zeros(words, bits, act_bits), zeros)


def test_golden_scale_permutations() -> None:
    grouped = tiles.permute_grouped(torch.arange(64)).tolist()
    assert grouped[:10] == [0, 8, 16, 24, 32, 40, 48, 56, 1, 9]
    single = tiles.permute_single(torch.arange(32)).tolist()
    assert single == [0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, 11, 18, 19, 26, 27,
                      4, 5, 12, 13, 20, 21, 28, 29, 6, 7, 14, 15, 22, 23, 30, 31]  # fmt: skip
    values = torch.arange(256).reshape(2, 128)
    for permute in (tiles.permute_grouped, tiles.permute_single):
        assert torch.equal(permute(permute(values)), values)
        assert not torch.equal(permute(values), values)


@pytest.mark.parametrize(("bits", "act_bits"), list(itertools.product((4, 8), (16, 8))))
@pytest.mark.parametrize("shape", [(64, 32), (192, 96), (320, 160)])
def test_words_read_by_thread_and_lane(bits: int, act_bits: int, shape: tuple[int, int]) -> None:
    rng = torch.Generator().manual_seed(bits * act_bits)
    codes = torch.randint(0, 1 << bits, shape, generator=rng, dtype=torch.uint8)
    words = tiles.pack_tiles(codes, bits, act_bits)
    found = marlin_simulation.read_codes(words, bits, act_bits)
    assert torch.equal(torch.from_numpy(found).to(torch.uint8), codes)
    assert torch.equal(tiles.unpack_tiles(words, bits, act_bits), codes)


CASES = {
    "plain": make.problem(),
    "group 64": make.problem(256, 192, group=64),
    "group 128": make.problem(256, 256, group=128),
    "channel": make.problem(group=-1),
    "asymmetric": make.problem(symmetric=False),
    "asymmetric channel": make.problem(symmetric=False, group=-1),
    "8 bit": make.problem(bits=8, group=128),
    "8 bit channel": make.problem(bits=8, group=-1),
    "fp16": make.problem(act_dtype="float16", scale_dtype="float16"),
    "bias": make.problem(bias=True),
    "non-gated": make.problem(activation="relu2_no_mul"),
    # one group in w2, several in w13: the width of w13 is H, not I
    "I == g": make.problem(512, 128, group=128),
    "I < g": make.problem(512, 64, group=128),
    # one group in w13 although I > g
    "H == g": make.problem(128, 256, group=128),
    "padded": make.problem(256, 96, symmetric=False, bias=True),
    "padded, non-gated": make.problem(256, 96, activation="gelu_no_mul", bias=True),
    "padded, interleaved activation": make.problem(256, 96, activation="swigluoai"),
    "padded to g": make.problem(256, 192, group=128, symmetric=False),
    "padded by groups": make.problem(256, 70, group=32, symmetric=False),
    "I = 8": make.problem(256, 8),
    "act-order w2": make.problem(256, 128, symmetric=False, act_order="w2", bias=True),
    "act-order w2, padded": make.problem(256, 96, act_order="w2", activation="silu_no_mul"),
    "act-order, one group": make.problem(256, 128, group=-1, act_order="w13+w2"),
    "act-order w13": make.problem(256, 128, group=64, act_order="w13"),
    "act-order both": make.problem(256, 96, act_order="w13+w2", symmetric=False, bias=True),
    "unlike groups": make.problem(256, 128, group=64, group2=-1),
}  # fmt: skip


def layout(problem: Problem) -> Marlin:
    return Marlin(problem.act_dtype)


@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_exact_and_pure(case: str) -> None:
    problem = CASES[case]
    packed = make.assert_round_trip(layout(problem), make.experts(problem))
    assert packed.meta["rounded"] == []
    assert all(tensor.is_contiguous() for tensor in packed.tensors.values())


@pytest.mark.parametrize("case", CASES)
def test_what_the_kernel_computes(case: str) -> None:
    """The whole layer from the packed words (read by the simulation) equals the canonical one."""
    problem = CASES[case]
    experts = make.experts(problem, seed=1)
    packed = layout(problem).pack(experts)
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(5, problem.hidden_size, generator=rng, dtype=torch.float64)
    stored = padded_intermediate(problem)
    for e in range(problem.num_local_experts):
        tensors = {name: stack[e] for name, stack in packed.tensors.items()}
        w13 = marlin_simulation.read_gemm(tensors, "w13", problem.w13.num_bits)
        w2 = marlin_simulation.read_gemm(tensors, "w2", problem.w2.num_bits)
        assert tuple(w13.shape) == (problem.num_shards * stored, problem.hidden_size)
        assert tuple(w2.shape) == (problem.hidden_size, stored)
        order = tensors.get("w13_order", torch.arange(problem.hidden_size)).long()
        h, y = x[:, order] @ w13.T, None
        expected = x @ dequantize_expert(experts.w13, e, torch.float64).T
        if problem.has_bias:
            h += marlin_simulation.read_bias(tensors["w13_bias"]).double()
            expected += experts.w13.bias[e].double()
        h, expected = _halves(h, problem), _halves(expected, problem)
        y = h @ w2.T
        expected = expected @ dequantize_expert(experts.w2, e, torch.float64).T
        if problem.has_bias:
            y += marlin_simulation.read_bias(tensors["w2_bias"]).double()
            expected += experts.w2.bias[e].double()
        torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)


def _halves(h: torch.Tensor, problem: Problem) -> torch.Tensor:
    """A stand-in for the activation that maps (0, 0) to 0 and tells gate from up."""
    if not problem.activation.gated:
        return torch.relu(h) ** 2
    gate, up = h.chunk(2, 1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize(
    "fault", ["nibble", "scale row", "zero point", "experts", "gate and up", "bias"]
)
def test_planted_faults_are_seen(fault: str) -> None:
    problem = make.problem(symmetric=False, bias=True)
    experts = make.experts(problem)
    packed = layout(problem).pack(experts)
    tensors = packed.tensors
    if fault == "nibble":
        tensors["w2"][1, 3, 5] ^= 1 << 12
    elif fault == "scale row":
        tensors["w13_scales"][1] = tensors["w13_scales"][1].flip(0)
    elif fault == "zero point":
        tensors["w13_zeros"][0, 1, 2] ^= 1
    elif fault == "experts":
        tensors["w2"][[0, 1]] = tensors["w2"][[1, 0]]
    elif fault == "gate and up":
        tensors["w13"][:] = torch.cat(tensors["w13"].chunk(2, 2)[::-1], 2)
    else:
        tensors["w13_bias"][:] = tensors["w13_bias"].roll(1, 1)
    with pytest.raises(AssertionError):
        make.assert_same(layout(problem).unpack(packed), experts)


@pytest.mark.parametrize("case", ["I == g", "I < g", "H == g"])
def test_the_other_scale_permutation_is_wrong(case: str) -> None:
    """The rule that looks at the wrong width gives other numbers, so the test above can fail."""
    problem = CASES[case]
    packed = layout(problem).pack(make.experts(problem))
    for name in ("w13", "w2"):
        stored = packed.tensors[f"{name}_scales"][0]
        natural = marlin_simulation.read_scales(stored)
        other = tiles.permute_grouped if stored.shape[0] == 1 else tiles.permute_single
        assert torch.equal(tiles.permute_scales(natural), stored)
        assert not torch.equal(other(natural), stored)


def test_one_scale_row_is_per_channel_for_the_kernel() -> None:
    problem = CASES["I < g"]
    packed = layout(problem).pack(make.experts(problem))
    assert packed.tensors["w13_scales"].shape[1] == 4
    assert packed.tensors["w2_scales"].shape[1] == 1
    assert padded_intermediate(problem) == 64  # no padding to the group that is not there


def test_padding_follows_the_group() -> None:
    assert padded_intermediate(CASES["padded"]) == 128
    assert padded_intermediate(CASES["padded to g"]) == 256
    assert (
        layout(CASES["padded by groups"])
        .pack(make.experts(CASES["padded by groups"]))
        .tensors["w2_scales"]
        .shape[1]
        == 4
    )


def test_fp16_scales_with_bf16_activations_are_rounded_and_said_so() -> None:
    problem = make.problem(scale_dtype="float16")
    experts = make.experts(problem)
    packed = Marlin("bfloat16").pack(experts)
    assert packed.meta["rounded"] == ["w13", "w2"]
    back = Marlin("bfloat16").unpack(packed)
    assert torch.equal(back.w13.codes, experts.w13.codes)
    expected = experts.w13.scales.to(torch.bfloat16).to(torch.float16)
    assert torch.equal(back.w13.scales, expected)


@pytest.mark.parametrize(
    ("value", "scale_dtype"),
    [(1e-8, "bfloat16"), (70000.0, "bfloat16"), (1e-6, "float32"), (-70000.0, "float32")],
)
def test_scales_outside_the_range_are_refused(value: float, scale_dtype: str) -> None:
    problem = make.problem(scale_dtype=scale_dtype, act_dtype="float16")
    experts = make.experts(problem)
    experts.w2.scales[1, 7, 2] = value
    with pytest.raises(UnsupportedError, match=r"w2\.scales of expert 1.*float16"):
        Marlin("float16").pack(experts)


def test_a_zero_scale_is_fine() -> None:
    problem = make.problem(scale_dtype="bfloat16", act_dtype="float16")
    experts = make.experts(problem)
    experts.w2.scales[1, 7, 2] = 0
    packed = Marlin("float16").pack(experts)
    make.assert_same(Marlin("float16").unpack(packed), experts)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (make.problem(160, 96), "hidden_size: found 160"),
        (make.problem(256, 128, group=16), "group_size: found 16"),
        (make.problem(512, 512, group=256), "group_size: found 256"),
    ],
)
def test_refusals_name_found_and_expected(problem: Problem, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        layout(problem).pack(make.experts(problem))


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_uneven_act_order_groups_are_refused(name: str) -> None:
    """A tensor-parallel share of an act-order layer: the groups are not full."""
    problem = make.problem(act_order=name)
    experts = make.experts(problem)
    g_idx = getattr(experts, name).g_idx
    g_idx[1, 0] = (g_idx[1, 0] + 1) % 4
    with pytest.raises(UnsupportedError, match=rf"{name}\.g_idx of expert 1: group lengths"):
        layout(problem).pack(experts)


@pytest.mark.parametrize("zeros", [8, 0, 15, "random"])
def test_fp8_codes_invert(zeros: int | str) -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(16)
    z = torch.arange(16, dtype=torch.uint8).repeat_interleave(16) if zeros == "random" else zeros
    stored = tiles.fp8_codes(codes, z)
    assert torch.equal(tiles.codes_from_fp8(stored, z), codes)


def test_fp8_codes_of_symmetric_weights() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    expected = [15, 14, 13, 12, 11, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7]
    assert tiles.fp8_codes(codes).tolist() == expected


def test_int8_scales() -> None:
    scales = torch.tensor([[[0.5, 0.25], [1.0, 0.125]]], dtype=torch.float16)
    stored, factor = tiles.int8_scales(scales)
    assert factor == 1 / 4096
    assert stored.dtype == torch.float16
    assert stored.view(torch.int16).tolist() == [[[2048, 1024], [4096, 512]]]


def test_a_group_index_that_names_no_group_is_refused() -> None:
    problem = CASES["act-order, one group"]
    experts = make.experts(problem)
    experts.w13.g_idx[0, 5] = 1
    with pytest.raises(UnsupportedError, match=r"w13\.g_idx of expert 0"):
        layout(problem).pack(experts)
