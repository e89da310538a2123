"""The fallback that always works: where each form is offered, exact weights, grouped matmuls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autosel import registry
from autosel.backends import emulation
from autosel.core import Activation, CanonicalExperts, Device, Problem, QuantScheme, Routing
from autosel.device import detect
from autosel.dispatch import apply
from autosel.errors import UnsupportedError
from autosel.layouts.dense import Dense
from autosel.packing import pack_last
from autosel.sources import RandomSource
from autosel.verify import make_cases, verify_candidate

SCHEME = QuantScheme(4, 32, True)
PROBLEM = Problem(4, 4, 2, 64, 32, SCHEME, SCHEME)
AVX512 = ("avx2", "avx512bw", "avx512dq", "avx512f", "avx512vl")


def kinds(problem: Problem, device: Device):
    points = list(registry.get("emulation").space(problem, 16, device))
    return [(p["weight_dtype"], p["matmul"]) for p in points]


def test_points_follow_the_processor():
    old = Device(kind="cpu", name="old", flags=("sse2",))
    assert kinds(PROBLEM, old) == [("bfloat16", "linear"), ("float32", "linear")]
    assert kinds(PROBLEM, replace(old, flags=AVX512)) == [
        ("bfloat16", "linear"),
        ("bfloat16", "onednn"),
        ("float32", "linear"),
        ("float32", "onednn"),
    ]
    half = replace(PROBLEM, act_dtype="float16")
    assert ("float16", "onednn") not in kinds(half, replace(old, flags=AVX512))
    assert ("float16", "onednn") in kinds(half, replace(old, flags=(*AVX512, "avx512_fp16")))
    assert kinds(replace(PROBLEM, act_dtype="float32"), old) == [("float32", "linear")]


@pytest.mark.parametrize(
    ("kind", "capability", "grouped"),
    [
        ("cuda", (9, 0), True),
        ("cuda", (7, 5), False),
        ("cuda", None, False),
        ("rocm", None, False),
        ("xpu", None, False),
    ],
)
def test_points_follow_the_accelerator(kind, capability, grouped):
    device = Device(kind=kind, name="pretended", capability=capability)
    assert registry.get("emulation").supports(PROBLEM, device)
    found = kinds(PROBLEM, device)
    assert (("bfloat16", "grouped") in found) == grouped
    assert found[0] == ("bfloat16", "grouped" if grouped else "linear")
    assert ("bfloat16", "linear") in found
    odd = replace(PROBLEM, hidden_size=68)
    assert ("bfloat16", "grouped") not in kinds(odd, device)
    half = replace(PROBLEM, act_dtype="float16")
    assert kinds(half, device)[0] == ("float16", "linear")


def test_weights_of_a_hand_made_word():
    """Zero points 0 and 5, stored code 3, scale 0.25: 0.75 and -0.5, nothing wraps to 15."""
    scheme = QuantScheme(4, -1, False)
    problem = Problem(1, 1, 1, 8, 4, scheme, scheme)
    experts = RandomSource(problem).load()
    weight = replace(
        experts.w13,
        codes=pack_last(torch.full((1, 8, 8), 3, dtype=torch.uint8), 4),
        scales=torch.full((1, 8, 1), 0.25, dtype=torch.bfloat16),
        zero_points=torch.tensor([0, 5, 5, 5, 5, 5, 5, 5], dtype=torch.uint8).view(1, 8, 1),
    )
    dense = Dense("bfloat16").pack(replace(experts, w13=weight)).tensors["w13"][0]
    assert dense[:, 0].tolist() == [0.75] + [-0.5] * 7


@pytest.mark.parametrize(("act", "expected"), [(None, 2.6424), (0.5, 1.0966)])
def test_router_weight_on_output_and_input(act, expected):
    """Input 1, gate 2, up 3, down 1, router weight 0.5: on the output, then on the input."""
    scheme = QuantScheme(4, -1, True)
    problem = Problem(1, 1, 1, 1, 1, scheme, scheme, router_weight_on_input=act is not None)
    experts = RandomSource(problem).load()
    one = torch.ones_like(experts.w13.scales)
    w13 = replace(experts.w13, codes=torch.tensor([[[10], [11]]], dtype=torch.int32), scales=one)
    w2 = replace(
        experts.w2, codes=torch.tensor([[[9]]], dtype=torch.int32), scales=one[:, :1].clone()
    )
    made = CanonicalExperts(problem, w13, w2)
    backend = registry.get("emulation")
    routing = Routing(torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 1), 0.5))
    x = torch.ones(1, 1, dtype=torch.bfloat16)
    for params in backend.space(problem, 1, detect("cpu")):
        out = apply(backend, backend.layout(problem, params).pack(made), x, routing, params)
        assert out.item() == pytest.approx(expected, rel=1e-2)


def overflowing(act_dtype: str):
    """Gate and up outputs of 300 and a down weight of 0.5: 90000 in between, 450 at the end."""
    scheme = QuantScheme(4, -1, True)
    problem = Problem(1, 1, 1, 1, 1, scheme, scheme, act_dtype=act_dtype)
    experts = RandomSource(problem).load()
    w13 = replace(
        experts.w13,
        codes=torch.tensor([[[9], [9]]], dtype=torch.int32),
        scales=torch.full((1, 2, 1), 300.0, dtype=torch.bfloat16),
    )
    w2 = replace(
        experts.w2,
        codes=torch.tensor([[[9]]], dtype=torch.int32),
        scales=torch.full((1, 1, 1), 0.5, dtype=torch.bfloat16),
    )
    routing = Routing(torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 1), 0.01))
    return problem, CanonicalExperts(problem, w13, w2), routing


@pytest.mark.parametrize("act_dtype", ["bfloat16", "float16"])
def test_large_intermediates(act_dtype):
    """bfloat16 passes; float16 overflows with float16 weights and passes with float32 ones."""
    problem, experts, routing = overflowing(act_dtype)
    backend = registry.get("emulation")
    x = torch.ones(1, 1, dtype=getattr(torch, act_dtype))
    for params in backend.space(problem, 1, detect("cpu")):
        packed = backend.layout(problem, params).pack(experts)
        found = apply(backend, packed, x, routing, params).item()
        if params["weight_dtype"] == "float16":
            assert not torch.isfinite(torch.tensor(found))
        else:
            assert found == pytest.approx(450, rel=1e-2)


@pytest.mark.parametrize("value", [1e-8, 70000.0, 30000.0])
def test_a_weight_outside_float16_is_refused_by_name(value):
    half = replace(PROBLEM, act_dtype="float16")
    experts = RandomSource(half).load()
    scales = experts.w2.scales.clone()
    scales[2, 5, 0] = value
    changed = replace(experts, w2=replace(experts.w2, scales=scales))
    with pytest.raises(UnsupportedError, match="w2 of expert 2"):
        Dense("float16").pack(changed)
    Dense("float32").pack(changed)


GROUPED = [
    PROBLEM,
    replace(PROBLEM, has_bias=True),
    replace(PROBLEM, activation=Activation("relu2_no_mul")),
    replace(PROBLEM, top_k=1, router_weight_on_input=True),
    replace(PROBLEM, num_experts=8, top_k=4),
    replace(PROBLEM, num_experts=60, num_local_experts=60, top_k=4),
]


def _grouped_works(device: str) -> bool:
    try:
        x = torch.ones(8, 16, dtype=torch.bfloat16, device=device)
        ends = torch.tensor([8], dtype=torch.int32, device=device)
        torch._grouped_mm(x, x.new_ones(1, 16, 16), offs=ends)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


@pytest.mark.skipif(not _grouped_works("cpu"), reason="this torch has no grouped GEMM on the CPU")
@pytest.mark.parametrize("problem", GROUPED, ids=lambda p: p.key)
def test_the_grouped_form(problem):
    """The code that CUDA runs, on the CPU's grouped GEMM, which leaves foreign rows unwritten."""
    _verify_grouped(problem, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("problem", GROUPED, ids=lambda p: p.key)
def test_every_form_on_the_gpu(problem):
    device = detect("cuda")
    backend = registry.get("emulation")
    experts = RandomSource(problem).load("cuda")
    cases = make_cases(experts)
    for params in backend.space(problem, 16, device):
        packed = backend.layout(problem, params).pack(experts)
        verdict = verify_candidate(backend, packed, params, cases)
        assert verdict, f"{params}: {verdict.reason}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_grouped_form_can_be_captured():
    backend = registry.get("emulation")
    params = {"weight_dtype": "bfloat16", "matmul": "grouped"}
    experts = RandomSource(PROBLEM).load("cuda")
    packed = backend.layout(PROBLEM, params).pack(experts)
    case = make_cases(experts)[0]
    apply(backend, packed, case.x, case.routing, params)
    out, graph = torch.full_like(case.x, float("nan")), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        apply(backend, packed, case.x, case.routing, params, out=out)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, apply(backend, packed, case.x, case.routing, params))


def _verify_grouped(problem: Problem, device: str) -> None:
    backend = emulation.Emulation()
    params = {"weight_dtype": "bfloat16", "matmul": "grouped"}
    experts = RandomSource(problem).load(device)
    packed = backend.layout(problem, params).pack(experts)
    verdict = verify_candidate(backend, packed, params, make_cases(experts))
    assert verdict, verdict.reason
