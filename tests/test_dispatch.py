"""What a backend is promised, established from whatever a caller has."""

import math

import pytest
import torch

from autosel.core import Routing
from autosel.dispatch import apply
from autosel.errors import AutoselError, RoutingError
from autosel.expert_map import local_map, localize
from autosel.routing_synthetic import make_routing
from tests.verify.layers import Truthful, layer, pack, problem, tokens


class Watching(Truthful):
    """Checks the contract on every call and counts the calls."""

    name = "watching"

    def __init__(self):
        self.calls = 0
        self.routing = None

    def run(self, packed, x, routing, params, out):
        self.calls += 1
        self.routing = routing
        p = packed.problem
        assert x.dim() == 2
        assert len(x) > 0
        for tensor in (x, routing.topk_ids, routing.topk_weights, out):
            assert tensor.is_contiguous()
        assert routing.topk_ids.dtype == torch.int32
        assert routing.topk_weights.dtype == torch.float32
        assert routing.topk_ids.min() >= -1
        assert routing.topk_ids.max() < p.num_local_experts
        assert out.shape == x.shape
        assert out.dtype == x.dtype
        assert not torch.is_grad_enabled()
        return super().run(packed, x, routing, params, out)


P = problem(4, 2)
PACKED = pack(layer(P))
X = tokens(6, P)
ROUTING = make_routing("uniform", 6, P)
EXPECTED = apply(Truthful(), PACKED, X, ROUTING, {})


def call(x=X, routing=ROUTING, packed=PACKED, **more):
    return apply(Watching(), packed, x, routing, {}, **more)


def left_half(t):
    return torch.cat([t, torch.full_like(t, math.nan)], dim=1)[:, : t.shape[1]]


def every_second_column(t):
    return torch.stack([t, torch.full_like(t, math.nan)], dim=2).flatten(1)[:, ::2]


def transposed(t):
    return t.T.contiguous().T


VIEWS = [left_half, every_second_column, transposed]


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_the_activations(view):
    x = view(X)
    assert not x.is_contiguous()
    assert torch.equal(call(x), EXPECTED)


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_the_router_weights_and_ids(view):
    routing = Routing(transposed(ROUTING.topk_ids), view(ROUTING.topk_weights))
    assert not routing.topk_weights.is_contiguous()
    assert torch.equal(call(routing=routing), EXPECTED)


@pytest.mark.parametrize("view", VIEWS)
def test_views_as_output(view):
    out = view(torch.zeros_like(X))
    assert call(out=out) is out
    assert torch.equal(out, EXPECTED)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.int64, torch.uint32, torch.uint64]
)
def test_ids_of_any_integer_type(dtype):
    routing = Routing(ROUTING.topk_ids.to(dtype), ROUTING.topk_weights.double())
    assert torch.equal(call(routing=routing), EXPECTED)


@pytest.mark.parametrize("stray", [4, 2147483647, -1, -5, 2**32, 2**32 + 1, -(2**62)])
@pytest.mark.parametrize("mapped", [False, True])
def test_an_id_that_is_no_expert_is_a_slot_served_elsewhere(stray, mapped):
    ids = ROUTING.topk_ids.long()
    ids[2, 1] = stray
    weights = ROUTING.topk_weights.clone()
    weights[2, 1] = math.nan
    watching = Watching()
    held = torch.tensor([1, 0, 3, 2]) if mapped else None
    apply(watching, PACKED, X, Routing(ids, weights), {}, expert_map=held)
    assert watching.routing.topk_ids[2, 1] == -1
    assert watching.routing.topk_weights[2, 1] == 0
    kept = torch.ones_like(ids, dtype=torch.bool)
    kept[2, 1] = False
    expected = ROUTING.topk_ids if held is None else held[ROUTING.topk_ids.long()]
    assert torch.equal(watching.routing.topk_ids[kept].long(), expected[kept].long())


def test_the_map_leads_to_local_ids():
    p = problem(4, 2, local=2)
    routing = Routing(torch.tensor([[0, 2], [3, -1]]), torch.tensor([[0.3, 0.7], [0.6, 0.4]]))
    local = localize(routing, p, torch.tensor([-1, -1, 0, 1]))
    assert local.topk_ids.tolist() == [[-1, 0], [1, -1]]
    torch.testing.assert_close(local.topk_weights, torch.tensor([[0.0, 0.7], [0.6, 0.0]]))


