"""Figures of a race whose device slowed down on the way, with known truth."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from autosel import samples
from autosel.core import Candidate, Device, Measurement
from autosel.decide import Decision, decide
from autosel.racing_pace import PACE, pace
from autosel.timing import Call, TimingSettings, time_candidates
from tests.fakes import PROBLEM
from tests.test_racing import NEAR
from tests.test_timing_race import OneByOne, facts

GPU = Device("cuda", "scripted")
TRUTH = {"first": 100.0, "second": 100.9, "third": 101.8, "early": 106.0}


class Throttles(OneByOne):
    """Its clock falls by a tenth after the first rounds, as power limits do."""

    def slowed(self, us: float, noise: float, seed: int) -> Call:
        rng = random.Random(seed)

        def call() -> None:
            factor = 1.1 if self.clock > 0.004 else 1.0
            self.clock += us * 1e-6 * factor * rng.lognormvariate(0, noise)

        return call


def raced(timer: Throttles, noise: float = 0.003) -> dict[str, Measurement]:
    calls = {n: timer.slowed(us, noise, seed) for seed, (n, us) in enumerate(TRUTH.items())}
    found = time_candidates(calls, TimingSettings(limit_s=1e9), timer)
    return {
        name: Measurement(
            problem=PROBLEM, candidate=Candidate.of(name), num_tokens=4, routing="uniform",
            device=GPU, status="ok", accuracy="exact",
            times_us=timed.times_us, timing=timed.timing, errors=NEAR,
        )
        for name, timed in found.items()
    }  # fmt: skip


def test_figures_are_at_the_pace_of_the_first_rounds() -> None:
    rows = raced(Throttles())
    counts = {name: len(row.times_us) for name, row in rows.items()}
    assert counts["early"] < 12 < counts["first"], "who is beaten never sees the slow rounds"
    raw = {name: float(np.median(row.times_us)) for name, row in rows.items()}
    assert raw["first"] > raw["early"], "the planted fault: medians of all samples"
    for name, us in TRUTH.items():
        assert samples.estimate(rows[name]).us == pytest.approx(us, rel=0.006)
    decision = decide(list(rows.values()))
    assert isinstance(decision, Decision)
    assert decision.winner_us == pytest.approx(100, rel=0.006)
    early = next(r for r in decision.rejected if r.candidate.backend == "early")
    assert early.time_us == pytest.approx(106, rel=0.006)


def test_samples_stay_as_they_were_taken() -> None:
    row = raced(Throttles())["first"]
    assert max(row.times_us) > 108
    factors = [float(text) for text in str(dict(row.timing)[PACE]).split(",")]
    assert len(factors) == str(dict(row.timing)["blocks"]).count(",") + 1
    assert factors[0] == pytest.approx(1, abs=0.005)
    assert factors[-1] == pytest.approx(1.1, abs=0.006)


def test_a_device_that_keeps_its_pace_has_none() -> None:
    """Noise stays in the samples, where intervals see it."""
    timer = OneByOne()
    rng = random.Random(0)

    def call(us: float) -> Call:
        def run() -> None:
            timer.clock += us * 1e-6 * rng.lognormvariate(0, 0.003)

        return run

    found = time_candidates({n: call(us) for n, us in TRUTH.items()}, TimingSettings(), timer)
    assert all(PACE not in facts(timed) for timed in found.values())


def test_low_quantiles_are_left_alone() -> None:
    timer = Throttles()
    timer.quantile = 0.2
    assert all(PACE not in dict(row.timing) for row in raced(timer).values())


def test_rounds_of_one_candidate_tell_nothing_of_the_device() -> None:
    nan = math.nan
    slower = [0.0] * 6 + [0.1] * 6
    assert pace([slower, [0.5, *[nan] * 11]]) == ()
    assert pace([slower]) == ()
    assert pace([slower, [nan] * 12]) == ()
    assert pace([]) == ()
    found = pace([slower, [0.5 + x for x in slower], [nan] * 12])
    assert found[0] == pytest.approx(1)
    assert found[-1] == pytest.approx(math.exp(0.1))
    gap = [[nan if 5 <= n < 8 else x for n, x in enumerate(slower)], [1 + x for x in slower]]
    assert pace(gap)[-1] == pytest.approx(math.exp(0.1)), "what one ran alone is bridged"


@pytest.mark.parametrize("text", ["", "1,1", "x", "0," * 40 + "1", "nan", None, 7])
def test_a_pace_that_makes_no_sense_is_not_used(text: str | int | None) -> None:
    row = raced(Throttles())["first"]
    odd = replace(row, timing=tuple(sorted({**dict(row.timing), PACE: text}.items())))
    assert samples.ranking(odd).times_us == row.times_us
