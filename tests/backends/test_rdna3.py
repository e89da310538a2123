"""RDNA3's adapter against an operator that decodes the shuffled words and adds into its output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autosel.backends.rdna3 import Rdna3
from autosel.core import Device, Problem
from tests.backends import adapters, stub_ops
from tests.backends.adapters import weighted, without_vllm
from tests.layouts import make

BACKEND = Rdna3()
W7900 = Device("rocm", "Radeon PRO W7900", flags=("gfx1100",))
SCHEMA = (
    "(Tensor a, Tensor! c, Tensor b_q_weight, Tensor b_scales, Tensor b_qzeros,"
    " Tensor topk_weights, Tensor sorted_token_ids, Tensor expert_ids,"
    " Tensor num_tokens_post_padded, int top_k, int block_size_m, bool mul_topk_weight,"
    " int output_topk) -> ()"
)
NAMES = [part.split()[-1] for part in SCHEMA[1 : SCHEMA.index(")")].split(",")]
LIMITS = {"bfloat16": 2e-2, "float16": 3e-3}


@pytest.fixture(autouse=True)
def _no_real_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch, "_rocm_C")


def operator(calls: list[dict[str, Any]]) -> Any:
    def op(*args: Any) -> None:
        call = dict(zip(NAMES, args, strict=True))
        calls.append({k: v for k, v in call.items() if not isinstance(v, torch.Tensor)})
        a, c, words, scales = call["a"], call["c"], call["b_q_weight"], call["b_scales"]
        assert not c.any()  # partial sums are added to it
        assert scales.dtype == a.dtype == c.dtype
        assert words.shape[1] * 8 == a.shape[1]
        weights = call["topk_weights"]
        assert weights.dtype == torch.float32
        assert weights.dim() == 1
        assert (weights.numel() > 0) == call["mul_topk_weight"]
        block, top_k, output_topk = call["block_size_m"], call["top_k"], call["output_topk"]
        rows = a.shape[0] * top_k
        for b in range(int(call["num_tokens_post_padded"]) // block):
            e = int(call["expert_ids"][b])
            natural = [0, 4, 1, 5, 2, 6, 3, 7]  # nibble that holds input j of its eight
            codes = torch.stack([words[e] >> (4 * i) & 0xF for i in natural], 1)  # [K/8, 8, N]
            zero = call["b_qzeros"][e].repeat_interleave(8, 1)
            shift = 4 * (torch.arange(zero.shape[1]) % 8)
            zero = (zero >> shift & 0xF) + 1  # [G, N]; the kernel adds one
            groups = a.shape[1] // scales.shape[1]
            w = (codes.flatten(0, 1) - zero.repeat_interleave(groups, 0)).float()
            w = (w * scales[e].float().repeat_interleave(groups, 0)).to(a.dtype).float()
            for slot in call["sorted_token_ids"][b * block : (b + 1) * block].tolist():
                if slot < rows:
                    row = a[slot // top_k].float() @ w
                    if call["mul_topk_weight"]:
                        row *= weights[slot]
                    c[slot // output_topk if output_topk else slot] += row.to(c.dtype)

    return op


def check(problem: Problem, ids: torch.Tensor | None = None, **params: int) -> list[dict[str, Any]]:
    routed = None if ids is None else weighted(ids, torch.Generator().manual_seed(1))
    calls: list[dict[str, Any]] = []
    with stub_ops.registered("_rocm_C", moe_gptq_gemm_rdna3=(SCHEMA, operator(calls))):
        adapters.check(BACKEND, problem, routed=routed, limits=LIMITS, **params)
    return calls


HALF = {"act_dtype": "float16", "scale_dtype": "float16"}
CASES = {
    "fp16": make.problem(64, 96, **HALF),
    "bf16": make.problem(64, 96),
    "group 64": make.problem(128, 64, group=64, **HALF),
    "non-gated": make.problem(64, 96, activation="relu2_no_mul", **HALF),
    "interleaved activation": make.problem(64, 96, activation="swigluoai", **HALF),
    "on input": make.problem(64, 96, top_k=1, on_input=True, **HALF),
}


@pytest.mark.parametrize("case", CASES)
def test_against_the_emulation(case: str) -> None:
    assert str(BACKEND.supports(CASES[case], W7900)).startswith("operator _rocm_C::")
    check(CASES[case])


def test_slots_served_elsewhere() -> None:
    ids = torch.tensor([[0, -1], [-1, -1], [1, 1], [1, 7], [0, 1]], dtype=torch.int32)
    check(CASES["fp16"], ids)


def test_arguments_of_both_gemms() -> None:
    first, second = check(CASES["fp16"], block_size_m=2)
    assert first == {"top_k": 2, "block_size_m": 2, "mul_topk_weight": False, "output_topk": 0}
    assert second == {"top_k": 1, "block_size_m": 2, "mul_topk_weight": True, "output_topk": 2}
    first, second = check(CASES["on input"])
    assert (first["mul_topk_weight"], second["mul_topk_weight"]) == (True, False)
    assert first["block_size_m"] == 4  # 5 tokens


def reasons(problem: Problem, device: Device = W7900) -> str:
    with stub_ops.registered("_rocm_C", moe_gptq_gemm_rdna3=(SCHEMA, operator([]))):
        return str(BACKEND.supports(problem, device))


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (make.problem(64, 96), "supported"),
        (make.problem(64, 96, symmetric=False), "w13 zero points: found asymmetric"),
        (make.problem(64, 96, bits=8), "w13 bits: found 8, required 4"),
        (make.problem(64, 96, bias=True), "expert bias: found present, required none"),
        (make.problem(64, 96, group=-1), "w13 scales: found per channel, required grouped"),
        (make.problem(64, 64, group=16), "w13 group_size: found 16, required a multiple of 32"),
        (make.problem(64, 96, act_order="w2"), "w2 act-order: found g_idx"),
        (make.problem(64, 48), "w2 inputs: found 48, required a multiple of 32"),
        (make.problem(64, 96, act_dtype="float32"), "activations' dtype: found float32"),
    ],
)
def test_refusals(problem: Problem, expected: str) -> None:
    assert expected in reasons(problem)


def test_devices() -> None:
    problem = make.problem(64, 96)
    other = replace(W7900, flags=("gfx942",))
    assert reasons(problem, other) == "architecture: found gfx942, required gfx1100"
    assert str(BACKEND.supports(problem, Device("cpu", "EPYC"))) == (
        "device: found cpu, required rocm; operator _rocm_C::moe_gptq_gemm_rdna3: found package "
        "vllm not installed, required pip install vllm, or "
        "AUTOSEL_VLLM_MOE_LIB=PATH/_rocm_C.abi3.so"
    )
