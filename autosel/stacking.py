"""Fills one GEMM's canonical tensors expert by expert, in memory that is allocated once."""

from __future__ import annotations

import torch

from autosel.canonical import check
from autosel.core import QuantScheme, QuantWeight
from autosel.errors import CheckpointError, field_error


class Stack:
    """Collects one-expert weights into a :class:`QuantWeight` of ``num_experts``.

    Zero points, group index and bias come into being with the first weight that needs them; what
    was put before, and what does not need them, gets the values that are implied.
    """

    def __init__(self, num_experts: int, num_outputs: int) -> None:
        self._shape = (num_experts, num_outputs)
        self._filled = torch.zeros(num_experts, num_outputs, dtype=torch.bool)
        self._first: QuantWeight | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def put(self, expert: int, first_output: int, weight: QuantWeight, where: str) -> None:
        """Copy in one expert's rows, from ``first_output`` on."""
        first = self._first
        if first is None:
            first = self._first = weight
            for name in ("codes", "scales"):
                like = weight.tensors[name]
                self._tensors[name] = torch.empty(*self._shape, like.shape[-1], dtype=like.dtype)
        self._require_like(first, weight, where)
        rows = slice(first_output, first_output + weight.num_outputs)
        for name in ("zero_points", "g_idx", "bias"):
            if name in weight.tensors:
                self._need(name, weight.tensors[name].dtype)
        for name, target in self._tensors.items():
            part = weight.tensors.get(name)
            if part is not None:
                place = target[expert] if name == "g_idx" else target[expert, rows]
                place.copy_(part[0])
        self._filled[expert, rows] = True

    def has(self, name: str) -> bool:
        """Whether some weight put so far needed that tensor."""
        return name in self._tensors

    def finish(self, *, symmetric: bool, has_g_idx: bool, has_bias: bool) -> QuantWeight:
        """The stacked weight; the flags ask for tensors that no expert here happened to need."""
        if self._first is None or not bool(self._filled.all()):
            raise AssertionError("Stack: not every row of every expert was put")
        for name, wanted in (
            ("zero_points", not symmetric),
            ("g_idx", has_g_idx),
            ("bias", has_bias),
        ):
            if wanted:
                self._need(name)
        found = self._first.scheme
        scheme = QuantScheme(
            found.num_bits,
            found.group_size,
            "zero_points" not in self._tensors,
            "g_idx" in self._tensors,
            found.scale_dtype,
        )
        weight = QuantWeight(scheme, self._first.num_inputs, **self._tensors)
        check(weight, "stacked experts")
        return weight

    def _need(self, name: str, dtype: torch.dtype | None = None) -> None:
        if name in self._tensors:
            found = self._tensors[name].dtype
            if dtype is not None and dtype != found:  # only biases come in several
                self._tensors[name] = self._tensors[name].to(torch.promote_types(found, dtype))
            return
        first = self._first
        assert first is not None
        scales = self._tensors["scales"]
        if name == "zero_points":
            implicit = first.scheme.implicit_zero
            made = torch.full(scales.shape, implicit, dtype=torch.uint8)
        elif name == "g_idx":
            size = first.scheme.group_size
            inputs = torch.arange(first.num_inputs, dtype=torch.int32)
            plain = torch.zeros_like(inputs) if size == -1 else inputs // size
            made = plain.repeat(self._shape[0], 1)
        else:
            made = torch.zeros(self._shape, dtype=dtype or scales.dtype)
        self._tensors[name] = made

    def _require_like(self, first: QuantWeight, weight: QuantWeight, where: str) -> None:
        """Copying would silently round scales or mix up widths; neither may happen."""
        for what, expected, found in (
            ("scale dtype", first.scales.dtype, weight.scales.dtype),
            ("bits", first.scheme.num_bits, weight.scheme.num_bits),
            ("group_size", first.scheme.group_size, weight.scheme.group_size),
            ("inputs", first.num_inputs, weight.num_inputs),
            ("groups", first.scales.shape[-1], weight.scales.shape[-1]),
        ):
            if expected != found:
                raise CheckpointError(field_error(where, what, found, expected))
