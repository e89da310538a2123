"""Matches the names of modules against the patterns and lists of a quantisation config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

from autosel.errors import ConfigError, field_error

#: Prefix of a pattern in compressed-tensors' ``targets`` and ``ignore``.
REGEX_PREFIX = "re:"
#: Bounds on one pattern, after :func:`_without_retries`; those in use stay far below.
MAX_REPEATS, MAX_WILD, MAX_OPTIONAL = 10, 3, 10
_COUNT = re.compile(r"\{\d*,?\d*\}")
_WILD = re.compile(r"(?:\.[*+]\??)+")
#: Escapes that match many letters, so that their repeats can share out a name in many ways.
_WIDE_ESCAPES = "wWSDB"


def compile_pattern(pattern: str, where: str) -> re.Pattern[str]:
    """A pattern of a config, for ``match``; bad ones, and ones that could run for ever, raise.

    Configs come from outside and Python's matcher backtracks. A repeat of a repeat or of
    alternatives, as in ``(a+)+`` or ``(a|aa)*``, can take exponential time on a name that does not
    match, and many repeats in a row a high power of its length, so both are a ConfigError. Whether
    it matches is all that may be asked: the groups and the end of a match differ from the original.
    """
    try:
        re.compile(pattern)
        compiled = re.compile(_without_retries(pattern))
    except (re.error, RecursionError, OverflowError) as exc:
        raise ConfigError(
            field_error(where, f"pattern {pattern!r}", str(exc), "a regular expression")
        ) from None
    fault = _fault(pattern, compiled.pattern)
    if fault is not None:
        raise ConfigError(field_error(where, f"pattern {pattern!r}", *fault))
    return compiled


def _without_retries(pattern: str) -> str:
    """The same question asked so that it takes linear time, where the form allows it.

    In ``.*A.*B.*C`` with parts of fixed length, the first A is as good as any later one: what can
    follow a later one can follow the first. An atomic group ``(?>.*?A)`` never tries another.
    """
    if "(?" in pattern or _has_alternatives(pattern):
        return pattern
    parts, joints = [""], []
    for token in _tokens(pattern):
        wild = _WILD.fullmatch(token)
        if wild:
            parts.append("")
            # ``.*.*`` says no more than ``.*``, and each ``.+`` takes one more letter.
            joints.append("." * token.count("+") + ".*?")
        else:
            parts[-1] += token
    out = parts[0]
    for number, (joint, part) in enumerate(zip(joints, parts[1:], strict=True), 1):
        fixed = not re.search(r"[*+?{}()]", part)
        out += f"(?>{joint}{part})" if fixed and number < len(joints) else f"{joint}{part}"
    return out


def _has_alternatives(pattern: str) -> bool:
    depth = 0
    for token in _tokens(pattern):
        depth += {"(": 1, ")": -1}.get(token, 0)
        if token == "|" and depth == 0:
            return True
    return False


def _tokens(pattern: str) -> Iterator[str]:
    """Escapes, classes, runs of ``.*`` outside of groups, counts and single letters."""
    pos = depth = 0
    while pos < len(pattern):
        end = pos + 1
        if pattern[pos] == "\\":
            end = pos + 2
        elif pattern[pos] == "[":
            end = pos + 1 + (pattern[pos + 1 : pos + 2] == "^")
            end += pattern[end : end + 1] == "]"  # a first ] is a member
            while end < len(pattern) and pattern[end] != "]":
                end += 2 if pattern[end] == "\\" else 1
            end += 1
        else:
            depth += {"(": 1, ")": -1}.get(pattern[pos], 0)
            long = _COUNT.match(pattern, pos) or (None if depth else _WILD.match(pattern, pos))
            end = long.end() if long else end
        yield pattern[pos:end]
        pos = end


def _fault(pattern: str, safer: str) -> tuple[str, str] | None:
    """What in a pattern could run for ever, as found and expected; None for a harmless one."""
    open_groups: list[bool] = []  # for each open group: a repeat or alternatives in it so far?
    tokens = [*_tokens(pattern), ""]
    for before, token, after in zip(["", *tokens], tokens, tokens[1:], strict=False):
        if token == "(":
            open_groups.append(False)
        elif token == ")" and open_groups:
            inner = open_groups.pop()
            repeated = _quantifies(after)
            if inner and repeated:
                return "a repeat inside a repeat, or of alternatives", "none"
            if open_groups:
                open_groups[-1] |= inner or repeated
        elif open_groups and (_repeats(token) or token == "|" or (token == "?" and before != "(")):
            open_groups[-1] = True
    optional = sum(token == "?" and before not in "*+?(" for before, token in pairwise(tokens))
    if optional > MAX_OPTIONAL:
        return f"{optional} optional parts", f"at most {MAX_OPTIONAL}"
    repeats = sum(map(_repeats, tokens))
    if repeats > MAX_REPEATS:
        return f"{repeats} repeats", f"at most {MAX_REPEATS}"
    wild = _count_wild(re.sub(r"\(\?>[^()]*\)", "", safer))
    if wild > MAX_WILD + 1:  # the last one is followed by nothing that could send it back
        return f"{wild} repeats of many letters", f"at most {MAX_WILD + 1}"
    return None


def _repeats(token: str) -> bool:
    return _quantifies(token) or bool(_WILD.fullmatch(token))


def _quantifies(token: str) -> bool:
    """Whether a token repeats what stands before it."""
    return token in ("*", "+") or bool(_COUNT.fullmatch(token))


def _count_wild(pattern: str) -> int:
    """Repeats that can match many different letters, which alone can share out a name."""
    count = 0
    for token, after in pairwise([*_tokens(pattern), ""]):
        wide = token in (".", ")") or token.startswith("[") or token[1:] in [*_WIDE_ESCAPES]
        count += bool(_WILD.fullmatch(token)) or (wide and _quantifies(after))
    return count


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
