"""Rows of bytes: the bytes of MoeWNA16, and the signed form of XPU."""

from __future__ import annotations

import pytest
import torch

from autosel.canonical import expert_codes
from autosel.errors import UnsupportedError
from autosel.layouts.nfirst_bytes import NFirstBytes
from tests.layouts import make

CASES = {
    "plain": make.problem(),
    "asymmetric": make.problem(symmetric=False, bias=True),
    "8 bit asymmetric": make.problem(bits=8, symmetric=False),
    "channel": make.problem(group=-1),
    "odd sizes": make.problem(100, 36, group=32, symmetric=False, bias=True),
    "odd outputs": make.problem(102, 34, group=32, symmetric=False, activation="silu_no_mul"),
    "one input": make.problem(1, 1, group=-1, top_k=1, symmetric=False),
    "act-order": make.problem(act_order="w13+w2", symmetric=False),
    "fp32 scales": make.problem(scale_dtype="float32", bias=True),
    "fp16 scales": make.problem(scale_dtype="float16"),
}


@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_exact_and_pure(case: str) -> None:
    experts = make.experts(CASES[case])
    packed = make.assert_round_trip(NFirstBytes(), experts)
    for name, tensor in packed.tensors.items():
        assert tensor.data_ptr() not in {
            t.data_ptr() for w in (experts.w13, experts.w2) for t in w.tensors.values()
        }, name


@pytest.mark.parametrize("case", CASES)
def test_every_code_by_hand(case: str) -> None:
    """4 bit: low nibble = even input; zero points: low nibble = even output. 8 bit: one byte."""
    problem = CASES[case]
    experts = make.experts(problem)
    tensors = NFirstBytes().pack(experts).tensors
    for name, weight in (("w13", experts.w13), ("w2", experts.w2)):
        bits = weight.scheme.num_bits
        per_byte, mask = 8 // bits, (1 << bits) - 1
        codes = expert_codes(weight, 0)
        rows = tensors[name][0]
        for n, k in ((0, 0), (codes.shape[0] - 1, codes.shape[1] - 1), (0, codes.shape[1] // 2)):
            byte = int(rows[n, k // per_byte])
            assert byte >> (bits * (k % per_byte)) & mask == int(codes[n, k])
        if weight.zero_points is not None:
            zeros = tensors[f"{name}_zeros"][0]  # [bytes, G]
            for n in (0, codes.shape[0] - 1):
                byte = int(zeros[n // per_byte, -1])
                found = byte >> (bits * (n % per_byte)) & mask
                assert found == int(weight.zero_points[0, n, -1])


def test_a_word_of_the_checkpoint() -> None:
    """Word 0x76543210 holds 0 .. 7, so its bytes are 0x10 0x32 0x54 0x76."""
    experts = make.experts(make.problem(8, 8, group=-1, top_k=1))
    experts.w2.codes[0, 3, 0] = 0x76543210
    row = NFirstBytes().pack(experts).tensors["w2"][0, 3]
    assert row.tolist() == [0x10, 0x32, 0x54, 0x76]
    signed = NFirstBytes(signed=True).pack(experts).tensors["w2"][0, 3]
    assert signed.dtype == torch.int8
    assert [b & 0xFF for b in signed.tolist()] == [0x98, 0xBA, 0xDC, 0xFE]


def test_signed_nibbles_are_twos_complement() -> None:
    problem = make.problem()
    experts = make.experts(problem)
    layout = NFirstBytes(signed=True, scale_dtype="bfloat16")
    packed = layout.pack(experts)
    assert layout.key == "nfirst_bytes-signed-bfloat16"
    low = packed.tensors["w13"].to(torch.int32) & 0xF
    value = torch.where(low >= 8, low - 16, low)  # [E, N, K/2]
    expected = expert_codes(experts.w13, 1)[:, 0::2].to(torch.int32) - 8
    assert torch.equal(value[1], expected)
    make.assert_same(layout.unpack(packed), experts)


@pytest.mark.parametrize("kind", [{"bits": 8}, {"symmetric": False}])
def test_signed_is_for_symmetric_4_bit(kind: dict[str, object]) -> None:
    with pytest.raises(UnsupportedError, match="expected symmetric 4 bit"):
        NFirstBytes(signed=True).pack(make.experts(make.problem(**kind)))


@pytest.mark.parametrize(
    "tensor", ["w13", "w2", "w13_scales", "w2_scales", "w13_zeros", "w2_zeros"]
)
def test_planted_faults_are_seen(tensor: str) -> None:
    experts = make.experts(make.problem(symmetric=False))
    packed = NFirstBytes().pack(experts)
    stack = packed.tensors[tensor]
    stack.view(torch.uint8)[1, 3, 2] ^= 1
    with pytest.raises(AssertionError):
        make.assert_same(NFirstBytes().unpack(packed), experts)
