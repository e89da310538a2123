"""The exllama shuffle of the RDNA3 kernel."""

from __future__ import annotations

import pytest
import torch

from autosel.canonical import expert_codes
from autosel.core import Problem
from autosel.errors import UnsupportedError
from autosel.layouts.exllama import Exllama, shuffle_words, unshuffle_words
from autosel.packing import pack_last
from tests.layouts import make
from tests.layouts.test_marlin_layout import golden_codes, unsigned


def test_golden_words() -> None:
    words = shuffle_words(pack_last(golden_codes(4), 4).T.contiguous())
    assert unsigned(words[0, :4]) == [0x1357ACE0, 0x578AEF13, 0x9BCD2346, 0xEFF06789]


def test_shuffle_inverts_for_words_with_the_sign_bit() -> None:
    words = torch.tensor([0x76543210, -1, -(2**31), 0x12345678, -0x76543210], dtype=torch.int32)
    assert torch.equal(unshuffle_words(shuffle_words(words)), words)
    assert unsigned(shuffle_words(words[:1])) == [0x75316420]


CASES = {
    "fp16": make.problem(scale_dtype="float16", act_dtype="float16"),
    "bf16": make.problem(),
    "non-gated": make.problem(activation="silu_no_mul"),
}


@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_exact_and_pure(case: str) -> None:
    problem = CASES[case]
    make.assert_round_trip(Exllama(problem.act_dtype), make.experts(problem))


def test_what_the_kernel_reads() -> None:
    """Even inputs in the low half-word, odd ones in the high; scales [G, N]; zero 7 + 1."""
    experts = make.experts(CASES["bf16"])
    tensors = Exllama("bfloat16").pack(experts).tensors
    codes = expert_codes(experts.w13, 1)  # [N, K]
    words = tensors["w13"][1]
    assert tuple(words.shape) == (256 // 8, 256)
    for k, n in ((0, 0), (1, 5), (6, 9), (7, 255), (255, 17)):
        bit = 4 * (k % 8 // 2) + (16 if k % 2 else 0)
        assert int(words[k // 8, n]) >> bit & 0xF == int(codes[n, k])
    assert torch.equal(tensors["w13_scales"][1, 3], experts.w13.scales[1, :, 3])
    assert set(unsigned(tensors["w13_zeros"])) == {0x77777777}


@pytest.mark.parametrize("tensor", ["w13", "w2", "w13_scales", "w2_scales"])
def test_planted_faults_are_seen(tensor: str) -> None:
    experts = make.experts(CASES["bf16"])
    packed = Exllama("bfloat16").pack(experts)
    packed.tensors[tensor].view(torch.uint8)[1, 2, 3] ^= 1
    with pytest.raises(AssertionError):
        make.assert_same(Exllama("bfloat16").unpack(packed), experts)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (make.problem(symmetric=False), "scheme"),
        (make.problem(bits=8), "scheme"),
        (make.problem(act_order="w2"), "scheme"),
        (make.problem(bias=True), "bias"),
    ],
)
def test_refusals(problem: Problem, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        Exllama("bfloat16").pack(make.experts(problem))
