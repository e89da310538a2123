"""The store when a clock is set back, its file is taken away, or its path is none."""

from __future__ import annotations

import os
import shutil
import sqlite3
import warnings
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from autosel import rows
from autosel.errors import StoreError
from autosel.store import Store, StoreWarning, snapshot
from autosel.store_prune import prune
from tests.test_store import COLD, DEVICE, FAST, PROBLEM, decided, failed, measured

AHEAD = timedelta(days=2000)


def clock(monkeypatch: pytest.MonkeyPatch, by: timedelta) -> None:
    """Another process or host, whose clock is off by ``by``."""
    ticks = iter(range(10**6))

    def now() -> str:
        time = datetime.now(UTC) + by + timedelta(microseconds=next(ticks))
        return time.strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    monkeypatch.setattr(rows, "now", now)


def winner(store: Store) -> str | None:
    found = store.decision(PROBLEM, DEVICE, 1, "uniform")
    return found.winner.backend if found else None


def stamps(path: Path, table: str) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [row[0] for row in connection.execute(f"SELECT created FROM {table} ORDER BY id")]


# clocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [False, True])
def test_what_is_stored_last_counts_though_the_clock_was_set_back(tmp_path, monkeypatch, segments):
    place = tmp_path / "a.db"
    clock(monkeypatch, AHEAD)
    with Store.open(place, segments=segments) as store:
        store.add_decision(decided(1, None, "early"), DEVICE, COLD)
    clock(monkeypatch, timedelta())
    with Store.open(place, segments=segments) as store:
        store.add_decision(decided(1, None, "late"), DEVICE, COLD)
        assert winner(store) == "late"
    with Store.open(place, segments=segments) as store:
        assert winner(store) == "late"


@pytest.mark.parametrize("segments", [False, True])
def test_a_failure_after_a_clock_was_set_back_withdraws(tmp_path, monkeypatch, segments):
    place = tmp_path / "a.db"
    clock(monkeypatch, AHEAD)
    with Store.open(place, segments=segments) as store:
        store.add_decision(decided(1, None, winner=FAST), DEVICE, COLD)
    clock(monkeypatch, timedelta())
    with Store.open(place, segments=segments) as store:
        store.add_measurement(failed("crashed", candidate=FAST, num_tokens=1))
        assert winner(store) is None
        store.add_decision(decided(1, None, winner=FAST), DEVICE, COLD)  # measured again
        assert winner(store) == "fast"


@pytest.mark.parametrize("segments", [False, True])
def test_a_row_of_another_process_that_came_meanwhile_is_seen(tmp_path, monkeypatch, segments):
    place = tmp_path / "a.db"
    with Store.open(place, segments=segments) as here:
        here.add_decision(decided(1, None, "first"), DEVICE, COLD)
        clock(monkeypatch, AHEAD)
        with Store.open(place, segments=segments) as there:
            there.add_decision(decided(1, None, "theirs"), DEVICE, COLD)
        clock(monkeypatch, timedelta())
        here.add_decision(decided(1, None, "ours"), DEVICE, COLD)
        assert winner(here) == "ours"


def test_a_row_that_was_merged_in_is_seen(tmp_path, monkeypatch):
    clock(monkeypatch, AHEAD)
    with Store.open(tmp_path / "ahead.db") as store:
        store.add_decision(decided(1, None, "theirs"), DEVICE, COLD)
    clock(monkeypatch, timedelta())
    with Store.open(tmp_path / "a.db") as store:
        store.add_decision(decided(1, None, "first"), DEVICE, COLD)
        store.merge(tmp_path / "ahead.db")
        assert winner(store) == "theirs"
        store.add_decision(decided(1, None, "ours"), DEVICE, COLD)
        assert winner(store) == "ours"


def test_a_sweep_ends_no_earlier_than_it_began(tmp_path, monkeypatch):
    clock(monkeypatch, AHEAD)
    with Store.open(tmp_path / "a.db") as store:
        store.begin_sweep(DEVICE, label="early")
        clock(monkeypatch, timedelta())
        store.finish_sweep(store.begin_sweep(DEVICE, label="late"))
        early, late = store.sweeps()
        assert (early.label, late.label) == ("early", "late")
        assert late.finished is not None
        assert early.started < late.started <= late.finished


def test_a_clock_that_is_right_is_not_changed(tmp_path, monkeypatch):
    clock(monkeypatch, timedelta())
    before = rows.now()
    with Store.open(tmp_path / "a.db") as store:
        store.add_measurements([measured(num_tokens=n) for n in (1, 2, 3)])
    found = stamps(tmp_path / "a.db", "measurements")
    assert found == sorted(set(found))
    assert before < found[0]
    assert found[-1] < rows.now()


