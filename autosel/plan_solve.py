"""Which layouts to keep resident: exact, by enumeration, and never for a gain within the noise.

Given are, for each token bucket, the time of the best candidate of each layout, how often the
bucket is called, and the bytes of each layout's packed copy. A set of layouts serves a bucket with
its fastest member, since candidates that read a resident layout can be switched for nothing. Wanted
is the set within the byte budget, with a member for every bucket, of least expected time.

**Exact.** Layouts that another one dominates (no larger, no slower in any bucket) are dropped; all
sets of the others that fit are looked at. With L layouts left and at most c copies in the budget
these are ``sum of L choose i for i <= c`` sets, times B buckets; more than :data:`MAX_SETS` sets
are refused. A kernel library has three to eight layouts, so this takes microseconds to
milliseconds.

**Noise.** A caller that knows how uncertain its times are says which gains are real. Among sets of
equally many copies, those that are not really slower than the fastest are tied, and the one of
fewest bytes is taken, the first by name among equals. A set with more copies is taken only for a
real gain over the best with fewer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autosel.errors import AutoselError, field_error

#: Sets to look at, at most.
MAX_SETS = 1_000_000

Set = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Instance:
    """One problem to solve.

    sizes    bytes of each layout's packed copy
    times    for each bucket, microseconds of a call with each layout that can serve it
    weights  calls of each bucket; at least one above 0
    """

    sizes: Mapping[str, int]
    times: Sequence[Mapping[str, float]]
    weights: Sequence[float]

    def bytes(self, layouts: Set) -> int:
        return sum(self.sizes[name] for name in layouts)

    def serves(self, layouts: Set) -> bool:
        """Whether every bucket has a member, those that are never called included."""
        return all(any(name in row for name in layouts) for row in self.times)

    def time(self, layouts: Set) -> float:
        """Weighted time; infinite when a bucket has no member."""
        if not self.serves(layouts):
            return math.inf
        return sum(w * self.fastest(b, layouts)[1] for b, w in enumerate(self.weights))

    def fastest(self, bucket: int, layouts: Set) -> tuple[str, float]:
        """The member that serves a bucket, the first by name among equals, and its time."""
        row = self.times[bucket]
        us, name = min((row[name], name) for name in layouts if name in row)
        return name, us


@dataclass(frozen=True, slots=True)
class Chosen:
    """A set of layouts, sorted by name, with its bytes and its weighted time."""

    layouts: Set
    nbytes: int
    time_us: float


#: Whether the second set's gain over the first is real.
Clears = Callable[[Set, Set], bool]


def solve(
    instance: Instance,
    budget: int | None,
    clears: Clears | None = None,
    *,
    copies: int | None = None,
) -> Chosen | None:
    """The set of layouts to keep within ``budget`` bytes; None when none serves every bucket.

    clears  whether a gain is real; every gain is when left out, so that the answer is the set of
            least time, then of fewest copies, fewest bytes, and first names among the undominated
    copies  at most this many
    """
    best: Chosen | None = None
    for sets in itertools.islice(_sets(instance, budget), copies):
        fastest = min(sets, key=_fastest_first, default=None)
        if fastest is None:
            continue
        if best is not None and not _gains(instance, best.layouts, fastest.layouts, clears):
            continue
        tied = [
            found
            for found in sets
            if not _gains(instance, found.layouts, fastest.layouts, clears)
            and (best is None or _gains(instance, best.layouts, found.layouts, clears))
        ]
        best = min(tied, key=lambda found: (found.nbytes, found.layouts))
    return best


def by_copies(instance: Instance, budget: int | None = None) -> Iterator[Chosen]:
    """The fastest set of each number of copies that can be had, fewest first."""
    for sets in _sets(instance, budget):
        if sets:
            yield min(sets, key=_fastest_first)


def smallest(instance: Instance) -> Chosen | None:
    """The set of fewest bytes that serves every bucket; None when there is none."""
    sets = itertools.chain.from_iterable(_sets(instance, None))
    return min(sets, key=lambda found: (found.nbytes, found.layouts), default=None)


def _sets(instance: Instance, budget: int | None) -> Iterator[list[Chosen]]:
    """The sets that fit and serve every bucket, for each number of copies, fewest first."""
    names = undominated(instance)
    room = math.inf if budget is None else budget
    fitting = looked_at = 0
    for size in sorted(instance.sizes[name] for name in names):
        room -= size
        fitting += room >= 0
    for count in range(1, fitting + 1):
        looked_at += math.comb(len(names), count)
        if looked_at > MAX_SETS:
            found = f"{len(names)} layouts"
            raise AutoselError(
                field_error("plan", "sets of layouts", found, f"at most {MAX_SETS} sets")
            )
        sets = [
            Chosen(layouts, instance.bytes(layouts), instance.time(layouts))
            for layouts in itertools.combinations(names, count)
            if (budget is None or instance.bytes(layouts) <= budget) and instance.serves(layouts)
        ]
        yield sets


def _fastest_first(found: Chosen) -> tuple[float, int, Set]:
    return found.time_us, found.nbytes, found.layouts


def _gains(instance: Instance, one: Set, other: Set, clears: Clears | None) -> bool:
    """Whether ``other`` is really faster than ``one``."""
    faster = instance.time(other) < instance.time(one)
    return faster and (clears is None or clears(one, other))


def undominated(instance: Instance) -> Set:
    """Layouts worth looking at, by name.

    One is dropped when another takes no more bytes and serves every bucket that it serves at least
    as fast; of two that are equal in everything the first by name stays.
    """

    def dominates(a: str, b: str) -> bool:
        rows = [row for row in instance.times if b in row]
        if instance.sizes[a] > instance.sizes[b] or any(a not in row for row in rows):
            return False
        if any(row[a] > row[b] for row in rows):
            return False
        equal = instance.sizes[a] == instance.sizes[b] and all(
            (a in row) == (b in row) and row.get(a) == row.get(b) for row in instance.times
        )
        return not equal or a < b

    names = sorted(instance.sizes)
    return tuple(b for b in names if not any(dominates(a, b) for a in names if a != b))
