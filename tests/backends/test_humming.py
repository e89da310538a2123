"""Humming's adapter against a stand-in for the package, with the signatures of release 0.1.19."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autosel import reference
from autosel.backends import _humming_choices, _humming_offline, humming
from autosel.backends.batched_humming import BatchedHumming
from autosel.backends.humming import MASKED, Humming
from autosel.core import Device, Problem, QuantWeight
from autosel.errors import UnsupportedError
from autosel.packing import pack_last, unpack_last
from autosel.search import first_points
from tests.backends import adapters, stub_ops
from tests.backends.adapters import H200, check_slots_served_elsewhere, stand_in, without_vllm
from tests.layouts import make, marlin_simulation
from tests.layouts.humming_simulation import read_gemm
from tests.layouts.test_humming_layout import CASES

BACKEND, BATCHED = Humming(), BatchedHumming()
KINDS = ("indexed", "grouped_contiguous")
calls: list[dict[str, Any]] = []


@dataclass(kw_only=True)
class HummingWeightSchema:
    b_dtype: str
    bs_dtype: Any = None
    weight_scale_group_size: int = 0
    has_zero_point: bool = False


@dataclass(kw_only=True)
class HummingInputSchema:
    a_dtype: Any = None


@dataclass
class LayerConfig:
    shape_n: int
    shape_k: int
    pad_shape_n: int
    pad_shape_k: int
    schema: HummingWeightSchema
    experts: int
    has_bias: bool
    dtype: torch.dtype


def prepare_layer_config(
    shape_n, shape_k, weight_schema, input_schema=None, num_experts=None, pad_n_to_multiple=1,
    pad_k_to_multiple=1, has_bias=False, torch_dtype=None, device=None, tensors=None,
):  # fmt: skip
    assert isinstance(input_schema, HummingInputSchema)
    pad_n, pad_k = -shape_n % pad_n_to_multiple, -shape_k % pad_k_to_multiple
    return LayerConfig(shape_n + pad_n, shape_k + pad_k, pad_n, pad_k, weight_schema, num_experts,
                       has_bias, torch_dtype)  # fmt: skip


def get_heuristics_config(
    layer_config, shape_m=None, use_f16_accum=False, use_batch_invariant=False,
    use_m_major_input_scale=False, gemm_type="dense", device=None,
):  # fmt: skip
    assert gemm_type in (*KINDS, MASKED)
    # the two GEMMs of most cases differ in their block, so that both alignments are needed
    first = 16 if layer_config.shape_k % 256 == 0 else 32
    return [[0, 8, {"block_shape": [first, 64, 64]}],
            [8, 1 << 30, {"block_shape": [2 * first, 64, 64]}]]  # fmt: skip


def humming_forward(
    config, inputs, weight, weight_scale=None, zero_point=None, bias=None, weight_scale_2=None,
    outputs=None, input_scale=None, input_scale_2=None, sorted_ids=None, expert_ids=None,
    num_tokens_padded=None, expert_layout=None, locks=None, top_k=1, valid_shape_m=0,
    compute_config=None, tuning_config=None, hadamard_block_size=None, use_pdl=None,
):  # fmt: skip
    compute, ((low, high, chosen),) = json.loads(compute_config), json.loads(tuning_config)
    calls.append({"kind": compute["gemm_type"], "block": chosen["block_shape"][0],
                  "top_k": top_k, "valid_shape_m": valid_shape_m})  # fmt: skip
    assert (low, high) == (0, 1 << 30)
    assert not compute["use_f16_accum"]
    assert not compute["use_batch_invariant"]
    bits = int(config.schema.b_dtype.removeprefix("uint"))
    n, k = config.shape_n, config.shape_k
    assert tuple(weight.shape) == (config.experts, k // 16, n * bits // 2)
    assert weight_scale.dtype == inputs.dtype == outputs.dtype == config.dtype
    assert (zero_point is not None) == config.schema.has_zero_point
    assert (bias is not None) == config.has_bias
    assert inputs.is_contiguous()
    assert outputs.is_contiguous()
    assert inputs.shape[1] == k - config.pad_shape_k
    assert outputs.shape[1] == n - config.pad_shape_n
    assert locks.dtype == torch.int32
    assert not locks.any()

    def rows_of(expert: int, rows: torch.Tensor) -> torch.Tensor:
        group = config.schema.weight_scale_group_size
        if group:
            assert weight_scale.shape[1] == k // group
        w = read_gemm(weight[expert], weight_scale[expert],
                      None if zero_point is None else zero_point[expert], bits, group != 0,
                      config.dtype == torch.bfloat16)  # fmt: skip
        w = w[: outputs.shape[1], : inputs.shape[1]].to(rows.dtype).float()
        result = rows.float() @ w.T
        if bias is not None:
            read = marlin_simulation.read_bias(bias[expert]).float()
            result += read[: outputs.shape[1]]
        return result.to(rows.dtype)

    if compute["gemm_type"] == "indexed":
        assert expert_layout is None
        block, slots = chosen["block_shape"][0], outputs.shape[0]
        for b in range(int(num_tokens_padded) // block):
            ids = sorted_ids[b * block : (b + 1) * block].long()
            ids = ids[ids < slots]
            outputs[ids] = rows_of(int(expert_ids[b]), inputs[ids // top_k])
        return outputs
    assert sorted_ids is None
    if compute["gemm_type"] == MASKED:
        assert expert_layout.dtype == torch.int32
        assert tuple(expert_layout.shape) == (config.experts,)
        assert inputs.shape[0] % config.experts == 0
        length = inputs.shape[0] // config.experts
        for e, count in enumerate(expert_layout.tolist()):
            part = slice(e * length, e * length + count)
            if count:
                outputs[part] = rows_of(e, inputs[part])
        return outputs
    assert expert_layout.dtype == torch.int64
    offsets = expert_layout.tolist()
    assert len(offsets) == config.experts + 1
    for e in range(config.experts):
        part = slice(offsets[e], offsets[e + 1])
        if part.stop > part.start:
            outputs[part] = rows_of(e, inputs[part])
    return outputs


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    stand_in(
        monkeypatch,
        "humming",
        {
            "humming.forward": {"humming_forward": humming_forward},
            "humming.schema": {
                "HummingInputSchema": HummingInputSchema,
                "HummingWeightSchema": HummingWeightSchema,
            },
            "humming.transform": {"prepare_layer_config": prepare_layer_config},
            "humming.tune": {"get_heuristics_config": get_heuristics_config},
        },
    )
    forget()
    without_vllm(monkeypatch)
    calls.clear()
    yield
    forget()


def forget() -> None:
    """What a new process does not know."""
    for cached in (humming.package, humming.gemm_plan, humming.layer_config, humming._choices):
        cached.cache_clear()


def check(problem: Problem, tokens: int = 5, **params: object) -> None:
    adapters.check(BACKEND, problem, tokens, **params)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_against_the_emulation(kind: str, case: str) -> None:
    check(CASES[case], kind=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_with_vllms_alignment(kind: str) -> None:
    with stub_ops.marlin() as operators:
        check(CASES["plain"], kind=kind)
    mine = [call for call in operators if call["num_experts"] == 2]  # the rest are questions
    assert len(mine) == (2 if kind == "indexed" else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_slots_served_elsewhere(kind: str) -> None:
    check_slots_served_elsewhere(BACKEND, kind=kind)
    assert {call["valid_shape_m"] for call in calls} == {5}  # half of 5 x 2 slots are expected here


def test_arguments_of_both_gemms() -> None:
    check(CASES["plain"], 6, kind="indexed")
    first, second = calls
    # 12 routed rows: the second interval; K of 256 and 128
    assert first == {"kind": "indexed", "block": 32, "top_k": 2, "valid_shape_m": 12}
    assert second == {"kind": "indexed", "block": 64, "top_k": 1, "valid_shape_m": 12}


@pytest.mark.parametrize(("rows", "block"), [(3, 16), (12, 32), (48, 32)])
def test_rows_pick_the_interval_whatever_the_call_has(rows: int, block: int) -> None:
    for num_tokens in (6, 1):
        calls.clear()
        check(CASES["plain"], num_tokens, kind="indexed", rows=rows)
        assert calls[0]["block"] == block
        assert calls[0]["valid_shape_m"] == 2 * num_tokens


def test_configurations_are_computed_once_for_all_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """See test_humming_choices.py; here: it is what the backend asks, and both GEMMs' lists."""
    computed: list[tuple[int, str]] = []

    def counts(layer_config: Any, gemm_type: str, **options: Any) -> Any:
        computed.append((layer_config.shape_k, gemm_type))
        return get_heuristics_config(layer_config, gemm_type=gemm_type, **options)

    monkeypatch.setattr(_humming_choices, "_sources", lambda: "0.1.19")
    monkeypatch.setenv("AUTOSEL_CACHE", str(tmp_path))
    monkeypatch.setattr(LayerConfig, "to_str", lambda layer: repr(layer), raising=False)
    monkeypatch.setattr(sys.modules["humming.tune"], "get_heuristics_config", counts)
    record = _humming_offline.record(H200)
    device = SimpleNamespace(DeviceInfo=lambda: record)
    monkeypatch.setitem(sys.modules, "humming.device", device)
    seen = []
    for _ in range(2):
        forget()
        calls.clear()
        check(CASES["plain"], 6, kind="indexed")
        adapters.check(BATCHED, CASES["plain"])
        seen.append([dict(call) for call in calls])
    assert seen[0] == seen[1]
    assert computed == [(k, kind) for kind in ("indexed", MASKED) for k in (256, 128)]


