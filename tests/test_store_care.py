"""Merging, checking, pruning and reading a database with other programs."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import warnings
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from autosel import device as device_module
from autosel import store_prune, store_tables
from autosel.core import Candidate, TokenBucket
from autosel.errors import StoreError
from autosel.store import Store, StoreWarning
from autosel.store_check import check
from autosel.store_prune import Wanted, prune
from tests.test_migrations import SCHEMA_1
from tests.test_store import COLD, DEVICE, FAST, PROBLEM, decided, failed, integrity, measured

ROOT = Path(__file__).resolve().parents[1]
NEWER = replace(DEVICE, driver="600")


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", StoreWarning)
        yield


def fill(path: Path, label: str, tokens: tuple[int, ...] = (1, 16), segments=None) -> None:
    with Store.open(path, strict=True, segments=segments) as store:
        sweep = store.begin_sweep(DEVICE, {"seed": 0}, label=label)
        rows = [measured(num_tokens=n, times_us=(n + 0.5, n + 0.25)) for n in tokens]
        store.add_measurements([*rows, failed("oom", candidate=Candidate.of("big"))], sweep)
        for n in tokens:
            store.add_decision(decided(n, n, winner=FAST), DEVICE, COLD, sweep)
        store.finish_sweep(sweep)


def content(path: Path) -> dict[str, int]:
    with closing(sqlite3.connect(path)) as connection:
        names = ("measurements", "decisions", "sweeps", "problems", "devices", "candidates")
        return {n: connection.execute(f"SELECT count(*) FROM {n}").fetchone()[0] for n in names}


def listing(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


# merging -----------------------------------------------------------------------------------


def test_merging_brings_everything_once_and_leaves_the_sources(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        fill(tmp_path / name / "autosel.db", name)
    before = {name: listing(tmp_path / name) for name in "ab"}
    with Store.open(tmp_path / "all.db") as store:
        for _ in range(3):
            for name in "ab":
                store.merge(tmp_path / name / "autosel.db")
            sweeps = store.sweeps()
            assert [s.label for s in sweeps] == ["a", "b"]
            assert all(s.finished for s in sweeps)
            assert len(store.measurements(history=True)) == 6
            assert len(store.decisions(history=True)) == 4
            for sweep in sweeps:
                assert len(store.measurements(sweep_id=sweep.id, history=True)) == 3
        assert store.decision(PROBLEM, DEVICE, 16, "uniform").winner == FAST
    assert {name: listing(tmp_path / name) for name in "ab"} == before
    assert integrity(tmp_path / "all.db") == "ok"
    assert check(tmp_path / "all.db") == ()


def test_a_source_with_a_writer_at_work_is_read_as_far_as_it_is_committed(tmp_path):
    with Store.open(tmp_path / "busy.db") as busy:
        busy.add_measurement(measured())
        with busy.tables.write():
            busy.tables.insert("candidates", {"backend": "half", "params": "{}", "layout": ""})
            with Store.open(tmp_path / "all.db") as store:
                store.merge(tmp_path / "busy.db")
                assert store.measurements() == [measured()]
        busy.add_measurement(measured(num_tokens=2))


def test_rows_that_both_have_are_there_once(tmp_path):
    shared, mine, theirs = (measured(num_tokens=n) for n in (1, 2, 3))
    with Store.open(tmp_path / "a.db") as a, Store.open(tmp_path / "b.db") as b:
        a.add_measurements([shared, mine])
        b.add_measurements([shared, theirs])
    with Store.open(tmp_path / "a.db") as store:
        counts = store.merge(tmp_path / "b.db")
        assert counts.added["measurements"] == 1
        assert counts.present["measurements"] == 1
        assert len(store.measurements(history=True)) == 3


def test_a_failure_stored_later_elsewhere_still_withdraws(tmp_path):
    crash = failed("crashed", candidate=FAST, num_tokens=16)
    with Store.open(tmp_path / "a.db") as a, Store.open(tmp_path / "b.db") as b:
        a.add_measurement(crash)
        a.add_decision(decided(9, 32, winner=FAST), DEVICE, COLD)
        b.add_measurement(crash)
    with Store.open(tmp_path / "a.db") as store:
        assert store.decision(PROBLEM, DEVICE, 16, "uniform").winner == FAST
        store.merge(tmp_path / "b.db")
        assert store.decision(PROBLEM, DEVICE, 16, "uniform") is None
        assert store.merge(tmp_path / "b.db").added == {}


def test_an_older_result_merged_later_does_not_become_the_newest(tmp_path):
    with Store.open(tmp_path / "old.db") as old:
        old.add_measurement(measured(times_us=(9.0,)))
        old.add_decision(decided(1, None, "then"), DEVICE, COLD)
    with Store.open(tmp_path / "new.db") as new:
        new.add_measurement(measured(times_us=(1.0,)))
        new.add_decision(decided(1, None, "now"), DEVICE, COLD)
        new.merge(tmp_path / "old.db")
        assert new.measurements() == [measured(times_us=(1.0,))]
        assert new.decision(PROBLEM, DEVICE, 1, "uniform").winner.backend == "now"
        assert len(new.measurements(history=True)) == 2


def test_a_sweep_merged_while_it_ran_ends_when_merged_again(tmp_path):
    with Store.open(tmp_path / "a.db") as a, Store.open(tmp_path / "all.db") as store:
        number = a.begin_sweep(DEVICE, label="long")
        store.merge(tmp_path / "a.db")
        assert store.sweeps()[0].finished is None
        a.finish_sweep(number, ceilings={"read_gbps": 2.0})
        store.merge(tmp_path / "a.db")
        (sweep,) = store.sweeps()
        assert sweep.finished
        assert sweep.ceilings == {"read_gbps": 2.0}


@pytest.mark.parametrize("target", [False, True])
def test_segments_merge_into_a_file_and_a_file_into_segments(tmp_path, target):
    fill(tmp_path / "a.db", "a", segments=not target)
    before = listing(tmp_path / ("a.db" if target else "a.db.segments")) if not target else None
    with Store.open(tmp_path / "all.db", segments=target) as store:
        for _ in range(2):
            store.merge(tmp_path / "a.db")
            assert len(store.measurements(history=True)) == 3
    with Store.open(tmp_path / "all.db", segments=target) as again:
        assert len(again.measurements(history=True)) == 3
        assert [s.label for s in again.sweeps()] == ["a"]
        again.merge(tmp_path / "a.db")
    with Store.open(tmp_path / "all.db", segments=target) as again:
        assert len(again.measurements(history=True)) == 3
    assert before is None or listing(tmp_path / "a.db.segments") == before


def test_copies_of_one_old_file_are_known_as_one(tmp_path):
    for name in ("one.db", "two.db"):
        with closing(sqlite3.connect(tmp_path / name)) as connection:
            connection.executescript(SCHEMA_1)
    with closing(sqlite3.connect(tmp_path / "two.db")) as connection:  # made on another day
        connection.execute("UPDATE devices SET first_seen = '2020-01-01T00:00:00Z'")
        connection.commit()
    old = (tmp_path / "two.db").read_bytes()
    with Store.open(tmp_path / "one.db") as store:
        store.merge(tmp_path / "two.db")
        assert len(store.sweeps()) == 1
    assert (tmp_path / "two.db").read_bytes() == old  # migrated in memory, not on disk


def test_a_bad_source_is_refused_in_one_line_and_nothing_is_merged(tmp_path):
    fill(tmp_path / "good.db", "good")
    (tmp_path / "text.db").write_text("no database " * 500)
    with closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    data = bytearray((tmp_path / "good.db").read_bytes())
    data[4096 * 3 : 4096 * 4] = b"\xa5" * 4096
    (tmp_path / "damaged.db").write_bytes(data)
    shutil.copy(tmp_path / "good.db", tmp_path / "newer.db")
    with closing(sqlite3.connect(tmp_path / "newer.db")) as connection:
        connection.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at)"
            " VALUES ('autosel', '9999_from_the_future', 'then')"
        )
        connection.commit()
    names = ("text.db", "other.db", "damaged.db", "newer.db", "missing.db")
    before = listing(tmp_path)
    with Store.open(tmp_path / "all" / "all.db") as store:
        for name in names:
            with pytest.raises(StoreError, match=name) as caught:
                store.merge(tmp_path / name)
            assert "\n" not in str(caught.value)
        assert store.measurements(history=True) == []
    assert listing(tmp_path) == before


def test_orphans_of_a_source_are_left_out_and_counted(tmp_path):
    fill(tmp_path / "a.db", "a")
    with closing(sqlite3.connect(tmp_path / "a.db")) as connection:  # without foreign keys
        connection.execute("DELETE FROM candidates WHERE backend = 'big'")
        connection.commit()
    with Store.open(tmp_path / "all.db") as store:
        assert store.merge(tmp_path / "a.db").orphans == {"measurements": 1}
    assert integrity(tmp_path / "all.db") == "ok"


KILLED_MERGE = """
    import sys
    sys.path[:0] = [{root!r}]
    from autosel.store import Store
    from autosel import store_merge
    store = Store.open(sys.argv[1], strict=True)
    insert, rows = store_merge.Copier._insert, []
    def wait(self, table, values):
        rows.append(table)
        if len(rows) == 5:
            print("inside", flush=True)
            sys.stdin.read()
        return insert(self, table, values)
    store_merge.Copier._insert = wait
    store.merge(sys.argv[2])
