"""Finds, checks and opens the database file; what cannot be used is left as it is.

Nobody's sweep should fail because a cache folder is not writable, so :func:`open_database` answers
with a database in memory and says why. A damaged file is renamed, never deleted. All reading goes
through SQLite: opening and closing the file in any other way would drop the locks that another
connection of this process holds on it (SQLite, "How To Corrupt An SQLite Database File", 2.2).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import platformdirs
from sqlite_utils import Database

from autosel import migrations
from autosel.errors import StoreError, field_error

ENVIRONMENT = "AUTOSEL_DB"
FILE_NAME = "autosel.db"
#: Longest wait for other processes, in seconds; a write of ours takes about a millisecond.
BUSY_S = 30.0
#: Larger files are not searched for damage at each start; reading them still notices.
CHECK_BYTES = 64 << 20
#: A file that is no database at all is renamed only when its name says that it should be one.
SUFFIXES = (".db", ".sqlite", ".sqlite3")
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_MIN_SQLITE = (3, 37, 0)  # STRICT tables


@dataclass(frozen=True, slots=True)
class Opened:
    """An open connection; ``path`` is None in memory, ``notice`` is for the user."""

    connection: sqlite3.Connection
    path: Path | None
    notice: str = ""


class _UnusableError(Exception):
    """Why the file cannot serve, and a copy of its content in memory where it can be read."""

    def __init__(self, reason: str, copy: sqlite3.Connection | None = None) -> None:
        super().__init__(reason)
        self.copy = copy


def open_database(path: str | Path | None = None, *, strict: bool = False) -> Opened:
    """Open ``path``, else ``$AUTOSEL_DB``, else ``autosel.db`` in the user's cache folder.

    ``:memory:`` is a database in memory. A file that cannot be used is replaced by one in memory
    with a notice, or raises StoreError when ``strict``. A file of a newer autosel and a foreign
    file stay untouched; one that can only be read is read into memory.
    """
    if sqlite3.sqlite_version_info < _MIN_SQLITE:
        expected = "at least " + ".".join(map(str, _MIN_SQLITE))
        raise StoreError(field_error("sqlite3", "version", sqlite3.sqlite_version, expected))
    given = str(path) if path is not None else os.environ.get(ENVIRONMENT) or None
    if given == ":memory:":
        return Opened(_in_memory(), None)
    try:
        place = Path(given).expanduser().absolute() if given else _default_path()
        return _open(place, private=given is None)
    except (_UnusableError, OSError, RuntimeError) as error:
        # RuntimeError: a home folder that nobody can name.
        reason = error.strerror if isinstance(error, OSError) else str(error)
        where = f" {given}" if given else ""
        if strict:
            raise StoreError(f"database{where}: {reason}") from None
        copy = error.copy if isinstance(error, _UnusableError) else None
        kept = "what it holds was read, new results are" if copy else "results are"
        return Opened(
            copy or _in_memory(),
            None,
            f"database{where}: {reason}; {kept} kept in memory only "
            f"(set {ENVIRONMENT} to a file that can be written)",
        )


def _default_path() -> Path:
    folder = Path(platformdirs.user_cache_dir("autosel", appauthor=False))
    if not os.environ.get("XDG_CACHE_HOME"):
        home = Path.home()
        if not home.is_dir():
            raise _UnusableError(f"the home folder {home} does not exist")
        if home == Path(home.anchor):
            # A container user without a home; its files do not belong in the root folder.
            raise _UnusableError(f"the home folder is {home}")
    if not folder.is_absolute():
        raise _UnusableError(f"the cache folder {folder} is not an absolute path")
    return folder / FILE_NAME


def _open(path: Path, private: bool) -> Opened:
    folder = path.parent
    try:
        folder.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
    except OSError as error:
        raise _UnusableError(f"cannot create the folder {folder} ({error.strerror})") from None
    if private:
        _check_owner(folder)
    notice = ""
    if path.exists():
        if private:
            _check_owner(path)
        if not path.is_file():
            raise _UnusableError(f"{path} is not a file")
        seen = path.stat()
        try:
            _inspect(path)
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise _UnusableError(f"{path} cannot be read ({error})") from None
            if not private and path.suffix not in SUFFIXES and _is_no_database(error):
                raise _UnusableError(f"{path} is not a database; it was left untouched") from None
            notice = _set_aside(path, seen, " ".join(str(error).split()))
    elif not os.access(folder, os.W_OK):
        raise _UnusableError(f"the folder {folder} cannot be written")
    try:
        return Opened(_writable(path), path, notice)
    except sqlite3.Error as error:
        raise _UnusableError(f"{path} cannot be opened ({error})") from None


def _check_owner(path: Path) -> None:
    owner = path.stat().st_uid if hasattr(os, "geteuid") else None
    if owner is not None and owner != os.geteuid():
        raise _UnusableError(f"{path} belongs to another user (id {owner})")


def _inspect(path: Path) -> None:
    """Raise unless ``path`` is ours, of a version we know, whole and writable."""
    if not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        raise _UnusableError(f"{path} cannot be written", _read_into_memory(path))
    try:
        # Read-only, so that a newer autosel's file stays as it is to the last byte.
        connection = _connect(path, "ro")
        with contextlib.closing(connection):
            _check_content(path, connection)
    except sqlite3.OperationalError:
        # A writer died and left a journal that only a writing connection can replay.
        with contextlib.closing(_connect(path, "rw")) as connection:
            _check_content(path, connection)


def _check_content(path: Path, connection: sqlite3.Connection) -> None:
    database = Database(connection, execute_plugins=False, recursive_triggers=False)
    # One snapshot: another process may be building the tables at this moment.
    connection.execute("BEGIN")
    applied = {step.name for step in migrations.MIGRATIONS.applied(database)}
    tables = database.table_names()
    connection.execute("COMMIT")
    if migrations.is_newer(applied):
        raise _UnusableError(f"{path} was written by a newer autosel; it was left untouched")
    if not applied and tables:
        raise _UnusableError(f"{path} is another program's database; it was left untouched")
    if path.stat().st_size <= CHECK_BYTES:
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            error = sqlite3.DatabaseError(verdict)
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error


def _is_damage(error: sqlite3.Error) -> bool:
    # The low byte is the primary code; the rest says where it was found.
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED


def _is_no_database(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_NOTADB


def _set_aside(path: Path, seen: os.stat_result, reason: str) -> str:
    """Rename the damaged file and its journal; returns the notice."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    aside = path.with_name(f"{path.name}.damaged-{stamp}-{os.getpid()}")
    with _folder_lock(path.parent):
        # Another process may have been here already: its fresh file must stay.
        if path.exists() and path.stat().st_ino == seen.st_ino:
            for suffix in ("-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(f"{path}{suffix}", f"{aside}{suffix}")
            os.rename(path, aside)
    return f"database {path} is damaged ({reason}); it was set aside as {aside.name}"


@contextlib.contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # Windows, where a file in use cannot be renamed in the first place
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    # Threads of one process share a connection; the store has a lock around it.
    return sqlite3.connect(
        f"{path.as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY_S,
        isolation_level=None,
        check_same_thread=False,
    )


def _in_memory() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    _prepare(connection)
    return connection


def _writable(path: Path) -> sqlite3.Connection:
    connection = _connect(path, "rwc")
    try:
        _use_wal(connection)
        # After a power cut the last results may be missing, but the file is sound.
        connection.execute("PRAGMA synchronous = NORMAL")
        _prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


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


def _prepare(connection: sqlite3.Connection) -> None:
    """Apply missing migrations in one transaction, so that two starting processes take turns."""
    connection.execute("PRAGMA foreign_keys = ON")
    database = Database(connection, execute_plugins=False, recursive_triggers=False)
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


def _read_into_memory(path: Path) -> sqlite3.Connection | None:
    """A copy of a file that cannot be written, or None where that does not work.

    SQLite needs to write beside a database in WAL mode even to read it, hence the copied files.
    """
    memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    try:
        with tempfile.TemporaryDirectory(prefix="autosel-") as folder:
            copy = Path(folder) / FILE_NAME
            shutil.copyfile(path, copy)
            if Path(f"{path}-wal").exists():
                shutil.copyfile(f"{path}-wal", f"{copy}-wal")
            copy.chmod(0o600)
            with contextlib.closing(_connect(copy, "rw")) as source:
                _check_content(copy, source)
                source.backup(memory)
        _prepare(memory)
    except (OSError, sqlite3.Error, _UnusableError):
        memory.close()
        return None
    return memory
