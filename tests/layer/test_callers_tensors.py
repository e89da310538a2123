"""A caller's tensors: none is kept, each is read as what it is, and what is none gets one line."""

from dataclasses import replace

import pytest
import torch

from autosel import FusedMoE, registry
from autosel.core import Problem, QuantScheme, Routing
from autosel.device import detect
from autosel.dispatch import apart, apply
from autosel.errors import AutoselError, RoutingError
from autosel.layer_params import ExpertParameters
from autosel.routing_spec import RouterSpec
from autosel.sharding import shard_ep
from autosel.sources import RandomSource

SCHEME = QuantScheme(4, 32, True)
PROBLEM = Problem(8, 8, 2, 64, 32, SCHEME, SCHEME)
EXPERTS = RandomSource(PROBLEM).load()
PLACED = [0, 1, 2, 3, -1, -1, -1, -1]
ROUTER = RouterSpec(2, "sigmoid", has_correction_bias=True)


def made(**options):
    return FusedMoE.from_source(RandomSource(PROBLEM), **{"db": ":memory:", **options})


def part(placed):
    return FusedMoE.from_experts(shard_ep(EXPERTS, 0, 2), expert_map=placed, db=":memory:")


@pytest.fixture(scope="module")
def layer():
    return made(router=RouterSpec(2))


def call(tokens=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 64, generator=generator).bfloat16()
    ids = torch.rand(tokens, 8, generator=generator).topk(2).indices.int()
    return x, ids, torch.rand(tokens, 2, generator=generator)


# kept --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_map_that_changes_later_changes_nothing(dtype):
    placed = torch.tensor(PLACED, dtype=dtype)
    layer = part(placed)
    before = layer(*call())
    placed.fill_(-1)
    assert torch.equal(layer(*call()), before)
    assert before.any()


def test_parameters_keep_no_map_either():
    placed = torch.tensor(PLACED, dtype=torch.int32)
    parameters = ExpertParameters("gptq", PROBLEM, expert_map=placed)
    placed.fill_(-1)
    assert parameters._expert_map.tolist() == PLACED


def test_a_correction_bias_that_changes_later_changes_nothing():
    bias = torch.nn.Parameter(torch.zeros(8))
    layer = made(router=ROUTER, correction_bias=bias)
    x, logits = call()[0], torch.randn(5, 8, generator=torch.Generator().manual_seed(3))
    before = layer.apply_monolithic(x, logits)
    with torch.no_grad():
        bias[0] = 100
    assert torch.equal(layer.apply_monolithic(x, logits), before)
    assert not layer.correction_bias.requires_grad


# negated views -----------------------------------------------------------------------------------


def negated(tensor):
    """The same values in a view that has yet to be negated."""
    view = torch._neg_view(-tensor)
    assert view.is_neg()
    assert view.is_contiguous()
    return view


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("trusted", [False, True])
def test_negated_views_are_read_with_their_sign(layer, which, trusted):
    given = list(call())
    before = layer(*given)
    given[which] = negated(given[which])
    assert torch.equal(layer(*given, trusted=trusted), before)


def test_the_imaginary_part_of_a_conjugate(layer):
    x, ids, weights = call()
    turned = torch.complex(torch.zeros(1, 1), -weights[:1, :1]).conj().imag
    one = made_of_one_slot()
    assert turned.is_neg()
    assert turned.is_contiguous()
    right = one(x[:1], ids[:1, :1], weights[:1, :1])
    assert torch.equal(one(x[:1], ids[:1, :1], turned), right)


def made_of_one_slot():
    problem = Problem(8, 8, 1, 64, 32, SCHEME, SCHEME)
    return FusedMoE.from_source(RandomSource(problem), db=":memory:")


def test_negated_out_map_bias_and_weights(layer):
    given = call()
    before = layer(*given)
    out = torch._neg_view(torch.zeros_like(given[0]))
    layer(*given, out=out)
    assert torch.equal(out, before)
    placed = torch.tensor(PLACED, dtype=torch.int32)
    assert torch.equal(part(negated(placed))(*given), part(placed)(*given))
    turned = replace(EXPERTS, w13=replace(EXPERTS.w13, scales=negated(EXPERTS.w13.scales)))
    assert torch.equal(FusedMoE.from_experts(turned, db=":memory:")(*given), before)


def test_negated_views_of_any_backend():
    """Through the checks that backends of other projects need."""
    device = detect("cpu")
    x, ids, weights = call()
    for backend in registry.all_backends():
        if not backend.supports(PROBLEM, device):
            continue
        params = backend.space(PROBLEM, 5, device).default
        packed = backend.layout(PROBLEM, params).pack(EXPERTS)
        right = apply(backend, packed, x, Routing(ids, weights), params)
        turned = Routing(negated(ids), negated(weights))
        assert torch.equal(apply(backend, packed, negated(x), turned, params), right), backend.name


# overlapping out ---------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["topk_ids", "topk_weights"])
@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("storages", [1, 2])
def test_out_may_share_memory_with_the_routing(layer, of, trusted, storages):
    x, ids, weights = call()
    right = layer(x, ids, weights)
    small = ids if of == "topk_ids" else weights
    big = torch.zeros(160, dtype=small.dtype)
    held = big[:10].view(5, 2).copy_(small)
    out = big.view(torch.bfloat16).view(5, 64)
    if storages == 2:  # two tensors over one piece of memory that know nothing of each other
        held = torch.from_numpy(held.numpy())
    given = (x, held, weights) if of == "topk_ids" else (x, ids, held)
    assert torch.equal(layer(*given, out=out, trusted=trusted), right)
    assert torch.equal(out, right)