"""


def test_a_kill_inside_a_merge_leaves_nothing_of_it(tmp_path):
    fill(tmp_path / "a.db", "a")
    with Store.open(tmp_path / "all.db") as store:
        store.add_measurement(measured(num_tokens=99))
    code = textwrap.dedent(KILLED_MERGE).format(root=str(ROOT))
    words = [sys.executable, "-c", code, str(tmp_path / "all.db"), str(tmp_path / "a.db")]
    run = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert run.stdout.readline().strip() == "inside"
    run.kill()
    run.communicate()
    with Store.open(tmp_path / "all.db") as store:
        assert [m.num_tokens for m in store.measurements()] == [99]
        assert store.merge(tmp_path / "a.db").added["measurements"] == 3
    assert integrity(tmp_path / "all.db") == "ok"


# checking ----------------------------------------------------------------------------------


def edited(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


FAULTS = {
    "orphan": ["DELETE FROM candidates WHERE backend = 'big'"],
    "row": [
        "DROP TRIGGER measurements_are_append_only",
        "UPDATE measurements SET times_us = '[-1.0]' WHERE status = 'ok'",
    ],
    "identity": ["UPDATE problems SET key = 'another'"],
    "schema": ["DROP TRIGGER measurements_are_not_deleted"],
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_planted_fault_is_found_and_named(tmp_path, kind):
    fill(tmp_path / "a.db", "a")
    assert check(tmp_path / "a.db") == ()
    edited(tmp_path / "a.db", *FAULTS[kind])
    before = (tmp_path / "a.db").read_bytes()
    found = check(tmp_path / "a.db")
    assert kind in {item.kind for item in found}, found
    assert all("\n" not in str(item) for item in found)
    assert (tmp_path / "a.db").read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE problems SET spec = replace(spec, '\"top_k\":2', '\"top_k\": 2')",
        "UPDATE problems SET spec = '{}'",
        "UPDATE devices SET spec = replace(spec, '\"kind\"', '\"kinds\"')",
        "UPDATE devices SET name = 'another'",
    ],
)
def test_a_text_that_would_never_be_found_again_is_reported(tmp_path, change):
    fill(tmp_path / "a.db", "a")
    edited(tmp_path / "a.db", change)
    assert "identity" in {item.kind for item in check(tmp_path / "a.db")}


@pytest.mark.parametrize("how", ["page", "truncated", "text"])
def test_damage_is_found_and_left_in_place(tmp_path, how):
    path = tmp_path / "a.db"
    with Store.open(path) as store:
        store.add_measurements([measured(num_tokens=n) for n in range(1, 200)])
    data = bytearray(path.read_bytes())
    if how == "page":
        data[4096 * 20 : 4096 * 21] = b"\xa5" * 4096
    elif how == "truncated":
        del data[len(data) // 2 :]
    else:
        data = bytearray(b"text " * 999)
    path.write_bytes(data)
    found = check(path)
    assert {item.kind for item in found} == {"integrity"}
    assert path.read_bytes() == bytes(data)
    assert [p.name for p in tmp_path.iterdir()] == ["a.db"]


def test_a_segment_that_is_not_whole_is_found(tmp_path):
    fill(tmp_path / "a.db", "a", segments=True)
    folder = tmp_path / "a.db.segments"
    assert check(folder) == ()
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    (finding,) = check(folder)
    assert (finding.kind, finding.where) == ("integrity", file.name)


# raw samples stay --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE measurements SET times_us = '[1.0]'",
        "DELETE FROM measurements",
        "INSERT OR REPLACE INTO measurements SELECT * FROM measurements WHERE id = 1",
        "UPDATE decisions SET winner_us = 1.0",
        "DELETE FROM decisions WHERE id = 1",
        "REPLACE INTO decisions SELECT * FROM decisions WHERE id = 1",
    ],
)
def test_raw_samples_and_decisions_are_append_only_for_everybody(tmp_path, statement):
    fill(tmp_path / "a.db", "a")
    with closing(sqlite3.connect(tmp_path / "a.db")) as connection:
        before = connection.execute("SELECT * FROM measurements").fetchall()
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute(statement)
        assert connection.execute("SELECT * FROM measurements").fetchall() == before


# pruning -----------------------------------------------------------------------------------


@pytest.fixture
def worn(tmp_path):
    """Superseded rows, live ones, another version's, and a decision that newer ones cover."""
    path = tmp_path / "autosel.db"
    with Store.open(path) as store:
        store.add_measurement(measured(times_us=(9.0, 9.5)))  # superseded below
        store.add_decision(decided(1, None, "old", bucket=TokenBucket(1, None, 16)), DEVICE, COLD)
        store.add_measurement(measured(times_us=(1.0, 1.5)))
        store.add_measurement(failed("oom", candidate=Candidate.of("big")))
        new = decided(1, None, winner=FAST, bucket=TokenBucket(1, None, 16))
        store.add_decision(new, DEVICE, COLD)
        then = replace(DEVICE, driver="500")
        store.add_measurement(measured(device=then))
        store.add_decision(decided(9, 32), then, COLD)
    return path


