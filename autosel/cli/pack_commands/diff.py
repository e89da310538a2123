"""``autosel pack diff``."""

from __future__ import annotations

from dataclasses import asdict

import click

from autosel.cli.group import Command
from autosel.cli.options import Number
from autosel.cli.report import Report, Table, note


@click.command(cls=Command)
@click.argument("first", type=click.Path(dir_okay=False), metavar="PACK")
@click.argument("second", type=click.Path(dir_okay=False), metavar="PACK")
@click.option(
    "--tolerance", type=Number(0, 1), default=0.05, show_default=True, metavar="SHARE",
    help="Show times of one winner that differ by more than this.",
)  # fmt: skip
@click.option("--exit-code", is_flag=True, help="Exit with status 1 when anything differs.")
def command(first: str, second: str, tolerance: float, exit_code: bool) -> Report:
    """Say what two packs say differently: layers, machines, decisions that flip, times."""
    from autosel.packs.content import read
    from autosel.packs.difference import changes

    found = changes(read(first), read(second), tolerance=tolerance)
    columns = ("what", "layer", "device", "routing", "tokens", "first", "second", ">ratio")
    rows = [
        (
            item.kind,
            item.layer,
            item.device,
            item.routing,
            item.tokens or "-",
            item.first or "-",
            item.second or "-",
            f"{item.ratio:.3g}" if item.ratio is not None else "-",
        )
        for item in found
    ]
    data = {"first": first, "second": second, "changes": [asdict(item) for item in found]}
    parts = [Table(columns, rows)] if rows else ["no difference"]
    if exit_code and found:
        note(f"{len(found)} differences")
    return Report(data, parts, 1 if exit_code and found else 0)
