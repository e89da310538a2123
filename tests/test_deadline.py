"""The sweep's time budget: shares, what is tried, and what the result says was cut."""

from __future__ import annotations

import random
from collections.abc import Callable

import click
import pytest

from autosel.cli import options
from autosel.core import Decision, Params
from autosel.deadline import LEAST_S, Deadline
from autosel.errors import AutoselError
from autosel.interfaces import Space
from autosel.store import Store
from autosel.timing import TimingSettings
from autosel.tune_types import SweepSettings
from tests.fakes import Clock, FakeBackend, prove_quickly, registered
from tests.test_tune import run


@pytest.fixture(autouse=True)
def _quick_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    """How winners are proven is not asked here."""
    prove_quickly(monkeypatch)


def test_what_one_token_count_leaves_goes_to_the_others() -> None:
    clock = [0.0]
    deadline = Deadline(100.0, 4, lambda: clock[0])
    deadline.begin()
    assert deadline.timing_s() == pytest.approx(25.0)
    assert not deadline.trying_is_over()
    clock[0] = 15.0
    assert deadline.trying_is_over()
    assert deadline.timing_s() == pytest.approx(10.0)
    deadline.begin()  # 85 s left for three
    assert deadline.timing_s() == pytest.approx(85 / 3)
    clock[0] = 99.0
    deadline.begin()
    assert deadline.timing_s() == pytest.approx(0.5)
    clock[0] = 200.0
    deadline.begin()
    assert deadline.timing_s() == LEAST_S
    assert deadline.trying_is_over()


def test_without_a_budget_nothing_is_ever_over() -> None:
    deadline = Deadline(None, 2, lambda: 1e9)
    deadline.begin()
    assert (deadline.is_set, deadline.trying_is_over(), deadline.timing_s()) == (False, False, None)


def test_every_token_count_has_an_answer_and_the_cut_is_said() -> None:
    """Each first call takes a second; there is time for some of six candidates."""
    clock = Clock()

    def slow_start(params: object) -> None:
        if not clock.timing:
            clock.seconds += 0.05

    fakes = {f"b{n}": FakeBackend(clock, 100.0 + 40 * n, before=slow_start) for n in range(6)}
    with registered(**fakes):
        result = run(clock, token_counts=(1, 4, 16), budget_s=8.0)
        whole = run(clock, token_counts=(1, 4, 16))
    assert len(result.decisions) == 3
    assert all(isinstance(d, Decision) for d in result.outcomes)
    assert result.cuts
    assert all(cut.untried for cut in result.cuts)
    assert result.cuts[0].text.startswith("out of time at 1 tokens: not tried: ")
    tried = {m.candidate.backend for m in result.measurements}
    assert tried < set(fakes), "who was not tried is no row, so that a later sweep measures it"
    assert whole.cuts == ()
    assert {m.candidate.backend for m in whole.measurements} == set(fakes)


@pytest.mark.parametrize("stored", [True, False])
def test_time_that_is_left_in_the_end_goes_to_what_was_cut_short(stored: bool) -> None:
    """The first token count pays for what starts slowly; the others leave time for another turn."""
    clock = Clock()
    seen: set[str] = set()

    def starts(name: str, seconds: float) -> Callable[[object], None]:
        def before(params: object) -> None:
            clock.seconds += 0.0 if name in seen else seconds
            seen.add(name)

        return before

    fakes = {
        "early": FakeBackend(clock, 100.0, before=starts("early", 2.5)),
        "late": FakeBackend(clock, 50.0, before=starts("late", 1.0)),
    }
    with registered(**fakes), Store.open(":memory:") as store:
        kept = store if stored else None
        result = run(clock, store=kept, token_counts=(1, 4, 16), budget_s=12.0)
        assert result.cuts == ()
        assert [d.winner.backend for d in result.decisions] == ["late"] * 3
        assert [m.num_tokens for m in result.measurements] == [1, 1, 4, 4, 16, 16]
        seen.clear()
        short = run(clock, token_counts=(1, 4, 16), budget_s=4.4)
    assert [cut.num_tokens for cut in short.cuts] == [1]
    assert short.decision(1).winner.backend == "early"


