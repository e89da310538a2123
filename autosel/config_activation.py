"""Which function stands between the two GEMMs, by ``config.json`` and the quantisation settings.

A constant that is written down and has no place in the function is refused: leaving it out would
be another model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autosel.core import Activation
from autosel.errors import ConfigError, field_error
from autosel.json_file import Section
from autosel.model_families import Family

#: The more particular name wins: Nemotron-H has a second activation for its Mamba blocks.
NAMES = ("mlp_hidden_act", "hidden_activation", "hidden_act", "activation_function")

#: Names of config files. No config asks for a plain silu or gelu without a gate.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "swiglu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu2": "relu2_no_mul",
    "relu_squared": "relu2_no_mul",
    "swigluoai": "swigluoai",
    "swiglustep": "swiglustep",
    "situ": "situ",
}
#: Step-3.5's clamps of routed experts after silu, one a decoder layer, 0 or null for none.
_OF_LAYERS = "swiglu_limits"


@dataclass(frozen=True, slots=True)
class _Constant:
    """A constant's value, None where it is not said, and where it stands."""

    value: float | None
    where: str

    def no_place(self, name: str) -> ConfigError:
        return ConfigError(
            field_error(self.where, "value", self.value, f"none: {name} has no such")
        )


def read_activation(
    text: Section, quant: Section | None, family: Family | None, layer: int | None = None
) -> Activation:
    """The function of decoder layer number ``layer``, None where it has no number.

    Raises ConfigError, naming file and line, for what is missing or not understood.
    """
    named = next((n for n in NAMES if n in text), None)
    if family is not None and family.activation == "swigluoai":
        value = "swigluoai"  # gpt-oss says silu and means its own clamped form
    elif named is not None:
        value = str(text.string(named)).lower()
    elif family is not None:
        value = family.activation
    else:
        raise ConfigError(field_error(text.where(NAMES[0]), "value", "nothing", "an activation"))
    found = _ACTIVATIONS.get(value)
    if found is None:
        expected = f"one of {', '.join(_ACTIVATIONS)}"
        raise ConfigError(
            field_error(text.where(named or NAMES[0]), "activation", repr(value), expected)
        )
    clamp = _of_layer(text, layer)
    if clamp:
        if found not in ("silu", "swiglustep"):
            raise _Constant(clamp, text.where(_OF_LAYERS)).no_place(found)
        return Activation("swiglustep", limit=clamp)
    return _with_constants(found, text, quant)


def _with_constants(name: str, text: Section, quant: Section | None) -> Activation:
    """Clamp limit, alpha and beta: those of the quantisation config before the model's own."""

    def constant(in_quant: str | None, in_model: str) -> _Constant:
        if quant is not None and in_quant is not None and in_quant in quant:
            return _Constant(quant.number(in_quant), quant.where(in_quant))
        return _Constant(text.number(in_model), text.where(in_model))

    limit = constant("gemm1_clamp_limit", "swiglu_limit")
    alpha = constant("gemm1_alpha", "swiglu_alpha")
    beta = constant("gemm1_beta", "swiglu_beta")
    if limit.value is not None and limit.value <= 0:
        raise ConfigError(field_error(limit.where, "value", limit.value, "above 0, or null"))
    if name == "swigluoai":
        given = (limit.value, alpha.value, beta.value)
        own = (7.0, 1.702, 1.0)
        used = tuple(o if g is None else g for g, o in zip(given, own, strict=True))
        return Activation(name) if used == own else _uninterleaved(*used)
    # An alpha of 1 and a beta of 0 are what silu does without them.
    if name == "silu" and (alpha.value not in (None, 1.0) or beta.value not in (None, 0.0)):
        if limit.value is None:
            said = alpha if alpha.value is not None else beta
            raise ConfigError(
                field_error(said.where, "value", said.value, "none without a swiglu_limit")
            )
        return _uninterleaved(limit.value, alpha.value, beta.value)
    if name in ("silu", "swiglustep"):
        for said in (alpha, beta) if name == "swiglustep" else ():
            if said.value is not None:
                raise said.no_place(name)
        return Activation(name, limit=limit.value)
    for said in (limit, alpha, beta):
        if said.value is not None:
            raise said.no_place(name)
    if name == "situ":
        own_beta = constant(None, "situ_beta")
        if own_beta.value is None:
            raise ConfigError(field_error(own_beta.where, "value", "nothing", "a number"))
        linear = constant(None, "situ_linear_beta")
        return Activation(name, beta=own_beta.value, linear_beta=linear.value)
    return Activation(name)


def _uninterleaved(limit: float, alpha: float | None, beta: float | None) -> Activation:
    return Activation("swigluoai_uninterleave", limit=limit, alpha=alpha, beta=beta)


def _of_layer(text: Section, layer: int | None) -> float:
    """The clamp of one layer, 0.0 where it has none."""
    clamps = text.data.get(_OF_LAYERS)
    if clamps is None or (isinstance(clamps, list) and not any(clamps)):
        return 0.0
    numbers = isinstance(clamps, list) and all(
        v is None or (isinstance(v, int | float) and not isinstance(v, bool) and 0 <= v < math.inf)
        for v in clamps
    )
    if not numbers or layer is None or not 0 <= layer < len(clamps):
        expected = "a number or null for each layer"
        found = repr(clamps)[:60] if not numbers or layer is None else f"none for layer {layer}"
        raise ConfigError(field_error(text.where(_OF_LAYERS), "value", found, expected))
    return float(clamps[layer] or 0.0)
