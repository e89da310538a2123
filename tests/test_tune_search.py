"""Which settings a sweep spends its time on, and what it does with those that it kept."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import tune_search
from autosel.core import Candidate, Device, Measurement, Params, Problem, Routing, Scalar
from autosel.engine_export import StartingPoints
from autosel.evidence import gather
from autosel.explanation import explain
from autosel.interfaces import PackedExperts, Space
from autosel.store import Store
from autosel.timing import TimingSettings
from autosel.tune_search import FINALISTS, PATIENCE, PATIENCE_AFTER
from autosel.tune_searched import Searched
from autosel.tune_types import Observer
from tests.fakes import (
    CPU,
    PROBLEM,
    Clock,
    FakeBackend,
    judge_one_case,
    prove_quickly,
    registered,
)
from tests.test_tune import run
from tests.threads import one_thread


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is tried is asked here, not how it is judged; tiny tensors need one thread."""
    prove_quickly(monkeypatch)
    judge_one_case(monkeypatch)
    with one_thread():
        yield


LINE = Space({"n": 0}, {"n": tuple(range(60))})


def fastest_last(routing: Routing, params: Params) -> float:
    """200 down to 141 us: every further setting is a better one."""
    return 200.0 - int(params["n"] or 0)


def test_a_backend_far_behind_is_timed_with_its_own_setting_alone() -> None:
    clock = Clock()
    few = Space({"n": 0}, {"n": (0, 1, 2)})
    fakes = {
        "quick": FakeBackend(clock, 100.0, space=few),
        "near": FakeBackend(clock, 149.0, space=few),
        "far": FakeBackend(clock, 160.0, space=few),
        "far_searched": FakeBackend(clock, 170.0, space=LINE),
    }
    with registered(**fakes):
        result = run(clock, token_counts=(4, 8))
        every = run(clock, token_counts=(4,), search_within=10.0)
    tried = [m.candidate.backend for m in result.measurements if m.num_tokens == 4]
    assert {name: tried.count(name) for name in fakes} == {
        "quick": 3,
        "near": 3,
        "far": 1,
        "far_searched": 1,
    }
    assert result.unsearched == ((4, ("far", "far_searched")), (8, ("far", "far_searched")))
    assert result.unsearched_text.endswith("or not allowed to win: far, far_searched")
    assert every.unsearched == ()
    assert [m.candidate.backend for m in every.measurements].count("far") == 3
    assert all(m.times_us for m in result.measurements if m.status == "ok")


def test_what_is_stored_of_a_backend_far_behind_takes_part_again() -> None:
    clock = Clock()
    few = Space({"n": 0}, {"n": (0, 1, 2)})
    fakes = {
        "quick": FakeBackend(clock, 100.0),
        "far": FakeBackend(clock, 160.0, space=few),
    }
    with registered(**fakes), Store.open(":memory:") as store:
        first = run(clock, store=store, token_counts=(4,), search_within=10.0)
        again = run(clock, store=store, token_counts=(4,))
    assert len(first.measurements) == len(again.measurements) == 4
    assert again.decisions == first.decisions


def test_a_backend_whose_own_setting_fails_is_searched() -> None:
    clock = Clock()

    def us(routing: Routing, params: Params) -> float:
        if params["n"] == 0:
            raise RuntimeError("misaligned")
        return 90.0

    fakes = {"quick": FakeBackend(clock, 100.0), "odd": FakeBackend(clock, us, space=LINE)}
    with registered(**fakes):
        result = run(clock, token_counts=(4,))
    assert result.unsearched == ()
    assert result.decision(4).winner.backend == "odd"


