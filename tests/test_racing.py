"""The race: bounds that hold at any time, eliminations with known truth, decisions that agree."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autosel import racing, racing_bounds, samples
from autosel.core import Candidate, Device, ErrorFigures, Measurement, Problem, QuantScheme
from autosel.decide import Decision, decide
from autosel.errors import AutoselError
from autosel.racing import Race
from autosel.racing_bounds import PairedRatio, log_wealth, needed, upper_frequency
from autosel.replay import Cell
from autosel.replay import racing as run_race
from autosel.timing import TimingSettings
from bench.synthetic_timings import MACHINES, cell

SCHEME = QuantScheme(4, 128, True)
PROBLEM = Problem(8, 8, 2, 256, 128, SCHEME, SCHEME)
GPU = Device("cuda", "scripted")
NEAR = ErrorFigures(1e-3, 2e-3, 1e-2, 0.0)


# bounds --------------------------------------------------------------------------------------


def test_the_bet_is_fair_on_a_fair_coin() -> None:
    """Its expectation after any number of tosses is at most 1, summed over every outcome."""
    for rounds in (1, 5, 20, 60):
        chances = np.array([math.comb(rounds, k) / 2**rounds for k in range(rounds + 1)])
        wealth = np.exp(log_wealth(np.arange(rounds + 1), rounds))
        assert float(chances @ wealth) == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("log", [800.0, -800.0])
def test_a_ratio_beyond_all_numbers_overflows_nothing(log: float) -> None:
    ratio = PairedRatio((log,) * 40)
    interval = ratio.interval(0.95)
    assert interval is not None
    assert all(map(math.isfinite, (ratio.margin, *interval)))
    race: Race[str] = Race(["slow", "fast"], 0.5)
    for _ in range(40):
        race.add({"slow": [1e300], "fast": [1e-300]})
    assert math.isfinite(race.eliminated["slow"].at_least)


def test_looking_after_every_round_is_allowed() -> None:
    """5 % of fair coins may ever be called unfair; a fixed-sample test does it for a third."""
    rng = np.random.default_rng(0)
    agree = (rng.random((2000, 200)) < 0.5).cumsum(axis=1)
    rounds = np.arange(1, 201)
    ever = (log_wealth(agree, rounds) >= math.log(20)).any(axis=1).mean()
    assert ever <= 0.05
    # The planted fault: the normal 95 % bound, looked at after every round.
    fixed = ((agree - rounds / 2) / np.sqrt(rounds / 4) > 1.645)[:, 5:].any(axis=1).mean()
    assert fixed > 0.2


def test_needed_is_the_first_count_that_rejects() -> None:
    for rounds in (5, 13, 40):
        count = needed(rounds, 0.0025)
        wealth = log_wealth(np.arange(rounds + 1), rounds)
        if count is None:
            assert wealth.max() < -math.log(0.0025)
        else:
            assert wealth[count] >= -math.log(0.0025) > wealth[count - 1]
    assert needed(samples.PAIRED_ROUNDS, 0.05 / 20) is not None


@pytest.mark.parametrize("noise", ["normal", "cauchy"])
def test_the_interval_covers_the_median_ratio_whatever_the_tails(noise: str) -> None:
    rng = np.random.default_rng(1)
    missed = 0
    for _ in range(400):
        draw = rng.standard_normal(40) if noise == "normal" else rng.standard_cauchy(40)
        found = PairedRatio(tuple(math.log(1.02) + 0.01 * draw)).interval(0.95)
        assert found is not None
        missed += not found[0] <= 0.02 <= found[1]
    assert missed / 400 <= 0.05


def test_frequencies_are_bounded_from_above() -> None:
    assert upper_frequency(0, 0) == 1.0
    assert upper_frequency(0, 20) == pytest.approx(1 - 0.05 ** (1 / 20), abs=1e-5)
    assert upper_frequency(5, 10) > 0.5
    rng = np.random.default_rng(2)
    below = sum(upper_frequency(int(rng.binomial(50, 0.1)), 50) < 0.1 for _ in range(2000))
    assert below / 2000 <= 0.05


# the race ------------------------------------------------------------------------------------


def feed(
    race: Race[str], truth: dict[str, float], noise: float, rounds: int, seed: int = 0
) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        race.add({k: truth[k] * np.exp(noise * rng.standard_normal(1)) for k in race.alive})


def test_gross_losers_leave_first_and_close_ones_stay() -> None:
    truth = {"a": 100.0, "b": 100.2, "c": 110.0, "d": 200.0, "e": 1000.0}
    race: Race[str] = Race(list(truth), 0.5)
    feed(race, truth, 0.005, 6)
    assert set(race.alive) == {"a", "b"}
    for key, least in (("c", 0.05), ("d", 0.2), ("e", 1.0)):
        out = race.eliminated[key]
        assert out.samples <= 6
        assert least * 0.999 <= out.at_least <= truth[key] / 100 - 1, "a true statement"
        assert out.text.startswith(f"eliminated after {out.samples} samples: slower by at least ")
    feed(race, truth, 0.005, 100)
    assert set(race.alive) == {"a", "b"}
    assert race.settled()


def test_noise_as_large_as_the_gap_eliminates_nobody_early() -> None:
    """A gap of 30 % is gross where noise is 1 %, and nothing of the kind where it is 40 %."""
    truth = {"a": 100.0, "b": 130.0}
    early = 0
    for seed in range(40):
        race: Race[str] = Race(list(truth), 0.5)
        feed(race, truth, 0.4, 6, seed)
        early += bool(race.eliminated)
    assert early == 0


def test_candidates_of_another_class_end_nobodys_race() -> None:
    truth = {"exact": 100.0, "slow": 300.0, "a8": 20.0}
    classes = {"exact": 0, "slow": 0, "a8": 1}
    race: Race[str] = Race(list(truth), 0.5, classes=classes)
    feed(race, truth, 0.01, 20)
    assert set(race.alive) == {"exact", "a8"}
    whole: Race[str] = Race(list(truth), 0.5)
    feed(whole, truth, 0.01, 20)
    assert whole.alive == ["a8"]


def test_who_was_eliminated_by_a_fault_is_in_again() -> None:
    truth = {"liar": 10.0, "a": 100.0, "b": 150.0}
    race: Race[str] = Race(list(truth), 0.5)
    feed(race, truth, 0.01, 8)
    assert race.alive == ["liar"]
    race.withdraw("liar")
    assert {"a", "b"} <= set(race.alive)
    for _ in range(8):
        race.add({"a": [100.0], "b": [150.0]})
    assert race.eliminated["b"].by == "a"
    assert "a" in race.alive


def test_rounds_without_an_undisturbed_sample_are_no_rounds() -> None:
    race: Race[str] = Race(["a", "b"], 0.2)
    for _ in range(60):
        race.add({"a": [100.0], "b": []})
    assert race.alive == ["a", "b"]
    assert race.logs("a", "b") == ()
    race.add({"a": [math.nan], "b": [0.0]})
    assert race.logs("a", "b") == ()


def test_blocks_count_equally_many_samples_of_each() -> None:
    """The minimum of many is lower than of few: more samples must not look faster."""
    race: Race[str] = Race(["many", "few"], 0.0)
    race.add({"many": [110.0, 105.0, 80.0, 70.0], "few": [100.0, 104.0]})
    assert race.logs("many", "few")[0] == pytest.approx(math.log(1.05))


def test_limits_that_mean_nothing_are_refused() -> None:
    for bad in ({"confidence": 1.0}, {"epsilon": 0.0}):
        with pytest.raises(AutoselError, match="race: limits"):
            Race(["a"], 0.5, **bad)


def test_one_or_no_candidate_is_settled() -> None:
    assert Race([], 0.5).settled()
    assert Race(["a"], 0.5).settled()


# truth known: false winners, regret, agreement ---------------------------------------------------


@pytest.mark.parametrize("name", MACHINES)
def test_equal_candidates_have_no_winner_on_any_machine(name: str) -> None:
    """At most 5 % false winners; measured over many runs in bench/strategies.py, a few here."""
    equal = cell(name, [100.0] * 3, MACHINES[name], 0.02)
    settings = TimingSettings(warmup=1, rounds=60)
    false = sum(
        not run_race(equal, np.random.default_rng(seed), settings).tie for seed in range(15)
    )
    assert false <= 1


@pytest.mark.parametrize("name", ["quiet", "drifting", "two clocks", "heavy tails"])
def test_a_gap_of_three_percent_is_found_on_any_machine(name: str) -> None:
    near = cell(name, [103.0, 100.0, 150.0, 300.0], MACHINES[name], 0.01)
    for seed in range(6):
        choice = run_race(near, np.random.default_rng(seed))
        assert near.regret(choice.place) == 0.0
        assert not choice.tie
        assert choice.samples < 4 * 80


def test_pairing_sees_through_a_clock_that_changes() -> None:
    """The planted fault: the same samples, their rounds mixed up, often do not settle 3 %."""
    near = cell("two clocks", [103.0, 100.0], MACHINES["two clocks"], 0.002)
    timed = (("race", "r"), ("blocks", ",".join(["1"] * 40)))
    blind = 0
    for seed in range(24):
        rng = np.random.default_rng(seed)
        times = near.draw(rng, 40)
        rows = [measured(n, times[:, i, 0], timed) for i, n in enumerate("ba")]
        mixed = [measured(n, rng.permutation(times[:, i, 0]), timed) for i, n in enumerate("ba")]
        paired, alone = decide(rows), decide(mixed)
        assert isinstance(paired, Decision)
        assert isinstance(alone, Decision)
        assert (paired.winner.backend, paired.tie) == ("a", False)
        assert paired.margin == pytest.approx(0.03, abs=0.006)
        blind += alone.tie
    assert blind >= 2


def measured(
    name: str, times: np.ndarray, timing: tuple = (), weight_bytes: int | None = None
) -> Measurement:
    return Measurement(
        PROBLEM, 1, "uniform", Candidate.of(name), GPU, "ok",
        times_us=tuple(float(t) for t in times), timing=timing, errors=NEAR,
        weight_bytes=weight_bytes,
    )  # fmt: skip


def test_the_decision_is_the_race_run_again() -> None:
    """Who the race eliminated is out in the decision too, with the same words."""
    rng = np.random.default_rng(4)
    truth = {"a": 100.0, "b": 100.1, "c": 130.0}
    race: Race[str] = Race(list(truth), 0.5)
    taken: dict[str, list[float]] = {name: [] for name in truth}
    while not race.settled():
        blocks = {n: [truth[n] * math.exp(0.004 * rng.standard_normal())] for n in race.alive}
        for name, times in blocks.items():
            taken[name] += times
        race.add(blocks)
    rows = [
        measured(n, np.array(t), (("race", "r1"), ("blocks", ",".join(["1"] * len(t)))))
        for n, t in taken.items()
    ]
    found = decide(rows)
    assert isinstance(found, Decision)
    assert (found.winner.backend, found.tie) == ("a", True)
    (out,) = [r for r in found.rejected if r.candidate.backend == "c"]
    assert out.reason.startswith(race.eliminated["c"].text)
    # Samples of two races are never paired: as if each had been measured on another day.
    apart = [
        measured(m.candidate.backend, np.array(m.times_us), (("race", str(i)), m.timing[1]))
        for i, m in enumerate(rows)
    ]
    assert samples.paired(apart[0], apart[1]) is None
    assert samples.paired(rows[0], rows[1]) is not None


def test_a_faster_one_that_may_not_be_chosen_puts_nobody_out() -> None:
    rng = np.random.default_rng(5)
    timing = (("race", "r"), ("blocks", ",".join(["1"] * 30)))
    quick, exact = (
        measured(n, us * np.exp(0.01 * rng.standard_normal(30)), timing)
        for n, us in (("quick", 50.0), ("exact", 100.0))
    )
    a8 = Measurement(**{**{f: getattr(quick, f) for f in quick.__slots__}, "accuracy": "a8"})
    found = decide([a8, exact])
    assert isinstance(found, Decision)
    assert (found.winner.backend, found.tie) == ("exact", False)
    assert "would gain" in found.why


def test_near_ties_go_to_the_order_in_every_rerun() -> None:
    """Two at 100 us with 5 % noise, twenty tunings: one winner, and the tie is said."""
    equal = cell("tie", [100.0, 100.0], MACHINES["quiet"], 0.05)
    settings = TimingSettings(warmup=1, rounds=60)
    choices = [run_race(equal, np.random.default_rng(seed), settings) for seed in range(20)]
    assert {choice.place for choice in choices} == {0}
    assert all(choice.tie for choice in choices)


def test_without_the_stricter_level_reruns_would_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: no half of epsilon and a level of 50 % find winners among equals."""
    monkeypatch.setattr(racing, "RERUNS", 0.05)
    monkeypatch.setattr(racing, "SEPARATES", 0.0)
    wrong = 0
    for seed in range(60):
        race: Race[str] = Race(["a", "b"], 0.5)
        feed(race, {"a": 100.0, "b": 100.0}, 0.02, 60, seed)
        wrong += bool(race.eliminated)
    assert wrong > 6


def test_gross_levels_are_ratios_in_order() -> None:
    assert list(racing_bounds.GROSS) == sorted(racing_bounds.GROSS)
    assert isinstance(cell("x", [1.0, 2.0], MACHINES["quiet"], 0.0), Cell)
