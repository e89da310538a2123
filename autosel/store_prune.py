"""Moves rows that nothing uses any more out of a database into an archive, itself a database.

What stays, whatever is asked for: every live decision (one that :meth:`Store.decisions` gives),
the newest measurement of every candidate at the token count it was decided at, and every row that
another table refers to. What goes is copied and counted first; nothing is deleted that the archive
does not hold.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from autosel import identity, records, sqlite_file
from autosel.buckets import nearest_cover
from autosel.core import Device
from autosel.errors import StoreError, field_error
from autosel.safe_text import printable
from autosel.store import Store, StoredDecision
from autosel.store_merge import Copier
from autosel.tables import Tables

#: Tables that rows are taken from, in the order in which they may be deleted.
TABLES = ("decisions", "measurements")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What may go.

    superseded  rows that newer ones of the same key have replaced, and decisions withdrawn
    stale       everything that ``device``'s hardware measured with another driver or packages
    older_than  only rows stored longer ago than this
    """

    superseded: bool = True
    stale: bool = False
    older_than: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Pruned:
    """Row numbers that go, by table, and the archive they went to (None: nothing was done)."""

    rows: dict[str, tuple[int, ...]] = field(default_factory=dict)
    archive: Path | None = None

    @property
    def counts(self) -> dict[str, int]:
        return {table: len(numbers) for table, numbers in self.rows.items()}

    def __bool__(self) -> bool:
        return any(self.rows.values())


def prune(
    store: Store, device: Device, wanted: Wanted | None = None, *, archive: Path | None = None
) -> Pruned:
    """Say what may go; with ``archive``, a new or an existing archive file, move it there.

    Raises StoreError, with nothing deleted, for a store of segments or in memory, and for an
    archive that cannot be written or does not hold every row afterwards.
    """
    if store.path is None or store.segments:
        found = "segments" if store.segments else "a database in memory"
        raise StoreError(field_error("db prune", "database", found, "one database file"))
    if archive is not None and archive.absolute() == store.path:
        raise StoreError(field_error("db prune", "archive", archive, "another file"))
    tables = store.tables
    if archive is None:
        return Pruned(_select(store, tables, device, wanted or Wanted()))
    with tables.write():  # nobody adds a row between looking and deleting
        rows = _select(store, tables, device, wanted or Wanted())
        if any(rows.values()):
            _archive(tables.connection, rows, archive)
            _delete(tables.connection, rows)
    _shrink(tables)
    return Pruned(rows, archive if any(rows.values()) else None)


def _select(
    store: Store, tables: Tables, device: Device, wanted: Wanted
) -> dict[str, tuple[int, ...]]:
    decisions = store.stored_decisions(history=True)
    gone: dict[str, set[int]] = {table: set() for table in TABLES}
    if wanted.superseded:
        live = live_decisions(decisions)
        gone["decisions"] |= {s.id for s in decisions if s.id not in live}
        latest = _numbers(tables, "SELECT id FROM latest_measurements")
        gone["measurements"] |= _numbers(tables, "SELECT id FROM measurements") - latest
    if wanted.stale:
        gone["decisions"] |= {s.id for s in decisions if _is_stale(device, s.device)}
        gone["measurements"] |= _stale_rows(tables, device)
    for table in TABLES:
        gone[table] -= _referred_to(tables, table)
        if wanted.older_than is not None:
            before = (datetime.now(UTC) - wanted.older_than).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            gone[table] &= _numbers(tables, f"SELECT id FROM {table} WHERE created < ?", before)
    # Only now is it known which decisions stay, and with them what they were made from.
    staying = [s for s in decisions if s.id not in gone["decisions"]]
    live = live_decisions(staying)
    gone["measurements"] -= _behind(tables, [s for s in staying if s.id in live])
    return {table: tuple(sorted(gone[table])) for table in TABLES}


def _stale_rows(tables: Tables, here: Device) -> set[int]:
    made_on = tables.connection.execute(
        "SELECT DISTINCT x.device_id, x.versions_id, d.spec, v.spec FROM measurements AS x"
        " JOIN devices AS d ON d.id = x.device_id JOIN versions AS v ON v.id = x.versions_id"
    ).fetchall()
    found: set[int] = set()
    for device_id, versions_id, hardware, software in made_on:
        if _is_stale(here, records.device_from_texts(hardware, software)):
            sql = "SELECT id FROM measurements WHERE device_id = ? AND versions_id = ?"
            found |= _numbers(tables, sql, device_id, versions_id)
    return found


