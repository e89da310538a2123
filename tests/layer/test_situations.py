"""What users of such layers have met, through the layer and every backend of this machine."""

import math
from dataclasses import dataclass

import pytest
import torch

from autosel import FusedMoE, registry, workspace
from autosel.core import CanonicalExperts, Problem, QuantScheme, QuantWeight, Routing
from autosel.device import detect
from autosel.errors import AutoselError, CheckpointError
from autosel.packing import pack_last
from autosel.reference import moe
from autosel.sharding import shard_ep
from autosel.sources import RandomSource
from autosel.store import Store
from tests.layer.decided import candidate, store_times

SCHEME = QuantScheme(4, 32, True)
BACKENDS = [
    backend.name
    for backend in registry.all_backends()
    if backend.supports(Problem(8, 8, 2, 64, 32, SCHEME, SCHEME), detect("cpu"))
]


@dataclass
class Held:
    """Weights in memory as a source."""

    experts: CanonicalExperts
    label: str = "made"

    @property
    def problem(self):
        return self.experts.problem

    def load(self, device="cpu"):
        return self.experts


def run_by(name, experts, tmp_path, **options):
    """A layer that runs all token counts with this backend; skips where it does not support it."""
    # As the machine is now: threads and packages are part of what a decision is stored for, and
    # when this file was imported other tests had not yet set theirs.
    problem, device = experts.problem, detect("cpu")
    support = registry.get(name).supports(problem, device)
    if not support:
        pytest.skip(f"{name}: {support}")
    with Store.open(tmp_path / "layer.db") as store:
        winner = candidate(name, problem, device, 4)
        if registry.get(name).accuracy(winner.params_dict) != "exact":
            pytest.skip(f"{name} quantises activations")
        store_times(store, problem, device, {4: {winner: 10.0}})
        layer = FusedMoE.from_source(Held(experts), db=store, **options)
    assert [choice.candidate for choice in layer.choices] == [winner]
    return layer


def integers(values, scale=1.0, dtype="float32"):
    """Small whole numbers ``[E, N, K]`` as 4-bit weights, one group of 32 inputs after another."""
    scheme = QuantScheme(4, 32, True, scale_dtype=dtype)
    codes = pack_last((values + 8).to(torch.uint8), 4)
    shape = (*values.shape[:2], values.shape[2] // 32)
    scales = torch.full(shape, scale, dtype=getattr(torch, dtype))
    return QuantWeight(scheme, values.shape[2], codes, scales)


def one_path(gate, up, down, *, act_dtype="float32", on_input=False, scale=1.0):
    """Experts in which input 0 alone counts, hidden value 0 alone and output 0 alone."""
    w13, w2 = torch.zeros(1, 64, 32), torch.zeros(1, 32, 32)
    w13[0, 0, 0], w13[0, 32, 0], w2[0, 0, 0] = gate, up, down
    scheme = QuantScheme(4, 32, True, scale_dtype="float32")
    problem = Problem(
        1, 1, 1, 32, 32, scheme, scheme, act_dtype=act_dtype, router_weight_on_input=on_input
    )
    return CanonicalExperts(problem, integers(w13, scale), integers(w2))


def first_input(value, dtype=torch.float32):
    x = torch.zeros(1, 32, dtype=dtype)
    x[0, 0] = value
    return x


def single(layer, x, weight):
    return layer(x, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([[weight]]))[0, 0].item()


def relative(out, ref):
    return float((out.double() - ref.double()).norm() / ref.double().norm())


def random_experts(act_dtype="float32", experts=8, top_k=2, hidden=64, inter=32, group=32, **more):
    scheme = QuantScheme(4, group, more.pop("symmetric", True), **more.pop("scheme", {}))
    problem = Problem(
        experts, experts, top_k, hidden, inter, scheme, scheme, act_dtype=act_dtype, **more
    )
    return RandomSource(problem).load()


def call(experts, tokens, seed=0):
    problem = experts.problem
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, problem.hidden_size, generator=generator)
    scores = torch.rand(tokens, problem.num_experts, generator=generator)
    ids = scores.topk(problem.top_k).indices.to(torch.int32)
    weights = torch.rand(tokens, problem.top_k, generator=generator)
    return x.to(getattr(torch, problem.act_dtype)), ids, weights


LIMITS = {"float32": 1e-5, "bfloat16": 1.5e-2, "float16": 3e-3}


