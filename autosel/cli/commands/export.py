"""``autosel export``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from autosel.cli.group import Command
from autosel.cli.options import LayerOptions, db_option, layer_options
from autosel.cli.report import Report


@click.command(cls=Command)
@click.argument("target", metavar="[CHECKPOINT|PRESET]", required=False)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False),
    help="File to write (default: standard output).",
)  # fmt: skip
@click.option("--history", is_flag=True, help="Also what newer measurements have replaced.")
@layer_options
@db_option
def command(
    target: str | None,
    output: str | None,
    history: bool,
    layer_options: LayerOptions,
    db: str | None,
) -> Report:
    """Write measurements and decisions as strict JSON: all of them, or those of one target.

    Candidates that failed are there with a status and a reason; their times are null.
    """
    from autosel.atomic import atomic_file
    from autosel.cli.database import reading
    from autosel.cli.text import to_json

    problems: list[Any] = [None]
    if target:
        from autosel.cli.target import resolve

        problems = [layer.problem for layer in resolve(target, layer_options).layers]
    with reading(db) as store:
        exports = [json.loads(store.export_json(p, history=history)) for p in problems]
    data = exports[0]
    for more in exports[1:]:
        data["measurements"] += more["measurements"]
        data["decisions"] += more["decisions"]
    if output is None:
        return Report(data, always_json=True)
    with atomic_file(output) as partial:
        partial.write_text(to_json(data) + "\n", encoding="utf-8")
    counts = {name: len(data[name]) for name in ("measurements", "decisions")}
    summary = " and ".join(f"{count} {name}" for name, count in counts.items())
    return Report({"file": str(Path(output)), **counts}, [f"wrote {summary} to {output}"])
