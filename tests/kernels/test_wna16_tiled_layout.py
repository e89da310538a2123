"""The tiled layout: exact inverse, golden words, and faults that must be seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autosel.core import QuantScheme
from autosel.layouts.wna16_tiled import (
    Wna16Tiled,
    interleave_shards,
    pack_codes,
    split_shards,
    unpack_codes,
)
from tests.kernels.make import make_experts, make_problem

CASES = [
    {},
    {"group": 32},
    {"group": 64, "symmetric": False},
    {"group": -1},
    {"bits": 8, "group": 32},
    {"bits": 8, "group": -1, "symmetric": False},
    {"act_order": True, "group": 32},
    {"hidden": 160, "inner": 72, "group": 32, "bias": True},
    {"hidden": 96, "inner": 48, "group": -1, "symmetric": False, "bits": 8, "bias": True},
    {"activation": "relu2_no_mul", "group": 32},
    {"dtype": "float16", "group": 32, "symmetric": False},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_unpack_is_the_exact_inverse(case):
    experts = make_experts(make_problem(**case))
    before = {
        (n, k): t.clone() for n in ("w13", "w2") for k, t in getattr(experts, n).tensors.items()
    }
    layout = Wna16Tiled(experts.problem.act_dtype)
    packed = layout.pack(experts)
    back = layout.unpack(packed)
    assert back.problem == experts.problem
    for (name, key), tensor in before.items():
        assert torch.equal(getattr(experts, name).tensors[key], tensor), "pack changed its input"
        got = getattr(back, name).tensors[key]
        assert got.dtype == tensor.dtype
        assert torch.equal(got, tensor), (name, key)
    assert layout.nbytes(experts.problem) == packed.nbytes


@pytest.mark.parametrize("bits", [4, 8])
def test_where_each_code_lies(bits):
    """One code set at a time lands at the word and bit that the module's table gives."""
    gen = torch.Generator().manual_seed(bits)
    for _ in range(64):
        row, k = (int(torch.randint(0, n, (1,), generator=gen)) for n in (32, 128))
        codes = torch.zeros((32, 128), dtype=torch.uint8)
        codes[row, k] = (1 << bits) - 1
        words = pack_codes(codes, bits)
        i0, g = divmod(row % 16, 8)
        j, rest = divmod(k % 64, 16)
        i1, rest = divmod(rest, 8)
        t, p = divmod(rest, 2)
        word = j if bits == 4 else 2 * j + i1
        bit = 4 * (i0 + 2 * i1) + 16 * p if bits == 4 else 8 * i0 + 16 * p
        expected = ((1 << bits) - 1) << bit
        found = int(words[row // 16, k // 64, 4 * g + t, word]) & 0xFFFFFFFF
        assert found == expected
        assert int((words != 0).sum()) == 1
        assert torch.equal(unpack_codes(words, bits), codes)


def test_interleaving_puts_eight_gate_rows_before_eight_up_rows():
    rows = torch.arange(64)[:, None]  # gate 0..31, up 32..63
    mixed = interleave_shards(rows)
    assert mixed[:8, 0].tolist() == list(range(8))
    assert mixed[8:16, 0].tolist() == list(range(32, 40))
    assert torch.equal(split_shards(mixed), rows)


def test_every_single_changed_word_changes_the_weights():
    """Planted faults: one nibble, one scale, one zero point."""
    experts = make_experts(make_problem(group=32, symmetric=False))
    layout = Wna16Tiled(experts.problem.act_dtype)
    packed = layout.pack(experts)
    for name, key in (("w2", "codes"), ("s13", "scales"), ("z2", "zero_points")):
        bad = {k: t.clone() for k, t in packed.tensors.items()}
        bad[name].view(-1)[3] ^= 1
        broken = layout.unpack(type(packed)(packed.layout, packed.problem, bad, packed.meta))
        weight = "w13" if name.endswith("13") else "w2"
        differing = getattr(broken, weight).tensors[key] != getattr(experts, weight).tensors[key]
        assert int(differing.sum()) == 1


def test_scales_of_another_type_are_cast_and_named():
    """fp16 scales for bf16 activations lose bits, and the packed layer says so."""
    problem = make_problem()
    scheme = QuantScheme(4, 32, True, False, "float16")
    problem = replace(problem, w13=scheme, w2=scheme)
    experts = make_experts(problem)
    layout = Wna16Tiled("bfloat16")
    packed = layout.pack(experts)
    assert packed.meta["rounded"] == ["w13", "w2"]
    back = layout.unpack(packed)
    assert back.w13.scales.dtype == torch.float16
    expected = experts.w13.scales.bfloat16().half()
    assert torch.equal(back.w13.scales, expected)
    assert torch.equal(back.w13.codes, experts.w13.codes)


def test_act_order_with_one_group_changes_nothing():
    experts = make_experts(make_problem(group=-1, act_order=True))
    layout = Wna16Tiled()
    packed = layout.pack(experts)
    assert not {"x_order", "inner_order"} & set(packed.tensors)
    assert torch.equal(layout.unpack(packed).w2.g_idx, experts.w2.g_idx)
