"""``autosel db check``."""

from __future__ import annotations

import click

from autosel.cli.group import Command
from autosel.cli.options import db_option
from autosel.cli.report import Report, Table, note


@click.command(cls=Command)
@db_option
def command(db: str | None) -> Report:
    """Look for damage, missing or changed tables, orphan rows and rows that cannot be read.

    Nothing is changed. Exit status 1 when something is wrong.
    """
    from autosel.cli.database import place_of
    from autosel.store_check import check

    path = place_of(db)
    found = check(path)
    data = {"path": str(path), "ok": not found, "findings": found}
    if not found:
        return Report(data, [f"{path}: nothing is wrong"])
    note(f"error: {path}: {len(found)} finding{'' if len(found) == 1 else 's'}")
    rows = [(item.kind, item.where, item.detail) for item in found]
    return Report(data, [Table(("kind", "where", "what"), rows)], exit_code=1)
