"""Several packs as one: of other devices, other shapes, other models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from autosel import records
from autosel.core import Device, Problem
from autosel.errors import PackError
from autosel.packs.content import sealed
from autosel.packs.model import Entry, Model, Pack

#: Which of two entries about one thing is kept; None: neither, the merge is refused.
Prefer = Literal["newest", "first", "last"]
_Key = tuple[Problem, Device, str, str]


@dataclass(frozen=True, slots=True)
class Conflict:
    """One layer, device, routing and way of timing about which two packs say different things."""

    kept: Entry
    dropped: Entry
    kept_from: str
    dropped_from: str

    def __str__(self) -> str:
        return (
            f"{self.kept.problem.key} on {self.kept.device.name}, {self.kept.routing} routing: "
            f"{self.dropped_from} (decided {self.dropped.decided}) and "
            f"{self.kept_from} (decided {self.kept.decided}) differ"
        )


@dataclass(frozen=True, slots=True)
class Merged:
    """The sealed pack, unsigned, and what was left out of it."""

    pack: Pack
    conflicts: tuple[Conflict, ...]


def key(entry: Entry) -> _Key:
    """What an entry is about: two of one key in one pack contradict each other."""
    timing = records.to_json(dict(entry.timing))
    return (entry.problem, entry.device, entry.routing, timing)


def merge(packs: Iterable[tuple[str, Pack]], prefer: Prefer | None = None) -> Merged:
    """Everything in the ``packs``, each given with its name, as one.

    Entries that say the same are kept once. Raises PackError, naming every conflict, where two
    differ and ``prefer`` does not say which counts.
    """
    entries: dict[_Key, tuple[str, Entry]] = {}
    models: dict[tuple[str, str | None, str], Model] = {}
    conflicts: list[Conflict] = []
    for name, pack in packs:
        for model in pack.models:
            models.setdefault((model.name, model.quantization_sha256, model.shapes_sha256), model)
        for entry in pack.entries:
            before_name, before = entries.setdefault(key(entry), (name, entry))
            if before is entry or same_results(before, entry):
                continue
            newer = prefer == "last" or (prefer == "newest" and entry.decided > before.decided)
            kept, dropped = (entry, before) if newer else (before, entry)
            kept_name, dropped_name = (name, before_name) if newer else (before_name, name)
            entries[key(entry)] = (kept_name, kept)
            conflicts.append(Conflict(kept, dropped, kept_name, dropped_name))
    if conflicts and prefer is None:
        words = "; ".join(map(str, conflicts))
        raise PackError(f"merge: {len(conflicts)} conflicts (--prefer settles them): {words}")
    found = tuple(entry for _, entry in entries.values())
    return Merged(sealed(Pack(tuple(models.values()), found)), tuple(conflicts))


def same_results(one: Entry, other: Entry) -> bool:
    """Whether two entries of one key hold the same results, whenever they were packed."""
    return (one.decisions, one.undecided, one.measured, one.certificates, one.plan) == (
        (other.decisions, other.undecided, other.measured, other.certificates, other.plan)
    )
