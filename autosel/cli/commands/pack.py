"""``autosel pack``."""

from __future__ import annotations

import click

from autosel.cli import pack_commands
from autosel.cli.group import Group


@click.group(cls=Group, package=pack_commands, default="create")
def command() -> None:
    """Make, check and install decision packs: decisions that travel with a model.

    `autosel pack MODEL -o autosel-pack.json` is short for `autosel pack create MODEL ...`; a model
    folder that is called like a command is named `./inspect`.
    """
