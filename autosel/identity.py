"""What makes two stored entries differ, field by field, and which one is nearest to a wish."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autosel.core import Device, Problem


@dataclass(frozen=True, slots=True)
class Difference:
    """One field of the key: what was looked for and what is stored."""

    field: str
    wanted: Any
    stored: Any

    def __str__(self) -> str:
        return f"{self.field}: wanted {_shown(self.wanted)}, stored {_shown(self.stored)}"


@dataclass(frozen=True, slots=True)
class Entry:
    """What the store holds for one layer on one device with one set of versions."""

    problem: Problem
    device: Device
    routing: str
    token_counts: tuple[int, ...]
    decisions: int
    newest: str


@dataclass(frozen=True, slots=True)
class Nearest:
    """An entry and every field in which it differs from what was looked for."""

    entry: Entry
    differences: tuple[Difference, ...]

    @property
    def exact(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        return "; ".join(map(str, self.differences)) or "same key"


def problem_differences(wanted: Problem, stored: Problem) -> tuple[Difference, ...]:
    """Fields in which two layers differ, the nested ones with their full name."""
    return tuple(_differ("", wanted.to_dict(), stored.to_dict()))


def hardware_differences(wanted: Device, stored: Device) -> tuple[Difference, ...]:
    """Fields of the hardware that differ. An empty name is unknown, and unknown is not equal."""
    found = list(_differ("device.", _hardware(wanted), _hardware(stored)))
    if not wanted.name.strip() and not stored.name.strip() and wanted.name == stored.name:
        found.append(Difference("device.name", wanted.name, stored.name))
    return tuple(found)


def version_differences(wanted: Device, stored: Device) -> tuple[Difference, ...]:
    """Driver and packages that differ; a package that one side lacks is None there."""
    ours: dict[str, Any] = {"driver": wanted.driver, **dict(wanted.versions)}
    theirs: dict[str, Any] = {"driver": stored.driver, **dict(stored.versions)}
    return tuple(_differ("versions.", ours, theirs))


def nearest(
    problem: Problem, device: Device, entries: Iterable[Entry], routing: str | None = None
) -> Nearest | None:
    """The entry with the fewest differing fields: of the layer, then hardware, versions, routing.

    Among equals the newest. None when there is no entry at all.
    """
    best: tuple[tuple[int, ...], str, Nearest] | None = None
    for entry in entries:
        groups = (
            problem_differences(problem, entry.problem),
            hardware_differences(device, entry.device),
            version_differences(device, entry.device),
            _routing(routing, entry.routing),
        )
        rank = tuple(map(len, groups))
        if best is None or rank < best[0] or (rank == best[0] and entry.newest > best[1]):
            everything = tuple(difference for group in groups for difference in group)
            best = (rank, entry.newest, Nearest(entry, everything))
    return best[2] if best else None


def stale(device: Device, entries: Iterable[Entry]) -> tuple[Nearest, ...]:
    """Entries of this hardware that were made with another driver or other packages."""
    found = []
    for entry in entries:
        changed = version_differences(device, entry.device)
        if changed and not hardware_differences(device, entry.device):
            found.append(Nearest(entry, changed))
    return tuple(found)


def _routing(wanted: str | None, stored: str) -> tuple[Difference, ...]:
    if wanted is None or wanted == stored:
        return ()
    return (Difference("routing", wanted, stored),)


def _hardware(device: Device) -> dict[str, Any]:
    data = device.to_dict()
    del data["driver"], data["versions"]
    return data


def _differ(
    prefix: str, wanted: Mapping[str, Any], stored: Mapping[str, Any]
) -> Iterator[Difference]:
    for name in dict.fromkeys((*wanted, *stored)):
        ours, theirs = wanted.get(name), stored.get(name)
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            yield from _differ(f"{prefix}{name}.", ours, theirs)
        elif ours != theirs:
            yield Difference(prefix + name, ours, theirs)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return " ".join(map(str, value)) if isinstance(value, list) else repr(value)
