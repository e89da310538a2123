"""Opens the database for commands that only read it."""

from __future__ import annotations

from pathlib import Path

from autosel.cli.report import note
from autosel.errors import StoreError, field_error
from autosel.segments import SUFFIX
from autosel.store import Store
from autosel.storefile import default_place, is_there


def reading(db: str | None) -> Store:
    """The store at ``db`` or the usual place; a mistyped path does not make a new file."""
    if db and db != ":memory:" and not is_there(db):
        note(f"no database at {db}; a sweep makes one")
        return Store.open(":memory:")
    return Store.open(db)


def reading_to_write(db: str | None, output: object) -> Store:
    """:func:`reading`, but what a mistyped path does not hold must not replace a file:
    StoreError where ``db`` names nothing and there is an ``output``."""
    if output is not None and db and db != ":memory:" and not is_there(db):
        place_of(db)
    return reading(db)


def place_of(db: str | None) -> Path:
    """The database file or folder of segments at ``db`` or the usual place; StoreError for none."""
    path = Path(db).expanduser().absolute() if db else default_place()
    for found in (path, Path(f"{path}{SUFFIX}")):
        if found.exists():
            return found
    raise StoreError(
        field_error(f"database {path}", "file", "nothing", "a database; a sweep makes one")
    )