def test_out_beside_x_in_one_storage_is_written_at_once(layer):
    x, ids, weights = call()
    both = torch.zeros(10, 64, dtype=torch.bfloat16)
    both[:5] = x
    assert apart(both[5:], both[:5])
    assert not apart(both[4:9], both[:5])
    assert not apart(both[5:], both[::2])
    for start in (5, 3):
        both[:5] = x
        out = layer(both[:5], ids, weights, out=both[start : start + 5])
        assert torch.equal(out, layer(x, ids, weights))


# what does not fit -------------------------------------------------------------------------------

X, IDS, WEIGHTS = call()
CALLS = {
    "numpy x": ((X.float().numpy(), IDS, WEIGHTS), {}, "x: type: found ndarray"),
    "list x": ((X.tolist(), IDS, WEIGHTS), {}, "x: type: found list"),
    "list ids": ((X, IDS.tolist(), WEIGHTS), {}, "topk_ids: type: found list"),
    "no ids": ((X, None, WEIGHTS), {}, "topk_ids: type: found None"),
    "no ids, 3-D": ((X[None], None, WEIGHTS), {}, "topk_ids: type: found None"),
    "text weights": ((X, IDS, "x"), {}, "topk_weights: type: found 'x'"),
    "sparse x": ((X.to_sparse(), IDS, WEIGHTS), {}, "x: layout: found torch.sparse_coo"),
    "mkldnn x": ((X.to_mkldnn(), IDS, WEIGHTS), {}, "x: layout: found torch._mkldnn"),
    "sparse ids": ((X, IDS.to_sparse(), WEIGHTS), {}, "topk_ids: layout"),
    "sparse weights": ((X, IDS, WEIGHTS.to_sparse()), {}, "topk_weights: layout"),
    "numpy out": ((X, IDS, WEIGHTS), {"out": X.float().numpy()}, "out: type: found ndarray"),
    "list out": ((X, IDS, WEIGHTS), {"out": [1]}, "out: type: found list"),
    "expanded out": (
        (X, IDS, WEIGHTS),
        {"out": torch.empty(1, 64, dtype=torch.bfloat16).expand(5, -1)},
        "out: memory: found strides",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_do_not_fit_get_one_line_and_cost_nobody_their_place(layer, name):
    args, options, words = CALLS[name]
    served = layer.choices
    with pytest.raises(AutoselError) as said:
        layer(*args, **options)
    assert str(said.value).startswith(words)
    assert "\n" not in str(said.value)
    assert layer.choices == served


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((X, None), "router_logits: type"),
        ((X, [[0.0] * 8] * 5), "router_logits: type"),
        ((None, torch.zeros(5, 8)), "x: type"),
        ((X, torch.eye(8)[:5].to_sparse()), "router_logits: layout"),
    ],
)
def test_logits_that_do_not_fit(layer, given, words):
    with pytest.raises(AutoselError, match=words):
        layer.apply_monolithic(*given)


@pytest.mark.parametrize("count", [-1, 1.5, "x", None, True])
def test_token_counts_that_do_not_fit(layer, count):
    with pytest.raises(AutoselError, match=r"FusedMoE\.warm_up: tokens: found"):
        layer.warm_up(count)
    layer.warm_up(0, 3)


@pytest.mark.parametrize(
    ("shared", "words"),
    [
        (lambda x: None, "output: type: found None"),
        (lambda x: (x, None), "output: type: found tuple"),
        (lambda x: x[:, :3], r"output: shape: found \[5, 3\], expected that of x: 5 tokens of 64"),
        (lambda x: x.sum(1, keepdim=True), "output: shape"),
        (lambda x: x.T, r"output: shape: found \[64, 5\]"),
        (lambda x: x.to("meta"), "output: device: found meta"),
    ],
)
def test_shared_experts_that_return_something_else(shared, words):
    layer = made(shared_experts=shared)
    with pytest.raises(AutoselError, match=f"shared experts' {words}"):
        layer(*call())


OPTIONS = [
    ("device", None),
    ("device", []),
    ("plan", "x"),
    ("ep_rank", "x"),
    ("ep_size", 2.0),
    ("db", 5),
    ("require", None),
    ("require", "deterministic"),
    ("routing", 5),
    ("router", "softmax"),
    ("correction_bias", [0.0] * 8),
    ("shared_experts", 5),
    ("expert_map", list(range(8))),
    ("expert_map", torch.arange(8, device="meta")),
]


@pytest.mark.parametrize(("name", "value"), OPTIONS, ids=lambda value: repr(value)[:30])
def test_options_of_another_kind(name, value, monkeypatch):
    monkeypatch.setattr(RandomSource, "load", lambda *_: pytest.fail("loaded"))
    with pytest.raises(AutoselError, match=f"{name}.*: found") as said:
        made(**{name: value})
    assert "\n" not in str(said.value)


def test_things_that_no_layer_can_be_made_from(tmp_path):
    for make in (
        lambda: FusedMoE.from_source(None),
        lambda: FusedMoE.from_experts(None),
        lambda: FusedMoE.from_checkpoint(None, 0),
        lambda: FusedMoE.from_checkpoint(tmp_path, 0, tp_rank="x", tp_size=2),
    ):
        with pytest.raises(AutoselError, match=r"FusedMoE: .*: found"):
            make()
    with pytest.raises(RoutingError, match="type: found list"):
        FusedMoE.from_experts(EXPERTS, expert_map=PLACED)
