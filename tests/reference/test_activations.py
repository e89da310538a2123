"""Every activation against a scalar formula written here with the math module."""

import math

import pytest
import torch

from autosel.activations import activate, constants
from autosel.core import ACTIVATIONS, Activation
from autosel.errors import UnsupportedError


def sigmoid(v):
    return 1 / (1 + math.exp(-v))


def clamp(v, limit):
    return max(-limit, min(limit, v))


def gelu(v):
    return v * 0.5 * (1 + math.erf(v / math.sqrt(2)))


def gelu_tanh(v):
    return 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))


GATED = {
    Activation("silu"): lambda g, u: g * sigmoid(g) * u,
    Activation("silu", limit=2.0): lambda g, u: min(g, 2) * sigmoid(min(g, 2)) * clamp(u, 2),
    Activation("gelu"): lambda g, u: gelu(g) * u,
    Activation("gelu_tanh"): lambda g, u: gelu_tanh(g) * u,
    Activation("swigluoai"): lambda g, u: (
        min(g, 7) * sigmoid(1.702 * min(g, 7)) * (clamp(u, 7) + 1)
    ),
    Activation("swigluoai", limit=3.0, alpha=0.5, beta=2.0): lambda g, u: (
        min(g, 3) * sigmoid(0.5 * min(g, 3)) * (clamp(u, 3) + 2)
    ),
    Activation("swigluoai_uninterleave", limit=3.0): lambda g, u: (
        min(g, 3) * sigmoid(min(g, 3)) * clamp(u, 3)
    ),
    Activation("swigluoai_uninterleave", limit=3.0, alpha=1.7, beta=1.0): lambda g, u: (
        min(g, 3) * sigmoid(1.7 * min(g, 3)) * (clamp(u, 3) + 1)
    ),
    Activation("swiglustep"): lambda g, u: min(g * sigmoid(g), 7) * clamp(u, 7),
    Activation("situ", beta=2.0): lambda g, u: 2 * math.tanh(g / 2) * sigmoid(g) * u,
    Activation("situ", beta=2.0, linear_beta=3.0): lambda g, u: (
        2 * math.tanh(g / 2) * sigmoid(g) * 3 * math.tanh(u / 3)
    ),
}
PLAIN = {
    Activation("silu_no_mul"): lambda h: h * sigmoid(h),
    Activation("gelu_no_mul"): gelu,
    Activation("gelu_tanh_no_mul"): gelu_tanh,
    Activation("relu2_no_mul"): lambda h: max(h, 0) ** 2,
}
VALUES = [-20.0, -7.5, -3.0, -1.0, -0.25, 0.0, 0.5, 1.0, 2.5, 7.0, 7.5, 20.0]


def test_every_activation_has_a_formula_here():
    assert {a.name for a in [*GATED, *PLAIN]} == set(ACTIVATIONS)


@pytest.mark.parametrize("activation", GATED, ids=lambda a: a.key)
def test_gated(activation):
    pairs = [(g, u) for g in VALUES for u in VALUES]
    h = torch.tensor([[g for g, _ in pairs] + [u for _, u in pairs]], dtype=torch.float64)
    expected = torch.tensor([[GATED[activation](g, u) for g, u in pairs]], dtype=torch.float64)
    torch.testing.assert_close(activate(h, activation), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", PLAIN, ids=lambda a: a.key)
def test_not_gated(activation):
    h = torch.tensor([VALUES], dtype=torch.float64)
    expected = torch.tensor([[PLAIN[activation](v) for v in VALUES]], dtype=torch.float64)
    torch.testing.assert_close(activate(h, activation), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "activation",
    [
        Activation("gelu", limit=7.0),
        Activation("silu", alpha=1.7),
        Activation("swiglustep", beta=1),
    ],
    ids=lambda a: a.key,
)
def test_a_constant_without_a_place_is_refused(activation):
    with pytest.raises(UnsupportedError, match=f"activation {activation.name}: .* found"):
        activate(torch.zeros(1, 4), activation)


def test_defaults_are_the_models():
    assert constants(Activation("swigluoai")) == {"limit": 7.0, "alpha": 1.702, "beta": 1.0}
    assert constants(Activation("silu")) == {}
