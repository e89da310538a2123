"""What a database holds as a summary and as CSV files: for people, spreadsheets and notebooks."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, TextIO

from autosel import migrations
from autosel.errors import StoreError, field_error
from autosel.network_fs import file_system_type
from autosel.store import Store

#: Views for people, with what a row of each is; the columns' names carry the units.
VIEWS = {
    "results": "the newest measurement of each candidate, with its median and least time",
    "winners": "a decision, with its winner, runner-up and margin",
    "failures": "a candidate that was not timed, with the reason",
    "samples": "one raw sample",
    "sweep_summary": "a sweep, with how long it took and how many rows it stored",
}


def summary(store: Store) -> dict[str, Any]:
    """Where the database is, its schema, size, rows, devices and sweeps; JSON-able."""
    connection, path = store.tables.connection, store.path
    store.sweeps()  # in a folder of segments: look for new ones first
    tables = [name for name in _names(store, "table") if not name.startswith(("_", "sqlite_"))]
    devices = connection.execute(
        "SELECT d.name, d.kind, count(DISTINCT m.id), max(m.created) FROM devices AS d"
        " LEFT JOIN measurements AS m ON m.device_id = d.id GROUP BY d.id ORDER BY d.id"
    ).fetchall()
    sweeps = store.sweeps()
    return {
        "path": str(path) if path else None,
        "kind": "segments" if store.segments else "file" if path else "memory",
        "file_system": file_system_type(path) if path else None,
        "schema": sorted(migrations.known())[-1],
        "size_bytes": _size(path) if path else None,
        "rows": {
            name: connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0]
            for name in tables
        },
        "devices": [
            {"name": row[0], "kind": row[1], "measurements": row[2], "newest": row[3]}
            for row in devices
        ],
        "sweeps": {
            "finished": sum(sweep.finished is not None for sweep in sweeps),
            "unfinished": sum(sweep.finished is None for sweep in sweeps),
        },
        "views": [name for name in VIEWS if name in _names(store, "view")],
    }


def write_csv(store: Store, view: str, file: TextIO) -> int:
    """Write a view of :data:`VIEWS` as CSV with a header; returns the number of rows."""
    if view not in VIEWS:
        raise StoreError(field_error("database", "view", repr(view), "one of " + ", ".join(VIEWS)))
    store.sweeps()
    cursor = store.tables.connection.execute(f"SELECT * FROM {view}")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([column[0] for column in cursor.description])
    count = 0
    for row in cursor:
        writer.writerow(tuple(row))
        count += 1
    return count


def _names(store: Store, kind: str) -> list[str]:
    rows = store.tables.connection.execute(
        "SELECT name FROM sqlite_master WHERE type = ? ORDER BY name", (kind,)
    )
    return [str(row[0]) for row in rows.fetchall()]


def _size(path: Path) -> int:
    files = path.iterdir() if path.is_dir() else (Path(f"{path}{end}") for end in ("", "-wal"))
    return sum(file.stat().st_size for file in files if file.is_file())