def test_a_dry_run_counts_and_changes_nothing(worn):
    before = worn.read_bytes()
    with Store.open(worn) as store:
        found = prune(store, DEVICE)
    assert found.counts == {"decisions": 1, "measurements": 1}
    assert found.archive is None
    assert worn.read_bytes() == before


def test_what_goes_is_in_the_archive_and_comes_back(worn, tmp_path):
    archive = tmp_path / "archive.db"
    before = content(worn)
    with Store.open(worn) as store:
        everything = store.measurements(history=True)
        decisions = store.decisions(history=True)
        answers = store.decisions(PROBLEM, DEVICE), store.measurements(PROBLEM, DEVICE)
        done = prune(store, DEVICE, Wanted(stale=True), archive=archive)
        assert done.counts == {"decisions": 2, "measurements": 2}
        assert (store.decisions(PROBLEM, DEVICE), store.measurements(PROBLEM, DEVICE)) == answers
        assert len(store.measurements(history=True)) == len(everything) - 2
        assert not prune(store, DEVICE, Wanted(stale=True), archive=archive)
    assert integrity(worn) == integrity(archive) == "ok"
    assert check(worn) == check(archive) == ()
    assert content(archive)["measurements"] == 2
    with Store.open(worn) as store:  # the guards are back
        store.merge(archive)
        assert sorted(store.measurements(history=True), key=repr) == sorted(everything, key=repr)
        assert sorted(store.decisions(history=True), key=repr) == sorted(decisions, key=repr)
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            store.tables.connection.execute("DELETE FROM measurements")
    assert content(worn)["measurements"] == before["measurements"]