def test_while_one_gemms_list_is_computed_elsewhere_the_others_is_computed_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, ...]] = []

    def notes(heuristics: Any, own: Any, meanwhile: Any) -> Any:
        asked.append(tuple((one.layer.shape_k, one.kind) for one in (own, *meanwhile)))
        return heuristics(own.layer, gemm_type=own.kind)

    monkeypatch.setattr(_humming_choices, "choices", notes)
    check(CASES["plain"], 6, kind="indexed")
    assert asked == [
        ((256, "indexed"), (128, "indexed")),
        ((128, "indexed"), (256, "indexed")),
    ]


def test_space() -> None:
    space = BACKEND.space(CASES["plain"], 6, H200)
    points = list(space)
    assert points[0] == {"kind": "indexed", "rows": 12}
    assert {p["rows"] for p in points} == {12, 3, 6, 24, 48}
    assert BACKEND.space(CASES["plain"], 1, H200).choices["rows"] == (2, 1, 4, 8)
    assert BACKEND.compiled_counts(CASES["plain"], points[0], (6, 1, 64), H200) == (6,)
    assert BACKEND.compiled_counts(CASES["plain"], {}, (6, 1, 64), H200) == (6, 1, 64)
    assert {p["kind"] for p in points} == set(KINDS)
    first = first_points(space, 6)
    assert first[: len(KINDS)] == [{"kind": kind, "rows": 12} for kind in KINDS]
    with pytest.raises(UnsupportedError, match="kind: found masked"):
        check(CASES["plain"], kind="masked")


