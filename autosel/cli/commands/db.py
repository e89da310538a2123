"""``autosel db``."""

from __future__ import annotations

from autosel.cli import db_commands
from autosel.cli.group import Group

command = Group(
    name="db",
    package=db_commands,
    short_help="Look after the database: info, check, merge, stale, prune, export.",
    help="Look after the database of measurements and decisions.",
)
