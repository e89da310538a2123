"""Router rules at odd settings, against plain Python that follows the papers word by word."""

import math
import random

import pytest
import torch

from autosel.routing import route
from autosel.routing_spec import RouterSpec


def by_the_book(logits, spec, bias):
    """One token: experts and weights, in plain numbers (double precision)."""
    if spec.scoring == "softmax":
        top = max(logits)
        exps = [math.exp(v - top) for v in logits]
        scores = [e / sum(exps) for e in exps]
    else:
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    choice = [s + b for s, b in zip(scores, bias, strict=True)] if bias else list(scores)
    experts = list(range(len(logits)))
    if spec.num_groups > 1:
        size = len(logits) // spec.num_groups
        groups = [experts[g * size : (g + 1) * size] for g in range(spec.num_groups)]
        count = 1 if spec.group_score == "max" else 2
        values = [sum(sorted((choice[e] for e in g), reverse=True)[:count]) for g in groups]
        kept = sorted(range(spec.num_groups), key=lambda g: -values[g])[: spec.topk_groups]
        experts = [e for g in kept for e in groups[g]]
    chosen = sorted(experts, key=lambda e: -choice[e])[: spec.top_k]
    weights = [scores[e] for e in chosen]
    if spec.renormalize:
        weights = [w / sum(weights) for w in weights]
    return chosen, [w * spec.scaling_factor for w in weights]


@pytest.mark.parametrize("seed", range(40))
def test_random_rules(seed):
    """Any mixture of rule, bias (negative ones too), groups, scaling and number of slots."""
    draw = random.Random(seed)
    groups = draw.choice([1, 1, 2, 4])
    size = draw.choice([2, 3, 8])
    experts = groups * size
    kept = draw.randint(1, groups)
    top_k = draw.randint(1, kept * size)
    with_bias = draw.random() < 0.6
    spec = RouterSpec(
        top_k,
        draw.choice(["softmax", "sigmoid"]),
        draw.random() < 0.5,
        groups,
        kept,
        draw.choice(["max", "top2_sum"]),
        draw.choice([1.0, 2.5, 0.1]),
        with_bias,
    )
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, experts, generator=generator) * 2
    bias = (torch.randn(experts, generator=generator) - 1) if with_bias else None
    found = route(logits, spec, bias)
    for token in range(7):
        ids, weights = by_the_book(
            logits[token].tolist(), spec, bias.tolist() if with_bias else None
        )
        assert found.topk_ids[token].tolist() == ids
        assert found.topk_weights[token].tolist() == pytest.approx(weights, rel=1e-4)


RULES = {
    "softmax": RouterSpec(3),
    "sigmoid": RouterSpec(3, "sigmoid", True),
    "groups": RouterSpec(3, "sigmoid", True, 4, 2, "top2_sum", 2.5, True),
    "groups by the best": RouterSpec(3, "softmax", False, 4, 2, "max"),
    "sparsemixer": RouterSpec(2, "sparsemixer", False, jitter=0.01),
}


def bias_of(spec, value=0.0):
    return torch.full((8,), value) if spec.has_correction_bias else None


