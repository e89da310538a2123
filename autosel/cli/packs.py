"""What the commands of ``autosel pack`` share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autosel.cli.report import Table
from autosel.cli.text import time_text

if TYPE_CHECKING:
    from autosel.cli.target import Target
    from autosel.core import Device
    from autosel.packs.grade import Graded
    from autosel.packs.model import Entry, Model, Pack


def model_of(target: Target) -> Model:
    """What a pack says about a checkpoint or preset."""
    from autosel.packs.models import of_checkpoint, of_preset

    if target.kind == "checkpoint":
        return of_checkpoint(target.name, [(item.problem, item.indices) for item in target.layers])
    return of_preset(target.name, target.layers[0].problem)


def grades(pack: Pack, here: Device, *, shipped: bool = False) -> list[tuple[Entry, Graded]]:
    """Each entry with its grade on this machine."""
    from autosel.packs.grade import bystanders, grade

    return [
        (entry, grade(entry.source, here, shipped=shipped, bystanders=bystanders(entry)))
        for entry in pack.entries
    ]


def entry_table(graded: list[tuple[Entry, Graded]]) -> Table:
    """One row for each layer, device, routing and way of timing."""
    rows = [
        (
            entry.problem.key,
            entry.device.name or "unnamed",
            entry.routing,
            ", ".join(f"{k}={v}" for k, v in entry.timing.items()) or "-",
            len(entry.decisions),
            len(entry.measured),
            len(entry.certificates),
            "yes" if entry.plan else "no",
            result.grade,
        )
        for entry, result in graded
    ]
    columns = ("layer", "device", "routing", "timing", ">decisions", ">measured", ">certificates")
    return Table((*columns, "plan", "grade here"), rows)


def decision_table(entry: Entry) -> Table:
    """The decisions of one entry."""
    rows = [
        (
            d.bucket.label,
            d.winner.key,
            time_text(d.winner_us),
            d.runner_up.key if d.runner_up else "-",
            time_text(d.runner_up_us),
        )
        for d in entry.decisions
    ]
    rows += [(item.bucket.label, "nothing", "-", "-", item.why) for item in entry.undecided]
    title = f"{entry.problem.key} on {entry.device.name}, {entry.routing} routing"
    return Table(("tokens", "chosen", ">time", "runner-up", ">time"), rows, title)


def difference_lines(graded: list[tuple[Entry, Graded]]) -> list[str]:
    """Every field that differs from this machine, once for all entries alike."""
    found: dict[str, None] = {}
    for _, result in graded:
        for item in result.differences:
            found[str(item)] = None
    return list(found)


def graded_dict(entry: Entry, result: Graded) -> dict[str, Any]:
    """JSON-able form of one entry and its grade."""
    from dataclasses import asdict

    from autosel.records import candidate_dict

    return {
        "problem": entry.problem.to_dict(),
        "problem_key": entry.problem.key,
        "device": entry.device.to_dict(),
        "routing": entry.routing,
        "timing": dict(entry.timing),
        "decided": entry.decided,
        "grade": result.grade,
        "differences": [asdict(item) for item in result.differences],
        "decisions": [
            {
                "bucket": asdict(d.bucket),
                "winner": {**candidate_dict(d.winner), "key": d.winner.key},
                "winner_us": d.winner_us,
                "accuracy": d.accuracy,
            }
            for d in entry.decisions
        ],
        "measurements": len(entry.measured),
        "certificates": len(entry.certificates),
        "plan": entry.plan is not None,
    }
