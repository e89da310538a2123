"""The emulation against values worked out by hand and against another emulation."""

import math
from dataclasses import replace

import pytest
import torch

from autosel.canonical import dequantize_expert
from autosel.core import (
    Activation,
    CanonicalExperts,
    Problem,
    QuantScheme,
    QuantWeight,
    Routing,
)
from autosel.errors import AutoselError, RoutingError
from autosel.expert_map import local_map
from autosel.packing import pack_last
from autosel.reference import moe
from autosel.routing_synthetic import make_routing
from tests.verify.layers import dense_moe, layer, problem, tokens

CHANNEL = QuantScheme(4, -1, True, scale_dtype="float32")


def by_hand(values, scheme=CHANNEL, bias=None) -> QuantWeight:
    """Weights ``[E, N, K]`` of any value: code 9 over zero 8 is one, the scale is the rest."""
    values = torch.as_tensor(values, dtype=torch.float32)
    assert values.shape[2] == 1
    codes = torch.full(values.shape, 9, dtype=torch.uint8)
    return QuantWeight(
        scheme,
        1,
        pack_last(codes, 4),
        values.clone(),
        bias=None if bias is None else torch.as_tensor(bias, dtype=torch.float32),
    )


def one_unit(gate, up, down, *, on_input=False, act_dtype="float32"):
    """One expert with one input, one intermediate and one output."""
    p = Problem(
        1, 1, 1, 1, 1, CHANNEL, CHANNEL, act_dtype=act_dtype, router_weight_on_input=on_input
    )
    return CanonicalExperts(p, by_hand([[[gate], [up]]]), by_hand([[[down]]]))


def routed(ids, weights) -> Routing:
    return Routing(torch.tensor(ids, dtype=torch.int32), torch.tensor(weights))


def scalar(experts, x, weight, **how):
    return float(moe(torch.tensor([[x]]), experts, routed([[0]], [[weight]]), **how))


def test_gate_comes_before_up():
    assert scalar(one_unit(2, -1, 1), 1.0, 1.0) == pytest.approx(-1.7616, abs=5e-5)


def test_router_weight_goes_where_the_flag_says():
    assert scalar(one_unit(2, 3, 1), 1.0, 0.5) == pytest.approx(2.6424, abs=5e-5)
    assert scalar(one_unit(2, 3, 1, on_input=True), 1.0, 0.5) == pytest.approx(1.0966, abs=5e-5)


@pytest.mark.parametrize(("act_dtype", "rounded"), [("float16", math.inf), ("bfloat16", 450.56)])
def test_an_intermediate_above_65504(act_dtype, rounded):
    experts = one_unit(300, 300, 0.5, act_dtype=act_dtype)
    for dtype in (torch.float32, torch.float64):
        assert scalar(experts, 1.0, 0.01, dtype=dtype) == pytest.approx(450, rel=1e-6)
    got = scalar(experts, 1.0, 0.01, rounded=True)
    # 300 * 300 is 90112 in bfloat16 and infinite in float16.
    assert got == pytest.approx(rounded, rel=2**-8)


def constant_experts(outputs, held, total):
    """Experts whose output is a constant: scale 0 makes every weight 0, the bias is the rest."""
    p = Problem(total, len(outputs), 2, 1, 1, CHANNEL, CHANNEL, has_bias=True, act_dtype="float32")
    count = len(outputs)
    w13 = by_hand(torch.zeros(count, 2, 1), bias=torch.zeros(count, 2))
    w2 = by_hand(torch.zeros(count, 1, 1), bias=[[v] for v in outputs])
    assert len(held) == total
    return CanonicalExperts(p, w13, w2), torch.tensor(held, dtype=torch.int32)


def test_an_expert_elsewhere_does_not_wrap_to_the_last_one():
    experts, held = constant_experts([10.0, 100.0], [-1, -1, 0, 1], 4)
    routing = routed([[0, 2], [3, -1]], [[0.3, 0.7], [0.6, 0.4]])
    out = moe(torch.ones(2, 1), experts, routing, expert_map=held)
    torch.testing.assert_close(out, torch.tensor([[7.0], [60.0]], dtype=torch.float64))


