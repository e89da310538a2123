"""Made-up routings: what each kind promises, and that it repeats."""

import hashlib

import pytest
import torch

from autosel.errors import RoutingError
from autosel.routing_synthetic import ROUTING_KINDS, make_routing
from tests.verify.layers import problem


def counts(routing, experts):
    ids = routing.topk_ids[routing.topk_ids >= 0].long()
    return torch.bincount(ids, minlength=experts)


SIZES = [(1, 1, 1), (60, 4, 60), (128, 4, 2)]
NAMED = ["zipf:0.5", "one_hot:3", "all_but_one:3"]


@pytest.mark.parametrize(
    ("kind", "experts", "top_k", "local"),
    [(kind, *size) for kind in ROUTING_KINDS for size in SIZES]
    + [(kind, *size) for kind in NAMED for size in SIZES[1:]],
)
def test_what_every_kind_promises(kind, experts, top_k, local):
    p = problem(experts, top_k, local=local)
    routing = make_routing(kind, 50, p, seed=7)
    ids, weights = routing.topk_ids, routing.topk_weights
    assert (ids.shape, ids.dtype) == ((50, top_k), torch.int32)
    assert (weights.shape, weights.dtype) == ((50, top_k), torch.float32)
    assert ids.min() >= -1
    assert ids.max() < experts
    for row in ids.tolist():
        served = [e for e in row if e >= 0]
        assert len(set(served)) == len(served)
    assert (weights[ids < 0] == 0).all()
    assert (weights[ids >= 0] > 0).all()
    total = weights.sum(dim=1)[(ids >= 0).any(dim=1)]
    assert ((total > 0.49) & (total < 1.001)).all()
    assert ids.is_contiguous()
    assert make_routing(kind, 0, p).topk_ids.shape == (0, top_k)


def test_more_slots_than_local_experts():
    p = problem(128, 4, local=2)
    routing = make_routing("uniform", 4000, p)
    local = routing.topk_ids < 2
    assert local.sum(dim=1).max() <= 2
    # Every expert is equally likely: 4000 * 4 / 128 tokens each, give or take.
    assert 190 < local.sum() < 310


def test_uniform_is_even_and_zipf_is_not():
    p = problem(64, 4)
    even = counts(make_routing("uniform", 4000, p), 64)
    assert even.min() > 150
    assert even.max() < 350
    skewed = counts(make_routing("zipf:1.5", 4000, p), 64).sort(descending=True).values
    assert skewed[0] > 3500
    assert skewed[-16:].sum() < 0.1 * skewed.sum()
    milder = counts(make_routing("zipf:0.5", 4000, p), 64).sort(descending=True).values
    assert even.max() < milder[0] < skewed[0]


def test_one_hot_and_all_but_one():
    p = problem(64, 2)
    hot = make_routing("one_hot:5", 30, p)
    assert counts(hot, 64)[5] == 30
    assert counts(hot, 64).sum() == 30
    rest = counts(make_routing("all_but_one:5", 2000, p), 64)
    assert rest[5] == 0
    assert (rest > 0).sum() == 63
    assert rest.sum() == 4000


def test_the_singled_out_expert_is_one_of_the_ranks_own():
    p = problem(64, 2, local=8)
    for seed in range(20):
        hot = make_routing("one_hot", 1, p, seed=seed, rank=3).topk_ids[0, 0]
        assert 24 <= hot < 32


def test_every_expert_in_every_token_when_all_are_chosen():
    p = problem(4, 4)
    assert (make_routing("uniform", 20, p).topk_ids.sort(dim=1).values == torch.arange(4)).all()


def test_seeds_differ_and_repeat():
    p = problem(64, 4)
    a, b = make_routing("uniform", 16, p, seed=1), make_routing("uniform", 16, p, seed=1)
    assert torch.equal(a.topk_ids, b.topk_ids)
    assert torch.equal(a.topk_weights, b.topk_weights)
    other = make_routing("uniform", 16, p, seed=2)
    assert not torch.equal(a.topk_ids, other.topk_ids)
    torch.manual_seed(123)
    assert torch.equal(make_routing("uniform", 16, p, seed=1).topk_ids, a.topk_ids)


@pytest.mark.parametrize(
    ("kind", "digest"), [("uniform", "3a41057373dbbc3f"), ("zipf:1.2", "13a39f3f842c5f35")]
)
def test_the_same_on_every_machine(kind, digest):
    """A stored timing names its routing by kind and seed; what that means must not drift."""
    routing = make_routing(kind, 64, problem(128, 8), seed=42)
    found = hashlib.sha256(routing.topk_ids.numpy().astype("<i4").tobytes()).hexdigest()
    assert found[:16] == digest


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("even", "routing kind: name: found even, expected uniform, zipf"),
        ("uniform:3", "routing kind: parameter: found 3"),
        ("zipf:much", "zipf exponent: found much"),
        ("zipf:-1", "zipf exponent: found -1"),
        ("zipf:nan", "zipf exponent: found nan"),
        ("one_hot:8", "routing kind: expert: found 8, expected 0 to 7"),
        ("one_hot:-1", "routing kind: expert: found -1"),
    ],
)
def test_unknown_kinds_are_named(kind, message):
    with pytest.raises(RoutingError, match=message):
        make_routing(kind, 4, problem(8, 2))


def test_a_negative_count_is_refused():
    with pytest.raises(RoutingError, match="num_tokens: found -1"):
        make_routing("uniform", -1, problem(8, 2))
