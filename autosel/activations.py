"""The element-wise functions between the two GEMMs, in the halves form, in one table.

Gated ones read ``h = [gate | up]`` along the last axis; the others (``_no_mul``) read ``h`` whole.
``relu2`` is squared ReLU (So et al., Primer, arXiv:2109.08668); ``swigluoai`` is the clamped
SwiGLU of gpt-oss with its constants as defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from autosel.core import Activation
from autosel.errors import UnsupportedError, field_error

Constants = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Formula:
    """``function(gate, up, constants)``; ``defaults`` names the constants it has a place for.

    A default of None means that the constant may be absent. For a function that is not gated,
    ``gate`` is the whole of ``h`` and ``up`` is None.
    """

    function: Callable[[torch.Tensor, torch.Tensor, Constants], torch.Tensor]
    defaults: Mapping[str, float | None]


def _clamped(
    gate: torch.Tensor, up: torch.Tensor, limit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    # The gate has no lower clamp: its sigmoid already vanishes there.
    return gate.clamp(max=limit), up.clamp(-limit, limit)


def _silu(gate: torch.Tensor, up: torch.Tensor, c: Constants) -> torch.Tensor:
    if "limit" in c:
        gate, up = _clamped(gate, up, c["limit"])
    return functional.silu(gate) * up


def _swiglu_oai(gate: torch.Tensor, up: torch.Tensor, c: Constants) -> torch.Tensor:
    gate, up = _clamped(gate, up, c["limit"])
    return gate * torch.sigmoid(c["alpha"] * gate) * (up + c["beta"])


def _swiglu_step(gate: torch.Tensor, up: torch.Tensor, c: Constants) -> torch.Tensor:
    return functional.silu(gate).clamp(max=c["limit"]) * up.clamp(-c["limit"], c["limit"])


def _situ(gate: torch.Tensor, up: torch.Tensor, c: Constants) -> torch.Tensor:
    beta, linear = c["beta"], c.get("linear_beta", 0.0)
    if linear > 0:
        up = linear * torch.tanh(up / linear)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up


_FORMULAS: dict[str, _Formula] = {
    "silu": _Formula(_silu, {"limit": None}),
    "gelu": _Formula(lambda g, u, c: functional.gelu(g) * u, {}),
    "gelu_tanh": _Formula(lambda g, u, c: functional.gelu(g, approximate="tanh") * u, {}),
    "swigluoai": _Formula(_swiglu_oai, {"limit": 7.0, "alpha": 1.702, "beta": 1.0}),
    "swigluoai_uninterleave": _Formula(_swiglu_oai, {"limit": None, "alpha": 1.0, "beta": 0.0}),
    "swiglustep": _Formula(_swiglu_step, {"limit": 7.0}),
    "situ": _Formula(_situ, {"beta": None, "linear_beta": None}),
    "silu_no_mul": _Formula(lambda h, _, c: functional.silu(h), {}),
    "gelu_no_mul": _Formula(lambda h, _, c: functional.gelu(h), {}),
    "gelu_tanh_no_mul": _Formula(lambda h, _, c: functional.gelu(h, approximate="tanh"), {}),
    "relu2_no_mul": _Formula(lambda h, _, c: functional.relu(h).square(), {}),
}


def constants(activation: Activation) -> dict[str, float]:
    """The constants of the formula: the model's, else the function's own; absent ones left out.

    Raises UnsupportedError for a constant that the function has no place for: dropping it would
    compute another model.
    """
    formula = _FORMULAS[activation.name]
    found: dict[str, float] = {}
    for name in ("limit", "alpha", "beta", "linear_beta"):
        value = getattr(activation, name)
        if value is not None and name not in formula.defaults:
            raise UnsupportedError(
                field_error(f"activation {activation.name}", name, value, "nothing")
            )
        value = formula.defaults.get(name) if value is None else value
        if value is not None:
            found[name] = float(value)
    return found


def activate(h: torch.Tensor, activation: Activation) -> torch.Tensor:
    """``act(h)``: ``[..., s * I]`` to ``[..., I]`` in h's dtype, ``s`` = 2 when gated, else 1."""
    gate, up = h.chunk(2, dim=-1) if activation.gated else (h, h)
    return _FORMULAS[activation.name].function(gate, up, constants(activation))