@pytest.mark.parametrize("name", RULES)
def test_all_logits_equal(name):
    """Any choice is right; it must be distinct experts of at most the chosen groups, evenly."""
    spec = RULES[name]
    found = route(torch.zeros(5, 8), spec, bias_of(spec))
    again = route(torch.zeros(5, 8), spec, bias_of(spec))
    assert torch.equal(found.topk_ids, again.topk_ids)
    for ids in found.topk_ids.tolist():
        assert len(set(ids)) == spec.top_k
        assert len({e // (8 // spec.num_groups) for e in ids}) <= (
            spec.topk_groups if spec.num_groups > 1 else 8
        )
    if name != "sparsemixer":
        assert torch.equal(found.topk_weights, found.topk_weights[:, :1].expand(5, spec.top_k))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", RULES)
def test_a_token_whose_logits_are_not_finite_spoils_no_other(name, bad):
    """Its ids stay experts, so that no kernel reads out of bounds; its weights may be NaN."""
    spec = RULES[name]
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    plain = route(logits, spec, bias_of(spec))
    for spoilt in (logits.clone(), logits.clone()):
        spoilt[1] = bad
        spoilt[2, 5] = bad
        found = route(spoilt, spec, bias_of(spec))
        assert int(found.topk_ids.min()) >= 0
        assert int(found.topk_ids.max()) < 8
        for row in (0, 3):
            assert torch.equal(found.topk_ids[row], plain.topk_ids[row])
            assert torch.equal(found.topk_weights[row], plain.topk_weights[row])


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "groups", "groups by the best"])
def test_masked_experts_are_chosen_last_and_weigh_nothing(name):
    """Logits of -inf switch experts off; with fewer left than slots the rest weighs 0."""
    spec = RULES[name]
    logits = torch.full((1, 8), -float("inf"))
    logits[0, 4], logits[0, 5] = 1.0, 0.5
    found = route(logits, spec, bias_of(spec))
    assert found.topk_ids[0, :2].tolist() == [4, 5]
    assert torch.isfinite(found.topk_weights).all()
    assert found.topk_weights[0, 2] == 0
    assert found.topk_weights[0, :2].min() > 0


def test_renormalising_scores_that_are_all_zero():
    """Sigmoids of -inf and of very negative logits sum to 0: weights are 0, not NaN."""
    for value in (-float("inf"), -1e4, -200.0):
        found = route(torch.full((2, 8), value), RouterSpec(3, "sigmoid", True))
        assert torch.isfinite(found.topk_weights).all()
        assert found.topk_weights.sum() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", RULES)
def test_logits_of_other_types(name, dtype):
    spec = RULES[name]
    logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(4)).to(dtype)
    a, b = route(logits, spec, bias_of(spec)), route(logits.float(), spec, bias_of(spec))
    assert torch.equal(a.topk_ids, b.topk_ids)
    assert torch.equal(a.topk_weights, b.topk_weights)
    assert (a.topk_ids.dtype, a.topk_weights.dtype) == (torch.int32, torch.float32)


def test_large_float16_logits_do_not_overflow():
    logits = torch.tensor([[65504.0, 65504.0, -65504.0, 0.0]], dtype=torch.float16)
    found = route(logits, RouterSpec(2))
    assert sorted(found.topk_ids[0].tolist()) == [0, 1]
    assert found.topk_weights[0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("experts", [1, 3, 60])
def test_every_expert_is_chosen(scoring, experts):
    logits = torch.randn(4, experts, generator=torch.Generator().manual_seed(5))
    found = route(logits, RouterSpec(experts, scoring, True))
    assert [sorted(ids) for ids in found.topk_ids.tolist()] == [list(range(experts))] * 4
    torch.testing.assert_close(found.topk_weights.sum(-1), torch.ones(4))


def test_one_expert_and_no_tokens():
    assert route(torch.randn(3, 1), RouterSpec(1)).topk_weights.tolist() == [[1.0]] * 3
    for spec in RULES.values():
        empty = route(torch.empty(0, 8), spec, bias_of(spec))
        assert empty.topk_ids.shape == empty.topk_weights.shape == (0, spec.top_k)


def test_views_and_gradients_of_logits():
    wide = torch.randn(5, 16, generator=torch.Generator().manual_seed(6))
    for view in (wide[:, ::2], wide[:, :8], wide.t()[:8].t()):
        a, b = route(view, RouterSpec(2)), route(view.contiguous(), RouterSpec(2))
        assert torch.equal(a.topk_ids, b.topk_ids)
        assert torch.equal(a.topk_weights, b.topk_weights)
        assert a.topk_ids.is_contiguous()
        assert a.topk_weights.is_contiguous()
