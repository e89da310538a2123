"""Plans from a database: several kinds of layers, renewal after sweeps, the Python interface."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autosel
from autosel import planning
from autosel.core import Plan, TokenBin, Workload
from autosel.device import detect
from autosel.errors import AutoselError, NothingUsableError
from autosel.sources import CheckpointSource
from autosel.store import Store
from autosel.weight_budget import WeightBudget
from tests.fakes import PROBLEM
from tests.test_plans import CROSSING, GPU, table

TRAFFIC = Workload("half", (TokenBin(1, 1, 0.5), TokenBin(1024, 1024, 0.5)))
OTHER = replace(PROBLEM, hidden_size=64)


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "a.db") as opened:
        opened.add_measurements(table(CROSSING))
        opened.add_measurements(
            replace(m, problem=OTHER, weight_bytes=3000) for m in table(CROSSING)
        )
        yield opened


def test_a_budget_in_bytes_is_shared_by_the_kinds_of_layers(store) -> None:
    """10 layers of 1000 bytes a copy and 2 of 3000: 16000 bytes are one copy of everything."""
    kinds = [(PROBLEM, 10), (OTHER, 2)]

    def copies(total: int) -> list[int]:
        policy = planning.Policy(TRAFFIC, WeightBudget(None, total))
        plans = planning.plan_model(store, kinds, GPU, policy)
        for plan, (problem, layers) in zip(plans, kinds, strict=True):
            assert isinstance(plan, Plan)
            assert (plan.problem, plan.layers) == (problem, layers)
        used = sum(p.resident_bytes * p.layers for p in plans if isinstance(p, Plan))
        assert used <= total
        return [len(p.resident) for p in plans if isinstance(p, Plan)]

    assert copies(16000) == [1, 1]
    assert copies(31999) == [1, 1]
    assert copies(32000) == [2, 2]
    too_little = planning.plan_model(
        store, kinds, GPU, planning.Policy(TRAFFIC, WeightBudget(None, 15999))
    )
    assert all(isinstance(p, NothingUsableError) for p in too_little)


def test_kinds_fail_apart(store) -> None:
    unknown = replace(PROBLEM, hidden_size=128)
    found = planning.plan_model(store, [(unknown, 1), (PROBLEM, 1)], GPU)
    assert isinstance(found[0], AutoselError)
    assert "nothing is stored" in str(found[0])
    assert isinstance(found[1], Plan)
    shared = planning.plan_model(
        store, [(unknown, 1), (PROBLEM, 1)], GPU, planning.Policy(budget=WeightBudget(None, 5000))
    )
    assert isinstance(shared[0], AutoselError)
    assert isinstance(shared[1], Plan)


def test_nothing_is_known_about_an_unnamed_device(store) -> None:
    unnamed = replace(GPU, name=" ")
    with pytest.raises(NothingUsableError, match="an unnamed device"):
        planning.plan_layer(store, PROBLEM, unnamed)
    assert planning.held(store, PROBLEM, unnamed, "uniform") is None


def test_renewal_keeps_the_policy_and_follows_the_times(store) -> None:
    assert planning.held(store, PROBLEM, GPU, "uniform") is None
    first = planning.renew(store, PROBLEM, GPU, layers=7)
    assert first is not None
    assert (first.workload.name, first.budget, first.layers) == ("mixed", "1.0x", 7)
    mine = planning.plan_layer(
        store, PROBLEM, GPU, planning.Policy(TRAFFIC, WeightBudget(None, 14000)), layers=7
    )
    planning.keep(store, mine)
    assert len(mine.resident) == 2
    faster = {"a": dict.fromkeys(CROSSING["a"], 1.0), "b": CROSSING["b"]}
    store.add_measurements(table(faster))
    again = planning.renew(store, PROBLEM, GPU)
    assert again is not None
    assert (again.workload, again.budget_bytes, again.layers) == (TRAFFIC, 2000, 7)
    assert [item.layout for item in again.resident] == ["a"]
    assert planning.held(store, PROBLEM, GPU, "uniform") == again


def test_another_way_of_timing_is_not_mixed_in(store) -> None:
    """Measured again with huge pages: the rows without them do not count any more."""
    again = [replace(m, timing=(*m.timing, ("huge_pages", True))) for m in table(CROSSING)]
    store.add_measurements(replace(m, times_us=tuple(t / 2 for t in m.times_us)) for m in again)
    plan = planning.plan_layer(store, PROBLEM, GPU, planning.Policy(TRAFFIC))
    assert dict(plan.timing)["huge_pages"] is True
    assert plan.time_us == pytest.approx((14 + 300) / 4, rel=0.01)


def test_keeping_the_same_plan_twice_adds_nothing(store) -> None:
    plan = planning.plan_layer(store, PROBLEM, GPU)
    assert planning.keep(store, plan)
    assert not planning.keep(store, plan)
    assert len(store.plans()) == 1


def test_conditions_are_kept_in_words_and_are_not_renewed_away(store) -> None:
    policy = planning.Policy(exclude=("backend_a",))
    planning.keep(store, planning.plan_layer(store, PROBLEM, GPU, policy))
    assert store.plans()[-1].plan.requirements == ("not backend backend_a",)
    assert planning.renew(store, PROBLEM, GPU) is None
    assert len(store.plans()) == 1


def test_a_policy_with_required_properties_asks_for_certificates(store) -> None:
    policy = planning.Policy(require=("deterministic",))
    with pytest.raises(NothingUsableError, match="deterministic: not checked"):
        planning.plan_layer(store, PROBLEM, GPU, policy)
    with pytest.raises(AutoselError, match="found 'luck'"):
        planning.plan_layer(store, PROBLEM, GPU, planning.Policy(require=("luck",)))


def test_the_python_interface(tmp_path, get_checkpoint) -> None:
    path = get_checkpoint("ct-w4-g128-sym-mixtral").path
    here = detect("cpu")
    problem = CheckpointSource(str(path), 0).problem
    with Store.open(tmp_path / "api.db") as store:
        store.add_measurements(replace(m, problem=problem, device=here) for m in table(CROSSING))
        made = autosel.plan(path, device=here, db=store, histogram=TRAFFIC, weight_budget="2x")
        assert made.problem == problem
        assert len(made.resident) == 2
        assert store.plans()[-1].plan == made
        layers = [x for x in autosel.open_checkpoint(path).layers if x.problem == problem]
        assert made.layers == len(layers)
        seen = autosel.plan(path, device=here, db=store, histogram="decode-only", keep=False)
        assert len(store.plans()) == 1
        assert seen.workload.name == "decode-only"
        with pytest.raises(AutoselError, match="weight budget"):
            autosel.plan(path, device=here, db=store, weight_budget="lots")
