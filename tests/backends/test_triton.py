"""The plain Triton kernel in the interpreter, against the emulation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from autosel import dispatch, reference
from autosel.activations import activate
from autosel.backends.triton import Triton, default_params, shared_memory
from autosel.core import ACTIVATIONS, Activation, CanonicalExperts, Device, Problem, Routing
from autosel.errors import UnsupportedError
from autosel.packing import pack_last
from tests.layouts import make

BACKEND = Triton()
H200 = Device("cuda", "H200", (9, 0), 132, 150 << 30, 50 << 20, 232448)


def routing(problem: Problem, tokens: int, seed: int = 0) -> Routing:
    rng = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, problem.num_experts, generator=rng)
    ids = scores.topk(problem.top_k, 1).indices.to(torch.int32)
    return Routing(ids, torch.rand(ids.shape, generator=rng) + 0.1)


def run(experts: CanonicalExperts, x: torch.Tensor, routed: Routing, **params: int) -> torch.Tensor:
    packed = BACKEND.layout(experts.problem, {}).pack(experts)
    out = torch.full_like(x, float("nan"))
    return dispatch.apply(BACKEND, packed, x, routed, params, out=out)


def inputs(problem: Problem, tokens: int) -> torch.Tensor:
    dtype = getattr(torch, problem.act_dtype)
    return torch.randn(tokens, problem.hidden_size, generator=torch.Generator().manual_seed(9)).to(
        dtype
    )


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


#: The interpreter cuts float32 to bfloat16 where a GPU rounds, hence most cases are in float16.
LIMITS = {"bfloat16": 2.5e-2, "float16": 2e-3, "float32": 1e-5}
LIMIT = LIMITS["float16"]


def half(*sizes: int, **kwargs: Any) -> Problem:
    return make.problem(*sizes, act_dtype="float16", scale_dtype="float16", **kwargs)


CASES = {
    "plain": half(64, 64),
    "asymmetric": half(64, 64, symmetric=False, bias=True),
    "channel": half(64, 96, group=-1, symmetric=False),
    "8 bit": half(64, 64, bits=8),
    "8 bit asymmetric": half(64, 64, bits=8, symmetric=False),
    "bf16": make.problem(64, 64),
    "fp16 activations": make.problem(64, 64, act_dtype="float16"),
    "fp32": make.problem(64, 64, act_dtype="float32", scale_dtype="float32"),
    "fp16 scales": make.problem(64, 64, scale_dtype="float16"),
    "act-order": half(96, 64, act_order="w13+w2", symmetric=False),
    "odd sizes": half(100, 36, symmetric=False),
    "I = 8": half(64, 8),
    "I < g": half(256, 64, group=128),
    "on input": half(64, 64, top_k=1, on_input=True, bias=True),
    "non-gated": half(64, 64, activation="relu2_no_mul"),
    "many experts": half(64, 32, experts=60, top_k=4),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_against_the_emulation(case: str) -> None:
    problem = CASES[case]
    experts = make.experts(problem)
    x, routed = inputs(problem, 5), routing(problem, 5)
    expected = reference.moe(x, experts, routed)
    assert error(run(experts, x, routed), expected) < LIMITS[problem.act_dtype]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_run_in_halves(name: str) -> None:
    extra = {"swigluoai_uninterleave": {"limit": 2.0, "alpha": 1.5, "beta": 0.5},
             "situ": {"beta": 1.5, "linear_beta": 2.0}}.get(name, {})  # fmt: skip
    problem = half(64, 32, activation=Activation(name, **extra))
    experts = make.experts(problem)
    x, routed = inputs(problem, 3) * 4, routing(problem, 3)
    assert error(run(experts, x, routed), reference.moe(x, experts, routed)) < LIMIT


@pytest.mark.parametrize(
    "params",
    [
        {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64},
        {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 8},
        {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 32, "num_warps": 8},
    ],
)
def test_block_sizes_give_the_same(params: dict[str, int]) -> None:
    problem = half(128, 128, group=32, symmetric=False)
    experts = make.experts(problem)
    x, routed = inputs(problem, 37), routing(problem, 37)
    assert error(run(experts, x, routed, **params), reference.moe(x, experts, routed)) < LIMIT


def test_elsewhere_and_cold_experts() -> None:
    """Slots served elsewhere add nothing, whatever stands in memory."""
    problem = half(64, 64, experts=8, local=4, top_k=2)
    experts = make.experts(problem)
    x = inputs(problem, 6)
    ids = torch.tensor([[0, 5], [6, 7], [3, 3], [1, 9], [-5, 2**31 - 1], [2, 4]], dtype=torch.int32)
    routed = Routing(ids, torch.ones(ids.shape))
    expert_map = torch.tensor([0, 1, 2, 3, -1, -1, -1, -1], dtype=torch.int32)
    packed = BACKEND.layout(problem, {}).pack(experts)
    out = torch.full_like(x, float("nan"))
    dispatch.apply(BACKEND, packed, x, routed, {}, expert_map=expert_map, out=out)
    expected = reference.moe(x, experts, routed, expert_map=expert_map)
    assert error(out, expected) < LIMIT
    assert not out[1].any()
    assert not out[4].any()


def test_hot_expert_is_repeatable() -> None:
    problem = half(64, 64, experts=16, top_k=1)
    experts = make.experts(problem)
    x = inputs(problem, 40)
    routed = Routing(torch.full((40, 1), 5, dtype=torch.int32), torch.ones(40, 1))
    first = run(experts, x, routed)
    assert error(first, reference.moe(x, experts, routed)) < LIMIT
    assert torch.equal(first, run(experts, x, routed))


def tiny(gate: float, up: float, down: float, **kwargs: object) -> CanonicalExperts:
    """One input, one column: code 9 is 1 step of its scale."""
    problem = make.problem(1, 1, group=-1, experts=1, top_k=1, act_dtype="float32",
                           scale_dtype="float32", **kwargs)  # fmt: skip
    experts = make.experts(problem)
    codes = pack_last(torch.full((1, 2, 1), 9, dtype=torch.uint8), 4)
    w13 = replace(experts.w13, codes=codes, scales=torch.tensor([[[gate], [up]]]))
    w2 = replace(experts.w2, codes=codes[:, :1], scales=torch.tensor([[[down]]]))
    return replace(experts, w13=w13, w2=w2)


def test_gate_stands_before_up() -> None:
    routed = Routing(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1))
    out = run(tiny(2.0, -1.0, 1.0), torch.ones(1, 1), routed)
    assert out.item() == pytest.approx(-1.7616, abs=1e-4)


@pytest.mark.parametrize(("on_input", "expected"), [(False, 2.6424), (True, 1.0966)])
def test_router_weight_once(on_input: bool, expected: float) -> None:
    routed = Routing(torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 1), 0.5))
    out = run(tiny(2.0, 3.0, 1.0, on_input=on_input), torch.ones(1, 1), routed)
    assert out.item() == pytest.approx(expected, abs=1e-4)


def test_zero_tokens_launch_nothing() -> None:
    problem = CASES["plain"]
    packed = BACKEND.layout(problem, {}).pack(make.experts(problem))
    empty = torch.empty(0, 64, dtype=torch.float16)
    routed = Routing(torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2))
    assert dispatch.apply(BACKEND, packed, empty, routed, {}).shape == (0, 64)


def test_activation_kernel_equals_the_table() -> None:
    from autosel.backends._steps import activation_constants
    from autosel.kernels.moe_wna16_plain import activation_kernel

    for name in ACTIVATIONS:
        extra = {"swigluoai_uninterleave": {"limit": 2.0}, "situ": {"beta": 1.5}}.get(name, {})
        activation = Activation(name, **extra)
        width = 100
        h = torch.linspace(-12, 12, 3 * width * (2 if activation.gated else 1)).reshape(3, -1)
        h = h[:, torch.randperm(h.shape[1], generator=torch.Generator().manual_seed(0))]
        out = torch.full((3, width), float("nan"))
        activation_kernel[(3, 1)](
            h.contiguous(), out, N=width, GATED=activation.gated, BLOCK=128,
            **activation_constants(activation),
        )  # fmt: skip
        torch.testing.assert_close(out, activate(h, activation), rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------ space and rules
@pytest.mark.parametrize(
    ("hidden", "inner", "legal"),
    [(1344, 1344, {32, 64}), (256, 256, {32, 64, 128, 256}), (160, 96, {32}), (100, 36, {32})],
)
def test_blocks_divide_the_inputs(hidden: int, inner: int, legal: set[int]) -> None:
    problem = make.problem(hidden, inner)
    space = BACKEND.space(problem, 64, H200)
    points = list(space)
    assert points[0] == dict(space.default)
    assert {p["BLOCK_SIZE_K"] for p in points} == legal
    for block in {32, 64, 128, 256} - legal:
        reason = space.constraint({**space.default, "BLOCK_SIZE_K": block})
        assert reason is not None
        assert reason.found == str(block)


def test_shared_memory_is_asked_before_launch() -> None:
    problem = make.problem(4096, 4096, group=128)
    params = {**default_params(problem, 64), "BLOCK_SIZE_M": 128, "BLOCK_SIZE_K": 256}
    params |= {"BLOCK_SIZE_N": 128, "num_stages": 2}
    small = replace(H200, shared_memory_bytes=101376)
    reason = BACKEND.space(problem, 64, small).constraint(params)
    assert reason is not None
    assert reason.found == f"{shared_memory(params, problem)} bytes"
    assert "101376" in reason.required
    assert BACKEND.space(problem, 64, H200).constraint(params) is None


@pytest.mark.parametrize("value", [1e-8, 70000.0])
def test_scales_beyond_float16_are_refused(value: float) -> None:
    problem = make.problem(64, 64, act_dtype="float16")
    experts = make.experts(problem)
    experts.w2.scales[1, 7, 1] = value
    with pytest.raises(UnsupportedError, match=r"w2\.scales of expert 1.*float16"):
        BACKEND.layout(problem, {}).pack(experts)
    same = make.problem(64, 64)
    kept = replace(experts, problem=same)
    make.assert_same(
        BACKEND.layout(same, {}).unpack(BACKEND.layout(same, {}).pack(kept)), kept
    )  # bfloat16 activations hold it


def test_supports() -> None:
    problem = CASES["asymmetric"]
    assert BACKEND.supports(problem, H200)
    assert BACKEND.supports(problem, Device("xpu", "Arc"))
    here = BACKEND.supports(problem, Device("cpu", "EPYC"))
    assert str(here) == "device: found cpu, required one of cuda, rocm, xpu"
    old = BACKEND.supports(problem, replace(H200, capability=(7, 0)))
    assert str(old) == "compute capability: found 7.0, required 8.0 or newer"
    unknown = BACKEND.supports(problem, replace(H200, capability=None))
    assert "found not reported" in str(unknown)
    odd = make.problem(activation=Activation("gelu", limit=7.0))
    assert "activation gelu" in str(BACKEND.supports(odd, H200))
