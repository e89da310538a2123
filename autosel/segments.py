"""The store on file systems that machines share: a folder of segments in place of one database.

SQLite's locks cannot be relied on there, so nothing is locked. Each open store is one writer with
a name of its own that no other host, process or clock can share. What it commits becomes a segment:
a small SQLite database, written to a temporary name, flushed, and renamed. A file is never changed
after that. While a segment is small, the next commit writes a larger one with the same number and
the next version, and only then is the version before removed; above :data:`SEGMENT_BYTES` the next
number begins. Readers merge all segments in memory and look for new ones before every query.

A segment's name ends with a hash of its content: one that is half there, whatever the file system
did, is passed over (the version before it counts, where it is still there) and stays where it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sqlite3
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autosel import migrations, sqlite_file
from autosel.errors import StoreError
from autosel.rows import StoreWarning
from autosel.sqlite_file import UnusableError
from autosel.store_merge import Copier, Known, describe
from autosel.tables import Row, Tables

#: A segment of this size is finished: each commit writes the whole of an unfinished one.
SEGMENT_BYTES = 1 << 20
#: Most looks at a folder in which files are replaced all the time.
LOOKS = 100
#: Added to a database's path, it names the folder of segments in its place.
SUFFIX = ".segments"

_NAME = re.compile(
    r"(?P<writer>[0-9a-f]{32})-(?P<number>\d{6})-(?P<version>\d{6})-[0-9a-f]{16}\.db"
)


@dataclass(slots=True)
class _Seen:
    """One segment as far as it was read: its version, and its rows' numbers in memory."""

    version: int = -1
    known: Known = field(default_factory=dict)


def segment_files(folder: Path) -> dict[tuple[str, int], list[Path]]:
    """Files of each writer's numbered segments, the newest version first."""
    found: dict[tuple[str, int], list[tuple[int, Path]]] = {}
    for path in folder.iterdir():
        name = _NAME.fullmatch(path.name)
        if name:
            place = (name["writer"], int(name["number"]))
            found.setdefault(place, []).append((int(name["version"]), path))
    return {
        place: [path for _, path in sorted(files, reverse=True)]
        for place, files in sorted(found.items())
    }


def read_segment(path: Path) -> sqlite3.Connection:
    """The segment in memory. UnusableError when it is newer, OSError or sqlite3.Error when it is
    not whole."""
    content = path.read_bytes()
    if not path.stem.endswith(_digest(content)):
        raise sqlite3.DatabaseError("its content is not what its name says")
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    try:
        connection.deserialize(content)
        # Its hash says that it is whole, so that only its age is left to look at.
        rows = connection.execute("SELECT name FROM _sqlite_migrations WHERE migration_set = ?",
                                  (migrations.NAME,)).fetchall()  # fmt: skip
        applied = {name for (name,) in rows}
        if migrations.is_newer(applied):
            raise UnusableError(f"{path} was written by a newer autosel; it was left untouched")
        if applied != migrations.known():
            sqlite_file.prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