def test_a_budget_of_nothing_still_finds_one_right_candidate_a_token_count() -> None:
    clock = Clock()
    fakes = {"bad": FakeBackend(clock, spoil=lambda x, out, packed: out.mul_(2)),
             "good": FakeBackend(clock), "more": FakeBackend(clock)}  # fmt: skip
    with registered(**fakes):
        result = run(clock, token_counts=(1, 8), budget_s=1e-6)
    assert [d.winner.backend for d in result.decisions] == ["good", "good"]
    assert [cut.untried for cut in result.cuts] == [("more",), ("more", "bad")] or all(
        "more" in cut.untried for cut in result.cuts
    )


def test_a_search_ends_with_its_share_and_says_how_far_it_came() -> None:
    clock = Clock()
    space = Space(default={"n": 0}, choices={"n": tuple(range(40))})

    def slow(params: object) -> None:
        if not clock.timing:
            clock.seconds += 0.02

    def better_and_better(routing: object, params: Params) -> float:
        return 100.0 - 2 * int(params["n"] or 0)  # so that nothing else ends the search

    with registered(tuned=FakeBackend(clock, better_and_better, space=space, before=slow)):
        result = run(clock, token_counts=(4,), budget_s=6.0, trials=40)
    (cut,) = result.cuts
    assert "search ended after" in cut.text
    assert result.decision(4).winner.backend == "tuned"


def test_a_race_that_was_cut_is_run_again_by_a_later_sweep() -> None:
    clock = Clock()
    rng = random.Random(0)

    def noisy(routing: object, params: object) -> float:
        return 100.0 * rng.lognormvariate(0, 0.1)

    timing = TimingSettings(rounds=60, samples_per_round=1, limit_s=1e9)
    fakes = {"a": FakeBackend(clock, noisy), "b": FakeBackend(clock, noisy)}
    with Store.open(":memory:") as store, registered(**fakes):
        first = run(clock, store=store, token_counts=(1,), timing=timing, budget_s=1e-3)
        again = run(clock, store=store, token_counts=(1,), timing=timing)
        third = run(clock, store=store, token_counts=(1,), timing=timing)
    assert first.cuts[0].unsettled or first.cuts[0].untried
    assert again.cuts == ()
    assert {len(m.times_us) for m in again.measurements} == {60}
    assert len({dict(m.timing)["race"] for m in again.measurements}) == 1, "raced together"
    assert third.measurements == again.measurements, "and that one is kept"


def test_bad_budgets_are_refused() -> None:
    with pytest.raises(AutoselError, match=r"SweepSettings\.budget_s"):
        SweepSettings(budget_s=0.0)
    with pytest.raises(AutoselError, match=r"SweepSettings\.trials"):
        SweepSettings(trials=0)
    assert SweepSettings(timing=TimingSettings()).budget_s is None


@pytest.mark.parametrize(
    ("text", "seconds", "trials"),
    [("120s", 120.0, None), ("2m", 120.0, None), ("1.5h", 5400.0, None), (" 90 S ", 90.0, None),
     ("32", None, 32)],
)  # fmt: skip
def test_a_budget_is_a_time_and_the_older_spelling_is_a_number(
    text: str, seconds: float | None, trials: int | None
) -> None:
    found = options.budget(text)
    assert (found.seconds, found.trials) == (seconds, trials)


@pytest.mark.parametrize("text", ["", "0s", "-5s", "5d", "1e9s", "5 minutes", "nan", "0", "1.5"])
def test_a_budget_that_is_neither_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        options.budget(text)
    assert "\n" not in caught.value.message
    assert "expected" in caught.value.message
