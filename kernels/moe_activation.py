# ruff: noqa: RET505 (the device language wants both branches, and no stars)
"""The element-wise functions between the two GEMMs, in float32 on accumulators.

ACT names are the project's; LIMIT, ALPHA, BETA and LINEAR_BETA are compile-time floats, and a
LIMIT of 0 means no clamp. ``sigmoid`` is written out, so that gate values far below zero give 0
and not NaN: exp overflows to infinity and 1 / infinity is 0.
"""

import triton
import triton.language as tl


@triton.jit
def _sigmoid(v):
    return 1.0 / (1.0 + tl.exp(-v))


@triton.jit
def _tanh(v):
    return 2.0 * _sigmoid(2.0 * v) - 1.0


@triton.jit
def _clamp(v, LIMIT: tl.constexpr):
    return tl.minimum(tl.maximum(v, -LIMIT), LIMIT)


@triton.jit
def _gelu(v, TANH: tl.constexpr):
    if TANH:
        return 0.5 * v * (1.0 + _tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)))
    return 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))


@triton.jit
def gated_activation(g, u, ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
                     BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):  # fmt: skip
    if ACT == "silu":
        if LIMIT > 0:
            g = tl.minimum(g, LIMIT)
            u = _clamp(u, LIMIT)
        return g * _sigmoid(g) * u
    elif ACT == "gelu" or ACT == "gelu_tanh":
        return _gelu(g, ACT == "gelu_tanh") * u
    elif ACT == "swigluoai" or ACT == "swigluoai_uninterleave":
        g = tl.minimum(g, LIMIT)
        return g * _sigmoid(ALPHA * g) * (_clamp(u, LIMIT) + BETA)
    elif ACT == "swiglustep":
        return tl.minimum(g * _sigmoid(g), 7.0) * _clamp(u, 7.0)
    else:
        tl.static_assert(ACT == "situ", "unknown activation")
        if LINEAR_BETA > 0:
            u = LINEAR_BETA * _tanh(u / LINEAR_BETA)
        return BETA * _tanh(g / BETA) * _sigmoid(g) * u


@triton.jit
def unary_activation(v, ACT: tl.constexpr):
    if ACT == "relu2_no_mul":
        v = tl.maximum(v, 0.0)
        return v * v
    elif ACT == "silu_no_mul":
        return v * _sigmoid(v)
    else:
        tl.static_assert(ACT == "gelu_no_mul" or ACT == "gelu_tanh_no_mul", "unknown activation")
        return _gelu(v, ACT == "gelu_tanh_no_mul")


@triton.jit
def activate_rows(acc, R: tl.constexpr, T: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
                  LIMIT: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
                  LINEAR_BETA: tl.constexpr):  # fmt: skip
    """Accumulators ``[16 R, T]`` to activations ``[8 R, T]`` (gated) or ``[16 R, T]``.

    Gated rows come as 8 gate, 8 up, so both values of a column are in one thread."""
    if GATED:
        g, u = tl.split(tl.permute(tl.reshape(acc, [R, 2, 8, T]), [0, 2, 3, 1]))
        h = gated_activation(g, u, ACT, LIMIT, ALPHA, BETA, LINEAR_BETA)
        return tl.reshape(h, [R * 8, T])
    else:
        return unary_activation(acc, ACT)
