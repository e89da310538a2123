"""What a layer is: how its weights are quantised, its activation and its sizes; no tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from autosel.errors import AutoselError, field_error

ACT_DTYPES = ("bfloat16", "float16", "float32")
SCALE_DTYPES = ("bfloat16", "float16", "float32")

#: ``_no_mul`` activations are not gated: w13 has only up rows.
ACTIVATIONS = (
    "silu",
    "gelu",
    "gelu_tanh",
    "swigluoai",
    "swigluoai_uninterleave",
    "swiglustep",
    "situ",
    "silu_no_mul",
    "gelu_no_mul",
    "gelu_tanh_no_mul",
    "relu2_no_mul",
)


def _choice(where: str, value: object, allowed: Iterable[object]) -> None:
    options = tuple(allowed)
    if value not in options:
        raise AutoselError(
            field_error(where, "value", repr(value), "one of " + ", ".join(map(repr, options)))
        )


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """How one GEMM's weights are quantised: ``w = (u - z) * S`` with unsigned codes ``u``.

    ``group_size`` counts inputs sharing one scale; -1 is one group per output channel.
    Symmetric means that every zero point is ``2 ** (num_bits - 1)`` and none is stored.
    """

    num_bits: int
    group_size: int
    symmetric: bool
    has_g_idx: bool = False
    scale_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        _choice("QuantScheme.num_bits", self.num_bits, (4, 8))
        _choice("QuantScheme.scale_dtype", self.scale_dtype, SCALE_DTYPES)
        if self.group_size != -1 and self.group_size < 1:
            raise AutoselError(
                field_error("QuantScheme.group_size", "value", self.group_size, "-1 or at least 1")
            )

    @property
    def pack_factor(self) -> int:
        """Codes in one 32-bit word."""
        return 32 // self.num_bits

    @property
    def implicit_zero(self) -> int:
        """The zero point of a symmetric scheme."""
        return 1 << (self.num_bits - 1)

    def num_groups(self, num_inputs: int) -> int:
        """Scale groups over ``num_inputs`` inputs; the last may be partial."""
        return 1 if self.group_size == -1 else math.ceil(num_inputs / self.group_size)

    @property
    def key(self) -> str:
        group = "ch" if self.group_size == -1 else f"g{self.group_size}"
        order = "-act" if self.has_g_idx else ""
        sym = "sym" if self.symmetric else "asym"
        return f"w{self.num_bits}{group}{sym}{order}-{_SHORT[self.scale_dtype]}"


_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, slots=True)
class Activation:
    """The element-wise function between the two GEMMs, in the canonical halves form.

    Canonical weights hold gate rows before up rows, so every gated activation reads halves here;
    a kernel that wants interleaved pairs permutes its own copy. The constants are those of the
    model: ``limit`` (clamp), ``alpha``, ``beta`` and ``linear_beta`` (``situ``).
    """

    name: str = "silu"
    limit: float | None = None
    alpha: float | None = None
    beta: float | None = None
    linear_beta: float | None = None

    def __post_init__(self) -> None:
        _choice("Activation.name", self.name, ACTIVATIONS)
        required = {"swigluoai_uninterleave": "limit", "situ": "beta"}.get(self.name)
        if required and getattr(self, required) is None:
            raise AutoselError(
                field_error(f"Activation {self.name}", required, "nothing", "a number")
            )

    @property
    def gated(self) -> bool:
        return not self.name.endswith("_no_mul")

    @property
    def key(self) -> str:
        constants = [
            f"{short}{_shortest(value)}"
            for short, value in (
                ("L", self.limit),
                ("a", self.alpha),
                ("b", self.beta),
                ("lb", self.linear_beta),
            )
            if value is not None
        ]
        return "".join([self.name, *constants])


def _shortest(value: float) -> str:
    """The shortest text that reads back as the same number: no two constants share one."""
    return repr(float(value)).removesuffix(".0")


@dataclass(frozen=True, slots=True)
class Problem:
    """One MoE layer on one rank, without tensors and without a token count.

    ``num_experts`` is the whole layer's (router width); ``num_local_experts`` are held here.
    ``intermediate_size`` is this rank's. ``w13`` is the stacked gate and up GEMM
    (``[shards * intermediate_size, hidden_size]``), ``w2`` the down GEMM.
    """

    num_experts: int
    num_local_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    w13: QuantScheme
    w2: QuantScheme
    activation: Activation = field(default_factory=Activation)
    act_dtype: str = "bfloat16"
    has_bias: bool = False
    router_weight_on_input: bool = False

    def __post_init__(self) -> None:
        _choice("Problem.act_dtype", self.act_dtype, ACT_DTYPES)
        for name in (
            "num_experts",
            "num_local_experts",
            "top_k",
            "hidden_size",
            "intermediate_size",
        ):
            if getattr(self, name) < 1:
                raise AutoselError(
                    field_error(f"Problem.{name}", "value", getattr(self, name), "at least 1")
                )
        if self.num_local_experts > self.num_experts:
            raise AutoselError(
                field_error(
                    "Problem.num_local_experts",
                    "value",
                    self.num_local_experts,
                    f"at most num_experts = {self.num_experts}",
                )
            )
        if self.top_k > self.num_experts:
            raise AutoselError(
                field_error(
                    "Problem.top_k", "value", self.top_k, f"at most num_experts {self.num_experts}"
                )
            )
        if self.router_weight_on_input and self.top_k != 1:
            raise AutoselError(
                field_error("Problem.router_weight_on_input", "top_k", self.top_k, 1)
            )

    @property
    def num_shards(self) -> int:
        """Stacked matrices in w13: 2 when gated (gate, up), else 1."""
        return 2 if self.activation.gated else 1

    @property
    def w13_shape(self) -> tuple[int, int, int]:
        """Logical ``(experts, outputs, inputs)`` of w13 on this rank."""
        return (
            self.num_local_experts,
            self.num_shards * self.intermediate_size,
            self.hidden_size,
        )

    @property
    def w2_shape(self) -> tuple[int, int, int]:
        """Logical ``(experts, outputs, inputs)`` of w2 on this rank."""
        return (self.num_local_experts, self.hidden_size, self.intermediate_size)

    @property
    def key(self) -> str:
        """Short text that differs whenever two layers may need different kernels."""
        quant = self.w13.key if self.w13 == self.w2 else f"{self.w13.key}+{self.w2.key}"
        flags = ("-bias" if self.has_bias else "") + ("-win" if self.router_weight_on_input else "")
        return (
            f"E{self.num_experts}-L{self.num_local_experts}-k{self.top_k}-H{self.hidden_size}"
            f"-I{self.intermediate_size}-{self.activation.key}-{_SHORT[self.act_dtype]}"
            f"-{quant}{flags}"
        )

    def with_act_dtype(self, act_dtype: str) -> Problem:
        return replace(self, act_dtype=act_dtype)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; :meth:`from_dict` is the inverse."""
        return to_plain(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Problem:
        values = dict(data)
        values["w13"] = QuantScheme(**values["w13"])
        values["w2"] = QuantScheme(**values["w2"])
        values["activation"] = Activation(**values["activation"])
        return Problem(**values)


def to_plain(obj: Any) -> dict[str, Any]:
    """A dataclass and those inside it as dictionaries."""
    out: dict[str, Any] = {}
    for item in fields(obj):
        value = getattr(obj, item.name)
        out[item.name] = to_plain(value) if hasattr(value, "__dataclass_fields__") else value
    return out
