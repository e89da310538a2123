"""The types that travel between autosel's modules.

They are frozen; the ones without tensors print a ``repr`` that evaluates back, survive
``to_dict``/``from_dict`` and have one short ``key``. Nothing here does torch work: tensors are
only carried. Sizes are logical (inputs, outputs, experts), never packed words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from autosel.errors import AutoselError, field_error

if TYPE_CHECKING:
    import torch

Scalar = bool | int | float | str | None
Params = Mapping[str, Scalar]

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
            f"{short}{value:g}"
            for short, value in (
                ("L", self.limit),
                ("a", self.alpha),
                ("b", self.beta),
                ("lb", self.linear_beta),
            )
            if value is not None
        ]
        return "".join([self.name, *constants])


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
        return _to_dict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Problem:
        values = dict(data)
        values["w13"] = QuantScheme(**values["w13"])
        values["w2"] = QuantScheme(**values["w2"])
        values["activation"] = Activation(**values["activation"])
        return Problem(**values)


def _to_dict(obj: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for item in fields(obj):
        value = getattr(obj, item.name)
        out[item.name] = _to_dict(value) if hasattr(value, "__dataclass_fields__") else value
    return out


@dataclass(frozen=True, slots=True, eq=False)
class QuantWeight:
    """One GEMM's quantised weights for all local experts, in the canonical form.

    codes        int32 ``[E, N, ceil(K / pack_factor)]``, packed along K, first code in low bits
    scales       ``[E, N, G]`` in the checkpoint's dtype
    zero_points  uint8 ``[E, N, G]`` TRUE zero points, or None when symmetric
    g_idx        int32 ``[E, K]`` group of each input (act-order), or None for ``k // group_size``
    bias         ``[E, N]`` or None
    """

    scheme: QuantScheme
    num_inputs: int
    codes: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None = None
    g_idx: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def num_experts(self) -> int:
        return int(self.codes.shape[0])

    @property
    def num_outputs(self) -> int:
        return int(self.codes.shape[1])

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        found = {
            "codes": self.codes,
            "scales": self.scales,
            "zero_points": self.zero_points,
            "g_idx": self.g_idx,
            "bias": self.bias,
        }
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalExperts:
    """The one internal form of a layer's routed experts; gate rows stand before up rows in w13."""

    problem: Problem
    w13: QuantWeight
    w2: QuantWeight

    @property
    def nbytes(self) -> int:
        return self.w13.nbytes + self.w2.nbytes

    def to(self, device: str | torch.device) -> CanonicalExperts:
        """The same experts on ``device``; tensors already there are shared, not copied."""

        def moved(weight: QuantWeight) -> QuantWeight:
            tensors: dict[str, Any] = {n: t.to(device) for n, t in weight.tensors.items()}
            return replace(weight, **tensors)

        return replace(self, w13=moved(self.w13), w2=moved(self.w2))


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Where each token goes: ``topk_ids`` int32 and ``topk_weights`` float32, both ``[M, top_k]``.

    An id outside ``[0, num_experts)`` is a slot that no expert here serves; it adds nothing.
    """

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.topk_ids.shape[0])


@dataclass(frozen=True, slots=True)
class Reason:
    """Why not: a property, the value met and the values that would do."""

    what: str
    found: str
    required: str

    def __str__(self) -> str:
        return f"{self.what}: found {self.found}, required {self.required}"


@dataclass(frozen=True, slots=True)
class Support:
    """Empty for yes, otherwise every reason for no. Build a no with :meth:`no`."""

    reasons: tuple[Reason, ...] = ()

    @staticmethod
    def yes() -> Support:
        return Support()

    @staticmethod
    def no(*reasons: Reason) -> Support:
        if not reasons:
            raise AutoselError("Support.no: found no reason, expected at least one")
        return Support(tuple(reasons))

    def __bool__(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return "supported" if not self.reasons else "; ".join(map(str, self.reasons))


@dataclass(frozen=True, slots=True)
class Device:
    """What the timings depend on: the machine, its driver and the installed packages.

    ``capability`` is CUDA's ``(major, minor)`` and None where the device has no such number.
    ``flags`` are instruction-set names (``avx2``, ``avx512_bf16``, ``amx_tile``, ``gfx1100``).
    ``versions`` are ``(package, version)`` pairs, sorted; ``threads`` is torch's thread count.
    """

    kind: Literal["cpu", "cuda", "rocm", "xpu"]
    name: str
    capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    memory_bytes: int | None = None
    cache_bytes: int | None = None
    shared_memory_bytes: int | None = None
    flags: tuple[str, ...] = ()
    threads: int | None = None
    driver: str | None = None
    versions: tuple[tuple[str, str], ...] = ()

    def version(self, package: str) -> str | None:
        return dict(self.versions).get(package)

    @property
    def torch_device(self) -> str:
        """The name torch uses; ROCm devices answer to ``cuda`` there."""
        return "cuda" if self.kind == "rocm" else self.kind

    def to_dict(self) -> dict[str, Any]:
        out = _to_dict(self)
        out["versions"] = dict(self.versions)
        out["flags"] = list(self.flags)
        out["capability"] = list(self.capability) if self.capability else None
        return out

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Device:
        values = dict(data)
        values["versions"] = tuple(sorted(dict(values["versions"]).items()))
        values["flags"] = tuple(values["flags"])
        values["capability"] = tuple(values["capability"]) if values["capability"] else None
        return Device(**values)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run the layer: a backend, its parameters and the weight layout it reads."""

    backend: str
    params: tuple[tuple[str, Scalar], ...] = ()
    layout: str = ""

    @staticmethod
    def of(backend: str, params: Params | None = None, layout: str = "") -> Candidate:
        return Candidate(backend, tuple(sorted((params or {}).items())), layout)

    @property
    def params_dict(self) -> dict[str, Scalar]:
        return dict(self.params)

    @property
    def key(self) -> str:
        inner = ",".join(f"{name}={value}" for name, value in self.params)
        return f"{self.backend}[{inner}]" if inner else self.backend


