"""Yes, or every reason for no."""

from __future__ import annotations

from dataclasses import dataclass

from autosel.errors import AutoselError


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
