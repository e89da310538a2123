"""Which settings a sweep spends its time on, and what it does with those that it kept."""

from __future__ import annotations

import torch

from autosel.core import Params, Routing
from autosel.interfaces import PackedExperts, Space
from autosel.store import Store
from autosel.tune_search import FINALISTS, PATIENCE, PATIENCE_AFTER
from tests.fakes import Clock, FakeBackend, registered
from tests.test_tune import run

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
    assert result.unsearched_text.endswith("too slow or not allowed to win: far, far_searched")
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
