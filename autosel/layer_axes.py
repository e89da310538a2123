"""How each checkpoint format's tensors lie, axis by axis, and how a rank's part is cut from them.

From the axes follow the shapes of stacked parameters and the cuts of tensor parallelism: gate and
up are cut along their outputs, down along its inputs and scale groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from autosel.core import QuantScheme
from autosel.errors import UnsupportedError, field_error
from autosel.rank_problem import tp_share

#: ``out`` outputs, ``in`` inputs, ``group`` scale groups; ``packed`` ones hold several in a word.
Axis = Literal["out", "packed out", "in", "packed in", "group"]

#: One linear's tensors as they stand on disk, by format and suffix.
AXES: dict[str, dict[str, tuple[Axis, ...]]] = {
    "gptq": {
        "qweight": ("packed in", "out"),
        "scales": ("group", "out"),
        "qzeros": ("group", "packed out"),
        "g_idx": ("in",),
        "bias": ("out",),
    },
    "awq": {
        "qweight": ("in", "packed out"),
        "scales": ("group", "out"),
        "qzeros": ("group", "packed out"),
        "bias": ("out",),
    },
    "compressed-tensors": {
        "weight_packed": ("out", "packed in"),
        "weight_scale": ("out", "group"),
        "weight_zero_point": ("packed out", "group"),
        "weight_g_idx": ("in",),
        "bias": ("out",),
    },
}


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of one linear: ``outputs`` and ``inputs`` from ``first_output`` and
    ``first_input`` on. ``scheme`` is the whole linear's; ``inputs_total`` its number of inputs.
    """

    scheme: QuantScheme
    outputs: int
    inputs: int
    inputs_total: int
    first_output: int = 0
    first_input: int = 0

    @staticmethod
    def of_outputs(scheme: QuantScheme, outputs: int, inputs: int, rank: int, size: int) -> Cut:
        """Gate or up."""
        count = tp_share(outputs, rank, size)
        return Cut(scheme, count, inputs, inputs, first_output=rank * count)

    @staticmethod
    def of_inputs(scheme: QuantScheme, outputs: int, inputs: int, rank: int, size: int) -> Cut:
        """Down."""
        count = tp_share(inputs, rank, size)
        return Cut(scheme, outputs, count, inputs, first_input=rank * count)

    @property
    def group_size(self) -> int:
        """Of the part: the common divisor of group and share where a border may cut a group."""
        size = self.scheme.group_size
        whole = self.inputs == self.inputs_total or self.scheme.has_g_idx
        return size if size == -1 or whole else math.gcd(size, self.inputs)

    @property
    def groups(self) -> list[int]:
        """The whole linear's group of each scale that the part keeps, in order.

        With act-order an input may belong to any group, so every scale is kept.
        """
        total = self.scheme.num_groups(self.inputs_total)
        if self.group_size == self.scheme.group_size and (
            self.inputs == self.inputs_total or self.scheme.has_g_idx or self.group_size == -1
        ):
            return list(range(total))
        finer = self.group_size
        starts = range(self.first_input, self.first_input + self.inputs, finer)
        return [start // self.scheme.group_size for start in starts]

    def length(self, axis: Axis, where: str) -> int:
        """Elements of an axis; refuses a border inside a word."""
        return self._span(axis, where)[1]

    def take(self, tensor: torch.Tensor, axes: tuple[Axis, ...], where: str) -> torch.Tensor:
        """The part of a whole linear's tensor."""
        for dim, axis in enumerate(axes):
            if axis == "group":
                chosen = torch.tensor(self.groups, device=tensor.device)
                tensor = tensor.index_select(dim, chosen)
            else:
                tensor = tensor.narrow(dim, *self._span(axis, where))
        return tensor

    def whole(self, axes: tuple[Axis, ...], outputs: int) -> tuple[int, ...]:
        """Shape of the whole linear's tensor on disk."""
        factor = self.scheme.pack_factor
        sizes: dict[Axis, int] = {
            "out": outputs,
            "packed out": -(-outputs // factor),
            "in": self.inputs_total,
            "packed in": -(-self.inputs_total // factor),
            "group": self.scheme.num_groups(self.inputs_total),
        }
        return tuple(sizes[axis] for axis in axes)

    def _span(self, axis: Axis, where: str) -> tuple[int, int]:
        if axis == "group":
            return 0, len(self.groups)
        along_inputs = axis in ("in", "packed in")
        first = self.first_input if along_inputs else self.first_output
        count = self.inputs if along_inputs else self.outputs
        if axis in ("in", "out"):
            return first, count
        factor = self.scheme.pack_factor
        cut = not along_inputs or count != self.inputs_total
        if first % factor or (count % factor and cut):
            found = f"{first} to {first + count}"
            raise UnsupportedError(
                field_error(
                    where,
                    "part of a rank",
                    found,
                    f"multiples of {factor} (values in a word); from_checkpoint cuts anywhere",
                )
            )
        return first // factor, -(-count // factor)
