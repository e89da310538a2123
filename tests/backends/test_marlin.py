"""Marlin's adapter against an operator that reads the packed words as the kernel does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autosel import dispatch, reference
from autosel.align import align_block_size
from autosel.backends import _vllm_align, _vllm_ops, marlin
from autosel.backends.batched_marlin import BatchedMarlin
from autosel.backends.marlin import BLOCK_SIZES, Marlin, default_block_size, scalar_type_id
from autosel.core import ACTIVATIONS, Activation, Device, Problem, Routing
from autosel.errors import UnsupportedError
from tests.backends import stub_ops
from tests.backends.adapters import (
    H200,
    check,
    check_slots_served_elsewhere,
    inputs,
    relative_error,
    routing,
    without_vllm,
)
from tests.layouts import make
from tests.layouts.test_marlin_layout import CASES

BACKENDS = {"marlin": Marlin(), "batched_marlin": BatchedMarlin()}


@pytest.fixture(autouse=True)
def _no_real_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch, "_moe_C")


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_against_the_emulation(name: str, case: str) -> None:
    with stub_ops.marlin():
        check(BACKENDS[name], CASES[case])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_in_halves_and_padded(name: str, activation: str) -> None:
    extra = {"swigluoai_uninterleave": {"limit": 2.0, "alpha": 1.5, "beta": 0.5},
             "situ": {"beta": 1.5, "linear_beta": 2.0}}.get(activation, {})  # fmt: skip
    problem = make.problem(128, 96, activation=Activation(activation, **extra))
    with stub_ops.marlin():
        check(BACKENDS[name], problem)


@pytest.mark.parametrize("schema", ["NEW", "OLD", "ACT_ORDER"])
@pytest.mark.parametrize("align", [True, False])
def test_old_and_new_operators(schema: str, align: bool) -> None:
    with stub_ops.marlin(getattr(stub_ops, f"MARLIN_{schema}"), align) as calls:
        check(BACKENDS["marlin"], CASES["padded"])
    assert any(call.get("op") == "align" for call in calls) == align


def test_arguments_of_both_gemms() -> None:
    """The table of the operator's arguments, for a padded layer with everything."""
    problem = make.problem(256, 96, symmetric=False, bias=True)
    with stub_ops.marlin() as calls:
        check(BACKENDS["marlin"], problem, 6, moe_block_size=16, tile13="64x128", tile2="128x64")
    *_, align, first, second = calls
    assert align == {"op": "align", "num_experts": 2, "block_size": 16}
    common = {"moe_block_size": 16, "b_type_id": 1125899906843648, "use_atomic_add": False,
              "use_fp32_reduce": True, "is_zp_float": False, "blocks_per_sm": -1}  # fmt: skip
    table = {
        "size_m": (6, 12), "size_n": (2 * 128, 256), "size_k": (256, 128), "top_k": (2, 1),
        "mul_topk_weights": (False, True), "thread_k": (64, 128), "thread_n": (128, 64),
    }  # fmt: skip
    for i, call in enumerate((first, second)):
        assert {key: call[key] for key in common} == common
        assert {key: call[key] for key in table} == {key: v[i] for key, v in table.items()}
        assert call["b_zeros_or_none"] is not None
        assert call["b_bias_or_none"] is not None
        assert tuple(call["topk_weights"].shape) == (6, 2)


def test_router_weight_on_input_is_applied_once() -> None:
    problem = make.problem(128, 64, top_k=1, on_input=True)
    with stub_ops.marlin() as calls:
        check(BACKENDS["marlin"], problem)
    assert [c["mul_topk_weights"] for c in calls if "a" in c] == [True, False]


def test_act_order_with_the_router_weight_on_input() -> None:
    with stub_ops.marlin():
        check(BACKENDS["marlin"], make.problem(top_k=1, on_input=True, act_order="w13+w2"))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("experts", [1, 60, 160])
