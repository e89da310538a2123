"""The ``autosel sweep`` that measured something, from what is stored of its settings."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from autosel.evidence import Evidence

#: Options of ``autosel sweep`` by the setting that a stored sweep has, with the usual value.
OPTIONS: tuple[tuple[str, str, Any], ...] = (
    ("--tokens", "token_counts", []),
    ("--backends", "backends", []),
    ("--allow-a8", "allow_a8", False),
    ("--require", "require", []),
    ("--trials", "trials", 32),
    ("--search-within", "search_within", 1.5),
    ("--seed", "seed", 0),
)


def sweep_commands(one: Evidence) -> list[str]:
    """The command of each sweep that left something here, the newest last and each once."""
    found = [_command(one, sweep.settings) for sweep in one.sweeps]
    return [*dict.fromkeys(reversed(found))][::-1]


def sweep_command(one: Evidence) -> str:
    """The command with the newest sweep's options; with the usual ones where none is known."""
    return _command(one, one.sweeps[-1].settings if one.sweeps else {})


def cache_words(one: Evidence) -> list[str]:
    """The option that asks for this way of timing."""
    cache = str(dict(one.timing).get("cache", "cold"))
    return [] if cache == "cold" else ["--cache", cache]


def _command(one: Evidence, settings: Mapping[str, Any]) -> str:
    words = ["autosel", "sweep", *(shlex.split(one.target) or ["CHECKPOINT"])]
    if one.routing != "uniform":
        words += ["--routing", one.routing]
    words += cache_words(one)
    for option, name, usual in OPTIONS:
        value = settings.get(name, usual)
        if value != usual:
            shown = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words += [option] if value is True else [option, shown]
    return shlex.join(words)
