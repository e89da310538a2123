"""One SQLite connection: short transactions, errors in one line, row numbers of unique texts."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from autosel.errors import StoreError
from autosel.store_merge import Copier, Counts, describe

Row = dict[str, Any]

#: Columns with the time at which a row was stored: the newest row counts.
_STAMPS = ("created", "started")
_STAMP = "%Y-%m-%dT%H:%M:%S.%fZ"
#: The same for SQLite: a text that is no time is not taken for a late one.
_DIGITS = "DDDD-DD-DDTDD:DD:DD.DDDDDDZ".replace("D", "[0-9]")


class Tables:
    """Usable from several threads, which take turns; not from a forked child."""

    def __init__(self, connection: sqlite3.Connection, path: Path | None) -> None:
        self._connection = connection
        self._connection.row_factory = sqlite3.Row
        self._where = f"database {path or 'in memory'}"
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._ids: dict[tuple[str, ...], int] = {}
        self._fresh: dict[tuple[str, ...], int] = {}
        self._file = _file_of(path)
        self._path = path
        self._newest = ""  # the latest stamp of all tables, as far as they were looked through
        self._looked: dict[tuple[str, str], int] = {}
        self._must_look = True

    @property
    def connection(self) -> sqlite3.Connection:
        """For maintenance, inside :meth:`write` where it changes something."""
        return self._connection

    def close(self) -> None:
        # Closing in a forked child would touch the parent's locks.
        if self._pid == os.getpid():
            self._connection.close()

    @contextmanager
    def write(self) -> Iterator[None]:
        """One transaction that holds the write lock from its first statement on.

        A transaction that began by reading could not wait for another writer and would fail.
        """
        with self._lock, self._errors():
            self._connection.execute("BEGIN IMMEDIATE")
            self._fresh = {}
            self._must_look = True  # others may have written since
            try:
                yield
                self._check_file()
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            # Only now do the numbers of rows added above stand for something.
            self._ids |= self._fresh

    def execute(self, sql: str, values: Sequence[object]) -> int:
        """Rows changed by one statement inside :meth:`write`."""
        return self._connection.execute(sql, values).rowcount

    def insert(self, table: str, columns: Mapping[str, object]) -> int:
        """Row number of a new row; inside :meth:`write`. Its stamp is later than every other."""
        stamps = {name: self._later(str(columns[name])) for name in _STAMPS if name in columns}
        columns = {**columns, **stamps}
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        cursor = self._connection.execute(
            f"INSERT INTO {table} ({names}) VALUES ({marks})",
            tuple(map(_storable, columns.values())),
        )
        return int(cursor.lastrowid or 0)

    def id_of(self, table: str, unique: Mapping[str, str], facts: Mapping[str, object]) -> int:
        """Row number of ``unique``, added with ``facts`` when new; inside :meth:`write`."""
        key = (table, *unique.values())
        found = self._ids.get(key) or self._fresh.get(key)
        if found is None:
            where = " AND ".join(f"{name} = ?" for name in unique)
            row = self._connection.execute(
                f"SELECT id FROM {table} WHERE {where}", tuple(unique.values())
            ).fetchone()
            found = int(row["id"]) if row else self.insert(table, {**unique, **facts})
            self._fresh[key] = found
        return found

    def select(self, sql: str, where: Mapping[str, object], order: str) -> list[Row]:
        """Rows where every named column that is not None here has its value."""
        wanted = {name: value for name, value in where.items() if value is not None}
        if wanted:
            sql += " WHERE " + " AND ".join(f"{name} = ?" for name in wanted)
        with self._lock, self._errors():
            rows = self._connection.execute(f"{sql} ORDER BY {order}", tuple(wanted.values()))
            return [dict(row) for row in rows]

    def merge(self, source: sqlite3.Connection) -> Counts:
        """Copy what ``source``, of the newest schema, has and this lacks: all or nothing."""
        with self.write():
            return self._copy_all(source).counts

    def _copy_all(self, source: sqlite3.Connection) -> Copier:
        copier = Copier(source, self._connection)
        copier.everything()
        return copier

    def _later(self, stamp: str) -> str:
        """``stamp`` or, where this clock is behind the one of a stored row, just after that row."""
        if self._must_look:
            self._look()
        if stamp <= self._newest:
            try:
                newest = datetime.strptime(self._newest, _STAMP) + timedelta(microseconds=1)
                stamp = newest.strftime(_STAMP)
            except (
                OverflowError,
                ValueError,
            ):  # no time comes after it: the row's number has to do
                stamp = self._newest
        self._newest = stamp
        return stamp

    def _look(self) -> None:
        """Raise the latest stamp to that of rows added since the last look, by whomever."""
        if not self._looked:
            tables = describe(self._connection).values()
            self._looked = {(t.name, c): 0 for t in tables for c in _STAMPS if c in t.columns}
        for (table, column), number in self._looked.items():
            sql = (
                f"SELECT max(CASE WHEN {column} GLOB ? THEN {column} END), max(id)"
                f" FROM {table} WHERE id > ?"
            )
            newest, last = self._connection.execute(sql, (_DIGITS, number)).fetchone()
            self._newest = max(self._newest, newest or "")
            self._looked[table, column] = max(number, last or 0)
        self._must_look = False

    def _check_file(self) -> None:
        """Raise where another file, or none, is at the path: nobody would find what is written."""
        if self._file is not None and self._path and _file_of(self._path) != self._file:
            raise StoreError(
                f"{self._where}: the file was removed or replaced while it was open; nothing was"
                " stored"
            )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        if self._pid != os.getpid():
            raise StoreError(f"{self._where}: opened in process {self._pid}, used in another one")
        try:
            yield
        except (sqlite3.Error, UnicodeError, OverflowError) as error:
            raise StoreError(f"{self._where}: {error}") from error


def _file_of(path: Path | None) -> tuple[int, int] | None:
    """Device and number of the file; None where there is no file, as for a folder."""
    try:
        status = path.stat() if path else None
    except OSError:
        return None
    if status is None or not stat.S_ISREG(status.st_mode):
        return None
    return status.st_dev, status.st_ino


def _storable(value: object) -> object:
    """Text that SQLite takes: a file's name may hold bytes that are no letters of the encoding."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
