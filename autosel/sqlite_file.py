"""Connections to autosel's database files: what each is opened with, and what a file must hold."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
import time
from functools import cache
from pathlib import Path

from sqlite_utils import Database

from autosel import migrations

#: Longest wait for other processes, in seconds; a write of ours takes about a millisecond.
BUSY_S = 30.0
#: Larger files are not searched for damage at each start; reading them still notices.
CHECK_BYTES = 64 << 20
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class UnusableError(Exception):
    """Why the file cannot serve, and a copy of its content in memory where it can be read."""

    def __init__(self, reason: str, copy: sqlite3.Connection | None = None) -> None:
        super().__init__(reason)
        self.copy = copy


def connect(path: Path, mode: str, *, immutable: bool = False) -> sqlite3.Connection:
    """``mode`` is SQLite's own: ``ro``, ``rw`` or ``rwc``; ``immutable`` takes no locks at all."""
    if "\0" in str(path):
        raise ValueError("embedded null byte")  # SQLite would take the part before it for the path
    # Threads of one process share a connection; the store has a lock around it.
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}" + ("&immutable=1" if immutable else ""),
        uri=True,
        timeout=BUSY_S,
        isolation_level=None,
        check_same_thread=False,
    )


def writable(path: Path) -> sqlite3.Connection:
    """A connection to a file that is made when missing and brought to the newest schema."""
    connection = connect(path, "rwc")
    try:
        _use_wal(connection)
        # After a power cut the last results may be missing, but the file is sound.
        connection.execute("PRAGMA synchronous = NORMAL")
        prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def in_memory() -> sqlite3.Connection:
    """An empty database in memory, of the newest schema."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    prepare(connection)
    return connection


def from_bytes(content: bytes) -> sqlite3.Connection:
    """The database file ``content`` in memory, brought to the newest schema.

    Raises sqlite3.DatabaseError for content that is no database. Such a database may grow to 1 GiB.
    """
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.deserialize(content)
    prepare(connection)
    return connection


@cache
def empty_bytes() -> bytes:
    """An empty database file with small pages: 30 KiB, a third of what usual pages make of it."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    with contextlib.closing(connection):
        connection.execute("PRAGMA page_size = 1024")
        prepare(connection)
        return bytes(connection.serialize())


class _Scripted(Database):
    """Runs scripts inside the open transaction as its base does, which joins and looks at all that
    it has read for every character: 30 ms for a new database.
    """

    def executescript(self, sql: str) -> sqlite3.Cursor:
        cursor = self.conn.cursor()
        for statement in statements(sql):
            cursor.execute(statement)
        return cursor


@cache
def statements(script: str) -> tuple[str, ...]:
    """The statements of ``script``; those inside a trigger belong to it."""
    found, start = [], 0
    for end, character in enumerate(script, 1):
        if character == ";" and sqlite3.complete_statement(script[start:end]):
            found.append(script[start:end].strip())
            start = end
    rest = script[start:].strip()
    return (*found, rest) if rest else tuple(found)


def prepare(connection: sqlite3.Connection) -> None:
    """Apply missing migrations in one transaction, so that two starting processes take turns."""
    connection.execute("PRAGMA foreign_keys = ON")
    database = _Scripted(connection, execute_plugins=False, recursive_triggers=False)
    if not migrations.MIGRATIONS.pending(database):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        migrations.MIGRATIONS.apply(database)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def check_content(what: object, connection: sqlite3.Connection, num_bytes: int) -> None:
    """Raise UnusableError for a newer or foreign database, sqlite3.DatabaseError for damage."""
    database = Database(connection, execute_plugins=False, recursive_triggers=False)
    # One snapshot: another process may be building the tables at this moment.
    connection.execute("BEGIN")
    applied = {step.name for step in migrations.MIGRATIONS.applied(database)}
    tables = database.table_names()
    connection.execute("COMMIT")
    if migrations.is_newer(applied):
        raise UnusableError(f"{what} was written by a newer autosel; it was left untouched")
    if not applied and tables:
        raise UnusableError(f"{what} is another program's database; it was left untouched")
    if num_bytes <= CHECK_BYTES:
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            error = sqlite3.DatabaseError(verdict)
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error


def read_copy(path: Path) -> sqlite3.Connection:
    """What ``path`` holds, in memory and of the newest schema; the file stays as it is.

    Raises UnusableError for a file that is not ours or newer, sqlite3.Error or OSError where it
    cannot be read.
    """
    memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    try:
        _back_up(path, memory)
        prepare(memory)
    except BaseException:
        memory.close()
        raise
    return memory


def _back_up(path: Path, memory: sqlite3.Connection) -> None:
    """Copy ``path`` into ``memory`` without leaving a trace beside it."""
    size = path.stat().st_size
    log = Path(f"{path}-wal")
    if not (log.exists() and log.stat().st_size):
        # Nobody is writing; SQLite would otherwise make files beside a database in WAL mode.
        with contextlib.closing(connect(path, "ro", immutable=True)) as source:
            check_content(path, source, size)
            source.backup(memory)
        return
    if os.access(path.parent, os.W_OK):
        with contextlib.closing(connect(path, "ro")) as source:
            check_content(path, source, size)
            source.backup(memory)
        return
    with tempfile.TemporaryDirectory(prefix="autosel-") as folder:
        copy = Path(folder) / "copy.db"
        shutil.copyfile(path, copy)
        shutil.copyfile(log, f"{copy}-wal")
        copy.chmod(0o600)
        with contextlib.closing(connect(copy, "rw")) as source:
            check_content(path, source, size)
            source.backup(memory)


def is_damage(error: sqlite3.Error) -> bool:
    # The low byte is the primary code; the rest says where it was found.
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED


def is_no_database(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_NOTADB


def _use_wal(connection: sqlite3.Connection) -> None:
    """Readers then never wait for a writer. Switching ignores the busy timeout, so retry."""
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
