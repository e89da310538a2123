"""Matches the names of modules against the patterns and lists of a quantisation config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from autosel.errors import ConfigError, field_error

#: Prefix of a pattern in compressed-tensors' ``targets`` and ``ignore``.
REGEX_PREFIX = "re:"
#: Unbounded repeats in one pattern; those in use have three or four.
MAX_REPEATS = 10


def compile_pattern(pattern: str, where: str) -> re.Pattern[str]:
    """A pattern of a config; bad ones, and ones that could run for ever, raise ConfigError.

    Configs come from outside and Python's matcher backtracks. A repeat inside a repeat, as in
    ``(a+)+``, can take exponential time on a name that does not match, and many repeats in a row
    a high power of its length, so both are refused.
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as exc:
        raise ConfigError(
            field_error(where, f"pattern {pattern!r}", str(exc), "a regular expression")
        ) from None
    if _repeats_a_repeat(pattern):
        raise ConfigError(
            field_error(where, f"pattern {pattern!r}", "a repeat inside a repeat", "none")
        )
    repeats = len(re.findall(r"(?<!\\)[*+]", pattern))
    if repeats > MAX_REPEATS:
        raise ConfigError(
            field_error(
                where, f"pattern {pattern!r}", f"{repeats} repeats", f"at most {MAX_REPEATS}"
            )
        )
    return compiled


def _repeats_a_repeat(pattern: str) -> bool:
    open_groups: list[bool] = []  # for each open group: has it a repeat so far?
    in_class = False
    pos = 0
    while pos < len(pattern):
        char = pattern[pos]
        if char == "\\":
            pos += 2
            continue
        if in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
            pos += 1 + (pattern[pos + 1 : pos + 2] == "^")  # a first ] is a member
        elif char == "(":
            open_groups.append(False)
        elif char == ")" and open_groups:
            inner = open_groups.pop()
            repeated = bool(re.match(r"[*+]|\{\d*,\d*\}", pattern[pos + 1 :]))
            if inner and repeated:
                return True
            if open_groups:
                open_groups[-1] |= inner or repeated
        elif open_groups and (char in "*+" or re.match(r"\{\d*,\d*\}", pattern[pos:])):
            open_groups[-1] = True
        pos += 1
    return False


def ancestors(module: str) -> Iterator[str]:
    """The module's own name and those of its parents, inner first: ``a.b.c``, ``a.b``, ``a``."""
    end = len(module)
    while end > 0:
        yield module[:end]
        end = module.rfind(".", 0, end)


class NameList:
    """Exact module names, which also cover everything below them, and ``re:`` patterns.

    ``model.layers.1`` covers ``model.layers.1.mlp`` and not ``model.layers.10``. Patterns match
    from the start of the name, as compressed-tensors does (``re.match``).
    """

    def __init__(self, entries: Iterable[str], where: str) -> None:
        self._names: set[str] = set()
        self._covers: dict[str, str | None] = {}
        self._patterns: list[tuple[str, re.Pattern[str]]] = []
        for entry in entries:
            if entry.startswith(REGEX_PREFIX):
                compiled = compile_pattern(entry.removeprefix(REGEX_PREFIX), where)
                self._patterns.append((entry, compiled))
            else:
                self._names.add(entry.rstrip("."))

    def _cover(self, module: str) -> str | None:
        """The module or parent of it that is in the list; parents, which many share, are kept."""
        if module in self._names:
            return module
        parent = module.rpartition(".")[0]
        if not parent:
            return None
        if parent not in self._covers:
            self._covers[parent] = self._cover(parent)
        return self._covers[parent]

    def match(self, module: str) -> str | None:
        """The entry that names this module or one of its parents, or None."""
        covered = self._cover(module)
        if covered is not None:
            return covered
        for entry, pattern in self._patterns:
            if pattern.match(module):
                return entry
        return None
