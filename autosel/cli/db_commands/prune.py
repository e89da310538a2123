"""``autosel db prune``."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from autosel.cli.group import Command
from autosel.cli.options import db_option, device_option
from autosel.cli.report import Report


@click.command(cls=Command)
@click.option(
    "--stale", is_flag=True,
    help="Also what this machine measured with another driver, other packages or kernels.",
)  # fmt: skip
@click.option(
    "--older-than", type=click.IntRange(0, 36500), metavar="DAYS",
    help="Only rows that were stored longer ago.",
)  # fmt: skip
@click.option(
    "--archive", type=click.Path(dir_okay=False), metavar="FILE",
    help="Database that takes the rows (default: DATABASE.archive-TIME.db beside it).",
)  # fmt: skip
@click.option("--yes", is_flag=True, help="Do it; without this it is only said what would be done.")
@device_option
@db_option
def command(
    stale: bool,
    older_than: int | None,
    archive: str | None,
    yes: bool,
    device: str | None,
    db: str | None,
) -> Report:
    """Move rows that newer ones have replaced out of the database into an archive.

    Decisions that hold, and the raw samples they were made from, always stay. The archive is
    written and checked before anything is deleted; `autosel db merge ARCHIVE` brings it back.
    """
    from autosel.cli.database import place_of
    from autosel.device import detect
    from autosel.store import Store
    from autosel.store_prune import Wanted, prune

    path = place_of(db)
    age = None if older_than is None else timedelta(days=older_than)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    target = Path(archive or f"{path}.archive-{stamp}.db").absolute() if yes else None
    with Store.open(path, strict=True) as store:
        wanted = Wanted(stale=stale, older_than=age)
        done = prune(store, detect(device), wanted, archive=target)
    counts = " and ".join(f"{count} {table}" for table, count in done.counts.items())
    data = {"database": str(path), "dry_run": not yes, "archive": done.archive, **done.counts}
    if not done:
        return Report(data, ["nothing to prune"])
    if not yes:
        return Report(data, [f"would archive {counts} of {path}; --yes does it"])
    return Report(data, [f"moved {counts} of {path} to {done.archive}"])