#: ``exact`` keeps the checkpoint's weights and 16-bit (or wider) activations; ``a8`` quantises
#: activations to 8 bits inside and is never chosen unless the user allows it.
AccuracyClass = Literal["exact", "a8"]

#: ok         correct and timed
#: unsupported  refused before anything ran; reason says why
#: wrong      ran, and differs from the reference by more than its class allows
#: nonfinite  ran, and gave NaN or infinity where the reference is finite
#: failed     raised, or a conversion failed
#: oom        does not fit in memory
#: timeout    ran past its limit
#: crashed    took its process down
Status = Literal["ok", "unsupported", "wrong", "nonfinite", "failed", "oom", "timeout", "crashed"]


@dataclass(frozen=True, slots=True)
class ErrorFigures:
    """Distance from the reference, relative to the reference's own size.

    ``rel_rms`` is ``||out - ref|| / ||ref||`` over everything; ``rel_rms_worst_token`` the
    same for the worst row; ``rel_max`` the largest element error over the reference's RMS;
    ``bias`` the signed mean error over the reference's RMS. All are None when not finite.
    """

    rel_rms: float | None
    rel_rms_worst_token: float | None
    rel_max: float | None
    bias: float | None


@dataclass(frozen=True, slots=True)
class Measurement:
    """What happened to one candidate at one token count. Times are microseconds a call."""

    problem: Problem
    num_tokens: int
    routing: str
    candidate: Candidate
    device: Device
    status: Status
    accuracy: AccuracyClass = "exact"
    reason: str = ""
    times_us: tuple[float, ...] = ()
    errors: ErrorFigures | None = None
    pack_ms: float | None = None
    first_call_ms: float | None = None
    weight_bytes: int | None = None
    timing: tuple[tuple[str, Scalar], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenBucket:
    """Token counts ``low <= M <= high`` that share one decision; it was measured at ``measured``.

    ``high`` is None for the open last bucket.
    """

    low: int
    high: int | None
    measured: int

    def __contains__(self, num_tokens: int) -> bool:
        return self.low <= num_tokens and (self.high is None or num_tokens <= self.high)

    @property
    def label(self) -> str:
        if self.high is None:
            return f"{self.low}+"
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class Rejected:
    """A candidate that was not chosen, with the reason in words."""

    candidate: Candidate
    status: Status
    reason: str
    accuracy: AccuracyClass = "exact"
    time_us: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer for one token bucket.

    ``margin`` is ``runner_up_us / winner_us - 1`` and ``margin_interval`` its 95 % confidence
    interval; ``tie`` says that the interval does not clear the noise, in which case a stated
    canonical order decided.
    """

    problem: Problem
    bucket: TokenBucket
    routing: str
    winner: Candidate
    winner_us: float
    runner_up: Candidate | None
    runner_up_us: float | None
    margin: float | None
    margin_interval: tuple[float, float] | None
    tie: bool
    why: str
    rejected: tuple[Rejected, ...] = ()
    accuracy: AccuracyClass = "exact"
