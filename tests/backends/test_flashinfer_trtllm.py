"""FlashInfer's adapter against a stand-in with the real signature that decodes the blocks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from autosel.backends import flashinfer_trtllm
from autosel.backends.flashinfer_trtllm import FlashInferTrtllm, pack_routing
from autosel.core import Activation, Device, Problem, Routing
from autosel.errors import UnsupportedError
from tests.backends.adapters import check, run_one_zero_token, stand_in
from tests.layouts import make

BACKEND = FlashInferTrtllm()
B200 = Device("cuda", "B200", (10, 0), 148, 180 << 30, 126 << 20, 232448)
PROBLEM = make.problem(256, 256, experts=4, top_k=2)
calls: list[dict[str, Any]] = []


def trtllm_mxint4_block_scale_routed_moe(
    topk_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm1_alpha: Any,
    gemm1_beta: Any,
    gemm1_clamp_limit: Any,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    gemm1_lora_delta: Any = None,
    output: torch.Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
    workspace_buffer: Any = None,
) -> list[torch.Tensor]:
    """The signature is that of FlashInfer 0.7.4."""
    calls.append({k: v for k, v in locals().items() if not isinstance(v, torch.Tensor)})
    assert output is not None
    assert hidden_states.dtype == torch.bfloat16
    assert topk_ids.dtype == torch.int32
    assert gemm1_weights.dtype == gemm2_weights.dtype == torch.uint8
    assert gemm1_weights_scale.dtype == gemm2_weights_scale.dtype == torch.bfloat16
    out = torch.zeros(output.shape)
    for t in range(topk_ids.shape[0]):
        for j in range(top_k):
            word = int(topk_ids[t, j]) & 0xFFFFFFFF
            e = (word >> 16) - local_expert_offset
            if not 0 <= e < local_num_experts:
                continue
            weight = torch.tensor([word & 0xFFFF], dtype=torch.int32).to(torch.int16)
            weight = weight.view(torch.bfloat16).float()
            h = hidden_states[t].float() @ decode(gemm1_weights[e], gemm1_weights_scale[e]).T
            # tensor-core order undone, rows alternate up, gate
            a = torch.nn.functional.silu(h[1::2]) * h[0::2]
            out[t] += weight * (a @ decode(gemm2_weights[e], gemm2_weights_scale[e]).T)
    output.copy_(out)
    return [output]


def decode(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Weights ``[rows, K]`` in the order before the shuffle, from the formulas of the layout."""
    rows = blocks.shape[1]
    bytes_ = blocks.transpose(0, 1).reshape(rows, -1)
    pairs = torch.stack((bytes_ & 0xF, bytes_ >> 4), -1).flatten(-2).int()
    values = torch.where(pairs >= 8, pairs - 16, pairs).float()
    groups = values.shape[1] // 32
    tiles = scales.reshape(rows // 128, -(-groups // 4), 32, 4, 4).float()
    natural = tiles.permute(0, 3, 2, 1, 4).reshape(rows, -1)[:, :groups]
    stored = values * natural.repeat_interleave(32, 1)
    out = torch.empty_like(stored)
    for r in range(rows):
        out[32 * (r // 32) + 4 * (r % 8) + r % 32 // 8] = stored[r]
    return out


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = {flashinfer_trtllm.FUNCTION: trtllm_mxint4_block_scale_routed_moe}
    stand_in(monkeypatch, "flashinfer", {"flashinfer.fused_moe": module})
    flashinfer_trtllm.function.cache_clear()
    calls.clear()
    yield
    flashinfer_trtllm.function.cache_clear()


@pytest.mark.parametrize("local", [4, 2])
def test_against_the_emulation(local: int) -> None:
    problem = replace(PROBLEM, num_local_experts=local)
    ids = torch.tensor([[0, 1], [1, -1], [3, 2]], dtype=torch.int32)
    routed = Routing(ids, torch.full(ids.shape, 0.5))
    expert_map = torch.arange(4, dtype=torch.int32)
    expert_map[local:] = -1
    check(BACKEND, problem, 3, routed=routed, expert_map=expert_map)


def test_arguments() -> None:
    run_one_zero_token(BACKEND, PROBLEM)
    (call,) = calls
    expected = {
        "num_experts": 4, "top_k": 2, "intermediate_size": 256, "local_expert_offset": 0,
        "local_num_experts": 4, "routed_scaling_factor": None, "gemm1_alpha": None,
        "gemm1_beta": None, "gemm1_clamp_limit": None, "do_finalize": True,
    }  # fmt: skip
    assert {key: call[key] for key in expected} == expected


def test_packed_routing() -> None:
    routed = Routing(
        torch.tensor([[3, 0], [-1, 2]], dtype=torch.int32), torch.tensor([[1.0, -0.5], [9.0, 0.25]])
    )
    words = pack_routing(routed, PROBLEM)
    assert [w & 0xFFFFFFFF for w in words.flatten().tolist()] == [
        0x00033F80, 0x0000BF00, 0x00000000, 0x00023E80,
    ]  # fmt: skip
    share = replace(PROBLEM, num_local_experts=2)
    assert int(pack_routing(routed, share)[1, 0]) == 0x00020000  # an expert behind the local ones


def test_signature_of_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def newer(topk_ids: torch.Tensor, mystery: int) -> None:
        raise AssertionError("must not be called")

    module = sys.modules["flashinfer.fused_moe"]
    monkeypatch.setattr(module, flashinfer_trtllm.FUNCTION, newer)
    flashinfer_trtllm.function.cache_clear()
    with pytest.raises(UnsupportedError, match="mystery unknown, hidden_states, "):
        run_one_zero_token(BACKEND, PROBLEM)


def test_a_release_without_the_function_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["flashinfer.fused_moe"], flashinfer_trtllm.FUNCTION)
    flashinfer_trtllm.function.cache_clear()
    text = str(BACKEND.supports(PROBLEM, B200))
    assert "trtllm_mxint4_block_scale_routed_moe: found missing" in text


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (PROBLEM, "supported"),
        (make.problem(256, 256, experts=4, symmetric=False), "zero points: found asymmetric"),
        (make.problem(256, 256, experts=4, group=64), "w13 group_size: found 64, required 32"),
        (make.problem(256, 256, experts=4, bits=8), "w13 bits: found 8"),
        (make.problem(256, 256, experts=4, act_order="w2"), "w2 act-order"),
        (make.problem(256, 256, experts=4, bias=True), "expert bias"),
        (make.problem(384, 256, experts=4), "hidden_size: found 384"),
        (make.problem(256, 128, experts=4), "intermediate_size: found 128"),
        (make.problem(256, 256, experts=6), "num_experts: found 6, required a multiple of 4"),
        (make.problem(256, 256, experts=4, activation="swigluoai"), "activation: found swigluoai"),
        (
            make.problem(256, 256, experts=4, activation=Activation("silu", limit=7.0)),
            "activation: found siluL7, required silu",
        ),
        (make.problem(256, 256, experts=4, top_k=1, on_input=True), "router weight"),
        (
            make.problem(256, 256, experts=4, act_dtype="float16"),
            "activations' dtype: found float16, required bfloat16",
        ),
    ],
)
def test_rules(problem: Problem, expected: str) -> None:
    assert expected in str(BACKEND.supports(problem, B200))


@pytest.mark.parametrize("capability", [(9, 0), (12, 0), None])
def test_only_data_centre_blackwell(capability: tuple[int, int] | None) -> None:
    text = str(BACKEND.supports(PROBLEM, replace(B200, capability=capability)))
    found = "not reported" if capability is None else f"{capability[0]}.{capability[1]}"
    assert text == f"compute capability: found {found}, required 10.x"


def test_on_a_cpu_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer")
    assert str(BACKEND.supports(PROBLEM, Device("cpu", "EPYC"))) == (
        "device: found cpu, required cuda; package flashinfer-python: found not installed, "
        "required pip install flashinfer-python"
    )