def test_expert_counts(name: str, experts: int) -> None:
    problem = make.problem(128, 64, experts=experts, top_k=1)
    with stub_ops.marlin():
        check(BACKENDS[name], problem, 7)


@pytest.mark.parametrize(("experts", "by_operator"), [(991, True), (992, False)])
def test_the_alignment_operator_has_a_limit(experts: int, by_operator: bool) -> None:
    with stub_ops.marlin() as calls:
        _vllm_align.align(torch.zeros(1, 1, dtype=torch.int32), experts, 8)
    assert bool(calls) is by_operator


@pytest.mark.parametrize(
    ("strays", "num_experts"), [("left out", 5), ("indices", 6), ("counted", 6)]
)
def test_ids_that_are_no_expert(strays: str, num_experts: int) -> None:
    """They are handed only to an operator that was seen to leave them out."""
    ids = torch.tensor([[0, -1], [4, 2], [-1, 5], [2, 2]], dtype=torch.int32)
    with stub_ops.marlin(strays=strays) as calls:
        found = _vllm_align.align(ids, 5, 8)
        assert calls[-1]["num_experts"] == num_experts
        asked = len(calls)
        again = _vllm_align.align(ids.clamp(max=4), 5, 8)
        assert len(calls) == asked + 1  # the question is asked once
    expected = align_block_size(ids.masked_fill(ids > 4, -1), 5, 8)
    used = int(expected.num_padded)
    assert int(found.num_padded) == used
    assert torch.equal(found.sorted_ids[:used], expected.sorted_ids[:used])
    assert torch.equal(found.expert_ids[: used // 8], expected.expert_ids[: used // 8])
    assert int(again.num_padded) == used


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("align", [True, False])
def test_slots_served_elsewhere(name: str, align: bool) -> None:
    with stub_ops.marlin(align=align):
        check_slots_served_elsewhere(BACKENDS[name])


@pytest.mark.parametrize("name", BACKENDS)
def test_all_slots_served_elsewhere(name: str) -> None:
    problem = make.problem(128, 64, experts=8, local=4)
    packed = BACKENDS[name].layout(problem, {}).pack(make.experts(problem))
    x = inputs(problem, 3)
    out = torch.full_like(x, float("nan"))
    routed = Routing(torch.full((3, 2), -1, dtype=torch.int32), torch.ones(3, 2))
    with stub_ops.marlin():
        BACKENDS[name].run(packed, x, routed, {}, out)
    assert not out.any()


def test_planted_fault_is_seen() -> None:
    """The comparison above notices the scale permutation chosen from the wrong width."""
    problem = CASES["I < g"]
    experts = make.experts(problem)
    packed = BACKENDS["marlin"].layout(problem, {}).pack(experts)
    scales = packed.tensors["w13_scales"]
    from autosel.layouts import _marlin_tiles as tiles

    scales.copy_(tiles.permute_single(tiles.permute_grouped(scales)))
    x, routed = inputs(problem, 5), routing(problem, 5)
    with stub_ops.marlin():
        out = dispatch.apply(BACKENDS["marlin"], packed, x, routed, {})
    expected = reference.moe(x, experts, routed)
    assert relative_error(out, expected) > 0.1


def test_a_failure_renews_the_workspace() -> None:
    problem = make.problem(128, 64)
    packed = BACKENDS["marlin"].layout(problem, {}).pack(make.experts(problem))
    x, routed = inputs(problem, 3), routing(problem, 3)
    names = ("_moe_C", stub_ops.MARLIN_NEW)

    def fails_half_way(*args: object) -> torch.Tensor:
        args[8].fill_(7)  # type: ignore[attr-defined]  # the locks stay taken
        raise RuntimeError("illegal memory access")

    with (
        stub_ops.registered(names[0], moe_wna16_marlin_gemm=(names[1], fails_half_way)),
        pytest.raises(RuntimeError, match="illegal memory access"),
    ):
        BACKENDS["marlin"].run(packed, x, routed, {}, torch.empty_like(x))
    with stub_ops.marlin():  # the stand-in refuses a workspace that is not zero
        check(BACKENDS["marlin"], problem)


def test_workspaces_of_streams_and_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    spaces, device = marlin.Workspaces(4), torch.device("cpu")

    def get(stream: int, capturing: bool = False) -> torch.Tensor:
        monkeypatch.setattr(marlin, "_stream", lambda device: stream)
        monkeypatch.setattr(marlin, "_capturing", lambda device: capturing)
        return spaces.get(device)

    # a capture before any call: not kept, its memory belongs to the graph
    assert get(9, capturing=True) is not get(9, capturing=True)
    first = get(1)
    assert get(1) is first
    zeroed_on_stream_1 = spaces._spares[device]
    second = get(2)
    assert second is not first
    assert second is not zeroed_on_stream_1
    # a capture after calls: its own buffer, made before the capture began, and kept
    spare = spaces._spares[device]
    captured = get(3, capturing=True)
    assert captured is spare
    assert get(3, capturing=True) is captured
    assert captured is not first
    assert captured is not second
    # two captures without a call between them: the second one has no spare
    assert get(4, capturing=True) is not captured
    get(1)
    assert get(4, capturing=True) is not captured
    monkeypatch.setattr(marlin, "_stream", lambda device: 1)
    spaces.renew(device)
    assert get(1) is not first
    assert all(not buffer.any() for buffer in spaces._buffers.values())


def test_unknown_arguments_are_refused_before_the_call() -> None:
    schema = stub_ops.MARLIN_NEW.replace("int blocks_per_sm", "int blocks_per_sm, Tensor mystery")
    with stub_ops.marlin(schema) as calls, pytest.raises(UnsupportedError, match="mystery unknown"):
        check(BACKENDS["marlin"], CASES["plain"])
    assert all("a" not in call for call in calls)


def test_an_operator_without_bias() -> None:
    with stub_ops.marlin(stub_ops.MARLIN_NO_BIAS):
        check(BACKENDS["marlin"], CASES["plain"])
        with pytest.raises(UnsupportedError, match="b_bias missing"):
            check(BACKENDS["marlin"], CASES["bias"])


def test_a_tile_that_the_operator_cannot_take_is_refused() -> None:
    with (
        stub_ops.marlin(stub_ops.MARLIN_OLD),
        pytest.raises(UnsupportedError, match="thread_k, thread_n missing"),
    ):
        check(BACKENDS["marlin"], CASES["plain"], tile13="64x128")


@pytest.mark.parametrize(
    ("bits", "bias", "expected"),
    [
        (4, 0, 1125899906843648),
        (8, 0, 1125899906844672),
        (4, 8, 1125899907892224),
        (8, 128, 1125899923621888),
    ],
)
def test_type_ids(bits: int, bias: int, expected: int) -> None:
    assert scalar_type_id(bits, bias) == expected


# ------------------------------------------------------------------------------ space and rules
@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, 8), (100, 8), (116, 16), (256, 32), (512, 48), (8192, 64)]
)
def test_default_block_size(tokens: int, expected: int) -> None:
    problem = make.problem(experts=128, top_k=8)
    assert default_block_size(problem, tokens) == expected
    share = make.problem(experts=128, local=16, top_k=8)
    assert default_block_size(share, tokens) == expected  # the same load for each expert