def test_rows_of_another_call_are_taken_over_in_proportion() -> None:
    """Those of 64 tokens say what configuration 64 tokens get: nothing to start 4,096 from."""
    wide = replace(CASES["plain"], top_k=1)
    for problem in (CASES["plain"], wide):
        there = BACKEND.space(problem, 64, H200)
        here = BACKEND.space(CASES["plain"], 4096, H200)
        for kind in KINDS:
            twice = {"kind": kind, "rows": 2 * int(str(there.default["rows"]))}
            assert here.carried(twice, there) == {"kind": kind, "rows": 4 * 4096}


def test_a_failure_renews_the_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(config: Any, locks: torch.Tensor, **kwargs: Any) -> None:
        locks.fill_(3)
        raise RuntimeError("launch failed")

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["humming.forward"], "humming_forward", fails)
        humming.package.cache_clear()
        with pytest.raises(RuntimeError, match="launch failed"):
            check(CASES["plain"])
    humming.package.cache_clear()
    check(CASES["plain"])


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        *((problem, "supported") for problem in CASES.values()),
        (make.problem(192, 96, group=48), "w13 group_size: found 48"),
        (make.problem(128, 100), "intermediate_size: found 100, required a multiple of 8"),
        (make.problem(top_k=1, on_input=True), "router weight: found on input"),
        (make.problem(act_dtype="float32"), "activations' dtype: found float32"),
    ],
)
def test_rules(problem: Problem, expected: str) -> None:
    assert expected in str(BACKEND.supports(problem, H200))