@pytest.mark.parametrize("stray", [4, 2147483647, -5, 2**32, -(2**40)])
@pytest.mark.parametrize("mapped", [True, False])
def test_ids_that_are_no_expert_add_nothing(stray, mapped):
    held = [-1, -1, 0, 1] if mapped else [0, 1, 2, 3]
    outputs = [10.0, 100.0] if mapped else [1.0, 1.0, 10.0, 100.0]
    experts, held = constant_experts(outputs, held, 4)
    # A weight that is not a number must not come through a slot that nobody serves.
    routing = Routing(torch.tensor([[stray, 2]]), torch.tensor([[math.nan, 0.5]]))
    out = moe(torch.ones(1, 1), experts, routing, expert_map=held if mapped else None)
    assert out.tolist() == [[5.0]]


SCHEMES = {
    "4 bit": QuantScheme(4, 32, True),
    "4 bit asym": QuantScheme(4, 32, False, scale_dtype="float16"),
    "4 bit act-order": QuantScheme(4, 32, True, has_g_idx=True),
    "8 bit": QuantScheme(8, 32, True),
    "8 bit asym channel": QuantScheme(8, -1, False),
    "partial group": QuantScheme(4, 48, False),
}


def silu(gate, up):
    return gate / (1 + torch.exp(-gate)) * up


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_an_emulation_that_shares_no_code(scheme, with_bias):
    p = problem(4, 3, 64, 32, scheme, has_bias=with_bias)
    experts, x = layer(p), tokens(9, p)
    routing = make_routing("uniform", 9, p)
    expected = dense_moe(x, experts, routing, silu)
    torch.testing.assert_close(moe(x, experts, routing), expected, rtol=1e-10, atol=1e-12)
    single = moe(x, experts, routing, dtype=torch.float32)
    assert single.dtype == torch.float32
    assert (single - expected).norm() < 1e-6 * expected.norm()


def test_router_weight_on_input_expert_map_and_stray_ids_together():
    p = problem(8, 1, 64, 32, local=3, router_weight_on_input=True)
    experts, x = layer(p), tokens(24, p)
    held = local_map(p, rank=1)
    routing = make_routing("uniform", 24, p)
    routing.topk_ids[5, 0] = 8
    expected = dense_moe(x, experts, routing, silu, expert_map=held)
    assert (expected.norm(dim=1) > 0).sum() >= 5
    got = moe(x, experts, routing, expert_map=held)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_not_gated():
    p = problem(4, 2, 64, 32, activation=Activation("relu2_no_mul"))
    experts, x = layer(p), tokens(9, p)
    routing = make_routing("uniform", 9, p)
    expected = dense_moe(x, experts, routing, lambda h: h.clamp(min=0) ** 2)
    torch.testing.assert_close(moe(x, experts, routing), expected, rtol=1e-10, atol=1e-12)


def test_w13_and_w2_of_one_shape_may_have_different_group_counts():
    p = problem(3, 2, 512, 128, QuantScheme(4, 128, True))
    experts, x = layer(p), tokens(5, p)
    assert (experts.w13.scales.shape[2], experts.w2.scales.shape[2]) == (4, 1)
    routing = make_routing("uniform", 5, p)
    expected = dense_moe(x, experts, routing, silu)
    torch.testing.assert_close(moe(x, experts, routing), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("hidden", "inter"), [(160, 96), (160, 8), (8, 8)])
def test_odd_sizes(hidden, inter):
    p = problem(3, 2, hidden, inter)
    experts, x = layer(p), tokens(5, p)
    routing = make_routing("uniform", 5, p)
    expected = dense_moe(x, experts, routing, silu)
    torch.testing.assert_close(moe(x, experts, routing), expected, rtol=1e-10, atol=1e-12)