# order, weights, range ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", BACKENDS)
def test_gate_and_up_are_not_swapped(name, tmp_path):
    layer = run_by(name, one_path(2, -1, 1), tmp_path)
    assert single(layer, first_input(1.0), 1.0) == pytest.approx(-1.7616, abs=1e-3)


@pytest.mark.parametrize(("on_input", "expected"), [(False, 2.6424), (True, 1.0966)])
@pytest.mark.parametrize("name", BACKENDS)
def test_the_router_weight_counts_once_and_where_the_model_says(name, on_input, expected, tmp_path):
    layer = run_by(name, one_path(2, 3, 1, on_input=on_input), tmp_path)
    assert single(layer, first_input(1.0), 0.5) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("act_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", BACKENDS)
def test_gate_times_up_beyond_half_precision(name, act_dtype, tmp_path):
    """300 x 300 x 0.5 x 0.01 = 450, with 90,000 in between; a backend that overflows is withdrawn
    or marked, never a silent infinity."""
    experts = one_path(3, 3, 4, act_dtype=act_dtype)
    experts.w2.scales.fill_(0.125)
    layer = run_by(name, experts, tmp_path)
    got = single(layer, first_input(100.0, getattr(torch, act_dtype)), 0.01)
    if act_dtype == "float16" and math.isinf(got):
        pytest.skip(f"{name} keeps the product in float16: certificates say so")
    assert got == pytest.approx(450, rel=1e-2)


@pytest.mark.parametrize(
    ("scale_dtype", "act_dtype"),
    [("float16", "bfloat16"), ("bfloat16", "float16"), ("float32", "bfloat16")],
)
@pytest.mark.parametrize("name", BACKENDS)
def test_scales_of_another_type_than_the_activations(name, scale_dtype, act_dtype, tmp_path):
    experts = random_experts(act_dtype, scheme={"scale_dtype": scale_dtype})
    layer = run_by(name, experts, tmp_path)
    x, ids, weights = call(experts, 5)
    ref = moe(x, experts, Routing(ids, weights), dtype=torch.float32)
    assert relative(layer(x, ids, weights), ref) < LIMITS[act_dtype]


def test_scales_that_float16_cannot_hold_never_serve_silently(tmp_path):
    """1e-8 would become 0 and 70,000 infinite: whoever serves gets both right."""
    experts = random_experts("float16", scheme={"scale_dtype": "bfloat16"})
    experts.w13.scales[2, 3, 0] = 70000.0
    experts.w13.scales[3, 4, 1] = 1e-8
    layer = FusedMoE.from_source(Held(experts), db=tmp_path / "layer.db")
    x, _, weights = call(experts, 4)
    ids = torch.tensor([[3, 0], [3, 1], [0, 1], [3, 4]], dtype=torch.int32)
    ref = moe(x, experts, Routing(ids, weights), dtype=torch.float32)
    assert relative(layer(x, ids, weights), ref) < LIMITS["float16"]
    x = x * 1e-5
    ids = torch.full((4, 2), 2, dtype=torch.int32)
    ref = moe(x, experts, Routing(ids, weights), dtype=torch.float32)
    assert relative(layer(x, ids, weights), ref) < 1e-2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_scales_that_are_not_finite_stop_the_loading_by_name(bad, tmp_path, get_checkpoint):
    from safetensors.torch import load_file, save_file

    from tests.layer.deep import repeat_layer

    folder = repeat_layer(
        get_checkpoint("awq-gptqmodel-w4-g32-mixtral").path, tmp_path / "model", 1
    )
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if ".experts.3." in n and n.endswith("scales"))
    tensors[name][0, 1] = bad
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as said:
        FusedMoE.from_checkpoint(folder, 0, db=":memory:")
    assert name in str(said.value)
    assert "group 0" in str(said.value)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_scale_of_zero_is_a_weight_of_zero(name, tmp_path):
    experts = random_experts()
    experts.w13.scales[:, :, 0] = 0
    layer = run_by(name, experts, tmp_path)
    x, ids, weights = call(experts, 3)
    changed = x.clone()
    changed[:, :32] = 7.0
    assert torch.equal(layer(x, ids, weights), layer(changed, ids, weights))


