"""Sweeps of fewer backends or settings: what was measured before stays in the running."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from autosel import trial, tune
from autosel.core import Candidate, Certificate, Decision, Level, Measurement, Reason, Support
from autosel.decide import decide
from autosel.engine_decisions import triton_decisions
from autosel.errors import AutoselError
from autosel.evidence import gather
from autosel.explanation import explain
from autosel.interfaces import Space
from autosel.records import of_newest_mode
from autosel.sources import RandomSource
from autosel.standing import standing
from autosel.store import Store
from autosel.timing import TimingSettings
from autosel.tune import sweep
from autosel.tune_types import Observer, SweepResult, SweepSettings
from tests.fakes import (
    CPU,
    PROBLEM,
    Clock,
    FakeBackend,
    PlainLayout,
    judge_one_case,
    prove_quickly,
    registered,
)
from tests.test_plans import GPU, row
from tests.threads import one_thread

QUICK = TimingSettings(rounds=3, samples_per_round=4)
NO = Support.no(Reason("compiler", "none", "a C++ compiler"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The full set takes longer than all that is asked here; tiny tensors need one thread."""
    prove_quickly(monkeypatch)
    judge_one_case(monkeypatch)
    with one_thread():
        yield


class Log(Observer):
    def __init__(self) -> None:
        self.fresh: list[str] = []
        self.resumed: list[str] = []

    def measured(self, measurement: Measurement, resumed: bool) -> None:
        (self.resumed if resumed else self.fresh).append(measurement.candidate.key)


def run(clock: Clock, store: Store, *backends: str, **settings: Any) -> SweepResult:
    observer = settings.pop("observer", None)
    device = settings.pop("device", CPU)
    chosen = SweepSettings(
        **{"token_counts": (8,), "timing": QUICK, "backends": backends, **settings}
    )
    return sweep(
        RandomSource(PROBLEM), chosen, device=device, store=store, observer=observer, timer=clock
    )


def keys(result: SweepResult) -> list[tuple[int, list[str]]]:
    return [(count, sorted(c.key for c in found)) for count, found in result.standing]


def three(clock: Clock, **changes: FakeBackend) -> dict[str, FakeBackend]:
    made = {
        "fast": FakeBackend(clock, 100.0),
        "slow": FakeBackend(clock, 300.0),
        "third": FakeBackend(clock, 200.0),
    }
    return {**made, **changes}


@pytest.mark.parametrize("resume", [True, False])
def test_a_sweep_of_one_slower_backend_does_not_replace_the_better_decision(resume: bool) -> None:
    clock, log = Clock(), Log()
    fakes = three(clock)
    with Store.open(":memory:") as store, registered(**fakes):
        run(clock, store, *fakes)
        found = run(clock, store, "slow", resume=resume, observer=log)
        stored = store.decision(PROBLEM, CPU, 8, "uniform")
    assert found.decision(8).winner.backend == "fast"
    assert found.decision(8).runner_up == Candidate("third", (), "plain")
    assert stored == found.decision(8)
    assert keys(found) == [(8, ["fast", "third"])]
    assert found.standing_text == "not tried now, in the running as stored: 2 (fast, third)"
    assert sorted(log.fresh + log.resumed) == ["fast", "slow", "third"]
    assert log.fresh == ([] if resume else ["slow"])
    assert {m.candidate.backend for m in found.measurements} == set(fakes)


