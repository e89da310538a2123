"""Searches in the database as Optuna reads them, and good starting points from it."""

from __future__ import annotations

import multiprocessing
import sqlite3
from contextlib import closing
from dataclasses import replace

import optuna
import pytest

from autosel import neighbours, studies
from autosel.core import Candidate, Device, Params, Reason, Routing
from autosel.interfaces import Space
from autosel.search import Found
from autosel.sources import RandomSource
from autosel.store import Store, StoreWarning
from autosel.timing import TimingSettings
from autosel.tune import sweep
from autosel.tune_types import SweepSettings
from tests.fakes import CPU, PROBLEM, Clock, FakeBackend, PlainLayout, registered
from tests.searching import walk
from tests.test_plans import GPU, row

QUICK = TimingSettings(rounds=3, samples_per_round=4)
SPACE = Space(
    default={"block": 64, "split": None},
    choices={"block": (16, 32, 64), "split": (None, True, 2)},
    constraint=lambda p: (
        Reason("shared memory", "9", "8") if (p["block"], p["split"]) == (16, 2) else None
    ),
)


def search() -> Found:
    def cost(point: dict[str, object]) -> float | None:
        return None if point["split"] is True else float(point["block"])  # type: ignore[arg-type]

    return walk(SPACE, 32, cost)


def test_optuna_reads_the_study_from_the_same_file(tmp_path) -> None:
    path = tmp_path / "odd name?%20#.db"
    with Store.open(path) as store:
        store.add_measurement(row("a", 1, 10.0))
        name = studies.record(store, "a layer, 16 tokens", SPACE, search(), {"tokens": 16})
        assert name is not None
        assert name.startswith("a layer, 16 tokens ")
        assert len(store.measurements()) == 1
    plain = tmp_path / "plain.db"
    path.rename(plain)
    study = optuna.load_study(study_name=name, storage=f"sqlite:///{plain}")
    assert study.best_params == {"block": 16, "split": None}
    assert study.user_attrs == {"tokens": 16}
    states = [trial.state.name for trial in study.trials]
    assert (states.count("COMPLETE"), states.count("FAIL"), states.count("PRUNED")) == (5, 3, 1)
    (pruned,) = [trial for trial in study.trials if trial.state.name == "PRUNED"]
    assert pruned.user_attrs["illegal"] == "shared memory: found 9, required 8"
    # A database with Optuna's tables is still ours.
    with Store.open(plain, strict=True) as store:
        assert store.path == plain
        assert len(store.measurements()) == 1


def test_no_names_collide(tmp_path) -> None:
    path = tmp_path / "a.db"

    def tables() -> set[str]:
        with closing(sqlite3.connect(path)) as connection:
            return {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}

    with Store.open(path) as store:
        ours = tables()
        studies.record(store, "x", SPACE, search())
    both = tables()
    fresh = tmp_path / "optuna.db"
    optuna.create_study(storage=f"sqlite:///{fresh}")
    with closing(sqlite3.connect(fresh)) as connection:
        theirs = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    assert not ours & theirs
    assert both == ours | theirs


@pytest.mark.parametrize("place", ["memory", "segments"])
def test_other_places_get_no_studies(place, tmp_path) -> None:
    opened = (
        Store.open(":memory:") if place == "memory" else Store.open(tmp_path / "a", segments=True)
    )
    with opened as store:
        assert studies.record(store, "x", SPACE, search()) is None


def test_what_cannot_be_written_costs_one_warning(tmp_path) -> None:
    path = tmp_path / "a.db"
    with Store.open(path) as store:
        studies.record(store, "x", SPACE, search())
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("UPDATE alembic_version SET version_num = 'v99'")
            connection.commit()
        with pytest.warns(StoreWarning, match="the search is not kept as a study"):
            assert studies.record(store, "y", SPACE, search()) is None
        store.add_measurement(row("a", 1, 10.0))


def _both(path: str, number: int) -> None:
    with Store.open(path) as store:
        for tokens in range(1, 21):
            store.add_measurement(row(f"l{number}", tokens, 10.0, samples=2))
        assert studies.record(store, f"study {number}", SPACE, search()) is not None


