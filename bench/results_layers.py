"""Names for layers, one place for files, figures and tables: each layer's is its own."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from autosel.evidence import Evidence, preset_label, preset_target

#: Longest file name made from a label, so that no file system refuses it.
LONGEST = 100


def slug(label: str) -> str:
    """``qwen3-30b-a3b-tp4-zipf`` of ``qwen3-30b-a3b TP4, zipf``: a file name without its suffix."""
    return re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.")[:LONGEST] or "layer"


def named(found: Iterable[Evidence]) -> list[Evidence]:
    """``found`` with labels that differ, also as file names, and the words to measure each again.

    A label is the preset's name with what is unusual (ranks, experts, bits, groups, zero points,
    activation type), else the label that the evidence has; then routing and caches where they are
    not the usual ones.
    """
    taken: set[str] = set()
    done = []
    for one in found:
        label = preset_label(one.problem) if not one.figures else ""
        whole = ", ".join([label or one.label, *unusual(one)])
        number, unique = 1, whole
        while slug(unique) in taken:
            number += 1
            unique = f"{whole} ({number})"
        taken.add(slug(unique))
        done.append(replace(one, label=unique, target=one.target or preset_target(one.problem)))
    return done


def unusual(one: Evidence) -> Sequence[str]:
    """Routing and caches in words, where they are not uniform and cold."""
    cache = str(dict(one.timing).get("cache", "cold"))
    words = [] if one.routing == "uniform" else [one.routing]
    return words + ([] if cache == "cold" else [f"{cache} caches"])


#: Options of ``autosel sweep`` by the setting that a stored sweep has, with the usual value.
_OPTIONS: tuple[tuple[str, str, Any], ...] = (
    ("--tokens", "token_counts", []),
    ("--backends", "backends", []),
    ("--allow-a8", "allow_a8", False),
    ("--require", "require", []),
    ("--trials", "trials", 32),
    ("--search-within", "search_within", 1.5),
    ("--seed", "seed", 0),
)


def sweep_command(one: Evidence) -> str:
    """The ``autosel sweep`` that measured a layer: the newest one's options."""
    settings = one.sweeps[-1].settings if one.sweeps else {}
    words = ["autosel", "sweep", *(shlex.split(one.target) or ["CHECKPOINT"])]
    if one.routing != "uniform":
        words += ["--routing", one.routing]
    cache = str(dict(one.timing).get("cache", "cold"))
    words += [] if cache == "cold" else ["--cache", cache]
    for option, name, usual in _OPTIONS:
        value = settings.get(name, usual)
        if value != usual:
            shown = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words += [option] if value is True else [option, shown]
    return shlex.join(words)
