"""Typed access to values from a pack. Every refusal names the place, what was found and expected.

Texts that name something (backends, parameters, layouts, kinds) are ASCII words, so that no name
is a path, looks like another one or carries code. Texts for people are one line of printable
characters: no control characters, no terminal escapes, nothing that reorders text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any, NoReturn, TypeVar

from autosel.core import Scalar
from autosel.errors import PackError, field_error
from autosel.packs.strict_json import shown
from autosel.stats import LEAST_US

T = TypeVar("T")
Object = Mapping[str, Any]

#: More of anything in one list than this is no measurement of a model.
MAX_ITEMS = 100_000
MAX_NAME = 128
MAX_TEXT = 4000
MAX_PARAMS = 64
#: Microseconds in an hour: no call of one layer takes longer.
MAX_US = 3.6e9

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:+-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def refuse(where: str, what: str, found: object, expected: object) -> NoReturn:
    raise PackError(field_error(where, what, found, expected))


def object_of(
    value: Any, where: str, required: Collection[str], optional: Collection[str] = ()
) -> Object:
    """An object with exactly these keys."""
    if not isinstance(value, dict):
        refuse(where, "value", kind(value), "an object")
    for name in required:
        if name not in value:
            refuse(where, "key", "nothing", name)
    if len(value) != len(required):
        for name in value:
            if name not in required and name not in optional:
                refuse(where, "key", shown(name), "a known key")
    return value


def items(
    value: Any, where: str, parse: Callable[[Any, str], T], *, most: int = MAX_ITEMS
) -> list[T]:
    """A list, each item parsed with its place."""
    if not isinstance(value, list):
        refuse(where, "value", kind(value), "a list")
    if len(value) > most:
        refuse(where, "items", len(value), f"at most {most}")
    return [parse(item, f"{where}[{number}]") for number, item in enumerate(value)]


def integer(value: Any, where: str, low: int = 0, high: int = 2**63 - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        refuse(where, "value", shown(value), f"a whole number from {low} to {high}")
    return value


def number(value: Any, where: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        refuse(where, "value", shown(value), f"a number from {low:g} to {high:g}")
    return float(value)


def time_us(value: Any, where: str) -> float:
    """Microseconds that a call can take."""
    return number(value, where, LEAST_US, MAX_US)


def numbers(
    value: Any, where: str, names: Set[str], low: float, high: float, *, nothing: bool = False
) -> dict[str, float]:
    """An object with exactly these keys, all numbers (or null where ``nothing``) in one range.

    Packs have thousands of these: what is right is seen without writing out a place for each.
    """
    if isinstance(value, dict) and value.keys() == names:
        for item in value.values():
            kind_ = type(item)
            if (kind_ is float or kind_ is int) and low <= item <= high:
                continue
            if item is not None or not nothing:
                break
        else:
            return value
    object_of(value, where, tuple(names))
    for key, item in value.items():
        if item is not None or not nothing:
            number(item, f"{where}.{key}", low, high)
    return value  # type: ignore[no-any-return]


def times_us(value: Any, where: str) -> tuple[float, ...]:
    """Samples in microseconds; like :func:`numbers`, places are written out only for a refusal."""
    if isinstance(value, list) and len(value) <= MAX_ITEMS:
        kinds = {type(item) for item in value}
        if kinds <= {float} and (not value or (min(value) >= LEAST_US and max(value) <= MAX_US)):
            return tuple(value)
    return tuple(items(value, where, time_us))


def boolean(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        refuse(where, "value", shown(value), "true or false")
    return value


def name(value: Any, where: str, *, empty: bool = False) -> str:
    """An ASCII word of letters, digits and ``_ . : + -``; never a path."""
    if isinstance(value, str):
        if empty and not value:
            return value
        if len(value) <= MAX_NAME and _NAME.fullmatch(value) and ".." not in value:
            return value
    refuse(where, "value", shown(value), "a plain name")


def names(value: str, where: str) -> str:
    """Nothing, or names with commas between them, as the parameter ``64,64+16,128``."""
    if len(value) > MAX_NAME:
        refuse(where, "value", shown(value), f"plain names of {MAX_NAME} characters together")
    for part in value.split(",") if value else ():
        name(part, where)
    return value


def text(value: Any, where: str, *, most: int = MAX_TEXT) -> str:
    """One line for people."""
    if not isinstance(value, str):
        refuse(where, "value", kind(value), "text")
    if len(value) > most:
        refuse(where, "characters", len(value), f"at most {most}")
    if not value.isprintable():
        refuse(where, "text", shown(value), "one line of printable characters")
    return value


def sha256(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        refuse(where, "value", shown(value), "64 hexadecimal digits")
    return value


def choice(value: Any, where: str, allowed: Sequence[Any]) -> Any:
    if not isinstance(value, str) or value not in allowed:
        refuse(where, "value", shown(value), "one of " + ", ".join(map(str, allowed)))
    return value


def optional(value: Any, where: str, parse: Callable[[Any, str], T]) -> T | None:
    return None if value is None else parse(value, where)


def scalar(value: Any, where: str) -> Scalar:
    """null, true, false, a number or a short plain text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return plain_number(value, where)
    if isinstance(value, str):
        return text(value, where, most=MAX_NAME)
    refuse(where, "value", kind(value), "a number, a name, true, false or null")


def plain_number(value: int | float, where: str) -> int | float:
    """A number that every reader of JSON has: finite, and of 64 bits where it is whole."""
    if isinstance(value, int):
        return integer(value, where, -(2**63))
    if not math.isfinite(value):
        refuse(where, "value", value, "a finite number")
    return value


def scalars(value: Any, where: str, *, most: int = MAX_PARAMS) -> dict[str, Scalar]:
    """Names and scalars; texts among them are plain names or lists of them, as parameters are."""
    if not isinstance(value, dict):
        refuse(where, "value", kind(value), "an object")
    if len(value) > most:
        refuse(where, "items", len(value), f"at most {most}")
    made: dict[str, Scalar] = {}
    for key, item in value.items():
        name(key, f"{where} key")
        inner = f"{where}.{key}"
        made[key] = names(item, inner) if isinstance(item, str) else scalar(item, inner)
    return made


def sane(value: Any, where: str, depth: int = 8) -> Any:
    """Any value whose texts are fit for people and whose nesting is bounded, unchanged."""
    if isinstance(value, str):
        text(value, where)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        plain_number(value, where)
    elif isinstance(value, list | dict):
        if depth == 0:
            refuse(where, "nesting", "deeper", "at most 8 levels")
        if len(value) > MAX_ITEMS:
            refuse(where, "items", len(value), f"at most {MAX_ITEMS}")
        for number_, item in enumerate(value):
            if isinstance(value, dict):
                text(item, f"{where} key", most=MAX_NAME)
                sane(value[item], f"{where}.{item}", depth - 1)
            else:
                sane(item, f"{where}[{number_}]", depth - 1)
    return value


def kind(value: object) -> str:
    """The JSON word for a value's type."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")
