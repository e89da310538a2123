"""What a checkpoint format must offer, and the checks that all formats share.

A format reads one linear at a time: a mapping from tensor suffix (``qweight``) to a 2-D tensor.
A tensor that stacks all experts is sliced before it gets here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from autosel.canonical import check
from autosel.core import QuantScheme, QuantWeight
from autosel.errors import CheckpointError, field_error
from autosel.json_file import Section
from autosel.packing import pack_last

#: safetensors' spelling of a dtype; tensors at hand are compared in the same words.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
FLOATS = ("F16", "BF16", "F32")
INTEGERS = ("I8", "U8", "I16", "I32", "I64")
_SCALE_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}

#: Dtype and shape of a stored tensor, from a header or from the tensor itself.
Header = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class LinearQuant:
    """What the config says about one linear.

    ``act_order`` promises a group index; ``zeros_minus_one`` is GPTQ's first convention.
    """

    num_bits: int
    group_size: int
    symmetric: bool
    act_order: bool = False
    zeros_minus_one: bool = False

    @property
    def pack_factor(self) -> int:
        return 32 // self.num_bits

    @property
    def implicit_zero(self) -> int:
        return 1 << (self.num_bits - 1)

    def num_groups(self, num_inputs: int) -> int:
        return 1 if self.group_size == -1 else -(-num_inputs // self.group_size)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the config says about a module by name: how it is packed, or why it is not.

    ``excluded`` by an entry that names it, ``untargeted`` by any entry, or ``refused`` because
    its scheme is not one that autosel reads.
    """

    kind: Literal["quantized", "excluded", "untargeted", "refused"]
    quant: LinearQuant | None = None
    reason: str = ""


class Rules(ABC):
    """A quantisation config, read and checked once, that answers for any module."""

    @abstractmethod
    def verdict(self, module: str, *, exclusions: bool = True) -> Verdict:
        """``module`` is the full name in the checkpoint, without the tensor's suffix.

        Without ``exclusions`` the answer is how the module is packed if it is packed after all.
        """


@dataclass(frozen=True, slots=True)
class Stored:
    """How one tensor of a linear may be stored: each ``(dtypes, shape)`` is one allowed form.

    Without any form the tensor may not be there.
    """

    forms: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]
    required: bool = True

    def __str__(self) -> str:
        if not self.forms:
            return "none (it is not part of this format)"
        return " or ".join(f"{'/'.join(dtypes)} {list(shape)}" for dtypes, shape in self.forms)

    def allows(self, header: Header) -> bool:
        """Whether that dtype and shape are one of the forms."""
        dtype, shape = header
        return any(dtype in dtypes and shape == form for dtypes, form in self.forms)


@dataclass(frozen=True)
class Origin:
    """Where a linear comes from, for messages; ``notes`` collects what is odd but readable."""

    module: str
    expert: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def label(self, suffix: str) -> str:
        name = self.names.get(suffix, f"{self.module}.{suffix}")
        file = f"{self.files[suffix]}: " if suffix in self.files else ""
        expert = "" if self.expert is None else f": expert {self.expert}"
        return f"{file}{name}{expert}"


@dataclass(frozen=True, slots=True)
class Probe:
    """What only the small tensors tell: true zero points, group index and bias of one linear."""

    zero_points: torch.Tensor | None
    g_idx: torch.Tensor | None
    bias: torch.Tensor | None


