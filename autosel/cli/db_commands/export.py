"""``autosel db export``."""

from __future__ import annotations

import io
import json

import click

from autosel.cli.group import Command
from autosel.cli.options import db_option
from autosel.cli.report import Report


@click.command(cls=Command)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), required=True, help="File to write."
)
@click.option(
    "--format", "form", type=click.Choice(["csv", "json"]), default="csv", show_default=True,
    help="csv: one view as a table. json: all measurements and decisions, as autosel export.",
)  # fmt: skip
@click.option(
    "--view", type=click.Choice(["results", "winners", "failures", "samples", "sweep_summary"]),
    default="results", show_default=True, help="The view to write as CSV.",
)  # fmt: skip
@click.option("--history", is_flag=True, help="JSON: also what newer measurements have replaced.")
@db_option
def command(output: str, form: str, view: str, history: bool, db: str | None) -> Report:
    """Write the whole database as CSV or strict JSON."""
    from autosel.atomic import atomic_file
    from autosel.cli.database import reading_to_write
    from autosel.store_tables import write_csv

    text = io.StringIO(newline="")
    with reading_to_write(db, output) as store:
        if form == "csv":
            count = write_csv(store, view, text)
        else:
            text.write(store.export_json(history=history) + "\n")
            count = len(json.loads(text.getvalue())["measurements"])
    with atomic_file(output) as partial:
        partial.write_text(text.getvalue(), encoding="utf-8", newline="")
    what = f"rows of {view}" if form == "csv" else "measurements and their decisions"
    data = {"file": output, "format": form, "rows": count}
    return Report(data, [f"wrote {count} {what} to {output}"])
