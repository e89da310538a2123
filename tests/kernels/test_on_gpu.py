"""The compiled kernels on a GPU: inline assembly, Gluon, PDL, every scheme and activation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
from autosel.backends.wna16_tiled import tiled_layer
from autosel.kernels.wna16_gemm_space import CLASSES
from autosel.kernels.wna16_moe import moe_forward
from autosel.kernels.wna16_space import starting_params
from autosel.layouts.wna16_tiled import Wna16Tiled
from tests.kernels.make import (
    ACTIVATIONS,
    DTYPES,
    ELSEWHERE,
    SCHEMES,
    make_experts,
    make_problem,
    paths,
)
from tests.kernels.reference import layer_reference, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = 6e-3

GLUON = {
    "path": "sorted",
    "classes": "8,16,16+8,32",
    "near": 2,
    "up_bn": 128,
    "up_bk": 64,
    "up_stages": 4,
    "up_warps": 8,
    "up_late": 0,
    "down_bn": 64,
    "down_bk": 64,
    "down_stages": 4,
    "down_warps": 4,
    "down_late": 1,
    "down_rt": 1,
    "up_with": "gluon",
    "down_with": "gluon",
}
SMALL = paths(
    {"up_ks": 4, "up_kw": 128, "up_sub": 128, "down_kw": 128},
    {"tok": 16, "up_bn": 128, "up_bk": 128, "up_stages": 3, "down_bk": 128, "down_stages": 3,
     "prefetch": 128},
    long_stages=3,
)  # fmt: skip
PATHS = {
    "decode": SMALL["decode"],
    "long": SMALL["long"],
    "scan": SMALL["scan"],
    "sorted": SMALL["sorted"],
    "rows": SMALL["srows"],
    "gluon": GLUON,
    "gluon_rows": GLUON | {"down_rt": 2},
}


def check(case, params, tokens=7, top_k=2, ids=None, inner=256):
    problem = make_problem(8, 512, inner, top_k, **case)
    experts = make_experts(problem)
    gen = torch.Generator().manual_seed(1)
    x = (torch.randn((tokens, 512), generator=gen) * 0.1).to(DTYPES[problem.act_dtype])
    if ids is None:
        ids = torch.rand((tokens, 8), generator=gen).topk(top_k, 1).indices.to(torch.int32)
    weights = torch.rand((tokens, top_k), generator=gen)
    packed = Wna16Tiled(experts.problem.act_dtype).pack(experts)
    tensors = {k: t.cuda() for k, t in packed.tensors.items()}
    layer = tiled_layer(replace(packed, tensors=tensors))
    out = torch.full_like(x, float("nan")).cuda()
    first = None
    for _ in range(3):
        out.fill_(float("nan"))
        moe_forward(layer, x.cuda(), ids.cuda(), weights.cuda(), out, params)
        result = out.cpu()
        assert relative_error(result, layer_reference(experts, x, ids, weights)) < TOLERANCE
        first = result if first is None else first
        assert torch.equal(first, result), "the result changes from run to run"
    return result


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_paths(path, group):
    check({"group": group}, PATHS[path], tokens=37)


FLOAT16 = [
    {"dtype": "float16", "group": 32, "symmetric": False},
    {"dtype": "float16", "group": 64, "bits": 8},
    {"dtype": "float16", "group": 64, "bits": 8, "symmetric": False},
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scheme", SCHEMES + FLOAT16, ids=str)
def test_schemes(path, scheme):
    if "gluon" in path and scheme.get("bias"):
        pytest.skip("the Gluon GEMM adds no bias")
    check(scheme, PATHS[path], tokens=37 if "gluon" in path else 7)


@pytest.mark.parametrize("scheme", [{}, {"symmetric": False}, {"bits": 8, "dtype": "float16"}],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize(
    ("inner", "more"),
    [
        (384, {}),  # 6 steps in rounds of 4
        (448, {}),
        (1408, {"down_bk": 128}),  # 11 in rounds of 4
        (1408, {"down_bn": 128, "down_stages": 6, "down_warps": 8, "down_late": 0}),
        (320, {"down_late": 0}),
    ],
    ids=str,
)
def test_the_last_round_of_the_ring_need_not_be_whole(inner, more, scheme):
    check({"group": 64} | scheme, GLUON | more, tokens=37, inner=inner)


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("scheme", [{}, {"symmetric": False, "dtype": "float16"}], ids=str)
def test_widths_of_blocks(classes, scheme):
    narrow = {"up_warps": 4, "up_bn": 64}
    check(scheme, GLUON | narrow | {"classes": classes}, tokens=200)


@pytest.mark.parametrize("path", ["decode", "sorted"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.key)
def test_activations(path, activation):
    check({"activation": activation}, PATHS[path])


@pytest.mark.parametrize("path", PATHS)
def test_slots_served_elsewhere_add_nothing(path):
    ids = torch.tensor(ELSEWHERE, dtype=torch.int32)
    result = check({}, PATHS[path], tokens=5, ids=ids)
    assert torch.equal(result[1], torch.zeros_like(result[1]))


@pytest.mark.parametrize("path", ["scan", "sorted", "rows", "gluon", "gluon_rows"])
def test_one_hot_expert(path):
    check({}, PATHS[path], tokens=70, ids=torch.tensor([[1, 2]] * 70, dtype=torch.int32))


@pytest.mark.parametrize("tokens", [600, 5000])
def test_many_slots(tokens):
    check({}, PATHS["sorted"], tokens=tokens)


def test_more_elements_than_32_bits_count():
    """40,000 tokens x 8 experts x 7,168 outputs: 2.3e9 elements go into the weighted sum."""
    free, _ = torch.cuda.mem_get_info()
    if free < 24 << 30:
        pytest.skip(f"needs 24 GiB of device memory, {free >> 30} are free")
    tokens, hidden = 40_000, 7168
    problem = make_problem(16, hidden, 256, 8)
    experts = make_experts(problem)
    packed = Wna16Tiled("bfloat16").pack(experts)
    layer = tiled_layer(replace(packed, tensors={k: t.cuda() for k, t in packed.tensors.items()}))
    gen = torch.Generator().manual_seed(1)
    ids = torch.rand((tokens, 16), generator=gen).topk(8, 1).indices.to(torch.int32)
    weights = torch.rand((tokens, 8), generator=gen)
    x = (torch.randn((tokens, hidden), generator=gen) * 0.1).to(torch.bfloat16)
    out = torch.full_like(x, float("nan"), device="cuda")
    for params in (starting_params(layer, tokens), PATHS["sorted"]):
        out.fill_(float("nan"))
        moe_forward(layer, x.cuda(), ids.cuda(), weights.cuda(), out, params)
        assert not out.isnan().any()
        some = torch.tensor([0, 1, 18_724, 18_725, 37_449, 39_998, 39_999])
        expected = layer_reference(experts, x[some], ids[some], weights[some])
        assert relative_error(out[some].cpu(), expected) < TOLERANCE