def test_a_backend_whose_own_setting_is_wrong_is_searched_until_that_finds_nothing_fast() -> None:
    clock = Clock()
    called: dict[int, set[object]] = {}

    def us(routing: Routing, params: Params) -> float:
        called.setdefault(len(routing.topk_ids), set()).add(params["n"])
        if params["n"] == 0:
            raise RuntimeError("misaligned")
        return 151.0

    quick, slow = FakeBackend(clock, 100.0), FakeBackend(clock, us, space=LINE)
    with registered(quick=quick, slow=slow), Store.open(":memory:") as store:
        result = run(clock, store=store, token_counts=(5, 11, 23))
        searched = {count: len(found) for count, found in called.items()}
        called.clear()
        again = run(clock, store=store, token_counts=(5, 11, 23))
        assert not called, "a sweep that is done has nothing to try"
        wider = run(clock, store=store, token_counts=(11,), search_within=2.0)
    assert result.unsearched == again.unsearched == ((11, ("slow",)), (23, ("slow",)))
    assert searched[5] > FINALISTS
    assert searched[11] == searched[23] == 1
    assert wider.unsearched == ()
    assert len(called[11]) > FINALISTS


def test_a_search_ends_when_settings_stop_getting_better() -> None:
    """Sooner at the next token count, where the best ones of this one are tried first."""
    clock = Clock()
    seen: dict[int, set[object]] = {}

    def flat(routing: Routing, params: Params) -> float:
        seen.setdefault(len(routing.topk_ids), set()).add(params["n"])
        return 100.0 if params["n"] else 150.0  # the first other one is as good as any

    with registered(flat=FakeBackend(clock, flat, space=LINE)):
        run(clock, token_counts=(5, 11), trials=50)
    assert len(seen[5]) == 2 + PATIENCE  # its own, the better one, and those after it
    assert len(seen[11]) <= 3 + PATIENCE_AFTER
    better = FakeBackend(clock, fastest_last, space=LINE)
    with registered(better=better):
        found = run(clock, token_counts=(5,), trials=50).decision(5)
    assert found.winner_us < fastest_last(Routing.__new__(Routing), {"n": 20})


def test_what_a_search_found_is_verified_and_the_next_best_takes_the_place_of_who_is_wrong() -> (
    None
):
    """The fastest settings are right for the token count that is timed, and for no other."""
    clock = Clock()
    quick = (40, 50)

    def us(routing: Routing, params: Params) -> float:
        return 10.0 if params["n"] in quick else 100.0 + int(params["n"] or 0)

    class Sly(FakeBackend):
        def run(
            self,
            packed: PackedExperts,
            x: torch.Tensor,
            routing: Routing,
            params: Params,
            out: torch.Tensor,
        ) -> torch.Tensor:
            super().run(packed, x, routing, params, out)
            if params["n"] in quick and len(x) != 5:
                out.mul_(1.5)
            return out

    space = Space({"n": 0}, {"n": tuple(range(0, 60, 5))})
    with registered(sly=Sly(clock, us, space=space)):
        result = run(clock, token_counts=(5,))
    rows = {m.candidate.params_dict["n"]: m for m in result.measurements}
    assert {n: rows[n].status for n in quick} == dict.fromkeys(quick, "wrong")
    assert all(not rows[n].times_us for n in quick)
    right = [n for n, row in rows.items() if row.status == "ok"]
    assert len(right) == FINALISTS
    assert result.decision(5).winner.params_dict == {"n": 0}
    assert all(rows[n].certificate is not None for n in right)


# ------------------------------------------------------------------------------ searched before


