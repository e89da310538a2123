"""Names for layers, one place for files, figures and tables: each layer's is its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autosel import records
from autosel.evidence import Evidence, preset_label, preset_target
from autosel.roofline import Ceilings

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


def with_best_ceilings(found: Sequence[Evidence]) -> list[Evidence]:
    """Each layer with the best that any sweep measured of its device.

    A sweep measures what the device does in a fraction of a second beside whatever else runs: on
    one H200 3.7 to 4.3 TB/s, which put kernels at up to 110 % of their roofline.
    """
    known = [one for one in found if one.ceilings is not None]
    return [one if one.ceilings is None else _with_best(one, known) for one in found]


def _with_best(one: Evidence, known: Sequence[Evidence]) -> Evidence:
    device, dtype = records.device_text(one.device), one.problem.act_dtype
    here = [other for other in known if records.device_text(other.device) == device]
    read = max(o.ceilings.read_gbps for o in here if o.ceilings)
    rate = max(
        o.ceilings.matmul_tflops for o in here if o.ceilings and o.problem.act_dtype == dtype
    )
    return replace(one, ceilings=Ceilings(read, rate))