def test_samples_behind_a_decision_that_holds_never_go(tmp_path):
    """The winner was measured again after the decision: both sets of samples stay."""
    with Store.open(tmp_path / "a.db") as store:
        store.add_measurement(measured(times_us=(9.0,)))
        bucket = TokenBucket(1, None, 16)
        store.add_decision(decided(winner=FAST, bucket=bucket), DEVICE, COLD)
        store.add_measurement(measured(times_us=(1.0,)))
        assert not prune(store, DEVICE, archive=tmp_path / "archive.db")
        assert len(store.measurements(history=True)) == 2


def test_an_exact_decision_under_one_with_8_bit_activations_stays(tmp_path):
    with Store.open(tmp_path / "a.db") as store:
        store.add_decision(decided(1, None, "exact"), DEVICE, COLD)
        store.add_decision(decided(1, None, "quick", accuracy="a8"), DEVICE, COLD)
        assert not prune(store, DEVICE)


def test_only_old_rows_go_when_asked(worn, monkeypatch):
    with Store.open(worn) as store:
        assert not prune(store, DEVICE, Wanted(stale=True, older_than=timedelta(days=1)))
        assert prune(store, DEVICE, Wanted(stale=True, older_than=timedelta(0)))


def test_stale_rows_of_another_machine_stay(worn):
    with Store.open(worn) as store:
        elsewhere = replace(NEWER, name="another")
        found = prune(store, elsewhere, Wanted(superseded=False, stale=True))
        assert not found
        assert prune(store, NEWER, Wanted(superseded=False, stale=True))


