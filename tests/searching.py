"""A search walked to its end, as the sweep walks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autosel.core import Params
from autosel.interfaces import Space
from autosel.search import Found, Search, Tried


def walk(
    space: Space,
    budget: int,
    evaluate: Callable[[dict[str, Any]], float | None],
    seed: int = 0,
    seeds: Sequence[Params] = (),
) -> Found:
    """What a search finds when ``evaluate`` answers each of its points."""
    search = Search(space, budget, seed, seeds)
    while (params := search.ask()) is not None:
        search.tell(evaluate(params))
    return search.found


def best(found: Found) -> Tried:
    """The point of the lowest value."""
    return min((t for t in found.tried if t.value is not None), key=lambda t: t.value or 0.0)
