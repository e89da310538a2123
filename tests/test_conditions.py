"""What a decision says of the machine while it was measured."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from autosel.conditions import words
from autosel.core import Candidate, Device, Measurement
from autosel.decide import Decision, decide
from autosel.timing import Call, TimedSamples, TimingSettings, time_candidates
from tests.fakes import PROBLEM
from tests.test_timing_race import OneByOne, noisy

GPU = Device(kind="cuda", name="scripted GPU", capability=(9, 0))


def row(name: str, samples: TimedSamples, **timing: Any) -> Measurement:
    facts = {**dict(samples.timing), "graph": True, **timing}
    return Measurement(
        PROBLEM, 4, "uniform", Candidate.of(name), GPU, "ok",
        times_us=samples.times_us, timing=tuple(sorted(facts.items())),
    )  # fmt: skip


def raced(calls: dict[str, Call], timer: OneByOne, **settings: Any) -> dict[str, TimedSamples]:
    return time_candidates(calls, TimingSettings(**{"limit_s": 1e9, **settings}), timer)


def rows(timer: OneByOne | None = None, **us: float) -> list[Measurement]:
    timer = timer or OneByOne()
    calls = {name: noisy(timer, value, 0.01, n) for n, (name, value) in enumerate(us.items())}
    found = raced(calls, timer, rounds=30, race=False)
    return [row(name, samples) for name, samples in found.items()]


def decided(measurements: list[Measurement]) -> Decision:
    found = decide(measurements)
    assert isinstance(found, Decision)
    return found


def test_a_quiet_machine_is_not_spoken_of() -> None:
    assert [text for text in words(rows(a=100.0, b=120.0)) if "busy" not in text] == []


def test_other_processes_on_the_gpu_are_named() -> None:
    timer = OneByOne()
    found = raced({"a": timer.call(1e-4), "b": timer.call(2e-4)}, timer)
    shared = [
        row("a", found["a"], other_processes="0,0,1,2,1"),
        row("b", found["b"], other_processes="0,0,0,nan,0"),
    ]
    assert "up to 2 other processes used the device meanwhile" in decided(shared).why
    alone = [row(name, samples, other_processes="0,0") for name, samples in found.items()]
    assert "other processes" not in decided(alone).why


def test_eager_beside_graphs_is_named_and_all_eager_is_not() -> None:
    timer = OneByOne()
    found = raced({"a": timer.call(1e-4), "b": timer.call(2e-4)}, timer)
    mixed = [row("a", found["a"], captured=True), row("b", found["b"], captured=False)]
    assert "no graph can be captured: b" in decided(mixed).why
    eager = [row(name, samples, graph=False, captured=False) for name, samples in found.items()]
    assert "graph" not in decided(eager).why


def test_lowered_clocks_and_quotas_are_named() -> None:
    timer = OneByOne()
    found = raced({"a": timer.call(1e-4), "b": timer.call(2e-4)}, timer)
    hot = [row(n, samples, throttle="0,0,32") for n, samples in found.items()]
    assert "clocks were lowered meanwhile (software thermal)" in decided(hot).why
    held = [row(n, samples, held_back_share=0.25) for n, samples in found.items()]
    assert "a quota of processor time held it back for 25% of the time" in decided(held).why


class Leaks:
    """A call of ``us`` microseconds that takes ``more`` of it longer with every call."""

    def __init__(self, timer: OneByOne, us: float, more: float, seed: int) -> None:
        self.timer, self.us, self.more, self.rng = timer, us, more, random.Random(seed)
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        us = self.us * (1 + self.more * self.calls) * self.rng.lognormvariate(0, 0.005)
        self.timer.clock += us * 1e-6


@pytest.mark.parametrize("more", [0.005, 0.02])
def test_a_candidate_that_gets_slower_is_named(more: float) -> None:
    timer = OneByOne()
    calls = {"leaks": Leaks(timer, 95.0, more, 1), "steady": noisy(timer, 100.0, 0.005, 2)}
    found = raced(calls, timer, rounds=40, race=False)
    decision = decided([row(name, samples) for name, samples in found.items()])
    assert decision.winner.backend == "steady"
    assert "got slower from round to round, unlike the others: leaks" in decision.why


def test_one_that_overtakes_by_its_early_samples_alone_does_not_win_the_race() -> None:
    """Faster in its first rounds only: the race goes on until that is made up for."""
    timer = OneByOne()
    calls = {"leaks": Leaks(timer, 97.0, 0.003, 1), "steady": noisy(timer, 100.0, 0.01, 2)}
    found = raced(calls, timer)
    assert decided([row(n, s) for n, s in found.items()]).winner.backend == "steady"


@pytest.mark.parametrize("seed", range(5))
def test_a_machine_that_gets_slower_is_nobodys_fault(seed: int) -> None:
    """Clocks fall by a third in the middle of the race, for all."""
    timer = OneByOne()
    rng = random.Random(seed)
    began = timer.clock

    def call(us: float) -> Call:
        def run() -> None:
            slow = 1.5 if timer.clock - began > 0.004 else 1.0
            timer.clock += us * 1e-6 * slow * rng.lognormvariate(0, 0.01)

        return run

    found = raced({"a": call(100.0), "b": call(110.0), "c": call(112.0)}, timer, race=False,
                  rounds=40)  # fmt: skip
    decision = decided([row(name, samples) for name, samples in found.items()])
    assert decision.winner.backend == "a"
    assert not decision.tie
    assert "got slower" not in decision.why


NOISE: dict[str, Callable[[random.Random], float]] = {
    "even": lambda rng: rng.gauss(1.0, 0.05),
    "bursts": lambda rng: rng.choice((1.0, 1.0, 1.0, 4.0)) * rng.lognormvariate(0, 0.02),
    "two clocks": lambda rng: rng.choice((1.0, 1.25)) * rng.lognormvariate(0, 0.01),
    "heavy tail": lambda rng: 1.0 + 0.02 * rng.paretovariate(1.2),
}


@pytest.mark.parametrize("kind", NOISE)
@pytest.mark.parametrize("count", [2, 3])
def test_equal_candidates_keep_their_order_whatever_the_noise(kind: str, count: int) -> None:
    """Tuned twenty times: the same winner, and it is said to be a tie."""
    names = "abc"[:count]
    found = []
    for seed in range(20):
        timer, rng = OneByOne(), random.Random(seed)

        def call(timer: OneByOne = timer, rng: random.Random = rng) -> None:
            timer.clock += 100e-6 * NOISE[kind](rng)

        samples = raced(dict.fromkeys(names, call), timer, rounds=100)
        found.append(decided([row(name, samples[name]) for name in names]))
    assert {decision.winner.backend for decision in found} == {"a"}
    assert all(decision.tie and "tie" in decision.why for decision in found)