def test_studies_and_measurements_are_written_at_the_same_time(tmp_path) -> None:
    """Three processes, each 20 measurements and a study: all are there and the file is sound."""
    path = str(tmp_path / "a.db")
    context = multiprocessing.get_context("forkserver")  # one imports for all
    context.set_forkserver_preload([__name__])
    processes = [context.Process(target=_both, args=(path, number)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 3
    with Store.open(path, strict=True) as store:
        assert len(store.measurements()) == 60
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        (trials,) = connection.execute("SELECT count(*) FROM trials").fetchone()
    assert trials == 3 * 9


# starting points --------------------------------------------------------------------------------


def tuned(block: int, us: float, tokens: int = 16, layout: str = "plain", **fields: object):
    candidate = Candidate.of("tunable", {"block": block}, layout)
    return replace(row("x", tokens, us), candidate=candidate, **fields)  # type: ignore[arg-type]


class Tunable(FakeBackend):
    name = "tunable"


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "a.db") as opened:
        yield opened


def points(store, problem=PROBLEM, device=GPU, tokens=16, routing="uniform"):
    backend = Tunable(Clock(), layout=PlainLayout("plain"))
    found = neighbours.starting_points(store, backend, problem, device, tokens, routing)
    return [point["block"] for point in found]


def test_the_nearest_token_counts_come_first_and_the_fastest_of_each(store) -> None:
    store.add_measurements(
        tuned(block, us, tokens)
        for tokens, times in {1: {1: 5, 2: 4}, 64: {3: 9, 4: 7, 5: 8}, 4096: {6: 1}}.items()
        for block, us in times.items()
    )
    assert points(store, tokens=32) == [4, 5, 2, 1, 6]
    assert points(store, tokens=2) == [2, 1, 4, 5, 6]


def test_sizes_count_by_their_ratio_and_other_things_as_doublings(store) -> None:
    twice = replace(PROBLEM, hidden_size=64)
    eight = replace(PROBLEM, hidden_size=256)
    other = replace(PROBLEM, w13=replace(PROBLEM.w13, group_size=8))
    store.add_measurements(
        [tuned(1, 5, problem=eight), tuned(2, 5, problem=other), tuned(3, 5, problem=twice)]
    )
    assert points(store) == [3, 2, 1]


def test_another_device_is_further_than_another_count(store) -> None:
    elsewhere = replace(GPU, name="another")
    store.add_measurements([tuned(1, 5, device=elsewhere), tuned(2, 5, tokens=32)])
    assert points(store) == [2, 1]
    newer = replace(GPU, driver="9.9")
    store.add_measurements([tuned(3, 5, device=newer)])
    # Other software of the same hardware is as near as a measurement of today.
    assert points(store)[:2] in ([3, 2], [2, 3])


def test_points_of_another_layout_and_failures_are_left_out(store) -> None:
    store.add_measurements(
        [
            tuned(1, 1, layout="other"),
            tuned(2, 2, status="wrong", reason="wrong", times_us=()),
            tuned(3, 3),
        ]
    )
    assert points(store) == [3]


def test_a_sweep_starts_from_the_nearest_case_and_leaves_a_study(tmp_path) -> None:
    """The best point of 16 tokens is tried second at 20, right after the default."""
    space = Space(default={"m": 0, "n": 0}, choices={"m": tuple(range(12)), "n": tuple(range(12))})
    clock = Clock()
    ran: list[tuple[object, object]] = []

    def us(routing: Routing, params: Params) -> float:
        ran.append((params["m"], params["n"]))
        return 50.0 + 10 * abs(int(params["m"] or 0) - 7) + 5 * abs(int(params["n"] or 0) - 9)

    fake = FakeBackend(clock, us, space=space)
    path = tmp_path / "a.db"
    with registered(fake=fake), Store.open(path) as store:

        def swept(tokens: int) -> list[tuple[object, object]]:
            ran.clear()
            settings = SweepSettings((tokens,), backends=("fake",), trials=16, timing=QUICK)
            sweep(RandomSource(PROBLEM), settings, device=CPU, store=store, timer=clock)
            return list(dict.fromkeys(ran))

        swept(16)
        best = min(
            (m for m in store.measurements() if m.status == "ok"), key=lambda m: min(m.times_us)
        )
        later = swept(20)
    assert later[0] == (0, 0)
    assert later[1] == tuple(best.candidate.params_dict[name] for name in "mn")
    names = optuna.get_all_study_names(f"sqlite:///{path}")
    assert sorted("16 tokens" in name for name in names) == [False, True]


def test_an_empty_store_gives_nothing(store) -> None:
    assert points(store) == []
    assert points(store, device=Device(kind="cpu", name="")) == []


def test_a_study_of_several_designs_names_each_trials_own_parameters(tmp_path) -> None:
    own = replace(SPACE, default={"path": "sort", "same": 1} | dict(SPACE.default))
    rival = Space(
        {"path": "scan", "same": 1, "block": 8, "rows": 1}, {"block": (8, 16), "rows": (1, 2)}
    )
    space = replace(own, rivals=(rival,))
    path = tmp_path / "designs.db"
    with Store.open(path) as store:
        name = studies.record(store, "both", space, walk(space, 32, lambda point: 1.0))
    trials = optuna.load_study(study_name=name, storage=f"sqlite:///{path}").trials
    names = [tuple(trial.params) for trial in trials if trial.state.name == "COMPLETE"]
    assert {name: names.count(name) for name in set(names)} == {
        ("block", "rows", "path"): 4,
        ("block", "split", "path"): 8,
    }
    pruned = [t.params for t in trials if t.state.name == "PRUNED"]
    assert pruned == [{"block": 16, "split": 2, "path": "sort"}]