def act_order_column(codes, g_idx):
    """w2 of one output: zero 0, groups with scales 0.5 and 2; w13 makes the inputs 1, 2, 3, 4."""
    inputs = len(codes)
    scheme = QuantScheme(4, 2, False, has_g_idx=True, scale_dtype="float32")
    w2 = QuantWeight(
        scheme,
        inputs,
        pack_last(torch.tensor([[codes]], dtype=torch.uint8), 4),
        torch.tensor([[[0.5, 2.0]]]),
        torch.zeros(1, 1, 2, dtype=torch.uint8),
        torch.tensor([g_idx], dtype=torch.int32),
    )
    # relu2 squares, so the first GEMM gives the square roots. Codes are 1, 2, 3, 4 as well.
    w13 = by_hand([[[math.sqrt(c)] for c in codes]])
    relu2 = Activation("relu2_no_mul")
    p = Problem(1, 1, 1, 1, inputs, CHANNEL, scheme, relu2, "float32")
    return CanonicalExperts(p, w13, w2)


@pytest.mark.parametrize(
    ("codes", "g_idx", "expected"),
    [
        ([1, 2, 3, 4], [1, 0, 1, 0], 30.0),
        ([1, 2], [1, 0], 4.0),
        ([3, 4], [1, 0], 26.0),
    ],
    ids=["whole", "rank 0", "rank 1"],
)
def test_act_order_survives_a_split_of_the_inputs(codes, g_idx, expected):
    experts = act_order_column(codes, g_idx)
    assert scalar(experts, 1.0, 1.0) == pytest.approx(expected, rel=1e-6)


