"""Opens the database for commands that only read it."""

from __future__ import annotations

from pathlib import Path

from autosel.cli.report import note
from autosel.store import Store


def reading(db: str | None) -> Store:
    """The store at ``db`` or the usual place; a mistyped path does not make a new file."""
    if db and db != ":memory:" and not Path(db).exists():
        note(f"no database at {db}; a sweep makes one")
        return Store.open(":memory:")
    return Store.open(db)
