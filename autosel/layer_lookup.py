"""From a token count to what serves it: one bisection in a tuple of integers.

Done in every call of every layer, so it costs well under a microsecond (``bench/lookup.py``),
allocates nothing and touches no tensor. Never changed once made; a new table replaces it whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Generic, TypeVar

from autosel.core import TokenBucket
from autosel.errors import AutoselError, field_error

T = TypeVar("T")


class Lookup(Generic[T]):
    """Entries of neighbouring buckets that cover every token count from 1 on."""

    __slots__ = ("_borders", "entries")

    def __init__(self, entries: Sequence[tuple[TokenBucket, T]]) -> None:
        """``entries`` sorted; AutoselError where two buckets overlap or leave a gap."""
        low: int | None = 1
        for bucket, _ in entries:
            if bucket.low != low:
                raise AutoselError(
                    field_error("lookup", "bucket", f"one from {bucket.low}", f"one from {low}")
                )
            low = None if bucket.high is None else bucket.high + 1
        if low is not None:
            raise AutoselError(field_error("lookup", "last bucket", "an upper end", "an open end"))
        self.entries = tuple(entry for _, entry in entries)
        # One border between each two neighbours: a bisection is the entry's place.
        self._borders = tuple(bucket.low for bucket, _ in entries[1:])

    def at(self, num_tokens: int) -> T:
        """What serves ``num_tokens`` tokens; 0 tokens, which run nothing, get the first entry."""
        return self.entries[bisect_right(self._borders, num_tokens)]
