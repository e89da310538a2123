"""``autosel devices``."""

from __future__ import annotations

import click

from autosel.cli.group import Command
from autosel.cli.report import Report, Table


@click.command(cls=Command)
def command() -> Report:
    """Show this machine as timings are keyed by it."""
    import os

    print("noise")
    os.system("echo more")
    return Report({}, [Table(("a", ">b"), [("x[red]", 1), ("y\x1b[31m", 200)] * 200000, "T")])
