"""Router rules against transformers' own blocks and against values worked out by hand."""

import json
import math

import pytest
import torch

from autosel.errors import RoutingError
from autosel.routing import route
from autosel.routing_spec import RouterSpec


def spec_of(config: dict) -> RouterSpec:
    """The rule of a fixture's model, from its config, as its modeling code has it."""
    top_k = config["num_experts_per_tok"]
    if config["model_type"] == "deepseek_v3":
        return RouterSpec(
            top_k,
            "sigmoid",
            config["norm_topk_prob"],
            config["n_group"],
            config["topk_group"],
            "top2_sum",
            config["routed_scaling_factor"],
            has_correction_bias=True,
        )
    if config["model_type"] == "deepseek_v2":
        grouped = config["topk_method"] == "group_limited_greedy"
        return RouterSpec(
            top_k,
            renormalize=False,
            num_groups=config["n_group"] if grouped else 1,
            topk_groups=config["topk_group"] if grouped else 1,
            scaling_factor=config["routed_scaling_factor"],
        )
    return RouterSpec(top_k, renormalize=config.get("norm_topk_prob", True))


def dense(ids, weights, experts):
    """Weights ``[M, experts]``: what a routing means, whatever the order of its slots."""
    return torch.zeros(len(ids), experts).scatter_(1, ids.long(), weights.float())


def test_every_checkpoint(checkpoint):
    config = json.loads((checkpoint.path / "config.json").read_text(encoding="utf-8"))
    spec = spec_of(config)
    for index in checkpoint.moe_layers:
        expected = checkpoint.expected
        at = f"layers.{index}."
        logits = expected[at + "input"] @ expected[at + "router.weight"].T
        routing = route(logits, spec, expected.get(at + "router.bias"))
        assert routing.topk_ids.dtype == torch.int32
        torch.testing.assert_close(
            dense(routing.topk_ids, routing.topk_weights, logits.shape[1]),
            dense(expected[at + "topk_ids"], expected[at + "topk_weights"], logits.shape[1]),
            rtol=1e-5,
            atol=1e-6,
        )


def one(logits, spec, bias=None):
    bias = None if bias is None else torch.tensor(bias)
    routing = route(torch.tensor([logits]), spec, bias)
    return routing.topk_ids[0].tolist(), routing.topk_weights[0].tolist()


def sigmoid(v):
    return 1 / (1 + math.exp(-v))


def test_softmax_with_and_without_renormalisation():
    logits = [math.log(v) for v in (1.0, 4.0, 2.0, 3.0)]
    assert one(logits, RouterSpec(2, renormalize=False)) == (
        [1, 3],
        pytest.approx([0.4, 0.3]),
    )
    assert one(logits, RouterSpec(2, scaling_factor=2.0)) == (
        [1, 3],
        pytest.approx([8 / 7, 6 / 7]),
    )


def test_softmax_of_the_chosen_is_the_renormalised_softmax():
    logits = torch.randn(50, 16, generator=torch.Generator().manual_seed(0)) * 4
    routing = route(logits, RouterSpec(4))
    chosen = logits.gather(1, routing.topk_ids.long())
    torch.testing.assert_close(routing.topk_weights, chosen.softmax(dim=1))


def test_one_sigmoid_of_the_chosen_logit():
    assert one([0.5, 2.0, -1.0], RouterSpec(1, "sigmoid", False)) == (
        [1],
        pytest.approx([sigmoid(2.0)]),
    )


def test_saturated_sigmoids_still_choose_the_largest_logit():
    assert one([40.0, 80.0, 60.0], RouterSpec(1, "sigmoid", False)) == ([1], [1.0])


def test_the_correction_bias_chooses_and_does_not_weigh():
    spec = RouterSpec(1, "sigmoid", False, has_correction_bias=True)
    assert one([2.0, 1.0], spec, [0.0, 0.5]) == ([1], pytest.approx([sigmoid(1.0)]))


def test_groups_by_their_best_expert_and_by_their_best_two():
    # Group 0 has the best expert, group 1 the better pair.
    logits = [3.0, -3.0, 2.0, 2.5]
    best = RouterSpec(1, "sigmoid", False, 2, 1, "max", has_correction_bias=True)
    pair = RouterSpec(1, "sigmoid", False, 2, 1, "top2_sum", has_correction_bias=True)
    assert one(logits, best, [0.0] * 4)[0] == [0]
    assert one(logits, pair, [0.0] * 4)[0] == [3]


def test_a_group_out_of_the_race_stays_out_with_negative_biased_scores():
    spec = RouterSpec(2, "sigmoid", True, 2, 1, "top2_sum", has_correction_bias=True)
    assert one([1.0, 0.5, 0.0, -0.5], spec, [-2.0] * 4)[0] == [0, 1]


def test_sparsemixer_by_hand():
    # Phi-MoE with jitter 0.01: 2 % of the larger of |logit| and the maximum counts as close.
    logits = [1.0, 0.985, 0.5, 0.1]
    first = 1 / (1 + math.exp(0.985 - 1.0))
    # 0.5 is 49 % away from 0.985, so the second stands alone.
    assert one(logits, RouterSpec(2, "sparsemixer", False, jitter=0.01)) == (
        [0, 1],
        pytest.approx([first, 1.0]),
    )


def test_half_precision_logits_are_scored_in_float32():
    logits = torch.randn(20, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    a, b = route(logits, RouterSpec(8)), route(logits.float(), RouterSpec(8))
    assert torch.equal(a.topk_ids, b.topk_ids)
    assert torch.equal(a.topk_weights, b.topk_weights)
    assert a.topk_weights.dtype == torch.float32


def test_no_tokens():
    spec = RouterSpec(2, "sigmoid", True, 2, 1, "top2_sum", has_correction_bias=True)
    routing = route(torch.empty(0, 8), spec, torch.zeros(8))
    assert routing.topk_ids.shape == (0, 2)


LOGITS = torch.zeros(3, 8)


@pytest.mark.parametrize(
    ("logits", "spec", "bias", "message"),
    [
        (LOGITS[0], RouterSpec(2), None, r"router_logits: tensor: found torch.float32 \[8\]"),
        (LOGITS.long(), RouterSpec(2), None, "router_logits: tensor: found torch.int64"),
        (LOGITS, RouterSpec(9), None, "top_k: value: found 9, expected 1 to 8"),
        (LOGITS, RouterSpec(2), torch.zeros(8), "correction_bias: value: found a tensor"),
        (LOGITS, RouterSpec(2, has_correction_bias=True), None, "correction_bias: value: found no"),
        (
            LOGITS,
            RouterSpec(2, has_correction_bias=True),
            torch.zeros(4),
            r"correction_bias: shape: found \[4\], expected \[8\]",
        ),
        (LOGITS, RouterSpec(2, num_groups=3), None, "num_groups: experts: found 8, expected 3 x n"),
        (LOGITS, RouterSpec(5, num_groups=2), None, "topk_groups: value: found 1"),
        (LOGITS, RouterSpec(2, num_groups=2, topk_groups=3), None, "topk_groups: value: found 3"),
        (
            LOGITS,
            RouterSpec(1, num_groups=8, group_score="top2_sum"),
            None,
            "group_score: value: found top2_sum with 1 experts",
        ),
        (LOGITS, RouterSpec(2, "softmin"), None, "scoring: value: found softmin"),
    ],
)
def test_what_does_not_fit_is_named(logits, spec, bias, message):
    with pytest.raises(RoutingError, match=message):
        route(logits, spec, bias)
