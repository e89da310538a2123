"""``autosel db stale``."""

from __future__ import annotations

import click

from autosel.cli.group import Command
from autosel.cli.options import db_option, device_option
from autosel.cli.report import Report, Table


@click.command(cls=Command)
@device_option
@db_option
def command(device: str | None, db: str | None) -> Report:
    """List what this machine measured with another driver, other packages or other kernels.

    Such entries are never used. A sweep measures them again; `autosel db prune --stale` archives
    them.
    """
    from autosel.cli.database import reading
    from autosel.device import detect

    here = detect(device)
    with reading(db) as store:
        found = store.stale(here)
        place = str(store.path) if store.path else None
    rows = [
        (
            item.entry.problem.key,
            item.entry.routing,
            item.entry.decisions,
            item.entry.newest,
            str(item),
        )
        for item in found
    ]
    data = {
        "database": place,
        "device": here.to_dict(),
        "stale": [
            {
                "problem": item.entry.problem.to_dict(),
                "problem_key": item.entry.problem.key,
                "routing": item.entry.routing,
                "decisions": item.entry.decisions,
                "newest": item.entry.newest,
                "differences": item.differences,
            }
            for item in found
        ],
    }
    columns = ("layer", "routing", ">decisions", "newest", "what changed")
    return Report(data, [Table(columns, rows) if rows else "nothing is stale"])
