"""What the backends are verified on: formats, groups, bits, dtypes and odd layers, as tasks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autosel.core import Activation, CanonicalExperts, Device, Problem, QuantScheme, QuantWeight
from autosel.errors import AutoselError
from autosel.formats import all_formats
from autosel.formats.base import LinearQuant, Origin
from autosel.interfaces import Backend
from autosel.sources import RandomSource

BACKENDS = (
    "marlin", "batched_marlin", "humming", "triton", "emulation", "marlin_int8", "moe_wna16",
    "batched_humming",
)  # fmt: skip
GROUPS = (32, 64, 128, -1)
DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class FormatCase:
    """A checkpoint format with the choices it leaves."""

    label: str
    format: str
    bits: tuple[int, ...]
    symmetric: bool
    scale_dtype: str
    zeros_minus_one: bool = False


FORMATS = (
    FormatCase("gptq", "gptq", (4, 8), True, "float16", zeros_minus_one=True),
    FormatCase("awq", "awq", (4,), False, "float16"),
    FormatCase("compressed-tensors sym", "compressed-tensors", (4, 8), True, "bfloat16"),
    FormatCase("compressed-tensors asym", "compressed-tensors", (4, 8), False, "bfloat16"),
)

#: Layers besides the plain one, each of which a kernel or a layout has a special path for.
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one group in w2": {"intermediate_size": 128, "hidden_size": 512},
    "padded intermediate": {"intermediate_size": 96},
    "non-gated": {"activation": Activation("relu2_no_mul")},
    "swigluoai": {"activation": Activation("swigluoai"), "intermediate_size": 96},
    "bias": {"has_bias": True},
    "expert parallel": {"num_experts": 16, "top_k": 4},
    "router weight on input": {"top_k": 1, "router_weight_on_input": True},
    "60 experts": {"num_experts": 60, "num_local_experts": 60, "top_k": 4},
}
#: (group, bits) that the special layers are run on: one grouped and one per-channel scheme.
_SPECIAL_SCHEMES = ((128, 4), (-1, 8))


@dataclass(frozen=True)
class Task:
    """One layer on which every backend is verified."""

    case: FormatCase
    bits: int
    group: int
    act_dtype: str
    layer: str

    @property
    def label(self) -> str:
        return f"{self.case.label} {self.bits} bit g{self.group} {self.act_dtype} {self.layer}"

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "format": self.case.label,
            "bits": self.bits,
            "group_size": self.group,
            "symmetric": self.case.symmetric,
            "scale_dtype": self.case.scale_dtype,
            "act_dtype": self.act_dtype,
            "layer": self.layer,
        }


def tasks(formats: Sequence[str], layers: Sequence[str]) -> list[Task]:
    """The plain layer of every format first, so that a run cut short has the most of it."""
    found = []
    for layer, case in itertools.product(layers, FORMATS):
        if case.label not in formats:
            continue
        for bits, group, dtype in itertools.product(case.bits, GROUPS, DTYPES):
            if layer == "plain" or (group, bits) in _SPECIAL_SCHEMES:
                found.append(Task(case, bits, group, dtype, layer))
    return found


def problem_of(case: FormatCase, bits: int, group: int, act_dtype: str, layer: str) -> Problem:
    scheme = QuantScheme(bits, group, case.symmetric, False, case.scale_dtype)
    plain = Problem(8, 8, 2, 512, 256, scheme, scheme, act_dtype=act_dtype)
    return replace(plain, **LAYERS[layer])


def experts_of(task: Task, device: str, seed: int = 0) -> CanonicalExperts:
    """Made-up weights that went through the format's tensors."""
    problem = problem_of(task.case, task.bits, task.group, task.act_dtype, task.layer)
    return through_format(RandomSource(problem, seed).load(), task.case).to(device)


def through_format(experts: CanonicalExperts, case: FormatCase) -> CanonicalExperts:
    """Write every projection in the format and read it back; gate and up are two of them."""
    fmt = next(f for f in all_formats() if f.name == case.format)

    def linear(weight: QuantWeight, e: int, rows: slice) -> QuantWeight:
        parts = {n: t[e : e + 1] if n == "g_idx" else t[e : e + 1, rows]
                 for n, t in weight.tensors.items()}  # fmt: skip
        one = replace(weight, **parts)
        quant = LinearQuant(
            weight.scheme.num_bits,
            weight.scheme.group_size,
            weight.scheme.symmetric,
            zeros_minus_one=case.zeros_minus_one,
        )
        tensors = fmt.write(one, quant)
        return fmt.read(tensors, quant, one.num_outputs, one.num_inputs, Origin("experts"))

    def whole(weight: QuantWeight, shards: int) -> QuantWeight:
        size = weight.num_outputs // shards
        rows = [slice(s * size, (s + 1) * size) for s in range(shards)]
        read = [[linear(weight, e, part) for part in rows] for e in range(weight.num_experts)]
        fields = {
            name: torch.cat([torch.cat([p.tensors[name] for p in parts], 1) for parts in read])
            for name in read[0][0].tensors
        }
        return QuantWeight(read[0][0].scheme, weight.num_inputs, **fields)

    problem = experts.problem
    back = replace(experts, w13=whole(experts.w13, problem.num_shards), w2=whole(experts.w2, 1))
    for name in ("w13", "w2"):
        for key, tensor in getattr(experts, name).tensors.items():
            if not torch.equal(getattr(back, name).tensors[key].to(tensor.dtype), tensor):
                raise AutoselError(
                    f"{case.label}: {name}.{key} changed on its way through the file"
                )
    return back


def points(backend: Backend, problem: Problem, device: Device, axes: bool) -> list[dict[str, Any]]:
    """The default parameters; with ``axes`` also every legal change of one of them."""
    return list(_points(backend, problem, device, axes))


def _points(
    backend: Backend, problem: Problem, device: Device, axes: bool
) -> Iterator[dict[str, Any]]:
    space = backend.space(problem, 64, device)
    yield dict(space.default)
    for design in space.designs if axes else ():
        default = dict(design.default)
        if default != space.default and design.constraint(default) is None:
            yield default
        for name, values in design.choices.items():
            for value in values:
                point = {**default, name: value}
                if value != default[name] and design.constraint(point) is None:
                    yield point