class Fresh(Observer):
    """The candidates that were measured and not taken from the store."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def measured(self, measurement: Measurement, resumed: bool) -> None:
        if not resumed:
            self.keys.append(measurement.candidate.key)


def fresh(clock: Clock, store: Store, **settings: Any) -> list[str]:
    """What a sweep of 4 tokens measures anew."""
    seen = Fresh()
    run(clock, store=store, token_counts=(4,), observer=seen, **settings)
    return seen.keys


def improving(routing: Routing, params: Params) -> float:
    """Each further setting is 10 % better, so that a search goes on to its last trial."""
    return 500.0 * 0.9 ** int(params["n"] or 0)


def test_a_stored_row_alone_does_not_mean_that_there_was_a_search() -> None:
    """After ``--trials 1``, and after fewer trials; what was searched as far is not repeated."""
    clock = Clock()
    with (
        Store.open(":memory:") as store,
        registered(deep=FakeBackend(clock, improving, space=LINE)),
    ):
        assert fresh(clock, store, trials=1) == ["deep[n=0]"]
        assert fresh(clock, store, trials=1) == []
        for trials in (8, 16, 40):
            assert len(fresh(clock, store, trials=trials)) >= FINALISTS, "it searches"
            assert fresh(clock, store, trials=trials) == [], "and not twice"
            assert fresh(clock, store, trials=trials - 3) == [], "it was searched further"
        assert fresh(clock, store, trials=2) == []
        best = run(clock, store=store, token_counts=(4,), trials=40).decision(4)
    assert best.winner_us < 500.0 * 0.9**30


def test_without_the_record_of_a_search_every_sweep_would_repeat_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The planted fault: the test above sees it."""
    monkeypatch.setattr(Searched, "noted", lambda self, row: row)
    clock = Clock()
    with (
        Store.open(":memory:") as store,
        registered(deep=FakeBackend(clock, improving, space=LINE)),
    ):
        fresh(clock, store, trials=8)
        assert fresh(clock, store, trials=8) != []


def test_a_search_that_time_ended_is_continued_by_a_sweep_with_more_time() -> None:
    clock = Clock()
    with (
        Store.open(":memory:") as store,
        registered(deep=FakeBackend(clock, improving, space=LINE)),
    ):
        short = run(clock, store=store, token_counts=(4,), trials=40, budget_s=0.02)
        assert "search ended after" in short.cuts[0].text
        assert len(fresh(clock, store, trials=40)) >= FINALISTS
        assert fresh(clock, store, trials=40) == []
        found = run(clock, store=store, token_counts=(4,), trials=40).decision(4)
    assert found.winner_us <= short.decision(4).winner_us


def test_a_backend_that_was_too_slow_to_be_searched_is_searched_when_asked_to() -> None:
    """Its own setting takes 170 us, its best one 60."""
    clock = Clock()

    def us(routing: Routing, params: Params) -> float:
        return 170.0 if params["n"] == 0 else 60.0 + int(params["n"] or 0)

    fakes = {"quick": FakeBackend(clock, 100.0), "far": FakeBackend(clock, us, space=LINE)}
    with Store.open(":memory:") as store, registered(**fakes):
        assert fresh(clock, store) == ["quick", "far[n=0]"]
        assert fresh(clock, store) == []
        found = run(clock, store=store, token_counts=(4,))
        assert found.unsearched == ((4, ("far",)),)
        assert len(fresh(clock, store, search_within=3.0)) > FINALISTS
        assert fresh(clock, store, search_within=3.0) == fresh(clock, store) == []
        assert run(clock, store=store, token_counts=(4,)).decision(4).winner.backend == "far"


def test_a_backend_without_its_faster_rival_is_searched() -> None:
    clock = Clock()
    fakes = {"quick": FakeBackend(clock, 100.0), "far": FakeBackend(clock, 170.0, space=LINE)}
    with Store.open(":memory:") as store, registered(**fakes):
        fresh(clock, store)
        assert len(fresh(clock, store, backends=("far",))) >= FINALISTS
        assert fresh(clock, store, backends=("far",)) == fresh(clock, store) == []


def test_noise_at_the_limit_does_not_begin_a_search_in_a_repeated_sweep() -> None:
    """The short timing saw 1.6 times the leader's time, the race 1.45."""
    clock = Clock()
    far = FakeBackend(clock, 160.0, space=LINE)
    calls = 0

    def us(routing: Routing, params: Params) -> float:
        nonlocal calls
        calls += clock.timing
        return 160.0 if calls < 8 else 145.0

    far.us = us
    with Store.open(":memory:") as store, registered(quick=FakeBackend(clock, 100.0), far=far):
        assert fresh(clock, store) == ["quick", "far[n=0]"]
        rows = {m.candidate.backend: m for m in store.measurements()}
        assert min(rows["far"].times_us) < 1.5 * min(rows["quick"].times_us)
        assert fresh(clock, store) == []


