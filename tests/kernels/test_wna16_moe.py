"""The plain-Triton kernels against a float32 reference, on CPU through Triton's interpreter.

The arithmetic under test is the ASM-free path; grids, offsets, masks, grouping and layout are those
that run on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

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

pytest.importorskip("triton")
from autosel.backends import wna16_tiled
from autosel.backends.wna16_tiled import Wna16TiledBackend, tiled_layer
from autosel.core import Routing
from autosel.kernels import wna16_moe
from autosel.kernels.wna16_moe import layer_launches, moe_forward
from autosel.layouts.wna16_tiled import Wna16Tiled

# The interpreter cuts float32 to bf16 instead of rounding it: about 0.01 over a layer, where a GPU
# gives 0.002 to 0.005. A zero point off by one gives 0.2 and more.
TOLERANCE = 2e-2

PATHS = paths({}, {}, long_stages=2)


def run(case, params, tokens=2, top_k=2, seed=0, ids=None):
    problem = make_problem(top_k=top_k, **case)
    experts = make_experts(problem, seed)
    layer = tiled_layer(Wna16Tiled(experts.problem.act_dtype).pack(experts))
    gen = torch.Generator().manual_seed(seed + 1)
    dtype = DTYPES[problem.act_dtype]
    x = (torch.randn((tokens, problem.hidden_size), generator=gen) * 0.5).to(dtype)
    if ids is None:
        scores = torch.rand((tokens, problem.num_experts), generator=gen)
        ids = scores.topk(top_k, 1).indices.to(torch.int32)
    weights = torch.rand((tokens, top_k), generator=gen)
    out = torch.full_like(x, float("nan"))
    before = x.clone(), ids.clone(), weights.clone()
    moe_forward(layer, x, ids, weights, out, params)
    for tensor, old in zip((x, ids, weights), before, strict=True):
        assert torch.equal(tensor, old), "an input changed"
    return out, layer_reference(experts, x, ids, weights)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("group", [32, pytest.param(128, marks=pytest.mark.slow)])
def test_every_path_matches_the_reference(path, group):
    sizes = {"hidden": 256, "inner": 128} if group == 128 else {}
    out, ref = run({"group": group} | sizes, PATHS[path])
    assert relative_error(out, ref) < TOLERANCE


@pytest.mark.parametrize("path", [pytest.param("decode", marks=pytest.mark.slow), "sorted"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_schemes(path, scheme):
    out, ref = run(scheme, PATHS[path], tokens=1)
    assert relative_error(out, ref) < TOLERANCE


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.key)
def test_activations(activation):
    out, ref = run({"activation": activation}, PATHS["scan"], tokens=1)
    assert relative_error(out, ref) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_slots_served_elsewhere_add_nothing(path):
    ids = torch.tensor(ELSEWHERE, dtype=torch.int32)
    out, ref = run({}, PATHS[path], tokens=5, ids=ids)
    assert relative_error(out, ref) < TOLERANCE
    assert torch.equal(out[1], torch.zeros_like(out[1]))


@pytest.mark.parametrize("path", ["decode", "scan", "sorted", "srows"])
def test_any_number_may_stand_for_no_expert_and_its_weight_is_not_read(path):
    """What ``reads_any_ids`` promises, without and with a bias (each has sums of its own)."""
    for bias in (False, True):
        experts = make_experts(make_problem(bias=bias))
        layer = tiled_layer(Wna16Tiled("bfloat16").pack(experts))
        x = torch.randn((3, 128), generator=torch.Generator().manual_seed(1)).bfloat16()
        plain = torch.tensor([[0, -1], [-1, -1], [3, 2]], dtype=torch.int32)
        strays = torch.tensor([[0, 4], [2**31 - 1, -5], [3, 2]], dtype=torch.int32)
        weights = torch.tensor([[0.5, 0.0], [0.0, 0.0], [0.25, 0.75]])
        outs = [torch.full_like(x, float("nan")) for _ in range(2)]
        moe_forward(layer, x, plain, weights, outs[0], PATHS[path])
        moe_forward(layer, x, strays, weights.where(plain >= 0, float("nan")), outs[1], PATHS[path])
        assert torch.equal(*outs)


@pytest.mark.parametrize("path", ["scan", "sorted", "rows", "srows"])
def test_one_hot_expert_takes_several_blocks(path):
    ids = torch.tensor([[1, 2]] * 9 + [[1, 0]] * 2, dtype=torch.int32)
    out, ref = run({}, PATHS[path], tokens=11, ids=ids)
    assert relative_error(out, ref) < TOLERANCE


@pytest.mark.parametrize("case", [{}, {"act_order": True}], ids=str)
def test_more_slots_than_are_looked_through(case, monkeypatch):
    monkeypatch.setattr(wna16_moe, "SCANNED", 7)
    out, ref = run(case, PATHS["scan"], tokens=11)
    assert relative_error(out, ref) < TOLERANCE


@pytest.mark.parametrize("path", ["decode", "scan", "sorted"])
def test_router_weights_on_the_input_scale_it_and_no_output(path):
    """As in Llama 4: one choice, whose weight is before the activation, where it is not linear."""
    experts = make_experts(make_problem(top_k=1))
    layer = tiled_layer(Wna16Tiled("bfloat16").pack(experts))
    gen = torch.Generator().manual_seed(3)
    x = torch.randn((3, 128), generator=gen).bfloat16()
    ids = torch.tensor([[1], [-1], [1]], dtype=torch.int32)
    weights = torch.tensor([[0.25], [float("nan")], [2.0]])
    out = torch.full_like(x, float("nan"))
    moe_forward(replace(layer, weight_on_input=True), x, ids, weights, out, PATHS[path])
    scaled = (x.float() * weights.nan_to_num()).bfloat16()
    ref = layer_reference(experts, scaled, ids, torch.ones_like(weights))
    assert relative_error(out, ref) < TOLERANCE
    assert torch.equal(out[1], torch.zeros_like(out[1]))


def test_calls_of_more_tokens_than_a_grid_has_rows_run_in_parts(monkeypatch):
    """8,192 tokens with 8 choices in act-order are 65,536 slots: CUDA refused the launch."""
    experts = make_experts(make_problem(act_order=True))
    packed = Wna16Tiled("bfloat16").pack(experts)
    gen = torch.Generator().manual_seed(5)
    x = torch.randn((5, 128), generator=gen).bfloat16()
    ids = torch.stack([torch.randperm(4, generator=gen)[:2] for _ in range(5)]).int()
    routing = Routing(ids, torch.rand((5, 2), generator=gen))
    lengths = []
    forward = wna16_moe.moe_forward
    monkeypatch.setattr(
        wna16_moe,
        "moe_forward",
        lambda layer, x, *rest: lengths.append(len(x)) or forward(layer, x, *rest),
    )
    outs = []
    for most in (65_535, 5):
        monkeypatch.setattr(wna16_tiled, "MAX_GRID_Y", most)
        out = torch.full_like(x, float("nan"))
        Wna16TiledBackend().run(packed, x, routing, PATHS["sorted"], out)
        outs.append(out)
    assert lengths == [5, 2, 2, 1]
    assert torch.equal(*outs)
    assert (
        relative_error(outs[0], layer_reference(experts, x, ids, routing.topk_weights)) < TOLERANCE
    )


@pytest.mark.slow
def test_six_choices_of_eight_lanes():
    out, ref = run({"experts": 8}, PATHS["decode"], tokens=2, top_k=6)
    assert relative_error(out, ref) < TOLERANCE


def test_padded_sizes():
    case = {"inner": 40, "group": 32}  # pads to 64
    out, ref = run(case, PATHS["scan"], tokens=3)
    assert relative_error(out, ref) < TOLERANCE


@pytest.mark.parametrize("fault", ["nibble", "scale", "swap"])
def test_planted_faults_are_seen(fault):
    problem = make_problem()
    experts = make_experts(problem)
    packed = Wna16Tiled(experts.problem.act_dtype).pack(experts)
    tensors = {k: t.clone() for k, t in packed.tensors.items()}
    if fault == "nibble":
        tensors["w13"][0, 0, 0, 0, 0] ^= 0x8
    elif fault == "scale":
        tensors["s13"][0, 0, 0] = 0
    else:
        r = tensors["w13"].shape[1]
        tensors["w13"] = tensors["w13"].flip(1) if r > 1 else tensors["w13"]
    bad = type(packed)(packed.layout, packed.problem, tensors, packed.meta)
    x = torch.ones((1, problem.hidden_size), dtype=torch.bfloat16)
    ids = torch.tensor([[0, 1]], dtype=torch.int32)
    weights = torch.ones((1, 2))
    outs = []
    for which in (packed, bad):
        out = torch.empty_like(x)
        outs.append(moe_forward(tiled_layer(which), x, ids, weights, out, PATHS["decode"]))
    assert not torch.equal(*outs)


@pytest.mark.parametrize(("path", "launches"), [("decode", 2), ("scan", 3), ("sorted", 4)])
def test_number_of_launches(path, launches):
    experts = make_experts(make_problem())
    layer = tiled_layer(Wna16Tiled(experts.problem.act_dtype).pack(experts))
    x = torch.zeros((4, 128), dtype=torch.bfloat16)
    ids = torch.zeros((4, 2), dtype=torch.int32)
    found = layer_launches(layer, x, ids, torch.zeros((4, 2)), torch.empty_like(x), PATHS[path])
    assert len(found) == launches


@pytest.mark.parametrize("tokens", [1, 9])
def test_backend_run_pads_odd_sizes(tokens):
    """The whole backend with its own starting point: hidden 96 pads to 128, inner 48 to 64."""
    from autosel.backends.wna16_tiled import Wna16TiledBackend
    from autosel.core import Routing

    problem = make_problem(8, 96, 48)
    experts = make_experts(problem)
    gen = torch.Generator().manual_seed(3)
    x = torch.randn((tokens, 96), generator=gen).bfloat16()
    ids = torch.rand((tokens, 8), generator=gen).topk(2, 1).indices.to(torch.int32)
    weights = torch.rand((tokens, 2), generator=gen)
    out = torch.full_like(x, float("nan"))
    packed = Wna16Tiled(experts.problem.act_dtype).pack(experts)
    Wna16TiledBackend().run(packed, x, Routing(ids, weights), {}, out)
    assert relative_error(out, layer_reference(experts, x, ids, weights)) < TOLERANCE