class Format(ABC):
    """One checkpoint format; :meth:`write` is the inverse of :meth:`read`."""

    name: ClassVar[str]
    #: Suffix of the packed weight: a linear that has it is quantised.
    weight: ClassVar[str]
    scales: ClassVar[str]
    zeros: ClassVar[str]
    g_idx: ClassVar[str]
    #: Any further tensors of a linear.
    others: ClassVar[tuple[str, ...]] = ()

    @property
    def suffixes(self) -> tuple[str, ...]:
        return (self.weight, self.scales, self.zeros, self.g_idx, *self.others, "bias")

    @abstractmethod
    def matches(self, config: Section) -> bool:
        """Whether this quantisation config is of this format."""

    @abstractmethod
    def rules(self, config: Section) -> Rules:
        """Read the config; ConfigError for what is wrong or unsupported in all of it."""

    @abstractmethod
    def num_outputs(self, quant: LinearQuant, shape: tuple[int, ...]) -> int:
        """Logical outputs of a linear, from the shape of its packed weight."""

    @abstractmethod
    def stored(self, quant: LinearQuant, num_outputs: int, num_inputs: int) -> dict[str, Stored]:
        """How each tensor of a linear of that logical size may be stored."""

    @abstractmethod
    def codes_of(self, tensor: torch.Tensor, quant: LinearQuant) -> torch.Tensor:
        """Packed weight to canonical int32 ``[N, ceil(K / pack_factor)]``."""

    @abstractmethod
    def scales_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stored scales to ``[N, G]``."""

    @abstractmethod
    def zeros_of(
        self, tensor: torch.Tensor, quant: LinearQuant, num_outputs: int, origin: Origin
    ) -> torch.Tensor:
        """Stored zero points to TRUE zero points, uint8 ``[N, G]``."""

    @abstractmethod
    def write(self, weight: QuantWeight, quant: LinearQuant) -> dict[str, torch.Tensor]:
        """One expert's canonical weight as the tensors of a linear."""

    def check_headers(
        self,
        found: Mapping[str, Header],
        quant: LinearQuant,
        num_outputs: int,
        num_inputs: int,
        origin: Origin,
    ) -> None:
        """Refuse a linear that lacks a tensor or stores one in another dtype or shape."""
        for suffix, rule in self.stored(quant, num_outputs, num_inputs).items():
            if suffix not in found:
                if rule.required:
                    raise CheckpointError(
                        field_error(origin.label(suffix), "tensor", "none", f"{rule}")
                    )
                continue
            dtype, shape = found[suffix]
            if not rule.allows(found[suffix]):
                sizes = (
                    f"dtype and shape ({num_outputs} outputs, {num_inputs} inputs, "
                    f"{quant.num_bits} bits, group_size {quant.group_size})"
                )
                what = sizes if rule.forms else "tensor"
                raise CheckpointError(
                    field_error(origin.label(suffix), what, f"{dtype} {list(shape)}", rule)
                )

    def read(
        self,
        tensors: Mapping[str, torch.Tensor],
        quant: LinearQuant,
        num_outputs: int,
        num_inputs: int,
        origin: Origin,
    ) -> QuantWeight:
        """One linear as canonical weights of one expert.

        The scheme follows the tensors where the config only promises: zero points that differ
        from the implicit one make a file declared symmetric asymmetric, as in the packing tools'
        own dequantisation, and a stored group index counts whether or not it was declared.
        """
        headers = {s: (dtype_name(t.dtype), tuple(t.shape)) for s, t in tensors.items()}
        self.check_headers(headers, quant, num_outputs, num_inputs, origin)
        probe = self.probe(tensors, quant, num_outputs, num_inputs, origin)
        scales = self.scales_of(tensors[self.scales]).contiguous()  # [N, G]
        require_finite(scales, ("output", "group"), origin.label(self.scales))
        codes = clear_padding(  # [N, W]
            self.codes_of(tensors[self.weight], quant), quant.num_bits, num_inputs
        )
        scheme = QuantScheme(
            quant.num_bits,
            quant.group_size,
            probe.zero_points is None,
            probe.g_idx is not None,
            _SCALE_NAMES[scales.dtype],
        )
        weight = QuantWeight(
            scheme,
            num_inputs,
            codes[None],
            scales[None],
            None if probe.zero_points is None else probe.zero_points[None],
            None if probe.g_idx is None else probe.g_idx[None],
            None if probe.bias is None else probe.bias[None],
        )
        check(weight, origin.module)
        return weight

    def probe(
        self,
        tensors: Mapping[str, torch.Tensor],
        quant: LinearQuant,
        num_outputs: int,
        num_inputs: int,
        origin: Origin,
    ) -> Probe:
        """Zero points, group index and bias; needs neither the packed weight nor the scales."""
        zero_points = None
        if self.zeros in tensors:
            zero_points = self.zeros_of(tensors[self.zeros], quant, num_outputs, origin)
            if quant.symmetric:
                differ = zero_points != quant.implicit_zero
                if not bool(differ.any()):
                    zero_points = None
                else:
                    origin.notes.append(
                        f"{origin.label(self.zeros)}: declared symmetric, but {int(differ.sum())} "
                        f"zero points are not {quant.implicit_zero}; the stored ones are used"
                    )
        g_idx = None
        if self.g_idx in tensors:
            g_idx = normalize_g_idx(
                tensors[self.g_idx], quant, num_inputs, origin.label(self.g_idx)
            )
        bias = tensors.get("bias")
        if bias is not None:
            require_finite(bias, ("output",), origin.label("bias"))
            # AutoGPTQ writes a bias of zeros for every linear; adding it changes nothing.
            bias = bias.clone() if bool((bias != 0).any()) else None
        return Probe(zero_points, g_idx, bias)


def dtype_name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype))


