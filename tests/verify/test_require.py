"""Decisions among certified candidates only: who fails is named, nobody unchecked is taken."""

from dataclasses import replace

import pytest
import torch

from autosel.core import Certificate
from autosel.errors import AutoselError, NothingUsableError
from autosel.explanation import explain
from autosel.layer import FusedMoE
from autosel.requirements import Required
from autosel.sources import RandomSource
from autosel.store import Store
from autosel.timing import TimingSettings
from autosel.tune import sweep
from autosel.tune_types import SweepSettings
from tests.fakes import CPU, PROBLEM, Clock, FakeBackend, registered
from tests.verify.test_certificate_type import GOOD


def last_bit(turns):
    """Flips the last bit of one element in every other call: right each time, never the same."""

    def spoil(x, out, packed):
        turns.append(0)
        if len(out) and out[0, 0] != 0:
            out.view(torch.int16)[0, 0] += len(turns) % 2

    return spoil


def by_size(x, out, packed):
    """Other bits in calls of one token, as kernels that change their path have."""
    if len(out) == 1:
        out.view(torch.int16)[0, 1] += 1


def fakes(clock):
    """The fastest does not repeat itself, the next depends on the batch, the slowest is sound."""
    return {
        "moody": FakeBackend(clock, 100.0, spoil=last_bit([])),
        "batchy": FakeBackend(clock, 150.0, spoil=by_size),
        "steady": FakeBackend(clock, 200.0),
    }


def run(store, clock, **settings):
    chosen = SweepSettings(
        token_counts=(8,),
        timing=TimingSettings(rounds=3, samples_per_round=4),
        backends=("moody", "batchy", "steady"),
        **settings,
    )
    return sweep(RandomSource(PROBLEM), chosen, device=CPU, store=store, timer=clock)


@pytest.mark.parametrize(
    ("require", "winner"),
    [
        ((), "moody"),
        (("deterministic",), "batchy"),
        (("deterministic", "batch_invariant"), "steady"),
    ],
)
def test_the_fastest_that_has_what_is_required(require, winner):
    clock = Clock()
    with registered(**fakes(clock)), Store.open(":memory:") as store:
        result = run(store, clock, require=require)
        decision = result.decision(8)
        assert decision.winner.key == winner
        if require:
            reasons = {r.candidate.key: r.reason for r in decision.rejected}
            assert "not deterministic" in reasons["moody"]
            assert ("not batch_invariant" in reasons.get("batchy", "")) == (winner == "steady")
        # From the database alone: the same answer, among those that were proven.
        answer = explain(store, PROBLEM, CPU, 8, require=require)
        assert answer.used.key == winner
        assert answer.certificate.missing(require) == ""
        held = answer.to_dict()
        assert Certificate.from_dict(held["certificate"]) == answer.certificate
        assert held["required"] == list(require)
        again = run(store, clock, require=require)
        assert again.decision(8).winner.key == winner


def test_nobody_has_it():
    clock = Clock()
    with registered(**fakes(clock)), Store.open(":memory:") as store:
        result = run(store, clock, require=("graph_equals_eager",))
        with pytest.raises(NothingUsableError, match="graph_equals_eager: not checked"):
            result.decision(8)
        assert explain(store, PROBLEM, CPU, 8, require=["deterministic"]).used.key == "batchy"


def test_stored_winners_without_a_certificate_are_not_checked():
    clock = Clock()
    with (
        registered(**fakes(clock)),
        Store.open(":memory:") as store,
        Store.open(":memory:") as bare,
    ):
        result = run(store, clock)
        bare.add_measurements(result.measurements)
        bare.add_decision(result.decision(8), CPU, tuple(clock.facts.items()))
        assert explain(bare, PROBLEM, CPU, 8).used.key == "moody"
        answer = explain(bare, PROBLEM, CPU, 8, require=["deterministic"])
        assert answer.status == "nothing usable"
        assert all("deterministic: not checked" in item.reason for item in answer.rejected)


def test_an_unknown_property_is_one_line():
    for ask in (
        lambda: SweepSettings(require=("fast",)),
        lambda: Required.of(["fast"]),
        lambda: explain(Store.open(":memory:"), PROBLEM, CPU, 8, require=["fast"]),
    ):
        with pytest.raises(AutoselError, match="property: found 'fast', expected one of determ"):
            ask()


def test_the_last_certificate_counts_but_a_quick_one_replaces_no_full_one():
    quick = replace(GOOD, level="quick", properties=tuple((n, None) for n, _ in GOOD.properties))
    assert Required.of(["deterministic"], [GOOD, quick]).lacks(GOOD.candidate) == ""
    assert "not checked" in Required.of(["deterministic"], [quick]).lacks(GOOD.candidate)
    wrong = replace(GOOD, status="wrong", reason="off")
    assert "not certified" in Required.of(["deterministic"], [GOOD, wrong]).lacks(GOOD.candidate)
    assert Required.of([], []).lacks(GOOD.candidate) == ""


def test_a_layer_runs_nothing_that_is_not_certified():
    with Store.open(":memory:") as store:
        with pytest.raises(NothingUsableError, match="certified for deterministic"):
            FusedMoE.from_source(RandomSource(PROBLEM), db=store, require=["deterministic"])
        with pytest.raises(AutoselError, match="property: found 'fast'"):
            FusedMoE.from_source(RandomSource(PROBLEM), db=store, require=["fast"])
