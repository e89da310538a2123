"""``autosel list``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from autosel.cli.group import Command
from autosel.cli.options import db_option, device_option
from autosel.cli.report import Report, Table

if TYPE_CHECKING:
    from autosel.identity import Difference, Entry


#: Differences that a row names.
NAMED = 2


@click.command(cls=Command)
@device_option
@db_option
def command(device: str | None, db: str | None) -> Report:
    """List what the database holds, and which entries are usable here, stale or of another device.

    Stale is what this hardware measured with another driver or other package versions.
    """
    from autosel.cli.database import reading
    from autosel.device import detect
    from autosel.identity import hardware_differences, version_differences

    here = detect(device)
    with reading(db) as store:
        entries = store.entries()
        place = str(store.path) if store.path else None
    found = [
        (entry, hardware_differences(here, entry.device), version_differences(here, entry.device))
        for entry in entries
    ]
    rows = [
        (
            entry.problem.key,
            entry.device.name,
            entry.routing,
            ",".join(map(str, entry.token_counts)),
            entry.decisions,
            entry.newest,
            _usable(hardware, versions),
        )
        for entry, hardware, versions in found
    ]
    columns = ("layer", "device", "routing", "tokens", ">decisions", "newest", "usable here")
    data = {
        "database": place,
        "device": here.to_dict(),
        "entries": [
            {
                **_entry(entry),
                "usable": not hardware and not versions,
                "stale": bool(versions) and not hardware,
                "differences": [*hardware, *versions],
            }
            for entry, hardware, versions in found
        ],
    }
    where = place or "a database in memory"
    return Report(data, [Table(columns, rows)] if rows else [f"nothing is stored in {where}"])


def _usable(hardware: tuple[Difference, ...], versions: tuple[Difference, ...]) -> str:
    if hardware:
        return f"no, another device: {_some(hardware)}"
    if versions:
        return f"no, stale: {_some(versions)}"
    return "yes"


def _some(differences: tuple[Difference, ...]) -> str:
    """The first ones: another kind of device differs in everything."""
    more = len(differences) - NAMED
    text = "; ".join(map(str, differences[:NAMED]))
    return f"{text}; {more} more (--json)" if more > 0 else text


def _entry(entry: Entry) -> dict[str, object]:
    return {
        "problem": entry.problem.to_dict(),
        "problem_key": entry.problem.key,
        "device": entry.device.to_dict(),
        "routing": entry.routing,
        "token_counts": entry.token_counts,
        "decisions": entry.decisions,
        "newest": entry.newest,
    }