def test_devices() -> None:
    problem = CASES["plain"]
    old = str(BACKEND.supports(problem, replace(H200, capability=(7, 0))))
    assert old.startswith("compute capability: found 7.0, required 7.5 or newer")
    unknown = str(BACKEND.supports(problem, replace(H200, capability=None)))
    assert unknown == "compute capability: found not reported, required 7.5 or newer"


def test_on_a_cpu_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "humming")
    assert str(BACKEND.supports(CASES["plain"], Device("cpu", "EPYC"))) == (
        "device: found cpu, required cuda; package humming-kernels: found not installed, required "
        "pip install 'humming-kernels[cu13]' (or [cu12])"
    )


def test_a_release_without_a_function_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["humming.transform"], "prepare_layer_config")
    humming.package.cache_clear()
    text = str(BACKEND.supports(CASES["plain"], H200))
    assert "humming.transform: prepare_layer_config: found missing" in text


def test_one_packed_copy_with_marlin() -> None:
    """Where the tensors are the same, the layouts compare equal, and Humming runs on them."""
    from autosel.backends.marlin import Marlin

    problem = make.problem(256, 128, group=64)
    assert BACKEND.layout(problem, {}) == Marlin().layout(problem, {})
    for kind in KINDS:
        check(problem, kind=kind)
    other = make.problem(256, 128, group=64, symmetric=False)
    assert BACKEND.layout(other, {}) != Marlin().layout(other, {})


@pytest.mark.parametrize("case", CASES)
def test_batched(case: str) -> None:
    adapters.check(BATCHED, CASES[case])
    assert {call["kind"] for call in calls} == {MASKED}


def test_batched_slots_served_elsewhere() -> None:
    check_slots_served_elsewhere(BATCHED)
    with pytest.raises(UnsupportedError, match="kind"):
        adapters.check(BATCHED, CASES["plain"], kind="indexed")
    assert {point["kind"] for point in BATCHED.space(CASES["plain"], 4, H200)} == {MASKED}


def test_weights_without_the_lowest_code_are_the_same_kernel() -> None:
    """The package's own converter re-encodes such weights, and so times another kernel for them:
    made-up weights, in which every code occurs, would say nothing about them.
    """
    problem = make.problem(256, 128, group=64)
    experts = make.experts(problem)

    def raised(weight: QuantWeight) -> QuantWeight:
        codes = unpack_last(weight.codes, 4, weight.num_inputs).clamp(min=1)
        return replace(weight, codes=pack_last(codes, 4))

    without = replace(experts, w13=raised(experts.w13), w2=raised(experts.w2))
    x = torch.randn(5, 256).to(torch.bfloat16)
    routed = adapters.routing(problem, 5)
    made = []
    for one in (experts, without):
        calls.clear()
        out = torch.full_like(x, float("nan"))
        BACKEND.run(BACKEND.layout(problem, {}).pack(one), x, routed, {}, out)
        made.append([dict(call) for call in calls])
        assert adapters.relative_error(out, reference.moe(x, one, routed)) < 1.2e-2
    assert made[0] == made[1]
    assert humming.layer_config(problem, "w13", "cpu").schema.b_dtype == "uint4"
