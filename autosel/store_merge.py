"""Copies rows from one autosel database into another: each row once, whatever its number there.

Row numbers mean nothing outside their file. Rows of a table with a unique key (devices, versions,
problems, candidates; sweeps by ``uid``) are found by it. Others (measurements, decisions) are the
same when every column is, apart from their number and, where raw samples were taken, the time of
storing: real samples do not repeat themselves. A row without samples says that something held at
its time, so it is copied unless an equal one is there that is as new.

Tables, keys and references are read from the schema, so that a new table needs no change here.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Row numbers in the target by table and row number in the source; None: not copied.
Known = dict[tuple[str, int], int | None]

_NUMBER, _CREATED, _SAMPLES = "id", "created", "times_us"


@dataclass(frozen=True, slots=True)
class Table:
    """Columns that are stored; ``key`` identifies a row, ``references`` maps column to table."""

    name: str
    columns: tuple[str, ...]
    nullable: tuple[str, ...]
    key: tuple[str, ...]
    references: Mapping[str, str]


#: Tables by name, those that others refer to first.
Schema = Mapping[str, Table]


@dataclass(slots=True)
class Counts:
    """What a merge did, by table: rows added, rows that were there, rows left out as orphans."""

    added: Counter[str] = field(default_factory=Counter)
    present: Counter[str] = field(default_factory=Counter)
    orphans: Counter[str] = field(default_factory=Counter)


class Copier:
    """Copies rows of ``source`` into ``target``, both of the newest schema, inside a transaction
    of the caller's.

    ``known``   results of an earlier copier with the same source, to go on from
    ``dedupe``  False where the caller knows that no row was copied before
    ``tables``  :func:`describe` of either, for a caller that copies often
    """

    def __init__(
        self,
        source: sqlite3.Connection,
        target: sqlite3.Connection,
        *,
        known: Known | None = None,
        dedupe: bool = True,
        tables: Schema | None = None,
    ) -> None:
        self.counts = Counts()
        self.added: list[tuple[str, int]] = []  # in the target
        self.tables = describe(target) if tables is None else tables
        self._source, self._target, self._dedupe = source, target, dedupe
        self._known: Known = {} if known is None else known

    def everything(self) -> Counts:
        """All rows of all tables."""
        for table in self.tables:
            for (number,) in _query(self._source, f"SELECT id FROM {table} ORDER BY id"):
                self.row(table, number)
        return self.counts

    def row(self, table: str, number: int, *, again: bool = False) -> int | None:
        """Copy one row and what it refers to; its number in the target, None for an orphan.

        ``again`` looks at a row that was copied before: what it lacked may have come since.
        """
        place = (table, number)
        if place not in self._known or again:
            self._known[place] = self._copy(self.tables[table], number)
        return self._known[place]

    # inside ----------------------------------------------------------------------------------

    def _copy(self, table: Table, number: int) -> int | None:
        names = ", ".join(table.columns)
        sql = f"SELECT {names} FROM {table.name} WHERE id = ?"
        found = next(iter(_query(self._source, sql, number)), None)
        if found is None:
            return None
        values = dict(zip(table.columns, found, strict=True))
        for column, other in table.references.items():
            if values[column] is not None:
                values[column] = self.row(other, values[column])
                if values[column] is None:
                    self.counts.orphans[table.name] += 1
                    return None
        there = self._find(table, values)
        if there is None:
            self.counts.added[table.name] += 1
            added = self._insert(table, values)
            self.added.append((table.name, added))
            return added
        self.counts.present[table.name] += 1
        if table.key:
            self._complete(table, there, values)
        return there

    def _find(self, table: Table, values: Mapping[str, Any]) -> int | None:
        if table.key and all(values[name] is not None for name in table.key):
            wanted, newest = [(f"{name} = ?", values[name]) for name in table.key], False
        elif self._dedupe:
            rest = [name for name in table.columns if name != _CREATED]
            wanted = [(f"{name} IS ?", values[name]) for name in rest]
            newest = _CREATED in values and values.get(_SAMPLES, "[]") == "[]"
        else:
            return None
        if newest:
            wanted.append((f"{_CREATED} >= ?", values[_CREATED]))
        where = " AND ".join(condition for condition, _ in wanted)
        sql = f"SELECT id FROM {table.name} WHERE {where} LIMIT 1"
        found = next(iter(_query(self._target, sql, *(value for _, value in wanted))), None)
        return None if found is None else int(found[0])

    def _insert(self, table: Table, values: Mapping[str, Any]) -> int:
        marks = ", ".join("?" * len(values))
        sql = f"INSERT INTO {table.name} ({', '.join(values)}) VALUES ({marks})"
        return int(self._target.execute(sql, tuple(values.values())).lastrowid or 0)

    def _complete(self, table: Table, number: int, values: Mapping[str, Any]) -> None:
        """Fill in what the target's row lacks: a sweep that was running when it was merged."""
        more = [n for n in table.nullable if n not in table.key and values[n] is not None]
        if more:
            sets = ", ".join(f"{name} = coalesce({name}, ?)" for name in more)
            lacking = " OR ".join(f"{name} IS NULL" for name in more)
            self._target.execute(
                f"UPDATE {table.name} SET {sets} WHERE id = ? AND ({lacking})",
                (*(values[name] for name in more), number),
            )


def describe(connection: sqlite3.Connection) -> Schema:
    """Every table with row numbers; those that others refer to come first."""
    sql = "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
    names = [str(name) for (name,) in _query(connection, sql)]
    found = {name: _describe(connection, name) for name in names if name[0] not in "_"}
    left = {n: t for n, t in found.items() if t and not n.startswith("sqlite_")}
    ordered: dict[str, Table] = {}
    while left:
        ready = [
            name
            for name, table in left.items()
            if not (set(table.references.values()) & left.keys() - {name})
        ]
        for name in ready or list(left):
            ordered[name] = left.pop(name)
    return ordered


def _describe(connection: sqlite3.Connection, name: str) -> Table | None:
    """None for a table without row numbers of its own."""
    info = list(_query(connection, f"PRAGMA table_xinfo({name})"))
    if not any(column == _NUMBER and primary for _, column, _, _, _, primary, _ in info):
        return None
    stored = [
        (column, not_null) for _, column, _, not_null, _, primary, hidden in info
        if not primary and not hidden
    ]  # fmt: skip
    key: tuple[str, ...] = ()
    for _, index, unique, _, partial in _query(connection, f"PRAGMA index_list({name})"):
        if unique and not partial:
            key = tuple(row[2] for row in _query(connection, f"PRAGMA index_info({index})"))
    references = {row[3]: row[2] for row in _query(connection, f"PRAGMA foreign_key_list({name})")}
    return Table(
        name,
        tuple(column for column, _ in stored),
        tuple(column for column, not_null in stored if not not_null),
        key,
        references,
    )


def _query(connection: sqlite3.Connection, sql: str, *values: object) -> list[tuple[Any, ...]]:
    cursor = connection.cursor()
    cursor.row_factory = None
    return cursor.execute(sql, values).fetchall()
