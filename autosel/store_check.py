"""Finds what is wrong with a database or a folder of segments, and changes nothing."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from autosel import records, sqlite_file
from autosel.core import Device
from autosel.errors import AutoselError
from autosel.rows import StoreWarning
from autosel.segments import read_segment, segment_files
from autosel.sqlite_file import UnusableError
from autosel.store import Store
from autosel.storefile import Opened
from autosel.tables import Tables

#: Kinds of findings, in the order in which they are looked for.
KINDS = ("unreadable", "integrity", "schema", "orphan", "row", "identity")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: its kind (:data:`KINDS`), where and what, in one line each."""

    kind: str
    where: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.detail}"


def check(path: Path) -> tuple[Finding, ...]:
    """Everything wrong with the file, or with each whole segment of the folder, at ``path``."""
    if path.is_dir():
        found: list[Finding] = []
        for files in segment_files(path).values():
            found += _one(files[0], read_segment)
        return tuple(found)
    return tuple(_one(path, sqlite_file.read_copy))


def _one(path: Path, read: Callable[[Path], sqlite3.Connection]) -> list[Finding]:
    name = path.name
    try:
        connection = read(path)
    except UnusableError as error:
        return [Finding("unreadable", name, _line(error))]
    except (sqlite3.Error, OSError) as error:
        return [Finding("integrity", name, _line(error))]
    with contextlib.closing(connection):
        found = [*_integrity(name, connection), *_schema(name, connection)]
        try:
            return [*found, *_orphans(name, connection), *_rows(name, connection)]
        except (sqlite3.Error, AutoselError) as error:  # what was found already says why
            return [*found, Finding("unreadable", name, _line(error))]


def _integrity(name: str, connection: sqlite3.Connection) -> Iterator[Finding]:
    """SQLite's own full check; opening a file only makes the quick one, of small files."""
    for (line,) in connection.execute("PRAGMA integrity_check").fetchall():
        if line != "ok":
            yield Finding("integrity", name, _line(line))


def _schema(name: str, connection: sqlite3.Connection) -> Iterator[Finding]:
    """Tables, views, indexes and guards as the migrations make them; more of them is no fault."""
    with contextlib.closing(sqlite_file.in_memory()) as fresh:
        wanted, found = _objects(fresh), _objects(connection)
    for (kind, item), sql in wanted.items():
        if (kind, item) not in found:
            yield Finding("schema", name, f"{kind} {item}: found nothing, expected it")
        elif found[kind, item] != sql:
            yield Finding("schema", name, f"{kind} {item}: found another definition")


def _objects(connection: sqlite3.Connection) -> dict[tuple[str, str], str]:
    rows = connection.execute(
        "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE '\\_%'"
        " ESCAPE '\\'"
    )
    return {(kind, name): " ".join(sql.split()) for kind, name, sql in rows.fetchall()}


def _orphans(name: str, connection: sqlite3.Connection) -> Iterator[Finding]:
    for table, number, parent, _ in connection.execute("PRAGMA foreign_key_check").fetchall():
        yield Finding("orphan", f"{name} {table} {number}", f"its row of {parent} is missing")


def _rows(name: str, connection: sqlite3.Connection) -> Iterator[Finding]:
    """Rows that make no valid object, and texts that are not what identifies their object."""
    for table, number, problem in _identities(connection):
        yield Finding("identity", f"{name} {table} {number}", problem)
    store = Store(Opened(Tables(connection, None), None))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store.measurements(history=True)
        store.stored_decisions(history=True)
        store.sweeps()
    connection.row_factory = None
    for item in caught:
        if issubclass(item.category, StoreWarning):
            yield Finding("row", name, str(item.message).removeprefix("database row "))


def _identities(connection: sqlite3.Connection) -> Iterator[tuple[str, int, str]]:
    """Layers and devices whose text would never be found again, or that are labelled wrongly."""
    for number, key, spec in connection.execute("SELECT id, key, spec FROM problems").fetchall():
        try:
            problem = records.problem_from_text(spec)
        except (AutoselError, TypeError, ValueError, KeyError, AttributeError) as error:
            yield "problems", number, _line(error)
            continue
        if records.problem_text(problem) != spec:
            yield "problems", number, "its text is not the canonical one, so it is never found"
        elif problem.key != key:
            yield "problems", number, f"key: found {key}, expected {problem.key}"
    for number, title, spec in connection.execute("SELECT id, name, spec FROM devices").fetchall():
        try:
            device = Device.from_dict({**json.loads(spec), "driver": None, "versions": {}})
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            yield "devices", number, _line(error)
            continue
        if records.device_text(device) != spec:
            yield "devices", number, "its text is not the canonical one, so it is never found"
        elif device.name != title:
            yield "devices", number, f"name: found {title!r}, expected {device.name!r}"


def _line(text: object) -> str:
    return " ".join(str(text).split())
