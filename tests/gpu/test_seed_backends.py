"""The GPU backends on the device itself, against the emulation. Needs a CUDA device.

Run with the libraries of vLLM and the package humming-kernels in place (see
:mod:`autosel.backends._vllm_ops`); a backend that is not there is skipped with its reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from autosel import dispatch, reference, registry
from autosel.core import CanonicalExperts, Device, Routing
from autosel.device import detect
from autosel.interfaces import Backend
from autosel.sources import RandomSource
from autosel.verify import verify_candidate
from autosel.verify_cases import Case, make_cases
from bench.verify_grid import (
    BACKENDS,
    DTYPES,
    FORMATS,
    GROUPS,
    LAYERS,
    FormatCase,
    points,
    problem_of,
    through_format,
)
from tests.layouts import make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

#: Refusals that are right, by backend: a reason that names one of these.
RIGHT_REFUSALS = {
    "marlin": ("asymmetric 8 bit",),
    "batched_marlin": ("asymmetric 8 bit", "router weight"),
    "humming": ("router weight",),
    "batched_humming": ("router weight",),
    "triton": (),
    "emulation": (),
    "marlin_int8": ("asymmetric 8 bit", "found 8, required 4"),
    "moe_wna16": ("group_size: found -1", "whole groups", "expert bias", "act-order"),
}


@cache
def device() -> Device:
    return detect("cuda")


@cache
def judged(
    case: FormatCase, bits: int, group: int, dtype: str, layer: str
) -> tuple[CanonicalExperts, list[Case]]:
    problem = problem_of(case, bits, group, dtype, layer)
    experts = through_format(RandomSource(problem).load(), case).to("cuda")
    return experts, make_cases(experts, token_counts=(1, 3, 17, 64))


def available(name: str) -> Backend:
    backend = registry.get(name)
    support = backend.available(device())
    if not support:
        pytest.skip(str(support))
    return backend


def verify(backend: Backend, experts: CanonicalExperts, cases: list[Case], axes: bool) -> None:
    problem = experts.problem
    support = backend.supports(problem, device())
    if not support:
        for reason in support.reasons:
            right = RIGHT_REFUSALS[backend.name]
            assert any(part in str(reason) for part in right), str(reason)
        return
    for params in points(backend, problem, device(), axes):
        packed = backend.layout(problem, params).pack(experts)
        verdict = verify_candidate(backend, packed, params, cases, experts=experts)
        assert verdict.status == "ok", f"{params}: {verdict.reason}"


def grid() -> Iterator[Any]:
    for case, group, dtype in itertools.product(FORMATS, GROUPS, DTYPES):
        for bits in case.bits:
            yield pytest.param(case, bits, group, dtype, id=f"{case.label}-{bits}-{group}-{dtype}")


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("case", "bits", "group", "dtype"), grid())
def test_formats(name: str, case: FormatCase, bits: int, group: int, dtype: str) -> None:
    verify(available(name), *judged(case, bits, group, dtype, "plain"), axes=False)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("layer", [name for name in LAYERS if name != "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers(name: str, layer: str, dtype: str) -> None:
    verify(available(name), *judged(FORMATS[2], 4, 128, dtype, layer), axes=False)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("index", range(len(FORMATS)))
def test_every_parameter(name: str, index: int) -> None:
    verify(available(name), *judged(FORMATS[index], 4, 128, "bfloat16", "plain"), axes=True)


@pytest.mark.parametrize("name", ["marlin", "batched_marlin", "humming", "triton"])
@pytest.mark.parametrize("which", ["w2", "w13+w2"])
def test_act_order(name: str, which: str) -> None:
    problem = make.problem(512, 256, group=128, act_order=which, experts=8, symmetric=False)
    experts = RandomSource(problem).load("cuda")
    verify(available(name), experts, make_cases(experts, token_counts=(1, 17)), axes=True)


#: Every way of running that claims to be capturable.
CAPTURED: dict[str, tuple[str, dict[str, Any]]] = {
    "marlin": ("marlin", {}),
    "batched_marlin": ("batched_marlin", {}),
    "humming indexed": ("humming", {"kind": "indexed"}),
    "humming grouped": ("humming", {"kind": "grouped_contiguous"}),
    "batched_humming": ("batched_humming", {}),
    "triton": ("triton", {}),
    "emulation": ("emulation", {}),
    "marlin_int8": ("marlin_int8", {}),
    "moe_wna16": ("moe_wna16", {}),
}


@pytest.mark.parametrize("act_order", ["", "w13+w2"])
@pytest.mark.parametrize("case", CAPTURED)
def test_cuda_graph(case: str, act_order: str) -> None:
    """Captured once, replayed on new inputs and a new routing with slots served elsewhere."""
    name, extra = CAPTURED[case]
    backend = available(name)
    problem = make.problem(512, 256, group=128, experts=8, local=4, act_order=act_order)
    experts = RandomSource(problem).load("cuda")
    if act_order and name == "moe_wna16":
        pytest.skip("act-order is refused")
    params = {**backend.space(problem, 8, device()).default, **extra}
    packed = backend.layout(problem, params).pack(experts)
    x = torch.randn(8, 512, device="cuda").to(torch.bfloat16)
    ids = torch.randint(-1, 4, (8, 2), device="cuda", dtype=torch.int32)
    routed = Routing(ids, torch.rand(8, 2, device="cuda"))
    out = torch.empty_like(x)
    backend.run(packed, x, routed, params, out)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.run(packed, x, routed, params, out)
    expert_map = torch.tensor([0, 1, 2, 3, -1, -1, -1, -1], device="cuda")
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        ids.copy_(torch.randint(-1, 4, (8, 2), device="cuda"))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        expected = reference.moe(x, experts, routed, expert_map=expert_map)
        limit = 1.2e-2 if backend.accuracy(params) == "exact" else 4e-2
        assert (out.double() - expected).norm() / expected.norm() < limit


@pytest.mark.parametrize("name", ["marlin", "triton"])
def test_two_streams(name: str) -> None:
    """Locks are separate for each stream: both results are right."""
    backend = available(name)
    problem = make.problem(512, 256, group=128, experts=8)
    experts = RandomSource(problem).load("cuda")
    packed = backend.layout(problem, {}).pack(experts)
    x = torch.randn(16, 512, device="cuda").to(torch.bfloat16)
    ids = torch.rand(16, 8, device="cuda").topk(2, 1).indices.to(torch.int32)
    routed = Routing(ids, torch.rand(16, 2, device="cuda"))
    expected = reference.moe(x, experts, routed)
    streams = [torch.cuda.Stream() for _ in range(2)]
    outs = [[torch.empty_like(x) for _ in range(20)] for _ in streams]
    torch.cuda.synchronize()
    for turn in range(20):
        for stream, results in zip(streams, outs, strict=True):
            with torch.cuda.stream(stream):
                dispatch.apply(backend, packed, x, routed, {}, out=results[turn])
    torch.cuda.synchronize()
    for out in itertools.chain(*outs):
        assert (out.double() - expected).norm() / expected.norm() < 1.2e-2


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [37449, 37450])
def test_beyond_31_bits_of_elements(tokens: int) -> None:
    """8 slots, hidden 7168: 2**31 elements of the second GEMM's output, sampled rows compared."""
    backend = available("triton")
    problem = make.problem(7168, 64, group=32, experts=8, top_k=8)
    problem = replace(problem, num_experts=8, num_local_experts=8)
    experts = RandomSource(problem).load("cuda")
    packed = backend.layout(problem, {}).pack(experts)
    x = torch.randn(tokens, 7168, device="cuda").to(torch.bfloat16)
    ids = torch.arange(8, device="cuda", dtype=torch.int32).repeat(tokens, 1)
    routed = Routing(ids, torch.rand(tokens, 8, device="cuda"))
    out = dispatch.apply(backend, packed, x, routed, {})
    rows = torch.tensor([0, 1, tokens // 2, tokens - 2, tokens - 1], device="cuda")
    part = Routing(ids[rows], routed.topk_weights[rows])
    expected = reference.moe(x[rows], experts, part)
    assert (out[rows].double() - expected).norm() / expected.norm() < 1.2e-2