def test_nothing_goes_when_the_archive_cannot_hold_it(worn, tmp_path, monkeypatch):
    before = content(worn)
    (tmp_path / "text.db").write_text("not ours " * 500)
    for bad in (tmp_path / "text.db", tmp_path / "text.db" / "below.db", worn):
        with Store.open(worn) as store, pytest.raises(StoreError):
            prune(store, DEVICE, archive=bad)
    monkeypatch.setattr(store_prune.Copier, "row", lambda *a, **k: None)  # a copy that lies
    with Store.open(worn) as store, pytest.raises(StoreError, match="rows are missing"):
        prune(store, DEVICE, archive=tmp_path / "archive.db")
    assert content(worn) == before
    assert integrity(worn) == "ok"


def test_segments_and_memory_are_not_pruned(tmp_path):
    with Store.open(":memory:") as store, pytest.raises(StoreError, match="in memory"):
        prune(store, DEVICE)
    with (
        Store.open(tmp_path / "a.db", segments=True) as store,
        pytest.raises(StoreError, match="segments"),
    ):
        prune(store, DEVICE)


# places that fail, for real ----------------------------------------------------------------


@pytest.fixture
def mounted(tmp_path):
    """Mounts a tmpfs of a size; again with other options. Unmounted at the end."""
    point = tmp_path / "mount"
    point.mkdir()

    def mount(*options: str) -> Path:
        words = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(point)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"no mount here: {done.stderr.strip()}")
        return point

    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux may mount")
    yield mount
    subprocess.run(["umount", "-l", str(point)], capture_output=True)


@pytest.mark.parametrize("segments", [False, True])
def test_a_real_full_disk_is_one_line_and_loses_nothing(mounted, segments):
    place = mounted("size=700k")
    stored = 0

    def write() -> None:
        nonlocal stored
        for number in range(1, 3000):
            store.add_measurements([measured(num_tokens=2 * number + i) for i in (0, 1)])
            stored += 2

    with Store.open(place / "autosel.db", strict=True, segments=segments) as store:
        with pytest.raises(StoreError) as caught:
            write()
        assert "\n" not in str(caught.value)
        assert stored > 10
        assert len(store.measurements()) == stored
    with Store.open(place / "autosel.db", strict=True, segments=segments) as again:
        assert len(again.measurements()) == stored
    assert check(place / ("autosel.db.segments" if segments else "autosel.db")) == ()
    subprocess.run(["mount", "-o", "remount,size=8m", str(place)], check=True)
    with Store.open(place / "autosel.db", strict=True, segments=segments) as again:
        again.add_measurement(measured(num_tokens=9999))  # and with room again it goes on
        assert len(again.measurements()) == stored + 1


def test_a_disk_that_is_full_from_the_start_gives_memory(mounted):
    place = mounted("size=8k")
    (place / "filler").write_bytes(b"x" * 8192)
    with pytest.warns(StoreWarning, match="kept in memory only"):
        store = Store.open(place / "autosel.db")
    store.add_measurement(measured())
    assert store.measurements() == [measured()]


@pytest.mark.parametrize("segments", [False, True])
def test_a_real_read_only_mount_is_read_and_not_touched(mounted, segments):
    place = mounted("size=8m")
    fill(place / "autosel.db", "before", segments=segments)
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    with pytest.warns(StoreWarning, match="what it holds was read"):
        store = Store.open(place / "autosel.db", segments=segments)
    assert store.path is None
    assert store.decision(PROBLEM, DEVICE, 16, "uniform").winner == FAST
    store.add_measurement(measured(num_tokens=77))
    assert 77 in {m.num_tokens for m in store.measurements()}
    with pytest.raises(StoreError, match="written"):
        Store.open(place / "autosel.db", strict=True, segments=segments)