def test_without_what_stands_the_better_decision_would_be_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The planted fault: the test above sees it."""
    monkeypatch.setattr(tune, "standing", lambda *_: ([], set()))
    clock = Clock()
    fakes = three(clock)
    with Store.open(":memory:") as store, registered(**fakes):
        run(clock, store, *fakes)
        run(clock, store, "slow")
        stored = store.decision(PROBLEM, CPU, 8, "uniform")
    assert stored is not None
    assert stored.winner.backend == "slow"


def test_a_new_backend_that_is_faster_wins_against_what_stands() -> None:
    clock = Clock()
    with Store.open(":memory:") as store, registered(**three(clock)):
        run(clock, store, "slow", "third")
        found = run(clock, store, "fast")
    assert found.decision(8).winner.backend == "fast"
    assert not found.decision(8).tie
    assert keys(found) == [(8, ["slow", "third"])]


def test_one_trial_does_not_lose_a_better_setting_that_is_stored() -> None:
    clock = Clock()
    space = Space({"block": 1}, {"block": tuple(range(1, 13))})
    tuned = FakeBackend(clock, lambda routing, params: 200.0 / params["block"], space=space)
    with Store.open(":memory:") as store, registered(tuned=tuned):
        first = run(clock, store, "tuned", trials=12)
        again = run(clock, store, "tuned", trials=1)
        fresh = run(clock, store, "tuned", trials=1, resume=False)
    assert first.decision(8).winner.params_dict == {"block": 12}
    assert again.decision(8).winner == fresh.decision(8).winner == first.decision(8).winner
    assert Candidate.of("tuned", {"block": 12}, "plain") in fresh.standing[0][1]


def test_a_default_of_a_backend_that_was_not_tried_is_kept_as_before() -> None:
    """Tied with its tuned settings; by their values alone, the order would prefer those."""
    clock = Clock()
    space = Space({"block": 64}, {"block": (64, 16)})
    backends = {"even": FakeBackend(clock, 100.0, space=space), "slow": FakeBackend(clock, 300.0)}
    with Store.open(":memory:") as store, registered(**backends):
        first = run(clock, store, *backends)
        again = run(clock, store, "slow")
    assert first.decision(8).winner.params_dict == {"block": 64}
    assert again.decision(8).winner == first.decision(8).winner


def test_what_can_no_longer_run_here_does_not_compete() -> None:
    clock = Clock()
    here = [Support.yes()]
    fast = FakeBackend(clock, 100.0, supports=lambda: here[0])
    fakes = three(clock, fast=fast)
    with Store.open(":memory:") as store, registered(**fakes):
        run(clock, store, *fakes)
        here[0] = NO
        for tried in (("slow", "third"), tuple(fakes)):
            assert run(clock, store, *tried).decision(8).winner.backend == "third"
        here[0] = Support.yes()
        assert run(clock, store, "slow").decision(8).winner.backend == "fast"
    with Store.open(":memory:") as store:
        with registered(**three(clock)):
            run(clock, store, *three(clock))
        with registered(slow=FakeBackend(clock, 300.0)):  # the package of the others is gone
            assert run(clock, store, "slow").decision(8).winner.backend == "slow"


def test_other_layers_devices_routings_and_token_counts_do_not_compete() -> None:
    clock = Clock()
    with Store.open(":memory:") as store, registered(**three(clock)):
        run(clock, store, "fast")
        other = replace(CPU, versions=(("torch", "99.0"),))
        for settings in ({"device": other}, {"routing": "zipf:1.2"}, {"token_counts": (4,)}):
            found = run(clock, store, "slow", **settings)
            assert found.outcomes[0].winner.backend == "slow"
            assert found.standing == ()
        unknown = replace(CPU, name=" ")
        run(clock, store, "fast", device=unknown)
        assert run(clock, store, "slow", device=unknown).standing == ()


def test_who_fails_in_this_sweep_or_was_refused_before_is_no_choice() -> None:
    clock = Clock()
    broken = [False]

    def spoil(x: torch.Tensor, out: torch.Tensor, packed: Any) -> None:
        if broken[0]:
            out.mul_(2)

    fast = FakeBackend(clock, 100.0, spoil=spoil)
    wrong = FakeBackend(clock, 10.0, spoil=lambda x, out, packed: out.mul_(2))
    fakes = three(clock, fast=fast, wrong=wrong)
    with Store.open(":memory:") as store, registered(**fakes):
        run(clock, store, *fakes)
        broken[0] = True
        found = run(clock, store, "fast", resume=False)
    decided = found.decision(8)
    assert decided.winner.backend == "third"
    reasons = {r.candidate.backend: r.reason for r in decided.rejected}
    assert reasons["fast"].startswith("wrong result")
    assert reasons["wrong"].startswith("wrong result")  # of the sweep before, for completeness
    assert keys(found) == [(8, ["slow", "third"])]


def test_a_choice_that_stands_and_was_never_proven_is_judged_before_it_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    fakes = three(clock)
    with Store.open(":memory:") as store, registered(**fakes):
        run(clock, store, *fakes)
        certify = trial.certify
        judged = []

        def refute(*args: Any, level: Level, **kwargs: Any) -> Certificate:
            made = certify(*args, level=level, **kwargs)
            judged.append(made.candidate.backend)
            bad = made.candidate.backend == "third"
            return replace(made, status="wrong", reason="on the full set") if bad else made

        monkeypatch.setattr(trial, "certify", refute)
        fakes["fast"].support = lambda: NO
        found = run(clock, store, "slow")
    assert judged == ["third", "slow"]
    assert found.decision(8).winner.backend == "slow"


def test_layouts_that_changed_since_do_not_stand() -> None:
    clock = Clock()
    fakes = three(clock)
    with Store.open(":memory:") as store, registered(**fakes):
        run(clock, store, *fakes)
        rows = store.measurements(PROBLEM)
        fakes["fast"].plain = PlainLayout("another")
        kept, defaults = standing(rows, [], CPU)
        assert {row.candidate.backend for row in kept} == {"slow", "third"}
        assert defaults == {row.candidate for row in kept}


def test_what_an_older_version_timed_without_saying_how_does_not_stand() -> None:
    """Decisions refuse to compare it, so it would end the sweep."""
    clock = Clock()
    fakes = three(clock)
    with Store.open(":memory:") as store, registered(**fakes):
        run(clock, store, "fast")
        (row,) = store.measurements(PROBLEM)
        less = tuple((name, value) for name, value in row.timing if name != "clock")
        with Store.open(":memory:") as older:
            older.add_measurement(replace(row, timing=less))
            found = run(clock, older, "slow")
    assert found.decision(8).winner.backend == "slow"
    assert found.standing == ()


def test_on_a_gpu_rows_of_the_clock_before_decide_nothing_any_more() -> None:
    """ "device events" held the events' own time, "device events, net" does not."""

    def timed(clock: str, block: int, us: float) -> Measurement:
        candidate = Candidate.of("triton", {"block": block}, "nk")
        timing = (("cache", "cold"), ("clock", clock), ("graph", True))
        return row("x", 16, us, candidate=candidate, timing=timing)

    old = [timed("device events", 16, 10.0), timed("device events", 32, 14.0)]
    new = [timed("device events, net", 16, 9.5), timed("device events, net", 64, 8.0)]
    with pytest.raises(AutoselError, match="timing: found"):
        decide([*old, *new])
    for rows in ([*old, *new], [*old, *new[:1]]):
        assert of_newest_mode(rows) == rows[2:]
        with Store.open(":memory:") as store:
            store.add_measurements(rows)
            best = min(rows[2:], key=lambda m: min(m.times_us)).candidate
            (found,) = triton_decisions(store, PROBLEM, GPU)
            assert found.winner == best
            assert explain(store, PROBLEM, GPU, 16).used == best
            outcome = gather(store, PROBLEM, GPU).outcome(16)
            assert isinstance(outcome, Decision)
            assert outcome.winner == best
    failed = replace(old[0], status="wrong", reason="wrong", times_us=(), timing=())
    assert of_newest_mode([failed, *old]) == [failed, *old]
    assert of_newest_mode([failed]) == [failed]
