"""The layer keeps to its plan: which copies are packed, and what each range of tokens runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autosel import FusedMoE, planning
from autosel.core import Candidate, TokenBin, Workload
from autosel.device import detect
from autosel.errors import AutoselError
from autosel.layer_choice import WithdrawnWarning
from autosel.sources import RandomSource
from autosel.store import Store
from autosel.weight_budget import WeightBudget
from tests.fakes import PROBLEM, Clock, FakeBackend, PlainLayout, registered
from tests.layer.decided import store_times

SMALL, LARGE, OTHER = (
    Candidate.of("small", {}, "a"),
    Candidate.of("large", {}, "b"),
    Candidate.of("other", {}, "b"),
)
TIMES = {
    4: {SMALL: 10, LARGE: 14, OTHER: 15},
    64: {SMALL: 100, LARGE: 50, OTHER: 60},
}


@pytest.fixture
def device():
    return detect("cpu")


@pytest.fixture
def packed():
    """Layouts in the order in which they were packed."""
    return []


@pytest.fixture
def store(tmp_path, device, packed):
    def fake(layout):
        return FakeBackend(Clock(), layout=PlainLayout(layout, packed))

    with (
        registered(small=fake("a"), large=fake("b"), other=fake("b")),
        Store.open(tmp_path / "plan.db") as opened,
    ):
        store_times(opened, PROBLEM, device, TIMES)
        yield opened


def made(store, device, budget="1x", **calls):
    bins = sorted((int(name[1:]), share) for name, share in calls.items())
    policy = planning.Policy(
        Workload("test", tuple(TokenBin(n, n, c) for n, c in bins)), WeightBudget.parse(budget)
    )
    return planning.plan_layer(store, PROBLEM, device, policy)


def served(layer):
    return [(choice.bucket.label, choice.candidate.backend) for choice in layer.choices]


def layer_of(store, **options):
    return FusedMoE.from_source(RandomSource(PROBLEM), db=store, **options)


def test_the_stored_plan_decides_what_is_packed(store, device, packed):
    planning.keep(store, made(store, device, m4=1.0))
    layer = layer_of(store)
    assert served(layer) == [("1-16", "small"), ("17+", "small")]
    assert packed == ["a"]
    assert list(layer.resident) == ["a"]
    assert "by the plan for test traffic (resident: a)" in layer.choices[0].why
    assert "large is 100 % faster and not resident" in layer.choices[1].why


def test_two_copies_where_the_plan_says_so(store, device, packed):
    planning.keep(store, made(store, device, "2x", m4=0.5, m64=0.5))
    layer = layer_of(store)
    assert served(layer) == [("1-16", "small"), ("17+", "large")]
    assert sorted(packed) == ["a", "b"]


def test_the_last_plan_counts_and_the_callers_before_it(store, device):
    first, second = made(store, device, m4=1.0), made(store, device, m64=1.0)
    planning.keep(store, first)
    planning.keep(store, second)
    assert served(layer_of(store)) == [("1-16", "large"), ("17+", "large")]
    assert list(layer_of(store, plan=first).resident) == ["a"]
    assert sorted(layer_of(store, layouts="all").resident) == ["a", "b"]


def test_without_a_plan_one_copy_is_resident(store, packed):
    layer = layer_of(store)
    assert packed == ["b"]
    assert served(layer) == [("1-16", "large"), ("17+", "large")]


def test_a_wide_copy_is_not_the_one(tmp_path, device):
    """b is four times as large: faster under every traffic, and still no single copy of weights."""
    fakes = {
        "small": FakeBackend(Clock(), layout=PlainLayout("a", size=1000)),
        "large": FakeBackend(Clock(), layout=PlainLayout("b", size=4000)),
    }
    with registered(**fakes), Store.open(tmp_path / "wide.db") as opened:
        times = {n: {SMALL: 30, LARGE: 15} for n in (4, 64)}
        store_times(opened, PROBLEM, device, times)
        assert list(layer_of(opened).resident) == ["b"]
        opened.add_measurements(
            replace(m, weight_bytes=4000)
            for m in opened.measurements(PROBLEM, device)
            if m.candidate == LARGE
        )
        assert list(layer_of(opened).resident) == ["a"]


def test_a_planned_candidate_that_fails_gives_way_on_the_same_copy(store, device, packed):
    planning.keep(store, made(store, device, m64=1.0))
    store.add_measurements(
        replace(m, status="failed", reason="no longer compiles", times_us=(), timing=())
        for m in store.measurements(PROBLEM, device)
        if m.candidate == LARGE
    )
    layer = layer_of(store)
    assert served(layer) == [("1-16", "other"), ("17+", "other")]
    assert packed == ["b"]


def test_a_copy_that_cannot_be_packed_gives_way_with_a_warning(tmp_path, device):
    def refuse():
        raise RuntimeError("no longer packs")

    fakes = {
        "small": FakeBackend(Clock(), layout=PlainLayout("a")),
        "large": FakeBackend(Clock(), layout=PlainLayout("b", fault=refuse)),
    }
    with registered(**fakes), Store.open(tmp_path / "plan.db") as opened:
        times = {n: {c: us for c, us in row.items() if c != OTHER} for n, row in TIMES.items()}
        store_times(opened, PROBLEM, device, times)
        planning.keep(opened, made(opened, device, m64=1.0))
        with pytest.warns(WithdrawnWarning, match="large is withdrawn"):
            layer = layer_of(opened)
        assert served(layer) == [("1-16", "small"), ("17+", "small")]


def test_plans_for_another_layer_or_machine_are_refused(store, device):
    plan = made(store, device, m4=1.0)
    other = replace(plan, problem=replace(PROBLEM, top_k=1))
    with pytest.raises(AutoselError, match=r"FusedMoE.plan: layer: found .*-k1-"):
        layer_of(store, plan=other)
    elsewhere = replace(plan, device=replace(device, driver="another"))
    with pytest.raises(AutoselError, match=r"FusedMoE.plan: device: found versions.driver"):
        layer_of(store, plan=elsewhere)


def test_8_bit_activations_in_a_plan_need_the_callers_leave(store, device):
    plan = made(store, device, m4=1.0)
    quick = replace(plan, buckets=tuple(replace(b, accuracy="a8") for b in plan.buckets))
    exact = layer_of(store, plan=quick)
    # The planned candidate is not taken on trust; what decides says that it is exact here.
    assert all("by the plan" not in choice.why for choice in exact.choices)
    allowed = layer_of(store, plan=quick, allow_a8=True)
    assert all("by the plan" in choice.why for choice in allowed.choices)
