"""Whether results made on one machine may decide on another, field by field.

exact       every field is equal: used as if it had been measured here
compatible  the hardware and the kernels are the same, and other fields differ only as their rule
            in :data:`RULES` allows: used after a check here (:mod:`autosel.packs.canary`)
foreign     anything else: never decides; shown, and of use as a starting point of a search

Where no rule stands for a field, any difference makes results foreign. A fact that only one side
knows is a difference (unknown is not equal), and a device without a name is unknown altogether.
Packages that no winner runs on are bystanders: another version, or none, of a rival's package
changes nothing about the winners, and whether they still win is what the check here asks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

import autosel
from autosel import registry
from autosel.core import Device
from autosel.packs.model import Entry, Source

Grade = Literal["exact", "compatible", "foreign"]
GRADES: tuple[Grade, ...] = ("exact", "compatible", "foreign")


@dataclass(frozen=True, slots=True)
class Rule:
    """When two different values still make compatible results; ``words`` say it."""

    words: str
    near: Callable[[Any, Any], bool]


@dataclass(frozen=True, slots=True)
class GradedField:
    """A field that differs: what the results were made with, what is here and what follows."""

    field: str
    made: Any
    here: Any
    grade: Grade

    def __str__(self) -> str:
        made, here = (_shown(value) for value in (self.made, self.here))
        return f"{self.field}: made with {made}, here {here} ({self.grade})"


@dataclass(frozen=True, slots=True)
class Graded:
    """The grade of results on a machine and every field that differs."""

    grade: Grade
    differences: tuple[GradedField, ...] = ()

    def __str__(self) -> str:
        return "; ".join([self.grade, *map(str, self.differences)])


def _patch(made: str, here: str) -> bool:
    try:
        one, two = Version(made), Version(here)
    except InvalidVersion:
        return False
    known = not (one.is_prerelease or two.is_prerelease)
    return known and one.release[:2] == two.release[:2] and one.local == two.local


def _branch(made: str, here: str) -> bool:
    one, two = (re.fullmatch(r"(\d+)\.(\d+)(\.\d+)*", text) for text in (made, here))
    if one is None or two is None:
        return False
    # NVIDIA numbers its branches from 100 up: 570.86.15 and 570.124.06 are one branch.
    numbers = 1 if int(one[1]) >= 100 else 2
    return one.groups()[:numbers] == two.groups()[:numbers]


def _compiler(made: str, here: str) -> bool:
    one, two = (re.findall(r"\d+\.\d+(?:\.\d+)*", text) for text in (made, here))
    if not one or not two or made.split()[0] != here.split()[0]:
        return False
    return _patch(one[-1], two[-1])


def _memory(made: int, here: int) -> bool:
    return abs(made - here) <= 0.02 * max(made, here)


_PATCH = Rule("the same release but for its last number, and the same build label", _patch)
_NEVER = Rule("equal", lambda made, here: False)

#: The one table. A field that is not here must be equal: all others of the hardware (another kind,
#: name, capability, number of multiprocessors, clock, MIG slice, cache, shared memory, instruction
#: set or thread count is another machine), and the content hash of our kernels.
RULES: Mapping[str, Rule] = {
    # A driver keeps some memory for itself, and its releases do not keep equally much.
    "device.memory_bytes": Rule("within 2 %", _memory),
    "device.driver": Rule("the same branch (first number from 100 up, else first two)", _branch),
    "versions.autosel-kernels": _NEVER,
    "versions.c++": Rule("the same compiler and release but for its last number", _compiler),
    "versions.*": _PATCH,
    "autosel.version": _PATCH,
}


def bystanders(entry: Entry) -> frozenset[str]:
    """Packages of backends that won nothing in ``entry``; none where a winner's are not known."""
    packages = {backend.name: {*backend.distributions} for backend in registry.all_backends()}
    winners = {decision.winner.backend for decision in entry.decisions}
    if not winners <= packages.keys():
        return frozenset()
    needed = {"torch"}.union(*(packages[name] for name in winners))
    return frozenset(set[str]().union(*packages.values()) - needed)


def grade(
    source: Source,
    here: Device,
    *,
    shipped: bool = False,
    bystanders: Collection[str] = (),
) -> Graded:
    """The grade on ``here`` of what ``source`` made, for the autosel that is running.

    The checkout's commit is not compared: what of it can change a result, the kernels, is by
    content. ``shipped`` results are part of this very autosel, so that the number of the version
    that made them does not count either. A difference in a package among ``bystanders`` asks for a
    check and no more.
    """
    beside = {f"versions.{name}" for name in bystanders}
    found = [
        GradedField(name, made, ours, "compatible" if name in beside else _effect(name, made, ours))
        for name, (made, ours) in _pairs(source, here).items()
        if made != ours and not (shipped and name == "autosel.version")
    ]
    if not here.name.strip() and not found:
        found.append(GradedField("device.name", source.device.name, here.name, "foreign"))
    worst = max((GRADES.index(item.grade) for item in found), default=0)
    return Graded(GRADES[worst], tuple(found))


def _pairs(source: Source, here: Device) -> dict[str, tuple[Any, Any]]:
    """Every field as made and as it is here."""
    made, ours = source.device.to_dict(), here.to_dict()
    pairs = {
        f"device.{item.name}": (made.get(item.name), ours.get(item.name))
        for item in fields(Device)
        if item.name != "versions"
    }
    theirs, mine = made["versions"], ours["versions"]
    for name in sorted(theirs.keys() | mine.keys()):
        pairs[f"versions.{name}"] = (theirs.get(name), mine.get(name))
    pairs["autosel.version"] = (source.autosel_version, autosel.__version__)
    return pairs


def _effect(name: str, made: Any, here: Any) -> Grade:
    if made is None or here is None:
        return "foreign"
    rule = RULES.get(name) or RULES.get(name.split(".")[0] + ".*", _NEVER)
    return "compatible" if rule.near(made, here) else "foreign"


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
