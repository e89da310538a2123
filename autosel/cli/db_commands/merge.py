"""``autosel db merge``."""

from __future__ import annotations

import click

from autosel.cli.group import Command
from autosel.cli.options import db_option
from autosel.cli.report import Report, Table


@click.command(cls=Command)
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True, type=click.Path())
@db_option
def command(sources: tuple[str, ...], db: str | None) -> Report:
    """Copy what other databases, or folders of segments, hold into the database.

    Rows that are there already are not doubled, so merging twice changes nothing. Sweeps stay
    apart, and the sources as they are. A source that cannot be read is refused as a whole.
    """
    from autosel.store import Store

    done = []
    with Store.open(db, strict=True) as store:
        place = str(store.path) if store.path else None
        for source in sources:
            counts = store.merge(source)
            done.append(
                {
                    "source": source,
                    "added": dict(counts.added),
                    "present": dict(counts.present),
                    "orphans": dict(counts.orphans),
                }
            )
    kinds = ("measurements", "decisions", "sweeps")
    rows = [
        (
            item["source"],
            *(item["added"].get(kind, 0) for kind in kinds),  # type: ignore[attr-defined]
            sum(item["present"].get(kind, 0) for kind in kinds),  # type: ignore[attr-defined]
            sum(item["orphans"].values()),  # type: ignore[attr-defined]
        )
        for item in done
    ]
    columns = ("source", *(f">new {kind}" for kind in kinds), ">already there", ">orphans")
    return Report({"database": place, "merged": done}, [Table(columns, rows), f"into {place}"])