class SegmentTables(Tables):
    """:class:`Tables` over the merged segments of ``folder``; what it writes is one more of them.

    ``base`` is a connection in memory with what there is beside the segments.
    """

    def __init__(self, base: sqlite3.Connection, folder: Path) -> None:
        super().__init__(base, folder)
        self._folder = folder
        self._schema = describe(base)
        self._seen: dict[tuple[str, int], _Seen] = {}
        self._told: set[str] = set()
        self._writer = uuid.uuid4().hex
        self._number = 0
        self._sweeps: list[int] = []  # begun here: they may end here
        self._pending: list[tuple[str, int]] = []
        self._new_segment()
        with self._lock, self._errors():
            self._refresh()

    def close(self) -> None:
        super().close()
        self._own.close()

    def insert(self, table: str, columns: Mapping[str, object]) -> int:
        number = super().insert(table, columns)
        self._pending.append((table, number))
        return number

    def execute(self, sql: str, values: Sequence[object]) -> int:
        changed = super().execute(sql, values)
        # The one thing that is ever updated is the end of a sweep.
        self._pending += [("sweeps", number) for number in self._sweeps]
        return changed

    def select(self, sql: str, where: Mapping[str, object], order: str) -> list[Row]:
        with self._lock, self._errors():
            if not self._connection.in_transaction:
                self._refresh()
        return super().select(sql, where, order)

    @contextlib.contextmanager
    def write(self) -> Iterator[None]:
        """As of :class:`Tables`; the segment stands in the folder before the commit is done."""
        with self._lock:
            self._pending = []
            with self._errors():
                self._refresh()  # another host's clock may be ahead of this one's
            with super().write():
                yield
                self._publish()
            begun = [number for table, number in self._pending if table == "sweeps"]
            self._sweeps = list(dict.fromkeys(self._sweeps + begun))

    def _copy_all(self, source: sqlite3.Connection) -> Copier:
        copier = super()._copy_all(source)
        self._pending += copier.added
        return copier

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        with super()._errors():
            try:
                yield
            except OSError as error:
                raise StoreError(f"{self._where}: {error.strerror or error}") from error

    # writing ---------------------------------------------------------------------------------

    def _new_segment(self) -> None:
        self._number += 1
        self._version = 0
        self._content = sqlite_file.empty_bytes()
        self._own = sqlite_file.from_bytes(self._content)
        self._copied: Known = {}
        self._last: Path | None = None

    def _publish(self) -> None:
        """Write the rows of this transaction; when that fails, nothing of them stays."""
        known = dict(self._copied)
        self._own.execute("BEGIN")
        try:
            copier = Copier(
                self._connection, self._own, known=known, dedupe=False, tables=self._schema
            )
            for table, number in dict.fromkeys(self._pending):
                copier.row(table, number, again=table == "sweeps")
            self._own.execute("COMMIT")
            content = bytes(self._own.serialize())
            path = self._write_file(content)
        except BaseException:
            self._own.close()
            self._own = sqlite_file.from_bytes(self._content)
            raise
        if self._last is not None:
            with contextlib.suppress(OSError):
                self._last.unlink()
        self._last, self._content, self._copied = path, content, known
        if len(content) >= SEGMENT_BYTES:
            self._new_segment()

    def _write_file(self, content: bytes) -> Path:
        self._version += 1
        name = f"{self._writer}-{self._number:06d}-{self._version:06d}-{_digest(content)}.db"
        path = self._folder / name
        partial = self._folder / f".{name}.partial"
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            os.rename(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        _flush_folder(self._folder)
        return path

    # reading ---------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Merge what others have written since the last look.

        A file that is gone when it is to be read was replaced by a newer one, so that another look
        finds its rows: what was committed before a query is in its answer.
        """
        for _ in range(LOOKS):
            try:
                found = segment_files(self._folder)
            except FileNotFoundError:
                return
            others = [item for item in found.items() if item[0][0] != self._writer]
            if not any(self._take(place, files) for place, files in others):
                return

    def _take(self, place: tuple[str, int], files: list[Path]) -> bool:
        """Merge the newest version that is whole; whether one was replaced in the meantime."""
        seen = self._seen.setdefault(place, _Seen())
        for path in files:
            version = int(path.stem.split("-")[2])
            if version <= seen.version:
                return False
            try:
                merged = self._merge(path, seen)
            except FileNotFoundError:
                return True
            if merged:
                seen.version = version
                return False
        return False

    def _merge(self, path: Path, seen: _Seen) -> bool:
        """Copy a segment's rows; False, with a warning, when it is not whole."""
        try:
            source = read_segment(path)
        except FileNotFoundError:
            raise
        except (UnusableError, OSError, sqlite3.Error) as error:
            self._tell(path, " ".join(str(error).split()))
            return False
        with contextlib.closing(source):
            known = dict(seen.known)
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                copier = Copier(
                    source, self._connection, known=known, dedupe=False, tables=self._schema
                )
                copier.everything()
                for (number,) in source.execute("SELECT id FROM sweeps").fetchall():
                    copier.row("sweeps", number, again=True)
                self._connection.execute("COMMIT")
            except sqlite3.Error as error:
                self._connection.execute("ROLLBACK")
                self._tell(path, " ".join(str(error).split()))
                return False
        seen.known = known
        return True

    def _tell(self, path: Path, reason: str) -> None:
        if path.name not in self._told:
            self._told.add(path.name)
            warnings.warn(f"segment {path} ignored: {reason}", StoreWarning, stacklevel=6)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _flush_folder(folder: Path) -> None:
    """Make the rename last through a power cut, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
