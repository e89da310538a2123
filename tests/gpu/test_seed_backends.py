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
from autosel.backends import _vllm_ops
from autosel.core import CanonicalExperts, Device, Routing
from autosel.device import detect
from autosel.interfaces import Backend
from autosel.sources import RandomSource
from autosel.verify import verify_candidate
from autosel.verify_cases import Case, make_cases
from bench.verify_backends import (
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
    "triton": (),
    "emulation": (),
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


@pytest.mark.parametrize("name", BACKENDS)
def test_packing_on_the_device_equals_the_cpus(name: str) -> None:
    """And the way back is exact there too."""
    backend = registry.get(name)
    problem = make.problem(512, 256, symmetric=False, experts=4)
    experts = RandomSource(problem).load()
    layout = backend.layout(problem, dict(backend.space(problem, 16, device()).default))
    here, there = layout.pack(experts), layout.pack(experts.to("cuda"))
    assert here.tensors.keys() == there.tensors.keys()
    for key, tensor in here.tensors.items():
        assert torch.equal(there.tensors[key].cpu(), tensor), key
    if layout.invertible:
        make.assert_same(layout.unpack(there).to("cpu"), experts)


def test_humming_packs_as_the_package_does() -> None:
    """Our tensors against the package's own transformation, bit for bit, with its repack kernel."""
    backend = available("humming")
    from humming.schema import HummingInputSchema, HummingWeightSchema
    from humming.transform import prepare_and_transform_humming_tensors

    for bits, group, symmetric, dtype in itertools.product(
        (4, 8), (32, 128, -1), (True, False), (torch.bfloat16, torch.float16)
    ):
        name = str(dtype).removeprefix("torch.")
        problem = make.problem(
            512, 192, bits=bits, group=group, group2=-1 if group == -1 else 32,
            symmetric=symmetric, act_dtype=name, scale_dtype=name, bias=True, experts=4,
        )  # fmt: skip
        experts = make.experts(problem).to("cuda")
        packed = backend.layout(problem, {}).pack(experts)
        for gemm, weight in (("w13", experts.w13), ("w2", experts.w2)):
            scheme = weight.scheme
            tensors = {
                "weight": weight.codes,
                "weight_scale": weight.scales,
                "bias": weight.bias,
            }
            if weight.zero_points is not None:
                from autosel.packing import pack_last

                words = pack_last(weight.zero_points.transpose(1, 2), bits)  # [E, G, N/pf]
                tensors["zero_point"] = words.transpose(1, 2).contiguous()
            _, theirs = prepare_and_transform_humming_tensors(
                tensors=tensors,
                shape_n=weight.num_outputs,
                shape_k=weight.num_inputs,
                weight_schema=HummingWeightSchema(
                    b_dtype=f"uint{bits}",
                    weight_scale_group_size=max(0, scheme.group_size),
                    has_zero_point=not symmetric,
                ),
                input_schema=HummingInputSchema(),
                num_experts=4,
                pad_n_to_multiple=256,
                pad_k_to_multiple=128,
                has_bias=True,
                torch_dtype=dtype,
                device="cuda",
            )
            ours = {"weight": gemm, "weight_scale": f"{gemm}_scales",
                    "zero_point": f"{gemm}_zeros", "bias": f"{gemm}_bias"}  # fmt: skip
            for key, tensor in theirs.items():
                same = torch.equal(packed.tensors[ours[key]], tensor)
                assert same, (bits, group, symmetric, dtype, gemm, key)


def test_marlin_packs_as_vllms_repack_does() -> None:
    """Our words against vLLM's CUDA repack kernel, where a library with it is loaded."""
    available("marlin")
    repack = _vllm_ops.find("_C", "gptq_marlin_repack")
    if repack is None:
        pytest.skip(f"_C::gptq_marlin_repack: {_vllm_ops.why_missing('_C', 'gptq_marlin_repack')}")
    from autosel.layouts._marlin_tiles import pack_tiles
    from autosel.packing import pack_last

    for bits in (4, 8):
        codes = torch.randint(0, 1 << bits, (192, 256), dtype=torch.uint8, device="cuda")
        words = pack_last(codes, bits).T.contiguous()  # GPTQ: [K/pf, N]
        theirs = repack(words, 256, 192, bits, False)
        assert torch.equal(pack_tiles(codes, bits), theirs)


@pytest.mark.parametrize("name", ["marlin", "humming", "triton"])
def test_cuda_graph(name: str) -> None:
    """Captured once, replayed on new inputs and a new routing."""
    backend = available(name)
    problem = make.problem(512, 256, group=128, experts=8, local=4)
    experts = RandomSource(problem).load("cuda")
    params = dict(backend.space(problem, 8, device()).default)
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
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        ids.copy_(torch.randint(-1, 4, (8, 2), device="cuda"))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        expert_map = torch.tensor([0, 1, 2, 3, -1, -1, -1, -1], device="cuda")
        expected = reference.moe(x, experts, routed, expert_map=expert_map)
        assert (out.double() - expected).norm() / expected.norm() < 1.2e-2


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