def test_space_offers_only_tiles_that_fit() -> None:
    problem = make.problem(256, 64)  # w13: 256 -> 128, w2: 64 -> 256
    space = BACKENDS["marlin"].space(problem, 4, H200)
    points = list(space)
    assert points[0] == dict(space.default)
    assert {p["moe_block_size"] for p in points} == set(BLOCK_SIZES)
    for point in points:
        small = point["moe_block_size"] <= 16
        assert point["tile13"] in {"auto", "64x128", "128x64"} | ({"128x128"} if small else set())
        assert point["tile2"] in {"auto", "64x128"} | (set() if small else {"64x256"})
    reason = space.constraint({"moe_block_size": 64, "tile13": "128x128", "tile2": "auto"})
    assert str(reason) == (
        "tile13 with moe_block_size 64: found 128x128, required 64x256, 64x128, 128x64"
    )


def reasons(problem: Problem, device: Device = H200, name: str = "marlin") -> str:
    with stub_ops.marlin():
        return str(BACKENDS[name].supports(problem, device))


@pytest.mark.parametrize("name", BACKENDS)
def test_supported_layers(name: str) -> None:
    for problem in CASES.values():
        assert reasons(problem, name=name) == "supported"
    # one group of all inputs is per channel, whatever its length is called
    assert reasons(make.problem(256, 100, group=256), name=name) == "supported"


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (make.problem(bits=8, symmetric=False), "w13 zero points: found asymmetric 8 bit"),
        (make.problem(group=16), "w13 group_size: found 16, required one of 32, 64, 128"),
        (make.problem(160, 96), "hidden_size: found 160, required a multiple of 128"),
        (make.problem(act_dtype="float32"), "activations' dtype: found float32"),
        (
            make.problem(top_k=1, on_input=True, bias=True),
            "router weight on input: found with expert bias, required without",
        ),
        (
            make.problem(activation=Activation("gelu", limit=7.0)),
            "activation gelu: found geluL7, required constants that it has",
        ),
    ],
)
def test_refusals(problem: Problem, expected: str) -> None:
    assert expected in reasons(problem)