def test_an_empty_read_only_mount_gives_memory(mounted):
    place = mounted("size=1m")
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    with pytest.warns(StoreWarning, match="kept in memory only"):
        Store.open(place / "autosel.db").close()
    with pytest.warns(StoreWarning, match="kept in memory only"):
        Store.open(place / "new folder" / "autosel.db").close()


# other programs ----------------------------------------------------------------------------


def test_every_view_has_readable_columns_with_units(tmp_path):
    fill(tmp_path / "a.db", "a")
    with closing(sqlite3.connect(tmp_path / "a.db")) as connection:
        connection.row_factory = sqlite3.Row
        for view in store_tables.VIEWS:
            rows = [dict(row) for row in connection.execute(f"SELECT * FROM {view}")]
            assert rows, view
            columns = set(rows[0])
            assert not {c for c in columns if c.endswith("_id")} - {"measurement_id", "sweep_id"}
            for column in columns:  # a time says its unit
                if "time" in column or column.startswith(("min", "median", "winner_u")):
                    assert column.endswith(("_us", "_ms", "_s")), (view, column)
        samples = [r["time_us"] for r in connection.execute("SELECT * FROM samples")]
        assert samples == [1.5, 1.25, 16.5, 16.25]
        (sweep,) = connection.execute("SELECT * FROM sweep_summary")
        assert (sweep["measurements"], sweep["failures"], sweep["decisions"]) == (3, 1, 2)
        assert 0 <= sweep["duration_s"] < 60


def test_the_datasette_metadata_names_what_is_there(tmp_path):
    fill(tmp_path / "a.db", "a")
    data = json.loads((ROOT / "docs" / "datasette.json").read_text())
    tables = data["databases"]["autosel"]["tables"]
    assert set(store_tables.VIEWS) <= set(tables)
    with closing(sqlite3.connect(tmp_path / "a.db")) as connection:
        for table, facts in tables.items():
            cursor = connection.execute(f"SELECT * FROM {table}")
            columns = {column[0] for column in cursor.description}
            named = {*facts.get("columns", {}), *facts.get("facets", [])}
            named |= {facts[key] for key in ("sort", "sort_desc") if key in facts}
            assert named <= columns, table


def test_csv_has_a_header_and_every_row(tmp_path):
    fill(tmp_path / "a.db", "a")
    text = io.StringIO()
    with Store.open(tmp_path / "a.db") as store:
        assert store_tables.write_csv(store, "results", text) == 3
        with pytest.raises(StoreError, match="one of results"):
            store_tables.write_csv(store, "sqlite_master", io.StringIO())
    rows = list(csv.DictReader(io.StringIO(text.getvalue())))
    assert {row["status"] for row in rows} == {"ok", "oom"}
    assert rows[0]["median_us"] == "1.375"
    assert [row["median_us"] for row in rows if row["status"] == "oom"] == [""]


# the commands ------------------------------------------------------------------------------


@pytest.fixture
def autosel(capsys, monkeypatch, tmp_path):
    from autosel.__main__ import main

    monkeypatch.setenv("AUTOSEL_DB", str(tmp_path / "autosel.db"))

    def run(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(arg) for arg in args])
        return status, *capsys.readouterr()

    return run


def test_info_says_where_what_and_how_much(autosel, tmp_path):
    fill(tmp_path / "autosel.db", "a")
    status, out, _ = autosel("db", "info", "--json")
    data = json.loads(out)
    assert status == 0
    assert data["path"] == str(tmp_path / "autosel.db")
    assert data["kind"] == "file"
    assert data["rows"]["measurements"] == 3
    assert data["sweeps"] == {"finished": 1, "unfinished": 0}
    assert data["devices"][0]["name"] == "Test GPU"
    assert {"user database", "site database"} <= {layer["layer"] for layer in data["layers"]}
    assert autosel("db", "info")[0] == 0


