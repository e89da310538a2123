"""vLLM's CUDA operator on N-first bytes, against a stand-in with its schema and limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from autosel import dispatch
from autosel.backends.moe_wna16 import BLOCK_M, GROUPS, MoeWna16, block_k
from autosel.core import Routing
from autosel.errors import UnsupportedError
from tests.backends import stub_ops
from tests.backends.adapters import H200, check, check_slots_served_elsewhere, without_vllm
from tests.layouts import make

BACKEND = MoeWna16()
SCHEMA = (
    "(Tensor input, Tensor! output, Tensor b_qweight, Tensor b_scales, Tensor? b_qzeros,"
    " Tensor? topk_weights, Tensor sorted_token_ids, Tensor expert_ids,"
    " Tensor num_tokens_post_pad, int top_k, int BLOCK_SIZE_M, int BLOCK_SIZE_N,"
    " int BLOCK_SIZE_K, int bit) -> Tensor"
)
CASES = {
    "group 32": make.problem(256, 128, group=32),
    "group 64": make.problem(128, 192, group=64),
    "group 128": make.problem(256, 128, group=128),
    "unlike groups": make.problem(256, 96, group=64, group2=32),
    "asymmetric": make.problem(128, 64, symmetric=False),
    "8 bit": make.problem(128, 64, bits=8),
    "8 bit asymmetric": make.problem(128, 64, bits=8, symmetric=False),
    "float16": make.problem(128, 64, act_dtype="float16", scale_dtype="float16"),
    "bf16 with fp16 scales": make.problem(128, 64, scale_dtype="float16"),
    "non-gated": make.problem(128, 64, activation="relu2_no_mul"),
    "swigluoai": make.problem(128, 96, activation="swigluoai"),
    "weight on input": make.problem(128, 64, top_k=1, on_input=True),
}
Call = dict[str, Any]


@pytest.fixture(autouse=True)
def _no_real_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch, "_moe_C")


@contextmanager
def operator() -> Iterator[list[Call]]:
    """Checks what the operator checks and what its kernel takes for granted."""
    calls: list[Call] = []

    def op(
        rows, out, words, scales, zeros, weights, sorted_ids, expert_ids, used, top_k,
        block_m, block_n, block_k, bits,
    ):  # fmt: skip
        calls.append({"block_m": block_m, "block_n": block_n, "block_k": block_k, "top_k": top_k,
                      "weighted": weights is not None})  # fmt: skip
        for tensor in (rows, out, words, scales, zeros, weights):
            assert tensor is None or tensor.is_contiguous()
        (m, k), n = rows.shape, words.shape[1]
        assert words.dtype == torch.uint8
        assert words.shape[2] == k * bits // 8
        assert scales.dtype == rows.dtype == out.dtype
        group = k // scales.shape[2]
        assert group * scales.shape[2] == k
        assert zeros is None or (zeros.dtype == torch.uint8
                                 and zeros.shape[1:] == (n * bits // 8, k // group))  # fmt: skip
        assert k % block_k == 0
        assert block_k % group == 0
        assert block_k // group in (1, 2, 4, 8)
        assert block_m <= 64
        assert block_n % 8 == 0
        assert block_n <= 1024
        assert 2 * block_m * block_k <= 48 << 10
        assert out.shape == (m * top_k, n)
        out.zero_()
        for b in range(int(used) // block_m):
            expert = int(expert_ids[b])
            slots = sorted_ids[b * block_m : (b + 1) * block_m].long()
            slots = slots[slots < m * top_k]
            out[slots] = product(rows[slots // top_k], expert, words, scales, zeros, bits)
            if weights is not None:
                out[slots] = (out[slots].float() * weights.flatten()[slots, None]).to(out.dtype)
        return out.clone()

    def product(rows, expert, words, scales, zeros, bits):
        packed = words[expert].int()
        codes = packed if bits == 8 else torch.stack((packed & 15, packed >> 4), -1).flatten(1)
        if zeros is None:
            offsets = torch.full(scales.shape[1:], 1 << (bits - 1))
        else:
            stored = zeros[expert].int()
            offsets = stored if bits == 8 else torch.stack((stored & 15, stored >> 4), 1)
            offsets = offsets.reshape(scales.shape[1:])
        group = codes.shape[1] // scales.shape[2]
        values = (codes - offsets.repeat_interleave(group, 1)).float()
        values *= scales[expert].float().repeat_interleave(group, 1)
        return (rows.float() @ values.to(rows.dtype).float().T).to(rows.dtype)

    with stub_ops.registered("_moe_C", moe_wna16_gemm=(SCHEMA, op)):
        yield calls


@pytest.mark.parametrize("case", CASES)
def test_against_the_emulation(case: str) -> None:
    with operator():
        check(BACKEND, CASES[case])


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("block_m", BLOCK_M)
def test_every_block(groups: int, block_m: int) -> None:
    problem = CASES["unlike groups"]
    with operator() as calls:
        check(BACKEND, problem, BLOCK_SIZE_M=block_m, groups=groups, BLOCK_SIZE_N=64)
    first, second = calls
    assert {first["block_m"], second["block_m"]} == {block_m}
    assert first["block_k"] == 64 * min(groups, 4)  # 256 inputs
    assert second["block_k"] == 32  # 96 inputs are an odd number of groups


def test_every_legal_point_fits() -> None:
    problem = make.problem(2048, 1024, group=128)
    space = BACKEND.space(problem, 4, H200)
    points = list(space)
    assert len(points) < len(BLOCK_M) * 5 * len(GROUPS)
    for params in points:
        rows, groups = int(str(params["BLOCK_SIZE_M"])), int(str(params["groups"]))
        assert 2 * rows * block_k(problem, "w13", groups) <= 48 << 10
    reason = space.constraint({**space.default, "BLOCK_SIZE_M": 64, "groups": 8})
    assert str(reason) == ("shared memory of one block of w13: found 131072 bytes, "
                           "required at most 49152 bytes")  # fmt: skip


def test_slots_served_elsewhere() -> None:
    with operator():
        check_slots_served_elsewhere(BACKEND)


def test_the_weight_is_applied_once() -> None:
    for problem in (CASES["group 32"], CASES["weight on input"]):
        with operator() as calls:
            check(BACKEND, problem)
        on_input = problem.router_weight_on_input
        assert [call["weighted"] for call in calls] == [on_input, not on_input]


def test_refusals() -> None:
    problem = make.problem(100, 64, group=-1, act_order="w2", bias=True, act_dtype="float32")
    problem = replace(problem, w2=replace(problem.w2, group_size=32))
    text = str(BACKEND.supports(problem, H200))
    for part in ("w13 group_size: found -1", "expert bias: found present", "w2 act-order",
                 "activations' dtype: found float32", "moe_wna16_gemm"):  # fmt: skip
        assert part in text


def test_more_elements_than_the_kernel_counts() -> None:
    problem = make.problem(128, 64, top_k=2)
    packed = BACKEND.layout(problem, {}).pack(make.experts(problem))
    tokens = 1 << 23
    x = torch.empty(1, 128, dtype=torch.bfloat16).expand(tokens, 128)
    ids = torch.zeros(1, 2, dtype=torch.int32).expand(tokens, 2)
    with operator(), pytest.raises(UnsupportedError, match="below 2\\*\\*31"):
        BACKEND.run(packed, x, Routing(ids, torch.ones(1, 2).expand(tokens, 2)), {}, x)


def test_an_empty_call_launches_nothing() -> None:
    problem = CASES["group 32"]
    packed = BACKEND.layout(problem, {}).pack(make.experts(problem))
    x = torch.empty(0, 256, dtype=torch.bfloat16)
    routed = Routing(torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2))
    with operator() as calls:
        assert dispatch.apply(BACKEND, packed, x, routed, {}).shape == (0, 256)
    assert not calls