def test_all_reasons_are_given() -> None:
    problem = make.problem(160, 96, bits=8, symmetric=False, group=16)
    text = reasons(problem, replace(H200, capability=(7, 0)))
    for part in ("compute capability", "zero points", "group_size", "hidden_size"):
        assert part in text


def test_capabilities() -> None:
    half = make.problem(act_dtype="float16", scale_dtype="float16")
    assert reasons(half, replace(H200, capability=(7, 5))) == "supported"
    assert "compute capability: found 7.0, required 7.5 or newer" in reasons(
        half, replace(H200, capability=(7, 0))
    )
    assert "below compute capability 8.0: found bfloat16, required float16" in reasons(
        make.problem(), replace(H200, capability=(7, 5))
    )
    assert "compute capability: found not reported, required 7.5 or newer" in reasons(
        half, replace(H200, capability=None)
    )


def test_batched_refuses_the_router_weight_on_input() -> None:
    problem = make.problem(top_k=1, on_input=True)
    assert "router weight: found on input" in reasons(problem, name="batched_marlin")


@pytest.mark.parametrize("name", BACKENDS)
def test_on_a_cpu_it_says_why(name: str) -> None:
    support = BACKENDS[name].supports(make.problem(), Device("cpu", "EPYC"))
    assert str(support) == (
        "device: found cpu, required cuda; "
        "operator _moe_C::moe_wna16_marlin_gemm: found package vllm not installed, required "
        "pip install vllm, or AUTOSEL_VLLM_MOE_LIB=PATH/_moe_C_stable_libtorch.abi3.so"
    )


def test_a_missing_operator_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr(_vllm_ops, "_libraries", lambda n: looked.append(n) or [])
    assert _vllm_ops.find("_moe_C", "moe_wna16_marlin_gemm") is None
    assert _vllm_ops.find("_moe_C", "moe_wna16_marlin_gemm") is None
    assert looked == ["_moe_C"]
    with stub_ops.marlin():  # registered later by somebody else: found all the same
        assert _vllm_ops.find("_moe_C", "moe_wna16_marlin_gemm") is not None


def test_a_library_that_does_not_load_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    path = f"{tmp_path}/moe.so"
    monkeypatch.setenv(_vllm_ops.LIBRARY_VARIABLE, path)
    text = str(BACKENDS["marlin"].available(H200))
    assert f"found {path}: " in text
    assert "\n" not in text