@pytest.mark.parametrize("stamp", ["9999-12-31T23:59:59.999999Z", "9999-99-99T99:99:99.999999Z"])
def test_no_time_after_the_last_leaves_it_to_the_rows_number(tmp_path, monkeypatch, stamp):
    monkeypatch.setattr(rows, "now", lambda: stamp)
    with Store.open(tmp_path / "a.db") as store:
        store.add_decision(decided(1, None, "early"), DEVICE, COLD)
    monkeypatch.undo()
    with Store.open(tmp_path / "a.db") as store:
        store.add_decision(decided(1, None, "late"), DEVICE, COLD)
        assert winner(store) == "late"


def test_a_stamp_that_is_no_time_hides_no_later_one(tmp_path, monkeypatch):
    clock(monkeypatch, AHEAD)
    with Store.open(tmp_path / "a.db") as store:
        store.add_decision(decided(1, None, "early"), DEVICE, COLD)
        monkeypatch.setattr(rows, "now", lambda: "{}")
        store.add_measurement(measured())
    clock(monkeypatch, timedelta())
    with Store.open(tmp_path / "a.db") as store:
        store.add_decision(decided(1, None, "late"), DEVICE, COLD)
        assert winner(store) == "late"


# a file that is taken away -------------------------------------------------------------------


def remove_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def put_another(path: Path) -> None:
    other = path.with_name("other.db")
    Store.open(other).close()
    os.replace(other, path)


def put_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("take", [Path.unlink, remove_folder, put_another, put_a_folder])
def test_results_that_nobody_would_find_are_refused(tmp_path, take):
    place = tmp_path / "folder" / "a.db"
    store = Store.open(place)
    store.add_measurement(measured())
    take(place)
    with pytest.raises(StoreError, match=r"^database .*: the file was removed or replaced while"):
        store.add_measurement(measured(num_tokens=2))
    with pytest.raises(StoreError, match="removed or replaced"):
        store.add_decision(decided(), DEVICE, COLD)
    store.close()


def test_a_file_taken_away_within_a_transaction_is_noticed(tmp_path):
    place = tmp_path / "a.db"
    with Store.open(place) as store:
        with pytest.raises(StoreError, match="removed or replaced"), store.tables.write():
            place.unlink()
        assert not store.tables.connection.in_transaction


def test_maintenance_keeps_the_file_the_same(tmp_path):
    with Store.open(tmp_path / "a.db") as store:
        for us in (3.0, 2.0, 1.0):
            store.add_measurement(measured(times_us=(us,)))
        assert prune(store, DEVICE, archive=tmp_path / "archive.db")
        store.add_measurement(measured(num_tokens=2))
        assert len(store.measurements()) == 2


def test_segments_and_memory_have_no_file_to_lose(tmp_path):
    with Store.open(tmp_path / "a.db", segments=True) as store:
        remove = store.path
        assert remove is not None
        shutil.rmtree(remove)
        store.add_measurement(measured())
    with Store.open(tmp_path / "a.db", segments=True) as store:
        assert store.measurements() == [measured()]
    with Store.open(":memory:") as store:
        store.add_measurement(measured())


# paths that are none -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a\0b.db", "a\0b/c.db", "a\0.segments", "a\ud800.db"])
@pytest.mark.parametrize("segments", [None, True])
def test_a_path_that_cannot_be_is_one_line(tmp_path, name, segments):
    path = f"{tmp_path}/{name}"
    with pytest.raises(StoreError) as refused:
        Store.open(path, strict=True, segments=segments)
    assert str(refused.value).isprintable()
    with pytest.warns(StoreWarning, match="kept in memory only") as told:
        assert Store.open(path, segments=segments).path is None
    assert [str(warning.message).isprintable() for warning in told] == [True]
    with pytest.raises(StoreError, match="found nothing") as refused, snapshot(path):
        pass
    assert str(refused.value).isprintable()
    with Store.open(":memory:") as store, pytest.raises(StoreError, match="found nothing"):
        store.merge(path)


def test_an_archive_that_cannot_be_is_one_line(tmp_path):
    with Store.open(tmp_path / "a.db") as store:
        for us in (2.0, 1.0):
            store.add_measurement(measured(times_us=(us,)))
        for name in ("a\0b/c.db", "a\0b.db"):
            with pytest.raises(StoreError, match=r"archive .* cannot be written") as refused:
                prune(store, DEVICE, archive=tmp_path / name)
            assert str(refused.value).isprintable()
        assert len(store.measurements(history=True)) == 2


def test_a_home_that_nobody_knows_is_one_line():
    with pytest.raises(StoreError, match="home directory"), snapshot("~nosuchuser/a.db"):
        pass
    with warnings.catch_warnings(), pytest.raises(StoreError, match="home directory"):
        Store.open("~nosuchuser/a.db", strict=True)