def test_check_exits_with_1_when_something_is_wrong(autosel, tmp_path):
    status, _, err = autosel("db", "check")
    assert status == 1
    assert "expected a database" in err
    assert not (tmp_path / "autosel.db").exists()
    fill(tmp_path / "autosel.db", "a")
    assert autosel("db", "check")[0] == 0
    edited(tmp_path / "autosel.db", *FAULTS["orphan"])
    status, out, err = autosel("db", "check", "--json")
    assert status == 1
    assert not json.loads(out)["ok"]
    assert err.count("error: ") == 1
    assert "Traceback" not in err


def test_merge_and_export_from_the_command_line(autosel, tmp_path):
    fill(tmp_path / "a.db", "a")
    fill(tmp_path / "b.db", "b", segments=True)
    for expected in (3, 0):
        status, out, _ = autosel("db", "merge", tmp_path / "a.db", tmp_path / "b.db", "--json")
        merged = json.loads(out)["merged"]
        assert status == 0
        assert [item["added"].get("measurements", 0) for item in merged] == [expected, expected]
    for view in store_tables.VIEWS:
        assert autosel("db", "export", "--view", view, "-o", tmp_path / f"{view}.csv")[0] == 0
    assert autosel("db", "export", "--format", "json", "-o", tmp_path / "x.json")[0] == 0
    assert len(json.loads((tmp_path / "x.json").read_text())["measurements"]) == 3
    status, _, err = autosel("db", "merge", tmp_path / "missing.db")
    assert status == 1
    assert "missing.db" in err


def test_stale_and_prune_from_the_command_line(autosel, worn, tmp_path):
    with device_module.pretend(DEVICE):
        _, out, _ = autosel("db", "stale", "--json")
        (stale,) = json.loads(out)["stale"]
        (difference,) = stale["differences"]
        assert difference["field"] == "versions.driver"
        before = content(worn)
        assert autosel("db", "prune", "--stale")[0] == 0
        assert content(worn) == before
        assert (
            "would archive 2 decisions and 2 measurements" in autosel("db", "prune", "--stale")[1]
        )
        status, out, _ = autosel("db", "prune", "--stale", "--yes", "--json")
        data = json.loads(out)
        assert status == 0
        assert content(Path(data["archive"]))["measurements"] == 2
        assert content(worn)["measurements"] == before["measurements"] - 2
        assert "nothing to prune" in autosel("db", "prune", "--stale", "--yes")[1]


# what other modules keep in the same file --------------------------------------------------


def test_every_table_merges_once_and_by_its_own_time(tmp_path):
    """Whatever tables there are: a copy of a full file adds nothing, another file's rows come."""
    path = tmp_path / "a.db"
    fill(path, "a")
    with closing(sqlite3.connect(path)) as connection:
        tables = [
            name
            for kind, name in connection.execute("SELECT type, name FROM sqlite_master")
            if kind == "table" and name[0] != "_" and not name.startswith("sqlite_")
        ]
    with Store.open(path) as store:
        for table in tables:
            _row_for(store, table)
    shutil.copy(path, tmp_path / "copy.db")
    with Store.open(path) as store:
        before = {t: store.tables.connection.execute(f"SELECT count(*) FROM {t}").fetchone()[0]
                  for t in tables}  # fmt: skip
        assert all(before.values()), before
        store.merge(tmp_path / "copy.db")
        after = {t: store.tables.connection.execute(f"SELECT count(*) FROM {t}").fetchone()[0]
                 for t in tables}  # fmt: skip
    assert after == before
    with Store.open(tmp_path / "new.db") as store:
        counts = store.merge(path)
        assert {t: counts.added[t] for t in tables} == before


def _row_for(store: Store, table: str) -> None:
    """A made-up row where the fixture left a table empty; columns by their declared types."""
    connection = store.tables.connection
    if connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]:
        return
    references = {r[3] for r in connection.execute(f"PRAGMA foreign_key_list({table})").fetchall()}
    values: dict[str, object] = {}
    for row in connection.execute(f"PRAGMA table_info({table})").fetchall():
        name, kind, primary = row[1], row[2], row[5]
        if primary:
            continue
        text = "{}" if kind == "TEXT" else 1
        values[name] = 1 if name in references else text
    marks = ", ".join("?" * len(values))
    with store.tables.write():
        connection.execute(
            f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", tuple(values.values())
        )
