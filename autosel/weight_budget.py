"""How many bytes packed weights may take: ``1.0x``, ``1.5x``, ``12GiB``.

``1.0x`` is one copy: the smallest packed copy of the layer among the layouts that were measured. As
packings of the same weights differ a little (padding, the order of scales), a budget in copies has
:data:`SLACK` of one copy to spare; 16-bit copies of 4-bit weights are four copies and do not slip
through. A budget in bytes is exact, and is that of all layers that the plan is for together.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from autosel.errors import AutoselError, field_error

#: Share of a copy that a budget in copies may be exceeded by. Measured packings of one layer of
#: 8 experts of 1024 x 2048: 25,952,256 bytes in two layouts, 3 and 11 % more in two others.
SLACK = 0.125
_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
#: Bytes from which on a budget is refused: the database holds no greater number.
TOO_MANY = 2**63
#: Far more copies than there are layouts.
MOST_COPIES = 1_000_000


@dataclass(frozen=True, slots=True)
class WeightBudget:
    """``copies`` of the layer's weights, or ``total_bytes`` for all layers; the other is None."""

    copies: float | None = 1.0
    total_bytes: int | None = None

    @staticmethod
    def parse(text: str) -> WeightBudget:
        """``1.5x``, ``12GiB``, ``800 MiB``, ``1000000``; AutoselError for anything else."""
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", text, re.ASCII)
        unit = found[2].upper() if found else None
        if found is None or (unit != "X" and unit not in _UNITS) or len(found[1]) > 20:
            raise AutoselError(
                field_error("weight budget", "value", repr(text), "such as 1.0x, 1.5x or 12GiB")
            )
        number = Fraction(found[1].rstrip("."))  # a float would round bytes from 2**53 on
        if unit == "X":
            if not 1 <= number <= MOST_COPIES:
                raise AutoselError(
                    field_error("weight budget", "copies", found[1], f"1.0x to {MOST_COPIES}x")
                )
            return WeightBudget(float(number), None)
        total = math.floor(number * _UNITS[unit or ""])
        _need_room(total, text.strip())
        # Nobody means 1.5 or 2 bytes.
        if total < 1 or (not unit and number < 1000):
            raise AutoselError(
                field_error("weight budget", "unit", f"none behind {found[1]}", "x, MiB or GiB")
            )
        return WeightBudget(None, total)

    def bytes(self, copy_bytes: int, layers: int) -> int:
        """Bytes for one of ``layers`` layers whose smallest packed copy takes ``copy_bytes``."""
        if self.copies is not None:
            total = math.floor((self.copies + SLACK) * copy_bytes)
            _need_room(total, f"{self} of {copy_bytes} bytes")
            return total
        return (self.total_bytes or 0) // layers

    def __str__(self) -> str:
        if self.copies is not None:
            return f"{self.copies!r}x"  # read again as the same number
        for name, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if self.total_bytes is not None and self.total_bytes % size == 0:
                return f"{self.total_bytes // size}{name}"
        return f"{self.total_bytes}B"


def _need_room(total: int, words: str) -> None:
    if total >= TOO_MANY:
        raise AutoselError(field_error("weight budget", "value", words, "less than 2^63 bytes"))