def test_contiguous_ranks_hold_every_expert_once():
    p = problem(6, 2, local=2)
    maps = torch.stack([local_map(p, rank) for rank in range(3)])
    assert ((maps >= 0).sum(dim=0) == 1).all()
    assert maps[1].tolist() == [-1, -1, 0, 1, -1, -1]
    with pytest.raises(RoutingError, match="rank: found 3, expected 0 to 2"):
        local_map(p, 3)


def test_ranks_sum_to_the_whole():
    whole = problem(6, 3)
    experts = layer(whole)
    x, routing = tokens(9, whole), make_routing("uniform", 9, whole)
    expected = apply(Truthful(), pack(experts), x, routing, {}).float()
    total = torch.zeros_like(expected)
    p = problem(6, 3, local=2)
    for rank in range(3):
        part = pack(experts)
        tensors = {n: t[2 * rank : 2 * rank + 2].contiguous() for n, t in part.tensors.items()}
        packed = type(part)("canonical", p, tensors)
        total += apply(Watching(), packed, x, routing, {}, expert_map=local_map(p, rank)).float()
    assert (total - expected).norm() < 0.01 * expected.norm()


def test_no_tokens_means_no_launch():
    watching = Watching()
    empty = Routing(ROUTING.topk_ids[:0], ROUTING.topk_weights[:0])
    out = apply(watching, PACKED, X[:0], empty, {})
    assert (out.shape, out.dtype) == ((0, P.hidden_size), X.dtype)
    given = torch.empty_like(out)
    assert apply(watching, PACKED, X[:0], empty, {}, out=given) is given
    assert watching.calls == 0


def test_output_may_be_the_input():
    x = X.clone()
    assert call(x, out=x) is x
    assert torch.equal(x, EXPECTED)


def test_activations_that_want_a_gradient():
    out = call(X.clone().requires_grad_())
    assert not out.requires_grad
    assert torch.equal(out, EXPECTED)


def test_a_backend_that_returns_memory_of_its_own_is_refused():
    class Own(Truthful):
        name = "own"

        def run(self, packed, x, routing, params, out):
            return self.output(packed, x, routing)

    with pytest.raises(AutoselError, match="backend own: returned"):
        apply(Own(), PACKED, X, ROUTING, {})

    class Forgetful(Truthful):
        name = "forgetful"

        def run(self, packed, x, routing, params, out):
            super().run(packed, x, routing, params, out)

    with pytest.raises(AutoselError, match="backend forgetful: returned"):
        apply(Forgetful(), PACKED, X, ROUTING, {})


def ids(values):
    return Routing(values, ROUTING.topk_weights)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"x": X.float()}, "x: dtype: found torch.float32, expected torch.bfloat16"),
        ({"x": X[:, :100]}, r"x: shape: found \[6, 100\], expected \[tokens, 128\]"),
        ({"x": X[0]}, "x: shape: found"),
        ({"x": X[:5]}, "topk_ids: tokens: found 6, expected 5 as in x"),
        ({"routing": ids(ROUTING.topk_ids.float())}, "topk_ids: dtype: found torch.float32"),
        ({"routing": ids(ROUTING.topk_ids.bool())}, "topk_ids: dtype: found torch.bool"),
        ({"routing": ids(ROUTING.topk_ids[:, :1])}, r"topk_ids: shape: found \[6, 1\]"),
        ({"routing": ids(ROUTING.topk_ids[:3])}, r"topk_weights: shape: found \[6, 2\]"),
        (
            {"routing": Routing(ROUTING.topk_ids, ROUTING.topk_ids)},
            "topk_weights: dtype: found torch.int32",
        ),
        ({"expert_map": torch.arange(3)}, r"expert_map: shape: found \[3\], expected \[4\]"),
        ({"expert_map": torch.arange(4.0)}, "expert_map: dtype: found torch.float32"),
        ({"expert_map": torch.arange(4) + 1}, "expert_map: local id: found 4, expected at most 3"),
        ({"out": torch.empty(5, 128)}, r"out: shape: found \[5, 128\]"),
        ({"out": torch.empty(6, 128)}, "out: dtype: found torch.float32"),
        ({"x": X.to("meta")}, "x: device: found meta, expected cpu"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(how, message):
    with pytest.raises(AutoselError, match=message):
        call(**how)


def test_local_experts_without_a_map_are_refused():
    p = problem(8, 2, local=4)
    with pytest.raises(RoutingError, match="expert_map: value: found nothing, expected a map of 8"):
        call(tokens(6, p), make_routing("uniform", 6, p), pack(layer(p)))
