"""What two packs say differently: entries, machines and decisions that flip."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autosel.core import Decision
from autosel.packs.grade import grade
from autosel.packs.merge import key
from autosel.packs.model import Entry, Pack


@dataclass(frozen=True, slots=True)
class Change:
    """One difference. ``kind``: ``only in first``, ``only in second``, ``machine``, ``winner``,
    ``time`` (the same winner took another time) or ``undecided``; ``tokens`` is a bucket's label.

    ``ratio`` is the second's time over the first's, where both have one.
    """

    kind: str
    layer: str
    device: str
    routing: str
    tokens: str = ""
    first: str = ""
    second: str = ""
    ratio: float | None = None


def changes(first: Pack, second: Pack, *, tolerance: float = 0.05) -> tuple[Change, ...]:
    """Everything that differs; times of one winner only beyond ``tolerance``.

    Entries are compared with that of the same key, else with that of the same layer, routing, way
    of timing and device name: then the other fields of the machine are told as well.
    """
    theirs = {key(entry): entry for entry in second.entries}
    loose = {_loose(entry): entry for entry in second.entries}
    found: list[Change] = []
    met: set[int] = set()
    for entry in first.entries:
        other = theirs.get(key(entry)) or loose.get(_loose(entry))
        if other is None:
            found.append(_whole(entry, "only in first"))
            continue
        met.add(id(other))
        found += _compared(entry, other, tolerance)
    found += [_whole(e, "only in second") for e in second.entries if id(e) not in met]
    return tuple(found)


def _loose(entry: Entry) -> tuple[object, ...]:
    problem, device, routing, timing = key(entry)
    return (problem, device.kind, device.name, routing, timing)


def _whole(entry: Entry, kind: str) -> Change:
    return Change(kind, entry.problem.key, entry.device.name, entry.routing)


def _compared(one: Entry, two: Entry, tolerance: float) -> Iterator[Change]:
    def change(kind: str, tokens: str, first: str, second: str, ratio: float | None) -> Change:
        device, routing = one.device.name, one.routing
        return Change(kind, one.problem.key, device, routing, tokens, first, second, ratio)

    for name, made, other in _machine(one, two):
        yield change("machine", "", f"{name}={made}", f"{name}={other}", None)
    for label, mine, theirs in _aligned(one, two):
        if mine is None or theirs is None:
            if mine is not theirs:
                words = [d.winner.key if d else "nothing" for d in (mine, theirs)]
                yield change("undecided", label, words[0], words[1], None)
            continue
        ratio = theirs.winner_us / mine.winner_us
        if mine.winner != theirs.winner:
            yield change("winner", label, mine.winner.key, theirs.winner.key, ratio)
        elif abs(ratio - 1) > tolerance:
            times = (f"{d.winner_us:.4g} us" for d in (mine, theirs))
            yield change("time", label, next(times), next(times), ratio)


def _machine(one: Entry, two: Entry) -> Iterator[tuple[str, object, object]]:
    """Fields of the machine and the software that made the entries, where they differ."""
    for field in grade(one.source, two.device).differences:
        if field.field != "autosel.version":  # that of the program that is running
            yield field.field, field.made, field.here
    made, other = one.source.autosel_version, two.source.autosel_version
    if made != other:
        yield "autosel.version", made, other


def _aligned(one: Entry, two: Entry) -> Iterator[tuple[str, Decision | None, Decision | None]]:
    """Both entries' decisions over the finest common buckets, with the buckets' labels."""
    buckets = [item.bucket for entry in (one, two) for item in entry.outcomes]
    edges = sorted({bucket.low for bucket in buckets})
    for place, low in enumerate(edges):
        high = edges[place + 1] - 1 if place + 1 < len(edges) else None
        label = f"{low}+" if high is None else str(low) if high == low else f"{low}-{high}"
        yield label, _decision(one, low), _decision(two, low)


def _decision(entry: Entry, num_tokens: int) -> Decision | None:
    return next((d for d in entry.decisions if num_tokens in d.bucket), None)
