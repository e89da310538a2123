"""Matches the names of modules against the patterns and lists of a quantisation config."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise

from autosel.errors import ConfigError, field_error

#: Prefix of a pattern in compressed-tensors' ``targets`` and ``ignore``.
REGEX_PREFIX = "re:"
#: Bounds on one pattern, after :func:`_without_retries`; those in use stay far below.
MAX_REPEATS, MAX_LETTERS = 10, 20_000
#: Ways to try on one name of ``MAX_NAME`` letters, of which the matcher takes some 1e8 in a second.
#: The longest names in use have about 100.
MAX_WAYS, MAX_NAME = 1e9, 200
#: What one pattern may take on all names together; 45,000 names take 0.02 s.
MAX_SECONDS = 5.0
_COUNT = re.compile(r"\{\d*,?\d*\}")
_WILD = re.compile(r"(?:\.[*+]\??)+")


class Pattern:
    """A regular expression of a config, for ``match``; ``where`` is its place for messages.

    Configs come from outside and Python's matcher backtracks. A repeat of a repeat or of
    alternatives, as in ``(a+)+`` or ``(a|aa)*``, can take exponential time on a name that does not
    match, and many repeats in a row a high power of its length, so both are a ConfigError. Whether
    it matches is all that may be asked: the groups and the end of a match differ from the original.
    """

    def __init__(self, pattern: str, where: str) -> None:
        self.pattern, self._where = pattern, where
        self._left = MAX_SECONDS
        if len(pattern) > MAX_LETTERS:
            raise self._refused(f"{len(pattern)} letters", f"at most {MAX_LETTERS}")
        try:
            re.compile(pattern)
            self._compiled = re.compile(_without_retries(pattern))
        except (re.error, RecursionError, OverflowError) as exc:
            raise self._refused(str(exc), "a regular expression") from None
        ways = _ways(self._compiled.pattern)
        fault = _fault(pattern, ways)
        if fault is not None:
            raise self._refused(*fault)
        self._longest = MAX_NAME if ways > MAX_NAME**2 else MAX_LETTERS

    def match(self, name: str) -> bool:
        """Whether some part of ``name`` from its start matches, as ``re.match``.

        Raises ConfigError for a name that is too long to match in time, and when all names
        together have taken ``MAX_SECONDS``.
        """
        if len(name) > self._longest:
            short = f"a module name of {len(name)} letters ({name[:40]}...)"
            raise self._refused(short, f"at most {self._longest}")
        if self._left < 0:
            raise self._refused("one that takes too long on these names", "a simpler one")
        start = time.perf_counter()
        found = self._compiled.match(name) is not None
        self._left -= time.perf_counter() - start
        return found

    def _refused(self, found: str, expected: str) -> ConfigError:
        short = self.pattern if len(self.pattern) <= 120 else f"{self.pattern[:120]}..."
        return ConfigError(field_error(self._where, f"pattern {short!r}", found, expected))


def _without_retries(pattern: str) -> str:
    """The same question asked so that it takes linear time, where the form allows it.

    In ``.*A.*B.*C`` with parts of fixed length, the first A is as good as any later one: what can
    follow a later one can follow the first. An atomic group ``(?>.*?A)`` never tries another.
    """
    if "(?" in pattern or len(_branches(_tokens(pattern))) > 1:
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


def _branches(tokens: Iterable[str]) -> list[list[str]]:
    """The alternatives of the whole pattern; one where it has none outside of groups."""
    branches: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += {"(": 1, ")": -1}.get(token, 0)
        if token == "|" and depth == 0:
            branches.append([])
        else:
            branches[-1].append(token)
    return branches


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


def _fault(pattern: str, ways: float) -> tuple[str, str] | None:
    """What in a pattern could run for ever, as found and expected; None for a harmless one.

    ``ways`` are those of :func:`_ways`.
    """
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
    repeats = sum(map(_repeats, tokens))
    if repeats > MAX_REPEATS:
        return f"{repeats} repeats", f"at most {MAX_REPEATS}"
    if ways > MAX_WAYS:
        found = f"repeats and alternatives that share out a long name in {ways:.0e} ways"
        return found, f"at most {MAX_WAYS:.0e}"
    return None


def _ways(safer: str) -> float:
    """How often parts of the pattern may be tried again on a name of ``MAX_NAME`` letters."""
    tokens = [*_tokens(re.sub(r"\(\?>[^()]*\)", "", safer))]
    # Each way walks over the rest of the name once more before it fails.
    # Repeats of other branches never multiply.
    wild = max(map(_count_wild, _branches(tokens))) + 1
    places: float = MAX_NAME**wild / math.factorial(wild)
    optional = sum(b == "?" and a not in "*+?(" for a, b in pairwise(tokens))
    return places * _alternatives(tokens) * 2.0 ** min(optional, 100)


def _repeats(token: str) -> bool:
    return _quantifies(token) or bool(_WILD.fullmatch(token))


def _quantifies(token: str) -> bool:
    """Whether a token repeats what stands before it."""
    return token in ("*", "+") or bool(_COUNT.fullmatch(token))


def _count_wild(tokens: list[str]) -> int:
    """Repeats and options that could give letters to what follows, and so be tried again.

    What ends the pattern has nothing to give to, and ``[0-9]+`` before a letter that is no digit
    can only end there.
    """
    count = 0
    for place, (token, after) in enumerate(pairwise([*tokens, ""])):
        run = bool(_WILD.fullmatch(token))
        if (not run and not (_quantifies(after) or after == "?")) or token in "*+?(|":
            continue
        if token == ")" and after == "?":  # an option of a group doubles the ways
            continue
        rest = tokens[place + (1 if run else 2) :]
        wide = run or token in (".", ")")
        count += any(_takes_letters(t) for t in rest) and (wide or not _ends(token, rest))
    return count


def _alternatives(tokens: list[str]) -> float:
    """In how many ways alternatives that may match at the same place can be combined at most."""
    ways = 1.0
    open_groups: list[int] = []
    for place, token in enumerate(tokens):
        if token == "(":
            open_groups.append(place)
        elif token == ")" and open_groups:
            inside = tokens[open_groups.pop() + 1 : place]
            inside = inside[2:] if inside[:2] == ["?", ":"] else inside
            branches = sorted("".join(inside).split("|"))
            letters = all(re.fullmatch(r"(?:[^\W]|\\[._-])*", branch) for branch in branches)
            if letters:  # only a branch that another begins with can match beside it
                alike = sum(b.startswith(a) for a, b in pairwise(branches))
                ways *= 1 + alike
            else:
                ways *= len(branches)
    return ways


def _takes_letters(token: str) -> bool:
    return token not in ("(", ")", "|", "?", "*", "+", "$", "^", ":")


def _ends(item: str, rest: list[str]) -> bool:
    """Whether a repeat of ``item``, a letter, escape or class, must stop at what follows."""
    if rest[:1] == ["?"]:  # a lazy repeat
        rest = rest[1:]
    while rest[:1] in (["("], [")"]):
        rest = rest[3 if rest[:3] == ["(", "?", ":"] else 1 :]
    literal = rest[0] if rest else ""
    if len(literal) == 2 and literal[0] == "\\" and not literal[1].isalnum():
        letter = literal[1]
    elif len(literal) == 1 and literal not in ".^$*+?{}[]|\\":
        letter = literal
    else:
        return False
    free = rest[1:2] and (rest[1] in "*?" or bool(_COUNT.fullmatch(rest[1])))
    return not free and re.fullmatch(item, letter, re.IGNORECASE) is None


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
        self._patterns: list[tuple[str, Pattern]] = []
        for entry in entries:
            if entry.startswith(REGEX_PREFIX):
                compiled = Pattern(entry.removeprefix(REGEX_PREFIX), where)
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