# routing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BACKENDS)
def test_ids_that_are_no_expert_with_and_without_a_map(name, tmp_path):
    whole = random_experts()
    part = shard_ep(whole, 1, 2)
    placed = torch.tensor([-1] * 4 + [0, 1, 2, 3])
    layers = {
        "all": run_by(name, whole, tmp_path),
        "mapped": run_by(name, part, tmp_path, expert_map=placed),
    }
    x, ids, weights = call(whole, 6)
    for stray in (8, 2147483647, -5, -(2**31)):
        strays = ids.clone()
        strays[0, 0], strays[4] = stray, stray
        plain = torch.where(strays == stray, -1, ids)
        spoilt = torch.where(strays == stray, float("nan"), weights)
        for kind, layer in layers.items():
            experts, given = (whole, None) if kind == "all" else (part, placed)
            ref = moe(x, experts, Routing(plain, weights), expert_map=given)
            for form in (strays, strays.long()):
                out = layer(x, form, spoilt)
                assert relative(out, ref) < LIMITS["float32"], (kind, stray)
                assert not out[4].any()


@pytest.mark.parametrize("name", BACKENDS)
def test_no_tokens_for_any_backend(name, tmp_path):
    experts = random_experts("bfloat16")
    layer = run_by(name, experts, tmp_path)
    empty = torch.empty(0, 64, dtype=torch.bfloat16)
    for kind in (torch.int32, torch.int64):
        out = layer(empty, torch.empty(0, 2, dtype=kind), torch.empty(0, 2))
        assert (out.shape, out.dtype) == ((0, 64), torch.bfloat16)


@pytest.mark.parametrize("experts", [1, 60, 160, 256, 384])
@pytest.mark.parametrize("name", BACKENDS)
def test_any_number_of_experts(name, experts, tmp_path):
    made = random_experts(experts=experts, top_k=min(4, experts), hidden=32)
    layer = run_by(name, made, tmp_path)
    x, ids, weights = call(made, 9)
    ref = moe(x, made, Routing(ids, weights))
    assert relative(layer(x, ids, weights), ref) < LIMITS["float32"]


@pytest.mark.parametrize("name", BACKENDS)
def test_every_expert_in_every_token(name, tmp_path):
    made = random_experts(experts=6, top_k=6)
    layer = run_by(name, made, tmp_path)
    x, ids, weights = call(made, 5)
    ref = moe(x, made, Routing(ids, weights))
    assert relative(layer(x, ids, weights), ref) < LIMITS["float32"]


@pytest.mark.parametrize("name", BACKENDS)
def test_an_expert_twice_in_one_token_counts_twice(name, tmp_path):
    """A router never does that; hash tables and replicas that are mapped back do."""
    made = random_experts(top_k=4)
    layer = run_by(name, made, tmp_path)
    x, ids, weights = call(made, 5)
    ids[:, 1], ids[2] = ids[:, 0], 3
    ref = moe(x, made, Routing(ids, weights))
    assert relative(layer(x, ids, weights), ref) < LIMITS["float32"]
    once = weights.clone()
    once[:, 1] = 0
    assert relative(moe(x, made, Routing(ids, once)), ref) > 0.1


@pytest.mark.parametrize("name", BACKENDS)
def test_weights_of_any_size_and_sign(name, tmp_path):
    """Not renormalised, scaled, zero, negative: what counts is what the caller passes."""
    made = random_experts()
    layer = run_by(name, made, tmp_path)
    x, ids, weights = call(made, 6)
    weights = torch.tensor([[0.0, 0.0], [-1.0, 2.0], [1e-20, 1.0], [1e6, 1.0], [0.0, 3.0], [1, 1]])
    out, ref = layer(x, ids, weights), moe(x, made, Routing(ids, weights))
    for got, right in zip(out[1:], ref[1:], strict=True):
        assert relative(got, right) < LIMITS["float32"]
    assert not out[0].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_token_that_is_not_finite_spoils_no_other(name, bad, tmp_path):
    """All of them on the same experts, so that they meet in every block of every kernel."""
    made = random_experts()
    layer = run_by(name, made, tmp_path)
    x, ids, weights = call(made, 9)
    ids = ids[:1].repeat(9, 1)
    ref = moe(x, made, Routing(ids, weights))
    for row in (0, 4, 8):
        spoilt = x.clone()
        spoilt[row] = bad
        out = layer(spoilt, ids, weights)
        others = [i for i in range(9) if i != row]
        assert relative(out[others], ref[others]) < LIMITS["float32"]
        assert not torch.isfinite(out[row]).all()


