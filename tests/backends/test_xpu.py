"""XPU's adapter against a stand-in for the package that behaves like its class."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autosel import dispatch, reference
from autosel.activations import activate
from autosel.backends import xpu
from autosel.backends.xpu import Xpu
from autosel.core import Activation, Device, Problem, Routing
from autosel.errors import UnsupportedError
from tests.backends.adapters import LIMITS, relative_error, run_one_zero_token, stand_in
from tests.layouts import make

BACKEND = Xpu()
ARC = Device("xpu", "Arc B580")


class FakeXpuFusedMoe:
    """Recognises int4 by uint8, converts unmarked weights in place, reads int8 afterwards."""

    made: list[FakeXpuFusedMoe] = []  # noqa: RUF012

    def __init__(
        self, w13, w13_scales, w13_bias, w2, w2_scales, w2_bias, n_experts_per_token, activation,
        num_experts, ep_rank=0, ep_size=1, expert_map=None, gemm1_clamp_limit=None,
        activation_situ_beta=None, activation_situ_linear_beta=None,
    ):  # fmt: skip
        assert w13.is_contiguous()
        assert w2.is_contiguous()
        assert w13.dtype == w2.dtype == torch.uint8, "not recognised as int4"
        assert hasattr(w13, "xpu_fused_moe"), "would be converted in place"
        self.w13, self.w2, self.expert_map = w13, w2, expert_map
        self.scales, self.biases = (w13_scales, w2_scales), (w13_bias, w2_bias)
        self.activation = Activation(activation, limit=gemm1_clamp_limit)
        self.num_experts, self.top_k = num_experts, n_experts_per_token
        assert expert_map.shape[0] == num_experts + 1
        FakeXpuFusedMoe.made.append(self)

    def gemm(self, index: int, e: int, rows: torch.Tensor) -> torch.Tensor:
        packed = (self.w13, self.w2)[index][e]
        assert packed.dtype == torch.int8
        pairs = torch.stack((packed & 0xF, packed >> 4 & 0xF), -1).flatten(-2).int()
        values = torch.where(pairs >= 8, pairs - 16, pairs).float()  # two's complement
        scales = self.scales[index][e]
        assert scales.dtype == rows.dtype
        group = values.shape[1] // scales.shape[1]
        out = rows.float() @ (values * scales.float().repeat_interleave(group, 1)).T
        bias = self.biases[index]
        return (out if bias is None else out + bias[e].float()).to(rows.dtype)

    def apply(self, output, hidden_states, topk_weights, topk_ids, expert_map=None, a1q_scale=None):
        assert expert_map is not None
        assert topk_ids.dtype == torch.int32
        assert int(topk_ids.min()) >= 0
        total = torch.zeros(output.shape)
        for t, row in enumerate(topk_ids.tolist()):
            for j, i in enumerate(row):
                e = int(expert_map[i])
                if e >= 0:
                    a = activate(self.gemm(0, e, hidden_states[t : t + 1]), self.activation)
                    total[t] += topk_weights[t, j] * self.gemm(1, e, a)[0].float()
        output.copy_(total)


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = {"XpuFusedMoe": FakeXpuFusedMoe}
    stand_in(monkeypatch, "vllm_xpu_kernels", {"vllm_xpu_kernels.fused_moe_interface": module})
    xpu.factory.cache_clear()
    FakeXpuFusedMoe.made.clear()
    yield
    xpu.factory.cache_clear()


CASES: dict[str, Problem] = {
    "plain": make.problem(64, 96),
    "fp16": make.problem(64, 96, act_dtype="float16", scale_dtype="float16"),
    "fp16 scales": make.problem(64, 96, scale_dtype="float16"),
    "bias": make.problem(64, 96, bias=True),
    "clamp": make.problem(64, 96, activation=Activation("silu", limit=0.5)),
    "non-gated": make.problem(64, 96, activation="relu2_no_mul"),
    "gelu": make.problem(64, 96, activation="gelu_tanh"),
}


@pytest.mark.parametrize("case", CASES)
def test_against_the_emulation(case: str) -> None:
    problem = CASES[case]
    assert str(BACKEND.supports(problem, ARC)) == "supported"
    experts = make.experts(problem)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
    x = x.to(getattr(torch, problem.act_dtype))
    ids = torch.tensor([[0, 1], [1, -1], [-1, -1], [1, 0]], dtype=torch.int32)
    routed = Routing(ids, torch.full(ids.shape, 0.5))
    packed = BACKEND.layout(problem, {}).pack(experts)
    before = {name: tensor.clone() for name, tensor in packed.tensors.items()}
    for _ in range(2):
        out = torch.full_like(x, float("nan"))
        dispatch.apply(BACKEND, packed, x, routed, {}, out=out)
        expected = reference.moe(x, experts, routed)
        assert relative_error(out, expected) < LIMITS["bfloat16"]
        assert not out[2].any()
    assert len(FakeXpuFusedMoe.made) == 1
    for name, tensor in before.items():
        assert torch.equal(packed.tensors[name], tensor)
        assert packed.tensors[name].dtype == tensor.dtype


def test_objects_go_with_their_weights() -> None:
    problem = CASES["plain"]
    packed = BACKEND.layout(problem, {}).pack(make.experts(problem))
    xpu._object(packed)
    count = len(xpu._objects)
    del packed
    FakeXpuFusedMoe.made.clear()
    import gc

    gc.collect()
    assert len(xpu._objects) <= count


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (make.problem(64, 96, symmetric=False), "w13 zero points: found asymmetric"),
        (make.problem(64, 96, bits=8), "w13 bits: found 8"),
        (make.problem(64, 64, group=16), "w13 group_size: found 16"),
        (make.problem(64, 96, group=-1), "w13 group_size: found -1"),
        (make.problem(64, 96, act_order="w2"), "w2 act-order: found g_idx"),
        (make.problem(64, 96, activation="swigluoai"), "activation: found swigluoai"),
        (make.problem(64, 96, top_k=1, on_input=True), "router weight: found on input"),
        (make.problem(64, 80), "w2 inputs: found 80, required a multiple of 32"),
    ],
)
def test_refusals(problem: Problem, expected: str) -> None:
    assert expected in str(BACKEND.supports(problem, ARC))


def test_signature_of_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    class Newer(FakeXpuFusedMoe):
        def __init__(self, w13: Any, mystery: Any) -> None:
            raise AssertionError("must not be called")

    module = sys.modules["vllm_xpu_kernels.fused_moe_interface"]
    monkeypatch.setattr(module, "XpuFusedMoe", Newer)
    xpu.factory.cache_clear()
    with pytest.raises(UnsupportedError, match="mystery unknown, w13_scales, "):
        run_one_zero_token(BACKEND, CASES["plain"])


def test_on_a_cpu_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm_xpu_kernels")
    assert str(BACKEND.supports(CASES["plain"], Device("cpu", "EPYC"))) == (
        "device: found cpu, required xpu; package vllm-xpu-kernels: found not installed, "
        "required pip install vllm-xpu-kernels"
    )
