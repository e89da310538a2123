"""A sweep's wall time, shared among its token counts.

Each token count gets an equal part of what is left when it begins, so that what one does not use
goes to the rest. Of its part at most :data:`TRYING` goes to packing, verifying and searching, which
decide nothing, and what is then left to timing. What cannot be interrupted (a compilation, one
call) may overrun; a token count never ends without having tried until one candidate was right.
What is left in the end, since compilers had got ahead by then, goes to the token counts that were
cut short.
"""

from __future__ import annotations

from collections.abc import Callable

#: Share of a token count's time after which nothing further is packed, verified or searched.
TRYING = 0.6
#: A token count gets a second turn for no less than this, seconds: a few candidates.
WORTH_S = 1.0
#: Timing gets at least this much, seconds: one sample of each that is ready.
LEAST_S = 0.05


class Deadline:
    """``budget_s`` seconds from now on for ``shares`` token counts; None: as long as it takes."""

    def __init__(self, budget_s: float | None, shares: int, now: Callable[[], float]) -> None:
        self._now = now
        self._shares = shares
        self._end = None if budget_s is None else now() + budget_s
        self._began = self._until = now()

    @property
    def is_set(self) -> bool:
        return self._end is not None

    def begin(self) -> None:
        """The next token count's turn."""
        self._began = self._now()
        if self._end is not None:
            left = max(self._end - self._began, 0.0)
            self._until = self._began + left / max(self._shares, 1)
        self._shares -= 1

    def again(self, shares: int) -> bool:
        """Share what is left among so many token counts; False where that is not worth it."""
        left = 0.0 if self._end is None else self._end - self._now()
        self._shares = shares
        return bool(shares) and left >= WORTH_S * shares

    def trying_is_over(self) -> bool:
        """Whether this token count should now time what is ready, and try nothing further."""
        spent = self._now() - self._began
        return self.is_set and spent >= TRYING * (self._until - self._began)

    def is_over(self) -> bool:
        """Whether this token count's time is up."""
        return self.is_set and self._now() >= self._until

    def timing_s(self) -> float | None:
        """Seconds that timing may take; None: no limit."""
        return max(self._until - self._now(), LEAST_S) if self.is_set else None
