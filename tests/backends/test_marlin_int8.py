"""Marlin on int8 activations, against an operator that reads its words as the kernel does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autosel import reference, registry
from autosel.backends import _steps
from autosel.backends.marlin_int8 import MarlinInt8
from autosel.core import Problem
from autosel.errors import UnsupportedError
from autosel.layouts.marlin import MarlinInt8 as Layout
from autosel.verify import verify_candidate
from autosel.verify_cases import make_cases
from tests.backends import stub_ops
from tests.backends.adapters import H200, relative_error, routing, without_vllm
from tests.backends.test_steps import both
from tests.layouts import make, marlin_simulation

BACKEND = MarlinInt8()
CASES = {
    "groups": make.problem(256, 128, group=32),
    "per channel": make.problem(256, 128, group=-1),
    "asymmetric": make.problem(256, 128, group=64, symmetric=False),
    "asymmetric per channel": make.problem(256, 128, group=-1, symmetric=False),
    "one group in w2": make.problem(512, 128, group=128),
    "padded": make.problem(256, 96, symmetric=False, bias=True),
    "act-order": make.problem(256, 128, group=64, act_order="w13+w2"),
    "float16": make.problem(256, 128, act_dtype="float16", scale_dtype="float16"),
    "non-gated": make.problem(256, 128, activation="relu2_no_mul"),
    "expert parallel": make.problem(256, 128, experts=4, local=2),
    "weight on input": make.problem(256, 128, top_k=1, on_input=True),
}


@pytest.fixture(autouse=True)
def _no_real_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch, "_moe_C")


def verdict(problem: Problem, layout: Layout | None = None):
    experts = make.experts(problem)
    cases = make_cases(experts, token_counts=(1, 17))
    packed = (layout or BACKEND.layout(problem, {})).pack(experts)
    with stub_ops.marlin():
        return verify_candidate(BACKEND, packed, {}, cases, experts=experts)


@pytest.mark.parametrize("case", CASES)
def test_right_in_its_class(case: str) -> None:
    found = verdict(CASES[case])
    assert found.status == "ok", found.reason
    assert BACKEND.accuracy({}) == "a8"


def test_a_lost_scale_factor_is_seen() -> None:
    """The integers of grouped scales mean nothing without their unit."""

    class Forgetful(Layout):
        def pack(self, experts):
            packed = super().pack(experts)
            return replace(packed, meta={**packed.meta, "factors": {"w13": 1.0, "w2": 1.0}})

    assert verdict(CASES["groups"], Forgetful()).status in ("wrong", "nonfinite")


@pytest.mark.parametrize("case", ["groups", "per channel", "asymmetric", "one group in w2"])
def test_what_the_kernel_multiplies_with(case: str) -> None:
    """Words, zero points and scales read back by thread and lane: the weights, but for the
    rounding of grouped scales to half a unit.
    """
    problem = CASES[case]
    experts = make.experts(problem)
    packed = BACKEND.layout(problem, {}).pack(experts)
    assert packed.nbytes == BACKEND.layout(problem, {}).nbytes(problem)
    from autosel.canonical import dequantize_expert, expert_codes, expert_zeros

    for name, weight in (("w13", experts.w13), ("w2", experts.w2)):
        factor = packed.meta["factors"][name]
        tensors = {key: stack[1] for key, stack in packed.tensors.items()}
        read = marlin_simulation.read_gemm(tensors, name, 4, 8) * factor
        expected = dequantize_expert(weight, 1, torch.float64)
        groups = weight.scales.shape[2]
        codes, zeros = expert_codes(weight, 1).double(), expert_zeros(weight, 1).double()
        steps = (codes - zeros.repeat_interleave(weight.num_inputs // groups, 1)).abs()
        slack = 0.5001 * factor * steps if groups > 1 else 0.0 * steps
        assert ((read[:, : expected.shape[1]][: len(expected)] - expected).abs() <= slack).all()


def test_arguments() -> None:
    problem = CASES["groups"]
    experts = make.experts(problem)
    packed = BACKEND.layout(problem, {}).pack(experts)
    x = torch.randn(3, problem.hidden_size).to(torch.bfloat16)
    routed = routing(problem, 3)
    out = torch.full_like(x, float("nan"))
    with stub_ops.marlin() as calls:
        BACKEND.run(packed, x, routed, {}, out)
    *_, first, second = calls
    assert first["a"].dtype == second["a"].dtype == torch.int8
    assert (first["moe_block_size"], first["top_k"], second["top_k"]) == (16, 2, 1)
    back = first["a"].float() * first["a_scales"] / packed.meta["factors"]["w13"]
    assert relative_error(back, x.double()) < 1e-2
    assert relative_error(out, reference.moe(x, experts, routed)) < 3e-2


def test_refusals() -> None:
    with stub_ops.marlin():
        eight = BACKEND.supports(make.problem(256, 128, bits=8), H200)
    assert "w13 bits: found 8, required 4" in str(eight)
    with pytest.raises(UnsupportedError, match="bits"):
        Layout().pack(make.experts(make.problem(256, 128, bits=8)))
    packed = Layout().pack(make.experts(CASES["groups"]))
    with pytest.raises(UnsupportedError, match="rounded scales"):
        Layout().unpack(packed)
    with stub_ops.marlin(stub_ops.MARLIN_OLD):
        assert "a_scales" in str(BACKEND.available(H200))
    space = BACKEND.space(CASES["groups"], 1, H200)
    assert space.default["moe_block_size"] == 16
    assert 8 not in space.choices["moe_block_size"]
    assert registry.get("marlin_int8").name == "marlin_int8"


@pytest.mark.parametrize("width", [64, 1100])
def test_rows_to_int8(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    pytest.importorskip("triton")
    x = torch.randn(5, width).half()
    x[3] = 0
    x[4, 0] = 100
    plain, kernel = both(monkeypatch, lambda: torch.cat(_steps.quantize_rows(x, 2.0), 1))
    torch.testing.assert_close(kernel[:, -1], plain[:, -1])
    assert (kernel[:, :-1] - plain[:, :-1]).abs().max() <= 1  # a tie in the last bit
    assert plain[:, :-1].abs().amax(1).tolist() == [127, 127, 127, 0, 127]
    step = plain[:, -1:] / 2  # of the row; the factor of 2 taken out
    assert ((plain[:, :-1] * step - x.float()).abs() <= 0.501 * step).all()


@pytest.mark.parametrize("inputs", [256, 4096])
@pytest.mark.parametrize("one_sign", [False, True])
def test_sums_never_overflow_32_bits(inputs: int, one_sign: bool) -> None:
    """Every input at the end of its range, against the weights' signs: the unit grows until the
    kernel's integer sum fits, and only there.
    """
    problem = make.problem(inputs, 64, group=32, experts=1, top_k=1)
    experts = make.experts(problem)
    if one_sign:
        lowest = torch.zeros_like(experts.w13.codes)  # -8 everywhere
        w13 = replace(experts.w13, codes=lowest, scales=torch.ones_like(experts.w13.scales))
        experts = replace(experts, w13=w13)
    packed = Layout().pack(experts)
    tensors = {name: stack[0] for name, stack in packed.tensors.items()}
    scales = marlin_simulation.read_int8_scales(tensors["w13_scales"])
    worst = 127 * marlin_simulation.read_gemm(tensors, "w13", 4, 8).abs().sum(1).max()
    assert worst < 2**31
    grown = int(scales.max()) < 4096
    assert grown is (inputs == 4096)
    assert not grown or worst > 0.95 * 2**31
