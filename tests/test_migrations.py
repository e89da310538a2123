"""Files of earlier and of later schemas."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import warnings
from contextlib import closing
from pathlib import Path

import pytest
from sqlite_utils import Database

from autosel import sqlite_file, storefile
from autosel.core import Candidate, Device, Problem, QuantScheme
from autosel.errors import StoreError
from autosel.migrations import APPLICATION_ID, MIGRATIONS, known
from autosel.store import Store, StoreWarning

SCHEMA_1 = (Path(__file__).parent / "data" / "store_schema_1.sql").read_text()
SCHEME = QuantScheme(4, 128, True)
PROBLEM = Problem(8, 8, 2, 256, 128, SCHEME, SCHEME)
DEVICE = Device(
    "cuda", "Test GPU", (9, 0), 132, 1 << 37, 50 << 20, 227 << 10, (), None, "580.1",
    (("torch", "2.13.0"), ("triton", "3.7.1")),
)  # fmt: skip
FAST = Candidate.of("fast", {"block": 64, "split": None, "ratio": 0.5, "on": True}, "tiled")


def rows(path: Path, table: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(f"SELECT * FROM {table} ORDER BY id").fetchall()


def pragma(path: Path, name: str) -> object:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(f"PRAGMA {name}").fetchone()[0]


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "autosel.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMA_1)
    return path


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", StoreWarning)
        yield


TABLES = ("devices", "versions", "problems", "candidates", "sweeps", "measurements", "decisions")


def test_a_file_of_schema_1_is_migrated_without_loss(old):
    before = {table: rows(old, table) for table in TABLES}
    assert all(before.values())
    with Store.open(old) as store:
        assert store.path == old
        m = store.done(PROBLEM, 16, "uniform", FAST, DEVICE)
        assert (m.times_us, m.errors.rel_rms, m.first_call_ms) == ((10.5, 11.25, 12.0), 1e-3, 812.0)
        assert m.verify_ms is None
        assert store.done(PROBLEM, 64, "uniform", FAST, DEVICE).status == "oom"
        d = store.decision(PROBLEM, DEVICE, 16, "uniform")
        assert (d.winner.backend, d.margin_interval) == ("fast", (0.1, 0.3))
        assert store.nearest(PROBLEM, DEVICE, "uniform").exact
        (sweep,) = store.sweeps()
        assert (sweep.label, sweep.settings) == ("made by schema 1", {"seed": 0})
        assert MIGRATIONS.pending(Database(sqlite3.connect(old))) == []
    after = {table: rows(old, table) for table in TABLES}
    for table in TABLES:
        assert len(after[table]) == len(before[table])
        if table == "measurements":  # what judging took, which schema 1 did not ask for
            assert after[table] == [(*row, None) for row in before[table]]
        elif table not in ("devices", "sweeps"):
            assert after[table] == before[table]
    for then, now in zip(before["devices"], after["devices"], strict=True):
        unknown = {"max_clock_mhz": None, "mig_slice": None}  # facts that schema 1 did not ask for
        assert json.loads(now[3]) == {**json.loads(then[3]), **unknown}
        assert (now[:3], now[4:]) == (then[:3], then[4:])
    for then, now in zip(before["sweeps"], after["sweeps"], strict=True):
        assert now[:-1] == then
        assert re.fullmatch("[0-9a-f]{32}", now[-1])
    assert pragma(old, "integrity_check") == "ok"
    assert rows(old, "winners")[0][7] == "fast"


def test_migrating_twice_changes_nothing(old):
    Store.open(old).close()
    first = old.read_bytes()
    Store.open(old).close()
    assert old.read_bytes() == first


def schema(path: Path) -> dict[str, str]:
    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
        return {name: re.sub(r"\s+", " ", sql) for name, sql in found}


def test_a_migrated_file_has_the_schema_of_a_new_one(old, tmp_path):
    Store.open(old).close()
    Store.open(tmp_path / "new.db").close()
    assert schema(old) == schema(tmp_path / "new.db")
    assert (
        pragma(old, "user_version") == pragma(tmp_path / "new.db", "user_version") == len(known())
    )
    assert pragma(old, "application_id") == APPLICATION_ID


def test_the_first_step_still_builds_what_schema_1_was(old, tmp_path):
    """An edited step would leave two kinds of files that claim one version."""
    path = tmp_path / "first.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        MIGRATIONS.apply(Database(connection), stop_before="0002_views_and_guards")
    assert schema(path) == schema(old)


def test_steps_are_numbered_in_order():
    names = sorted(known())
    assert [name[:4] for name in names] == [f"{n:04}" for n in range(1, len(names) + 1)]


def test_every_table_is_strict_and_every_reference_indexed(tmp_path):
    Store.open(tmp_path / "new.db").close()
    with closing(sqlite3.connect(tmp_path / "new.db")) as connection:
        db = Database(connection)
        for table in TABLES:
            assert db[table].strict, table
        with pytest.raises(sqlite3.IntegrityError):
            db.execute("INSERT INTO devices (kind, name, spec) VALUES (X'00', 'n', '{}')")
        for view in ("results", "winners", "failures", "latest_measurements"):
            assert list(db.query(f"SELECT * FROM {view}")) == []
        plan = " ".join(
            row["detail"]
            for row in db.query("EXPLAIN QUERY PLAN SELECT id FROM latest_measurements")
        )
        assert "measurements_key" in plan


def test_a_step_that_fails_leaves_the_file_as_it_was(old, monkeypatch):
    def break_off(self, db, **_):
        db.execute("CREATE TABLE half_done (x)")
        raise sqlite3.OperationalError("planted")

    before = schema(old)
    with monkeypatch.context() as patch:
        patch.setattr(type(MIGRATIONS), "apply", break_off)
        with pytest.raises(StoreError, match="planted"):
            Store.open(old, strict=True)
    assert schema(old) == before
    with Store.open(old) as store:
        assert len(store.measurements()) == 2


def test_a_newer_step_is_recognised_and_nothing_is_touched(old):
    with closing(sqlite3.connect(old)) as connection:
        connection.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at)"
            " VALUES ('autosel', '0099_future', 'then')"
        )
        connection.commit()
    before = old.read_bytes()
    with pytest.raises(StoreError, match="newer autosel"):
        Store.open(old, strict=True)
    with pytest.warns(StoreWarning, match="newer autosel"):
        store = Store.open(old)
    assert (store.path, store.measurements()) == (None, [])
    store.close()
    assert old.read_bytes() == before
    assert [p.name for p in old.parent.iterdir() if p.suffix == ".db"] == ["autosel.db"]


def test_steps_of_other_tools_in_the_same_table_are_not_ours(old):
    with closing(sqlite3.connect(old)) as connection:
        connection.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at)"
            " VALUES ('another tool', '0099_theirs', 'then')"
        )
        connection.commit()
    with Store.open(old) as store:
        assert store.path == old


def test_a_memory_database_has_the_same_tables():
    opened = storefile.open_database(":memory:")
    with contextlib.closing(opened.tables._connection) as connection:
        assert set(TABLES) <= set(Database(connection).table_names())


def test_a_script_is_cut_where_a_statement_ends_and_nowhere_else() -> None:
    table = "CREATE TABLE a (b TEXT DEFAULT ';')"
    trigger = "CREATE TRIGGER t BEFORE UPDATE ON a\nBEGIN SELECT 1; SELECT RAISE(ABORT, 'no;'); END"
    script = f"\n  {table};\n-- a; comment\n{trigger};\n  SELECT 2  "
    assert sqlite_file.statements(script) == (f"{table};", f"-- a; comment\n{trigger};", "SELECT 2")
    assert sqlite_file.statements(" \n") == ()
