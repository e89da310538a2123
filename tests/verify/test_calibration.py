"""Where the limits come from: correct 16-bit arithmetic, in units of the error scale.

``pytest -s`` prints the table.
"""

import itertools

import pytest
import torch

from autosel.compare import LIMITS
from autosel.core import Activation, QuantScheme
from autosel.error_scale import Rounding, error_scale, judge
from autosel.reference import moe, routed_parts
from autosel.routing_synthetic import make_routing
from tests.verify.layers import dense_moe, layer, problem, tokens

ACTS = {
    "silu": Activation("silu"),
    "swigluoai": Activation("swigluoai"),
    "relu2_no_mul": Activation("relu2_no_mul"),
}
SCHEMES = {
    "w4g32": QuantScheme(4, 32, True),
    "w4ch": QuantScheme(4, -1, True),
    "w4g64 asym fp16": QuantScheme(4, 64, False, scale_dtype="float16"),
    "w8g32 act-order": QuantScheme(8, 32, True, has_g_idx=True),
}


def units(p, *, seed=0, count=48, shift=0.0, out=None, accuracy="exact"):
    """|error| / scale ``[M, H]`` of ``out`` (the rounded emulation by default)."""
    experts = layer(p, seed)
    x = (tokens(count, p, seed) + shift).to(getattr(torch, p.act_dtype))
    routing = make_routing("uniform", count, p, seed=seed)
    judged = judge(x, experts, routing, accuracies=(accuracy,))
    got = (out or rounded)(x, experts, routing)
    return (got - judged.reference).abs() / judged.scales[accuracy]


def rounded(x, experts, routing):
    return moe(x, experts, routing, rounded=True)


