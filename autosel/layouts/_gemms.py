"""The two GEMMs of a layer side by side, and their bias: what layouts walk over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from autosel.core import CanonicalExperts, Problem, QuantScheme, QuantWeight
from autosel.interfaces import PackedExperts
from autosel.layouts import _common as common


def schemes(problem: Problem) -> Iterator[tuple[str, QuantScheme, tuple[int, int, int]]]:
    """``(name, scheme, (experts, outputs, inputs))`` of w13, then w2."""
    yield "w13", problem.w13, problem.w13_shape
    yield "w2", problem.w2, problem.w2_shape


def weights(experts: CanonicalExperts) -> Iterator[tuple[str, QuantWeight]]:
    yield "w13", experts.w13
    yield "w2", experts.w2


#: ``(name, scheme, (experts, outputs, inputs), expert)`` to the fields of QuantWeight.
UnpackExpert = Callable[[str, QuantScheme, tuple[int, int, int], int], common.Parts]


def unpacked(packed: PackedExperts, unpack: UnpackExpert) -> CanonicalExperts:
    """Both GEMMs, filled expert by expert with what ``unpack`` gives."""
    found = []
    for name, scheme, shape in schemes(packed.problem):
        fields: common.Parts = {}
        for expert in range(shape[0]):
            common.fill(fields, expert, shape[0], unpack(name, scheme, shape, expert))
        found.append(QuantWeight(scheme, shape[2], **fields))
    return CanonicalExperts(packed.problem, *found)


def group_inputs(scheme: QuantScheme, num_inputs: int) -> int:
    """Inputs in one group; all of them where one scale serves the row."""
    return num_inputs if common.single_group(scheme, num_inputs) else scheme.group_size


def keep_bias(
    tensors: common.Parts,
    meta: dict[str, Any],
    name: str,
    bias: torch.Tensor | None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Store a copy of a bias ``[E, N]`` in ``dtype`` and remember the one it came in."""
    if bias is not None:
        cast = common.cast_scales(bias, dtype, f"{name}.bias")
        tensors[f"{name}_bias"] = cast.clone(memory_format=torch.contiguous_format)
        meta[f"{name}_bias_dtype"] = bias.dtype


def kept_bias(packed: PackedExperts, name: str, expert: int) -> common.Parts:
    """Inverse of :func:`keep_bias`: ``bias`` ``[N]`` of one expert, nothing where there is none."""
    stack = packed.tensors.get(f"{name}_bias")
    if stack is None:
        return {}
    return {"bias": stack[expert].to(packed.meta[f"{name}_bias_dtype"])}


def panels(table: torch.Tensor, width: int) -> torch.Tensor:
    """``width`` outputs side by side: ``[N, G]`` to ``[N / width, G, width]``."""
    return table.view(-1, width, table.shape[1]).transpose(1, 2)


def panel_rows(values: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`panels`."""
    return values.transpose(1, 2).reshape(-1, values.shape[1])


def interleave(rows: torch.Tensor) -> torch.Tensor:
    """Gate and up halves ``[2 * I, ...]`` to pairs: gate 0, up 0, gate 1, up 1 and so on."""
    return rows.reshape(2, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def deinterleave(rows: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`interleave`."""
    return rows.reshape(-1, 2, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)