def live_decisions(decisions: Iterable[StoredDecision]) -> set[int]:
    """Row numbers of those that answer for at least one token count of their key.

    A decision whose winner needs 8-bit activations hides no exact one from those who do not allow
    it, so each class of accuracy has its own answers.
    """
    groups: dict[object, list[StoredDecision]] = defaultdict(list)
    for s in decisions:
        if not s.withdrawn:
            key = (s.decision.problem, s.device, s.decision.routing, tuple(sorted(s.mode.items())))
            groups[key].append(s)
    live: set[int] = set()
    for group in groups.values():
        exact = [s for s in group if s.decision.accuracy == "exact"]
        for some in (group, exact):
            marked = [replace(s.decision, why=str(s.id)) for s in reversed(some)]
            live |= {int(decision.why) for decision in nearest_cover(marked)}
    return live


def _is_stale(here: Device, there: Device) -> bool:
    return not identity.hardware_differences(here, there) and bool(
        identity.version_differences(here, there)
    )


def _behind(tables: Tables, decisions: list[StoredDecision]) -> set[int]:
    """Newest measurements of the decisions' keys at the token counts they were decided at."""
    found: set[int] = set()
    for s in decisions:
        found |= _numbers(
            tables,
            "SELECT m.id FROM latest_measurements AS m JOIN decisions AS x ON x.id = ?"
            " WHERE m.problem_id = x.problem_id AND m.device_id = x.device_id"
            " AND m.versions_id = x.versions_id AND m.routing = x.routing"
            " AND m.num_tokens = x.bucket_measured"
            # What was measured before the decision is what it was made from.
            " UNION SELECT m.id FROM measurements AS m JOIN decisions AS x ON x.id = ?"
            " WHERE m.problem_id = x.problem_id AND m.device_id = x.device_id"
            " AND m.versions_id = x.versions_id AND m.routing = x.routing"
            " AND m.num_tokens = x.bucket_measured AND m.created <= x.created"
            " AND NOT EXISTS (SELECT 1 FROM measurements AS n WHERE n.problem_id = m.problem_id"
            "  AND n.device_id = m.device_id AND n.versions_id = m.versions_id"
            "  AND n.routing = m.routing AND n.num_tokens = m.num_tokens"
            "  AND n.candidate_id = m.candidate_id AND n.mode = m.mode"
            "  AND (n.created, n.id) > (m.created, m.id) AND n.created <= x.created)",
            s.id,
            s.id,
        )
    return found


def _referred_to(tables: Tables, table: str) -> set[int]:
    """Rows of ``table`` that rows of another table refer to."""
    found: set[int] = set()
    with contextlib.closing(sqlite_file.in_memory()) as fresh:
        names = [n for (n,) in fresh.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for name in names:
            for row in fresh.execute(f"PRAGMA foreign_key_list({name})").fetchall():
                if row[2] == table:
                    found |= _numbers(tables, f"SELECT {row[3]} FROM {name} WHERE {row[3]} > 0")
    return found


def _archive(source: sqlite3.Connection, rows: dict[str, tuple[int, ...]], archive: Path) -> None:
    """Copy the rows and make sure that all are there, before anything is deleted."""
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        if archive.exists():
            sqlite_file.read_copy(archive).close()  # refuses what is not ours
        target = sqlite_file.writable(archive)
    except (sqlite_file.UnusableError, sqlite3.Error, OSError, ValueError) as error:
        raise StoreError(f"archive {printable(archive)} cannot be written: {error}") from None
    with contextlib.closing(target):
        try:
            target.execute("PRAGMA synchronous = FULL")
            target.execute("BEGIN IMMEDIATE")
            copier = Copier(source, target)
            missing: Counter[str] = Counter()
            for table, numbers in rows.items():
                for number in numbers:
                    missing[table] += copier.row(table, number) is None
            target.execute("COMMIT")
            target.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            raise StoreError(f"archive {archive} cannot be written: {error}") from None
        if any(missing.values()):
            kept = ", ".join(f"{count} of {table}" for table, count in missing.items() if count)
            raise StoreError(f"archive {archive}: rows are missing ({kept}); nothing was deleted")


def _delete(connection: sqlite3.Connection, rows: dict[str, tuple[int, ...]]) -> None:
    """Delete inside the caller's transaction, which takes the guards away and puts them back."""
    guards = connection.execute(
        "SELECT name, sql FROM sqlite_master WHERE type = 'trigger' AND name LIKE '%not_deleted'"
    ).fetchall()
    for name, _ in guards:
        connection.execute(f"DROP TRIGGER {name}")
    for table, numbers in rows.items():
        connection.executemany(f"DELETE FROM {table} WHERE id = ?", [(n,) for n in numbers])
    for _, sql in guards:
        connection.execute(sql)


def _shrink(tables: Tables) -> None:
    """Give the space back; where another process is reading, that waits for the next time."""
    with contextlib.suppress(sqlite3.Error):
        tables.connection.execute("VACUUM")
        tables.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _numbers(tables: Tables, sql: str, *values: object) -> set[int]:
    return {row[0] for row in tables.connection.execute(sql, values).fetchall()}
