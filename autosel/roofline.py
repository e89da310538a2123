"""The least time a layer can take on a machine: the roofline model (Williams et al., 2009).

A call must read every weight of every expert that a token is sent to, read its input and write its
output, and do the multiplications of both matrices. With the read bandwidth ``B`` and the matrix
rate ``P`` that were measured on this machine::

    time >= max(bytes / B, flops / P)

Counted as bytes: the codes, scales, zero points, group indices and biases of the experts HIT, in
the checkpoint's own packing, plus input and output once. Not counted: the intermediate activations,
the routing tensors and the router. With true ceilings it would be a lower bound for any kernel that
starts from cold caches; measured ones are torch's own best (:mod:`autosel.ceilings`), so a kernel
that multiplies better than torch can be below the line where multiplications bound it. A backend
that unpacks weights to 16 bits reads more and cannot reach the part that reading bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from autosel.core import Problem, QuantScheme
from autosel.errors import AutoselError, field_error

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this machine was measured to do: ``read_gbps`` in 1e9 bytes a second, ``matmul_tflops``
    in 1e12 floating-point operations a second in the layer's activation type.
    """

    read_gbps: float
    matmul_tflops: float

    def __post_init__(self) -> None:
        for name in ("read_gbps", "matmul_tflops"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise AutoselError(
                    field_error(f"Ceilings.{name}", "value", value, "a finite number above 0")
                )


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    """The bound at one token count."""

    num_tokens: int
    experts_hit: float
    bytes: float
    flops: float
    time_us: float
    bound: Literal["memory", "compute"]


def roofline(
    problem: Problem,
    num_tokens: int,
    ceilings: Ceilings,
    *,
    experts_hit: float | None = None,
    slots: float | None = None,
) -> RooflinePoint:
    """The bound for ``num_tokens`` tokens.

    ``experts_hit`` is the number of local experts that at least one token is sent to and ``slots``
    the number of (token, expert) pairs served here; left out, both are those expected under
    uniform routing (:func:`expected_experts_hit`).
    """
    if experts_hit is None:
        experts_hit = expected_experts_hit(problem, num_tokens)
    if slots is None:
        slots = num_tokens * problem.top_k * problem.num_local_experts / problem.num_experts
    num_bytes = experts_hit * expert_bytes(problem) + activation_bytes(problem, num_tokens)
    flops = slots * slot_flops(problem)
    memory_us = num_bytes / ceilings.read_gbps / 1e3
    compute_us = flops / ceilings.matmul_tflops / 1e6
    return RooflinePoint(
        num_tokens=num_tokens,
        experts_hit=experts_hit,
        bytes=num_bytes,
        flops=flops,
        time_us=max(memory_us, compute_us),
        bound="memory" if memory_us >= compute_us else "compute",
    )


def expected_experts_hit(problem: Problem, num_tokens: int) -> float:
    """Mean number of local experts hit when each token picks ``top_k`` of them all, uniformly."""
    missed = (1 - problem.top_k / problem.num_experts) ** num_tokens
    return problem.num_local_experts * (1 - missed)


def expert_bytes(problem: Problem) -> int:
    """Bytes of one expert's two matrices with scales, zero points, group indices and biases."""
    _, w13_outputs, w13_inputs = problem.w13_shape
    _, w2_outputs, w2_inputs = problem.w2_shape
    bias = _DTYPE_BYTES[problem.act_dtype] * (w13_outputs + w2_outputs) if problem.has_bias else 0
    return (
        _matrix_bytes(problem.w13, w13_outputs, w13_inputs)
        + _matrix_bytes(problem.w2, w2_outputs, w2_inputs)
        + bias
    )


def activation_bytes(problem: Problem, num_tokens: int) -> int:
    """Bytes of the input read once and the output written once."""
    return 2 * num_tokens * problem.hidden_size * _DTYPE_BYTES[problem.act_dtype]


def slot_flops(problem: Problem) -> int:
    """Operations of one token in one expert: a multiplication and an addition for each weight."""
    _, w13_outputs, w13_inputs = problem.w13_shape
    _, w2_outputs, w2_inputs = problem.w2_shape
    return 2 * (w13_outputs * w13_inputs + w2_outputs * w2_inputs)


def _matrix_bytes(scheme: QuantScheme, outputs: int, inputs: int) -> int:
    groups = scheme.num_groups(inputs)
    words = math.ceil(inputs / scheme.pack_factor) * outputs
    scales = _DTYPE_BYTES[scheme.scale_dtype] * groups * outputs
    zeros = 0 if scheme.symmetric else math.ceil(outputs / scheme.pack_factor) * 4 * groups
    order = 4 * inputs if scheme.has_g_idx else 0
    return 4 * words + scales + zeros + order
