"""Finds, checks and opens the database file; what cannot be used is left as it is.

Nobody's sweep should fail because a cache folder is not writable, so :func:`open_database` answers
with a database in memory and says why. A damaged file is renamed, never deleted. All reading goes
through SQLite: opening and closing the file in any other way would drop the locks that another
connection of this process holds on it (SQLite, "How To Corrupt An SQLite Database File", 2.2).

On a file system that machines share, segments stand in for the database
(:mod:`autosel.segments`).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import platformdirs

from autosel import sqlite_file
from autosel.errors import StoreError, field_error
from autosel.network_fs import network_type
from autosel.safe_text import printable
from autosel.segments import SUFFIX, SegmentTables
from autosel.sqlite_file import UnusableError, check_content, in_memory
from autosel.tables import Tables

ENVIRONMENT = "AUTOSEL_DB"
FILE_NAME = "autosel.db"
#: A file that is no database at all is renamed only when its name says that it should be one.
SUFFIXES = (".db", ".sqlite", ".sqlite3")
_MIN_SQLITE = (3, 37, 0)  # STRICT tables
#: RuntimeError: a home folder that nobody can name. ValueError: a character no path can have.
_NO_PLACE = (UnusableError, OSError, RuntimeError, ValueError)


@dataclass(frozen=True, slots=True)
class Opened:
    """What a store works on; ``path`` is None in memory, ``notice`` is for the user.

    ``segments``: ``path`` is a folder of segments and not one database.
    """

    tables: Tables
    path: Path | None
    notice: str = ""
    segments: bool = False


def open_database(
    path: str | Path | None = None, *, strict: bool = False, segments: bool | None = None
) -> Opened:
    """Open ``path``, else ``$AUTOSEL_DB``, else ``autosel.db`` in the user's cache folder.

    ``:memory:`` is a database in memory. A file that cannot be used is replaced by one in memory
    with a notice, or raises StoreError when ``strict``. A file of a newer autosel and a foreign
    file stay untouched; one that can only be read is read into memory. ``segments`` says whether
    to use segments; left out, the kind of file system does, and a path that ends in their suffix.
    """
    if sqlite3.sqlite_version_info < _MIN_SQLITE:
        expected = "at least " + ".".join(map(str, _MIN_SQLITE))
        raise StoreError(field_error("sqlite3", "version", sqlite3.sqlite_version, expected))
    given = str(path) if path is not None else os.environ.get(ENVIRONMENT) or None
    if given == ":memory:":
        return Opened(Tables(in_memory(), None), None)
    try:
        place = Path(given).expanduser().absolute() if given else _default_path()
        return _open(place, private=given is None, segments=segments)
    except _NO_PLACE as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        where = f" {printable(given)}" if given else ""
        if strict:
            raise StoreError(f"database{where}: {reason}") from None
        copy = error.copy if isinstance(error, UnusableError) else None
        kept = "what it holds was read, new results are" if copy else "results are"
        return Opened(
            Tables(copy or in_memory(), None),
            None,
            f"database{where}: {reason}; {kept} kept in memory only "
            f"(set {ENVIRONMENT} to a file that can be written)",
        )


def default_place() -> Path:
    """Where a store is opened when no path is given; StoreError where there is no such place."""
    given = os.environ.get(ENVIRONMENT)
    try:
        return Path(given).expanduser().absolute() if given else _default_path()
    except _NO_PLACE as error:
        raise StoreError(f"database: {error}") from None


def _default_path() -> Path:
    folder = Path(platformdirs.user_cache_dir("autosel", appauthor=False))
    if not os.environ.get("XDG_CACHE_HOME"):
        home = Path.home()
        if not home.is_dir():
            raise UnusableError(f"the home folder {home} does not exist")
        if home == Path(home.anchor):
            # A container user without a home; its files do not belong in the root folder.
            raise UnusableError(f"the home folder is {home}")
    if not folder.is_absolute():
        raise UnusableError(f"the cache folder {folder} is not an absolute path")
    return folder / FILE_NAME


def _open(path: Path, *, private: bool, segments: bool | None) -> Opened:
    if path.name.endswith(SUFFIX):
        path, segments = path.with_name(path.name.removesuffix(SUFFIX)), True
    folder = path.parent
    try:
        folder.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
    except OSError as error:
        raise UnusableError(f"cannot create the folder {folder} ({error.strerror})") from None
    if private:
        _check_owner(folder)
    if segments or (segments is None and network_type(path) is not None):
        return _open_segments(path)
    notice = ""
    if path.exists():
        if private:
            _check_owner(path)
        if not path.is_file():
            raise UnusableError(f"{path} is not a file")
        seen = path.stat()
        try:
            _inspect(path)
        except sqlite3.DatabaseError as error:
            if not sqlite_file.is_damage(error):
                raise UnusableError(f"{path} cannot be read ({error})") from None
            no_database = sqlite_file.is_no_database(error)
            if not private and path.suffix not in SUFFIXES and no_database:
                raise UnusableError(f"{path} is not a database; it was left untouched") from None
            notice = _set_aside(path, seen, " ".join(str(error).split()))
    elif not os.access(folder, os.W_OK):
        raise UnusableError(f"the folder {folder} cannot be written")
    try:
        return Opened(Tables(sqlite_file.writable(path), path), path, notice)
    except sqlite3.Error as error:
        # A full disk, for one: what is stored can still be read.
        raise UnusableError(f"{path} cannot be opened ({error})", _copy_of(path)) from None


def _open_segments(path: Path) -> Opened:
    """Segments beside ``path``; what a database at ``path`` holds is read and stays as it is."""
    folder = path.with_name(path.name + SUFFIX)
    try:
        base = sqlite_file.read_copy(path) if path.exists() else in_memory()
    except (sqlite3.Error, OSError) as error:
        raise UnusableError(f"{path} cannot be read ({error})") from None
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UnusableError(f"cannot create {folder} ({error.strerror})", base) from None
    tables = SegmentTables(base, folder)
    if not os.access(folder, os.W_OK):
        raise UnusableError(f"{folder} cannot be written", base)
    return Opened(tables, folder, segments=True)


def _check_owner(path: Path) -> None:
    owner = path.stat().st_uid if hasattr(os, "geteuid") else None
    if owner is not None and owner != os.geteuid():
        raise UnusableError(f"{path} belongs to another user (id {owner})")


def _inspect(path: Path) -> None:
    """Raise unless ``path`` is ours, of a version we know, whole and writable."""
    if not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        raise UnusableError(f"{path} cannot be written", _copy_of(path))
    size = path.stat().st_size
    try:
        # Read-only, so that a newer autosel's file stays as it is to the last byte.
        with contextlib.closing(sqlite_file.connect(path, "ro")) as connection:
            check_content(path, connection, size)
    except sqlite3.OperationalError:
        # A writer died and left a journal that only a writing connection can replay.
        with contextlib.closing(sqlite_file.connect(path, "rw")) as connection:
            check_content(path, connection, size)


def is_there(path: str | Path) -> bool:
    """Whether a database, or the folder of its segments, lies at ``path``."""
    return Path(path).exists() or Path(f"{path}{SUFFIX}").is_dir()


@contextlib.contextmanager
def contents(path: str | Path) -> Iterator[sqlite3.Connection]:
    """What a database or a folder of segments holds, in memory; it stays as it is.

    Raises StoreError in one line for what is missing, damaged, another program's or a newer
    autosel's.
    """
    try:
        place = Path(path).expanduser().absolute()
    except _NO_PLACE as error:
        raise StoreError(f"database {printable(path)}: {error}") from None
    base = place.with_name(place.name.removesuffix(SUFFIX))
    folder = base.with_name(base.name + SUFFIX)
    wanted = "a database of autosel or a folder of its segments"
    if not (place.is_file() or folder.is_dir()):
        where = f"database {printable(path)}"
        raise StoreError(field_error(where, "file", "nothing", wanted))
    try:
        found = sqlite_file.read_copy(base) if base.is_file() else in_memory()
    except (UnusableError, sqlite3.Error, OSError) as error:
        reason = " ".join(str(error).split())
        raise StoreError(f"database {path} cannot be read: {reason}") from None
    if folder.is_dir():
        SegmentTables(found, folder)
    with contextlib.closing(found):
        yield found


def _copy_of(path: Path) -> sqlite3.Connection | None:
    """A copy in memory, or None where that does not work."""
    try:
        return sqlite_file.read_copy(path)
    except (OSError, sqlite3.Error, UnusableError):
        return None


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