@pytest.mark.parametrize("act_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_correct_rounding_stands_far_inside_the_limits(act, act_dtype):
    limits = LIMITS["exact"]
    for (name, scheme), shift in itertools.product(SCHEMES.items(), (0.0, 2.0)):
        z = units(problem(4, 2, 128, 64, scheme, activation=act, act_dtype=act_dtype), shift=shift)
        token = z.square().mean(dim=1).sqrt().max()
        rms, element = z.square().mean().sqrt(), z.max()
        print(
            f"{act.name:13} {act_dtype:9} {name:16} input mean {shift:g}: "
            f"rms {rms:.2f} of {limits.rms:g}, worst token {token:.2f} of {limits.token:g}, "
            f"worst element {element:.2f} of {limits.element:g}"
        )
        assert 0.3 < rms < 0.7
        assert token < 1.3
        assert element < 4


def test_no_false_alarm_over_many_seeds():
    worst = max(
        float(units(problem(4, 2, 64, 32), seed=seed, count=16).square().mean(dim=1).sqrt().max())
        for seed in range(100)
    )
    print(f"worst token of 1600: {worst:.2f} of {LIMITS['exact'].token:g}")
    assert 0.6 < worst < 0.6 * LIMITS["exact"].token


def int8(values):
    """Symmetric 8-bit with one scale a row, the way of dynamically quantised kernels."""
    step = values.abs().amax(dim=1, keepdim=True) / 127
    return torch.where(step > 0, (values / step).round() * step, values)


def a8_output(x, experts, routing):
    """The emulation with 8-bit inputs of both GEMMs."""
    p = experts.problem
    out = torch.zeros(x.shape, dtype=torch.float64)
    for part in routed_parts(x, experts, routing, None):
        for rows, weights in part.rows():
            gate, up = (int8(x[rows].double()) @ part.w13(torch.float64).T).chunk(2, dim=1)
            y = int8(torch.nn.functional.silu(gate) * up) @ part.w2(torch.float64).T
            out.index_add_(0, rows, y * weights.double().unsqueeze(1))
    return out.to(getattr(torch, p.act_dtype)).double()


@pytest.mark.parametrize("channel", [1.0, 50.0])
def test_eight_bit_activations_have_their_own_class(channel):
    p = problem(4, 2, 128, 64)

    def out(x, experts, routing):
        x[:, 3] *= channel
        return a8_output(x, experts, routing)

    experts, x = layer(p), tokens(48, p)
    x[:, 3] *= channel
    routing = make_routing("uniform", 48, p)
    judged = judge(x, experts, routing)
    error = (a8_output(x, experts, routing) - judged.reference).abs()
    own = (error / judged.scales["a8"]).square().mean().sqrt()
    strict = (error / judged.scales["exact"]).square().mean().sqrt()
    print(f"outlier x{channel:g}: a8 rms {own:.2f} of {LIMITS['a8'].rms}, as exact {strict:.2f}")
    assert 0.5 < own < 1.3
    assert strict > LIMITS["exact"].rms


def test_one_pass_gives_the_reference_itself():
    for more in ({}, {"has_bias": True}, {"activation": Activation("relu2_no_mul")}):
        p = problem(4, 2, 64, 32, **more)
        experts, x, routing = layer(p), tokens(9, p), make_routing("uniform", 9, p)
        judged = judge(x, experts, routing)
        torch.testing.assert_close(
            judged.reference, moe(x, experts, routing), rtol=1e-12, atol=1e-13
        )
        assert not judged.overflows.any()
    p = problem(4, 1, 64, 32, router_weight_on_input=True)
    experts, x, routing = layer(p), tokens(9, p), make_routing("uniform", 9, p)
    expected = dense_moe(x, experts, routing, lambda g, u: torch.nn.functional.silu(g) * u)
    torch.testing.assert_close(judge(x, experts, routing).reference, expected)


def test_the_scale_is_the_spread_of_real_rounding():
    """Random rounding of the weights and of the activations spreads as the scale says."""
    p = problem(2, 1, 64, 32, act_dtype="bfloat16")
    experts, x = layer(p), tokens(1, p).repeat(400, 1)
    routing = make_routing("one_hot:1", 1, p)
    many = type(routing)(routing.topk_ids.repeat(400, 1), routing.topk_weights.repeat(400, 1))
    generator = torch.Generator().manual_seed(0)
    unit = Rounding.of(torch.bfloat16).unit

    def noisy(values):
        noise = 2 * torch.rand(values.shape, generator=generator, dtype=torch.float64) - 1
        return values * (1 + unit * noise)

    (part,) = routed_parts(x, experts, many, None)
    rows = []
    for _ in range(400):
        gate, up = noisy(x[:1].double() @ noisy(part.w13(torch.float64)).T).chunk(2, dim=1)
        a = noisy(torch.nn.functional.silu(gate) * up)
        y = noisy(a @ noisy(part.w2(torch.float64)).T) * part.weights[0].double()
        rows.append(noisy(noisy(noisy(y))))
    spread = torch.cat(rows).std(dim=0)
    ratio = spread / error_scale(x[:1], experts, routing)[0]
    print(f"measured spread over error scale: {ratio.min():.2f} to {ratio.max():.2f}")
    # The scale takes the actual rounding of the weights besides, so it is a little larger.
    assert ratio.min() > 0.75
    assert ratio.max() < 1.1


def test_nothing_served_has_no_scale_and_scale_zero_weights_only_the_bias():
    p = problem(4, 2, 64, 32)
    experts, x, routing = layer(p), tokens(5, p), make_routing("uniform", 5, p)
    routing.topk_ids[2] = -1
    scale = error_scale(x, experts, routing)
    assert (scale[2] == 0).all()
    assert (scale[[0, 1, 3, 4]] > 0).all()


def test_overflow_on_the_way_is_flagged():
    p = problem(2, 1, 64, 32, act_dtype="float16")
    experts, x = layer(p), tokens(4, p)
    x[1] *= 400
    routing = make_routing("uniform", 4, p)
    assert judge(x, experts, routing).overflows.tolist() == [False, True, False, False]
    wide = layer(p.with_act_dtype("bfloat16"))
    assert not judge(x.bfloat16(), wide, routing).overflows.any()