@pytest.mark.parametrize("name", BACKENDS)
def test_experts_without_tokens_leave_no_old_memory_behind(name, tmp_path):
    """Free memory and planned memory hold NaN before each call."""
    experts = random_experts(experts=64)
    layer = run_by(name, experts, tmp_path)
    x, _, weights = call(experts, 12)
    only = torch.tensor([[5, -1]] * 12, dtype=torch.int32)
    others = torch.tensor([[e % 64 if e % 64 != 5 else 6, 63] for e in range(12)]).int()
    for ids in (only, others, only):
        ref = moe(x, experts, Routing(ids, weights))
        for _ in range(3):
            for held in workspace._thread.held.values():
                if held.buffer is not None:
                    held.buffer.fill_(0xFF)  # NaN in every floating-point type
            junk = [torch.full((size,), float("nan")) for size in (12 * 64, 24 * 32, 4096)]
            del junk
            out = layer(x, ids, weights)
            assert torch.isfinite(out).all()
            assert relative(out, ref) < LIMITS["float32"]


# shapes and views --------------------------------------------------------------------------------

SHAPES = {
    "groups 4 and 1": {"hidden": 512, "inter": 128, "group": 128},
    "no multiples of a tile": {"hidden": 160, "inter": 96},
    "an inner size of 8": {"hidden": 160, "inter": 8, "group": 8},
    "long and thin": {"hidden": 32, "inter": 1344},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BACKENDS)
def test_odd_shapes_are_right_or_left_out(name, shape, tmp_path):
    experts = random_experts(**SHAPES[shape])
    layer = run_by(name, experts, tmp_path)
    x, ids, weights = call(experts, 5)
    assert relative(layer(x, ids, weights), moe(x, experts, Routing(ids, weights))) < 1e-5


VIEWS = {
    "left half": lambda t: torch.cat([t, t + 1], 1)[:, : t.shape[1]],
    "every second column": lambda t: torch.stack([t, t + 1], 2).flatten(1)[:, ::2],
    "transposed": lambda t: t.t().contiguous().t(),
    "every second row": lambda t: torch.stack([t, t + 1], 1).flatten(0, 1)[::2],
    "one row for all": lambda t: t[:1].expand_as(t),
    "offset": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", BACKENDS)
def test_views_are_read_as_what_they_are(name, view, tmp_path):
    experts = random_experts()
    layer = run_by(name, experts, tmp_path)
    made = [VIEWS[view](tensor) for tensor in call(experts, 6)]
    packed = [tensor.clone(memory_format=torch.contiguous_format) for tensor in made]
    expected = layer(*packed)
    for which in range(3):
        mixed = [made[i] if i == which else packed[i] for i in range(3)]
        assert torch.equal(layer(*mixed), expected)
    assert torch.equal(layer(*made), expected)
    assert torch.equal(layer(*made, out=VIEWS["left half"](torch.empty(6, 64))), expected)


@pytest.mark.parametrize("name", BACKENDS)
def test_identical_rows_give_identical_answers(name, tmp_path):
    experts = random_experts("bfloat16")
    layer = run_by(name, experts, tmp_path)
    x, ids, weights = (tensor[:1].expand(64, -1) for tensor in call(experts, 1))
    out = layer(x, ids, weights)
    alone = layer(x[:1], ids[:1], weights[:1])
    assert relative(out, alone.expand(64, -1)) < LIMITS["bfloat16"]
    assert float((out.float() - out[:1].float()).abs().max()) <= 2e-2 * float(out.abs().max())


def test_a_batch_that_is_too_large_to_count_is_refused_or_right():
    """Sizes are counted in 64 bits; what a caller passes must at least agree with itself."""
    experts = random_experts()
    layer = FusedMoE.from_source(Held(experts), db=":memory:")
    x, ids, weights = call(experts, 4)
    huge = x[:1].expand(37450 * 8, 64)
    with pytest.raises(AutoselError, match="topk_ids: tokens: found 4, expected 299600"):
        layer(huge, ids, weights)
    sampled = layer(huge, ids[:1].expand(len(huge), 2), weights[:1].expand(len(huge), 2))
    assert torch.equal(sampled[-1], sampled[0])
    assert relative(sampled[-1:], moe(x[:1], experts, Routing(ids[:1], weights[:1]))) < 1e-5
