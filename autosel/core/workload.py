"""How many calls of how many tokens a server makes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autosel.errors import AutoselError, field_error


@dataclass(frozen=True, slots=True)
class TokenBin:
    """``calls`` calls (a count or any multiple of it) of ``low <= tokens <= high`` tokens each.

    ``high`` is None where only a lower edge is known. Where in the bin a call lies is not known.
    """

    low: int
    high: int | None
    calls: float

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            value = getattr(self, name)
            if name == "high" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise AutoselError(
                    field_error(f"TokenBin.{name}", "tokens", repr(value), "a whole number from 1")
                )
        if self.high is not None and self.high < self.low:
            raise AutoselError(
                field_error("TokenBin.high", "tokens", self.high, f"at least low = {self.low}")
            )
        number = isinstance(self.calls, int | float) and not isinstance(self.calls, bool)
        if not number or not (math.isfinite(self.calls) and self.calls >= 0):
            raise AutoselError(
                field_error("TokenBin.calls", "value", repr(self.calls), "finite and at least 0")
            )


@dataclass(frozen=True, slots=True)
class Workload:
    """A named histogram of tokens a call, its bins sorted and apart; at least one call in all.

    ``weighted_by`` says what the source counted: ``calls``, or ``tokens`` (tokens processed in
    calls of that size), from which calls were computed. The bins always hold calls.
    """

    name: str
    bins: tuple[TokenBin, ...]
    weighted_by: str = "calls"

    def __post_init__(self) -> None:
        if self.weighted_by not in ("calls", "tokens"):
            raise AutoselError(
                field_error("Workload.weighted_by", "value", self.weighted_by, "calls or tokens")
            )
        last = 0
        for item in self.bins:
            if item.low <= last:
                raise AutoselError(
                    field_error("Workload.bins", "low", item.low, f"above {last}: sorted, apart")
                )
            last = 2**63 if item.high is None else item.high
        total = sum(item.calls for item in self.bins)
        if not (math.isfinite(total) and total > 0):
            raise AutoselError(
                field_error("Workload.bins", "calls in all", total, "finite and above 0")
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; :meth:`from_dict` is the inverse."""
        return {
            "name": self.name,
            "weighted_by": self.weighted_by,
            "bins": [{"low": b.low, "high": b.high, "calls": b.calls} for b in self.bins],
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Workload:
        bins = tuple(TokenBin(item["low"], item["high"], item["calls"]) for item in data["bins"])
        return Workload(data["name"], bins, data["weighted_by"])