def require_finite(values: torch.Tensor, axes: tuple[str, ...], label: str) -> None:
    """Refuse NaN and infinity, naming the first one's place; ``axes`` name the dimensions."""
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        first = bad.nonzero()[0].tolist()
        place = ", ".join(f"{axis} {i}" for axis, i in zip(axes, first, strict=True))
        value = float(values[tuple(first)])
        raise CheckpointError(field_error(f"{label}, {place}", "value", value, "a finite number"))


def normalize_g_idx(
    stored: torch.Tensor, quant: LinearQuant, num_inputs: int, label: str
) -> torch.Tensor | None:
    """int32 ``[K]``, or None where it says no more than ``k // group_size``.

    Writers leave it all zero when they have no order to tell.
    """
    rule = stored_g_idx(quant, num_inputs)
    dtype, shape = dtype_name(stored.dtype), tuple(stored.shape)
    if not rule.allows((dtype, shape)):  # a format need not list it among its tensors
        raise CheckpointError(field_error(label, "dtype and shape", f"{dtype} {list(shape)}", rule))
    groups = quant.num_groups(num_inputs)
    low, high = int(stored.min()), int(stored.max())
    if low < 0 or high >= groups:
        raise CheckpointError(
            field_error(label, "group index", low if low < 0 else high, f"0 to {groups - 1}")
        )
    if high == 0:
        return None
    plain = torch.arange(num_inputs) // quant.group_size
    return None if torch.equal(stored.long(), plain) else stored.to(torch.int32).clone()


def plain_zeros(stored: torch.Tensor, quant: LinearQuant, offset: int, label: str) -> torch.Tensor:
    """Unpacked zero points, any number type, plus ``offset``, as uint8 of the same shape."""
    values = stored.to(torch.float64)
    require_finite(values, ("row", "column"), label)
    true = values + offset
    top = (1 << quant.num_bits) - 1
    bad = (true < 0) | (true > top) | (true != true.round())
    if bool(bad.any()):
        found = float(values[tuple(bad.nonzero()[0].tolist())])
        raise CheckpointError(
            field_error(
                label, "zero point", f"{found:g}", f"a whole number {-offset} to {top - offset}"
            )
        )
    return true.to(torch.uint8)


def clear_padding(codes: torch.Tensor, num_bits: int, num_inputs: int) -> torch.Tensor:
    """The codes with the unused part of each row's last word zero; a copy where there is one."""
    used = num_inputs % (32 // num_bits)
    if used:
        codes = codes.clone()
        codes[:, -1] &= (1 << (num_bits * used)) - 1
    return codes


def stored_zeros(quant: LinearQuant, packed: tuple[int, int], plain: tuple[int, int]) -> Stored:
    """Zero points in words or, by some writers, unpacked as they are. Dtype and shape tell."""
    forms = ((("I32",), packed), ((*FLOATS, *INTEGERS), plain))
    return Stored(forms, required=not quant.symmetric)


def stored_g_idx(quant: LinearQuant, num_inputs: int) -> Stored:
    """The group of every input; without one the groups are contiguous."""
    needed = quant.act_order and quant.num_groups(num_inputs) > 1
    return Stored(((("I32", "I64"), (num_inputs,)),), required=needed)


def stored_bias(num_outputs: int) -> Stored:
    return Stored(((FLOATS, (num_outputs,)),), required=False)


def written_bias(weight: QuantWeight) -> dict[str, torch.Tensor]:
    """``bias`` of the one expert, nothing where there is none."""
    return {} if weight.bias is None else {"bias": weight.bias[0].contiguous()}


def pack_zeros(zero_points: torch.Tensor, num_bits: int) -> torch.Tensor:
    """uint8 ``[N, G]`` to int32 ``[G, ceil(N / pack_factor)]``, packed along the outputs."""
    return pack_last(zero_points.t().contiguous(), num_bits)


def written_zeros(weight: QuantWeight) -> torch.Tensor:
    """True zero points of the one expert, uint8 ``[N, G]``, the implicit ones spelt out."""
    if weight.zero_points is not None:
        return weight.zero_points[0]
    return torch.full_like(weight.scales[0], weight.scheme.implicit_zero, dtype=torch.uint8)


def written_g_idx(weight: QuantWeight) -> torch.Tensor:
    """The group of every input, int32 ``[K]``, spelt out also where it is ``k // group_size``."""
    if weight.g_idx is not None:
        return weight.g_idx[0]
    size = weight.scheme.group_size
    inputs = torch.arange(weight.num_inputs, dtype=torch.int32)
    return torch.zeros_like(inputs) if size == -1 else inputs // size
