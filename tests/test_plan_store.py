"""Plans in the database."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

import pytest

from autosel.store import Store, StoreWarning
from tests.fakes import CPU, PROBLEM
from tests.test_plans import GPU, example


def test_the_newest_plan_of_a_key_comes_last(tmp_path) -> None:
    first = example()
    second = replace(first, budget="2.0x")
    elsewhere = replace(first, device=CPU)
    with Store.open(tmp_path / "a.db") as store:
        for made in (first, elsewhere, second):
            store.add_plan(made)
    with Store.open(tmp_path / "a.db") as store:
        assert [s.plan for s in store.plans(PROBLEM, GPU, "uniform")] == [first, second]
        assert [s.plan for s in store.plans(device=CPU)] == [elsewhere]
        assert store.plans(PROBLEM, GPU, "zipf") == []
        assert [s.plan for s in store.plans(timing=(("cache", "hot"),))] == []
        assert len(store.plans(timing=(("cache", "cold"),))) == 3


def test_plans_are_added_and_never_changed(tmp_path) -> None:
    path = tmp_path / "a.db"
    with Store.open(path) as store:
        store.add_plan(example())
    connection = sqlite3.connect(path)
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        connection.execute("UPDATE plans SET routing = 'zipf'")
    connection.close()


def test_a_damaged_row_is_left_out_with_a_warning(tmp_path) -> None:
    path = tmp_path / "a.db"
    with Store.open(path) as store:
        store.add_plan(example())
        store.add_plan(example())
    connection = sqlite3.connect(path)
    connection.executescript(
        "DROP TRIGGER plans_are_append_only;"
        "UPDATE plans SET spec = json_set(spec, '$.time_us', 1) WHERE id = 1;"
    )
    connection.close()
    with Store.open(path) as store, pytest.warns(StoreWarning, match="database row plans 1"):
        assert [s.plan for s in store.plans()] == [example()]