def test_a_split_inside_a_group_sums_to_the_whole():
    whole = layer(problem(3, 2, 64, 768, QuantScheme(4, 128, False)))
    p = whole.problem
    x, routing = tokens(6, p), make_routing("uniform", 6, p)
    finer = QuantScheme(4, 64, False)
    total = torch.zeros(6, 64, dtype=torch.float64)
    for rank, groups in enumerate([[0, 0, 1], [1, 2, 2], [3, 3, 4], [4, 5, 5]]):
        start = 192 * rank
        part = slice(start, start + 192)
        rows = torch.cat([torch.arange(768)[part], 768 + torch.arange(768)[part]])
        w13 = replace(
            whole.w13,
            codes=whole.w13.codes[:, rows],
            scales=whole.w13.scales[:, rows],
            zero_points=whole.w13.zero_points[:, rows],
        )
        w2 = replace(
            whole.w2,
            scheme=finer,
            num_inputs=192,
            codes=whole.w2.codes[:, :, start // 8 : (start + 192) // 8],
            scales=whole.w2.scales[:, :, groups],
            zero_points=whole.w2.zero_points[:, :, groups],
        )
        split = CanonicalExperts(replace(p, intermediate_size=192, w2=finer), w13, w2)
        total += moe(x, split, routing)
    torch.testing.assert_close(total, moe(x, whole, routing), rtol=1e-10, atol=1e-12)


def test_identical_rows_give_identical_results():
    p = problem(8, 2)
    experts = layer(p)
    x = tokens(1, p)
    routing = make_routing("uniform", 1, p)
    many = Routing(routing.topk_ids.repeat(64, 1), routing.topk_weights.repeat(64, 1))
    one = moe(x, experts, routing)
    torch.testing.assert_close(moe(x.repeat(64, 1), experts, many), one.expand(64, -1))


def test_an_expert_twice_in_one_token_counts_twice():
    p = problem(4, 2)
    experts, x = layer(p), tokens(1, p)
    twice = moe(x, experts, routed([[3, 3]], [[0.25, 0.5]]))
    once = moe(x, experts, routed([[3, -1]], [[0.75, 0.0]]))
    torch.testing.assert_close(twice, once)


def test_all_tokens_on_one_expert_and_on_all_but_one():
    p = problem(64, 2, 64, 32)
    experts, x = layer(p), tokens(40, p)
    for kind in ("one_hot:5", "all_but_one:5"):
        routing = make_routing(kind, 40, p)
        expected = dense_moe(x, experts, routing, silu)
        torch.testing.assert_close(moe(x, experts, routing), expected, rtol=1e-10, atol=1e-12)


def test_more_rows_than_are_multiplied_at_once(monkeypatch):
    p = problem(2, 1, 64, 32)
    experts, x = layer(p), tokens(37, p)
    routing = make_routing("one_hot", 37, p)
    whole = moe(x, experts, routing)
    monkeypatch.setattr("autosel.reference.ROWS_AT_ONCE", 8)
    torch.testing.assert_close(moe(x, experts, routing), whole, rtol=1e-12, atol=1e-14)


def test_no_tokens():
    p = problem(4, 2)
    out = moe(tokens(0, p), layer(p), make_routing("uniform", 0, p))
    assert out.shape == (0, p.hidden_size)
    assert out.dtype == torch.float64


def test_rounding_of_weights_alone_is_seen():
    """The rounded form really rounds: it differs from the truth by about the act dtype's unit."""
    for act_dtype, unit in (("bfloat16", 2**-8), ("float16", 2**-11)):
        p = problem(4, 2, act_dtype=act_dtype)
        experts, x, routing = layer(p), tokens(16, p), make_routing("uniform", 16, p)
        truth = moe(x, experts, routing)
        error = float((moe(x, experts, routing, rounded=True) - truth).norm() / truth.norm())
        assert 0.5 * unit < error < 3 * unit


def test_callers_settings_neither_matter_nor_change():
    p = problem(4, 2)
    experts, x, routing = layer(p), tokens(16, p), make_routing("uniform", 16, p)
    plain = moe(x, experts, routing, dtype=torch.float32)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = moe(x.clone().requires_grad_(), experts, routing, dtype=torch.float32)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert not got.requires_grad
    assert torch.equal(got, plain)


def test_inputs_stay_as_they_are():
    p = problem(4, 2, 64, 32, QuantScheme(4, 32, False, has_g_idx=True), has_bias=True)
    experts, x, routing = layer(p), tokens(5, p), make_routing("uniform", 5, p)
    watched = [x, routing.topk_ids, routing.topk_weights]
    watched += [*experts.w13.tensors.values(), *experts.w2.tensors.values()]
    before = [t.clone() for t in watched]
    moe(x, experts, routing, rounded=True)
    assert all(torch.equal(a, b) for a, b in zip(watched, before, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.bfloat16}, "reference: dtype: found torch.bfloat16"),
        ({"x": torch.ones(2, 5)}, r"x: shape: found \[2, 5\], expected \[tokens, 128\]"),
        ({"x": torch.ones(3, 128)}, "topk_ids: tokens: found 2, expected 3"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    p = problem(4, 2)
    arguments = {"x": tokens(2, p), "experts": layer(p), "routing": make_routing("uniform", 2, p)}
    with pytest.raises(AutoselError, match=message):
        moe(**{**arguments, **change})


def test_local_experts_without_a_map_are_refused():
    p = problem(8, 2, local=2)
    with pytest.raises(RoutingError, match="expert_map: value: found nothing"):
        moe(tokens(2, p), layer(p), make_routing("uniform", 2, p))


def test_planted_faults_would_be_seen():
    """What the emulation must not do: ignore the index, exchange the halves, drop a slot."""
    p = problem(4, 2, 64, 32, QuantScheme(4, 32, True, has_g_idx=True))
    experts, x, routing = layer(p), tokens(9, p), make_routing("uniform", 9, p)
    expected = dense_moe(x, experts, routing, silu)
    in_order = torch.arange(64, dtype=torch.int32).div(32, rounding_mode="floor").expand(4, -1)
    halves = torch.cat([experts.w13.codes[:, 32:], experts.w13.codes[:, :32]], dim=1)
    dropped = Routing(routing.topk_ids.clone(), routing.topk_weights)
    dropped.topk_ids[3, 1] = -1
    for wrong in (
        moe(x, replace(experts, w13=replace(experts.w13, g_idx=in_order)), routing),
        moe(x, replace(experts, w13=replace(experts.w13, codes=halves)), routing),
        moe(x, experts, dropped),
    ):
        assert (wrong - expected).norm() > 0.01 * expected.norm()


def test_dequantised_weights_are_the_ones_used():
    """A one-hot input through a linear unit reads the weight out again."""
    p = problem(2, 1, 64, 32, activation=Activation("relu2_no_mul"), act_dtype="float32")
    experts = layer(p)
    routing = Routing(torch.ones(64, 1, dtype=torch.int32), torch.ones(64, 1))
    w13, w2 = (dequantize_expert(w, 1, torch.float64) for w in (experts.w13, experts.w2))
    expected = (w13.clamp(min=0) ** 2).T @ w2.T
    torch.testing.assert_close(moe(torch.eye(64), experts, routing), expected)