def test_a_new_backend_leaves_the_record_of_the_others_searches() -> None:
    """Its rivals race again, and their new rows say as well that there was a search."""
    clock = Clock()
    deep = FakeBackend(clock, improving, space=LINE)
    with Store.open(":memory:") as store:
        with registered(deep=deep):
            fresh(clock, store, trials=8)
        with registered(deep=deep, late=FakeBackend(clock, 400.0)):
            assert "late" in fresh(clock, store, trials=8)
            assert fresh(clock, store, trials=8) == []


def test_a_tuned_file_is_tried_once_after_a_search_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    points = StartingPoints({4: {"n": 57}}, backend="deep")
    monkeypatch.setattr(tune_search, "read_tuned", lambda path: points)

    def us(routing: Routing, params: Params) -> float:
        return 50.0 if params["n"] == 57 else 100.0

    with Store.open(":memory:") as store, registered(deep=FakeBackend(clock, us, space=LINE)):
        fresh(clock, store, trials=6)
        assert "deep[n=57]" in fresh(clock, store, trials=6, start_from="tuned.json")
        assert fresh(clock, store, trials=6, start_from="tuned.json") == []
        assert fresh(clock, store, trials=6) == []


@pytest.mark.parametrize("trials", [2, 3, FINALISTS])
def test_a_search_of_few_settings_begins_with_the_known_good_ones(
    trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were once the first of the space in its own order, which nobody expects to be good."""
    clock = Clock()
    points = StartingPoints({4: {"n": 57}}, backend="deep")
    monkeypatch.setattr(tune_search, "read_tuned", lambda path: points)
    with (
        Store.open(":memory:") as store,
        registered(deep=FakeBackend(clock, improving, space=LINE)),
    ):
        tried = fresh(clock, store, trials=trials, start_from="tuned.json")
        assert tried[:1] == ["deep[n=0]"]
        assert "deep[n=57]" in tried
        assert len(tried) == trials
        assert fresh(clock, store, trials=trials, start_from="tuned.json") == []


def test_a_small_space_is_tried_as_far_as_trials_allow() -> None:
    clock = Clock()
    three = Space({"n": 0}, {"n": tuple(range(3))})
    with (
        Store.open(":memory:") as store,
        registered(deep=FakeBackend(clock, improving, space=three)),
    ):
        assert sorted(fresh(clock, store, trials=2)) == ["deep[n=0]", "deep[n=1]"]
        assert "deep[n=2]" in fresh(clock, store, trials=3)


def test_a_space_that_was_searched_to_its_end_is_done_for_any_number_of_trials() -> None:
    clock = Clock()
    seven = Space({"n": 0}, {"n": tuple(range(7))})
    with (
        Store.open(":memory:") as store,
        registered(deep=FakeBackend(clock, improving, space=seven)),
    ):
        assert fresh(clock, store, trials=20)
        assert fresh(clock, store, trials=1000) == []


# --------------------------------------------------------------- what was timed in another way


class Net(Clock):
    """The clock of now, and with ``gross`` the one of an older version."""

    gross = False

    @property
    def facts(self) -> Mapping[str, Scalar]:
        name = "device events" if self.gross else "device events, net"
        return {"cache": "cold", "clock": name, "graph": True}


def test_rows_of_another_clock_are_left_aside_and_the_summary_says_so() -> None:
    clock = Net()
    fakes = {"one": FakeBackend(clock, 100.0), "two": FakeBackend(clock, 120.0)}
    with Store.open(":memory:") as store, registered(**fakes):
        clock.gross = True
        old = run(clock, store=store, token_counts=(4,))
        clock.gross = False
        fakes["one"].us = 150.0  # what the events' own time had hidden
        assert old.aside_text == ""
        now = run(clock, store=store, token_counts=(4,))
        assert len(now.measurements) == 2, "measured anew"
        assert now.decision(4).winner.backend == "two"
        assert now.aside_text == (
            "stored, timed in another way and left aside: 2 with clock device events"
        )
        # Of what is stored the newer way counts, whoever asks.
        assert explain(store, PROBLEM, CPU, 4).used.backend == "two"
        assert gather(store, PROBLEM, CPU).outcome(4) == now.decision(4)
        assert store.decision(PROBLEM, CPU, 4, "uniform") == now.decision(4)
        again = run(clock, store=store, token_counts=(4,), backends=("one",))
        assert again.decision(4).winner.backend == "two"


@pytest.mark.parametrize("missing", ["clock", "graph", "cache"])
def test_rows_with_fewer_settings_do_not_end_a_resumed_sweep(missing: str) -> None:
    clock = Net()
    fakes = {"one": FakeBackend(clock, 100.0), "two": FakeBackend(clock, 120.0)}
    with registered(**fakes), Store.open(":memory:") as store, Store.open(":memory:") as older:
        run(clock, store=store, token_counts=(4,))
        for row in store.measurements():
            if row.candidate.backend == "two":
                less = tuple((name, v) for name, v in row.timing if name != missing)
                row = replace(row, timing=less)
            older.add_measurement(row)
        found = run(clock, store=older, token_counts=(4,))
        assert explain(older, PROBLEM, CPU, 4).used.backend == "one"
    assert {m.candidate.backend for m in found.measurements} == {"one", "two"}
    assert found.decision(4).winner.backend == "one"
    assert found.aside_text.endswith(f"1 with {missing} unknown")


def test_another_cache_setting_is_no_news() -> None:
    clock = Net()
    with Store.open(":memory:") as store, registered(one=FakeBackend(clock, 100.0)):
        (row,) = run(clock, token_counts=(4,)).measurements
        hot = tuple((name, "hot" if name == "cache" else v) for name, v in row.timing)
        store.add_measurement(replace(row, timing=hot, times_us=(1.0,)))
        found = run(clock, store=store, token_counts=(4,))
        assert found.aside_text == ""
        assert found.decision(4).winner_us > 90.0
        assert len(store.measurements()) == 2


# ------------------------------------------------------------- races that time ended, and no time


class Searches(Observer):
    """The steps of a sweep, by name."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def step(self, what: str, num_tokens: int, candidate: Candidate | None = None) -> None:
        self.steps.append(what)


def test_a_race_that_time_ended_is_run_again_without_another_search() -> None:
    """Its finalists are too near to each other for what the budget allows."""
    clock, rng = Clock(), random.Random(3)

    def us(routing: Routing, params: Params) -> float:
        return 100.0 * rng.lognormvariate(0, 0.2)

    timing = TimingSettings(rounds=3000, samples_per_round=1, limit_s=1e9)
    more: dict[str, Any] = {"token_counts": (4,), "timing": timing, "trials": 8}
    first, second = Searches(), Searches()
    with Store.open(":memory:") as store, registered(deep=FakeBackend(clock, us, space=LINE)):
        cut = run(clock, store=store, budget_s=0.1, observer=first, **more)
        assert cut.cuts[0].unsettled
        assert cut.cuts[0].untried == ()
        again = run(clock, store=store, observer=second, **more)
        finalists = {m.candidate for m in cut.measurements if m.status == "ok"}
        assert {m.candidate for m in again.measurements if m.status == "ok"} == finalists
        races = {dict(m.timing)["race"] for m in again.measurements if m.times_us}
        assert len(races) == 1, "all of them raced each other"
        third = Searches()
        run(clock, store=store, observer=third, **more)
    assert "search" in first.steps
    assert "search" not in second.steps
    assert second.steps.count("time") == 1
    assert third.steps == []


def test_where_the_clock_gives_no_time_nothing_is_lost() -> None:
    """It is no row of a database, and no fault of the candidate's."""
    clock = Clock()
    fakes = {"still": FakeBackend(clock, 0.0), "good": FakeBackend(clock, 100.0)}
    with Store.open(":memory:") as store, registered(**fakes):
        result = run(clock, store=store, token_counts=(4,))
        assert [m.candidate.backend for m in store.measurements()] == ["good"]
        assert store.incidents() == []
        assert result.decision(4).winner.backend == "good"
        (still,) = result.decision(4).rejected
        assert "no usable time" in still.reason
        fakes["still"].us = 50.0
        assert run(clock, store=store, token_counts=(4,)).decision(4).winner.backend == "still"
        with registered(alone=FakeBackend(clock, 0.0)):
            found = run(clock, store=store, token_counts=(4,), backends=("alone",))
        assert found.decision(4).winner.backend == "still"


def test_a_sweep_chooses_among_designs_and_a_wider_one_tries_what_is_left() -> None:
    """Six settings each of two designs, and time for nine: the fast design's are all tried."""
    values = {"n": tuple(range(6))}
    rival = Space({"path": "scan", "n": 0}, values)
    space = Space({"path": "decode", "n": 0}, values, rivals=(rival,))

    def us(routing: Routing, params: Params) -> float:
        return (90.0 if params["path"] == "scan" else 120.0) - 5.0 * int(params["n"] or 0)

    clock = Clock()
    fake = FakeBackend(clock, us, space=space)
    tried: list[set[tuple[Any, Any]]] = []
    with registered(fast=fake), Store.open(":memory:") as store:
        for trials in (9, 12):
            seen: set[tuple[Any, Any]] = set()
            fake.before = lambda params, seen=seen: seen.add((params["path"], params["n"]))
            result = run(clock, store=store, token_counts=(4,), trials=trials)
            tried.append(seen)
            assert result.decision(4).winner.params_dict == {"path": "scan", "n": 5}
    assert {n for path, n in tried[0] if path == "scan"} == set(range(6))
    assert len(tried[0]) == 9
    assert len(tried[0] | tried[1]) == 12


class Growing(FakeBackend):
    """Two designs with rows in proportion to the tokens; twice the default's are best."""

    def space(self, problem: Problem, num_tokens: int, device: Device) -> Space:
        rows = tuple(num_tokens * factor for factor in (16, 1, 2, 4, 8, 32, 64, 128))
        one, two = (
            Space({"kind": kind, "rows": rows[0]}, {"rows": rows}, relative=("rows",))
            for kind in ("one", "two")
        )
        return replace(one, rivals=(two,))


def test_a_search_carries_rows_over_in_proportion(tmp_path: Path) -> None:
    """Between token counts, from a database, and from a pack; each design has its own."""
    seen: dict[int, list[tuple[Any, Any]]] = {}

    def us(routing: Routing, params: Params) -> float:
        tokens = len(routing.topk_ids)
        found = seen.setdefault(tokens, [])
        point = params["kind"], int(params["rows"] or 0) / tokens / 16
        if point not in found:
            found.append(point)
        return 100.0 + 10 * abs(math.log2(point[1]) - 1) + 5 * (point[0] == "one")

    def swept(tokens: tuple[int, ...], trials: int, **more: Any) -> None:
        seen.clear()
        run(clock, token_counts=tokens, trials=trials, backends=("growing",), **more)

    clock = Clock()
    fake = Growing(clock, us)
    best, path = ("two", 2.0), tmp_path / "a.db"
    with registered(growing=fake):
        swept((4, 64), 13)
        assert best in seen[4]
        assert seen[64][:2] == [("one", 1.0), best]
        with Store.open(path) as store:
            swept((4,), 13, store=store)
            swept((256,), 3, store=store)
            assert seen[256][:2] == [("one", 1.0), best]
