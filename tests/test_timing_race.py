"""The timing engine as a race: who is sampled how often, budgets, limits, and what is recorded."""

from __future__ import annotations

import itertools
import math
import os
import random
from dataclasses import replace
from typing import Any

import pytest

from autosel import timing, timing_nvml
from autosel.errors import AutoselError
from autosel.timing import Call, Sample, TimedSamples, TimingSettings, time_candidates
from autosel.timing_nvml import Conditions, throttled
from tests.test_timing import ScriptedTimer


class OneByOne(ScriptedTimer):
    """As a GPU: blocks of one sample, ranked by the median."""

    quantile = 0.5
    block = 1


def noisy(timer: ScriptedTimer, us: float, noise: float, seed: int) -> Call:
    rng = random.Random(seed)

    def call() -> None:
        timer.clock += us * 1e-6 * rng.lognormvariate(0, noise)

    return call


def facts(samples: TimedSamples) -> dict[str, Any]:
    return dict(samples.timing)


def test_losers_stop_early_keep_their_samples_and_say_so() -> None:
    timer = OneByOne()
    truth = {"a": 100, "b": 103, "c": 150, "d": 900}
    calls = {name: noisy(timer, us, 0.01, n) for n, (name, us) in enumerate(truth.items())}
    found = time_candidates(calls, TimingSettings(limit_s=1e9), timer)
    counts = {name: len(samples.times_us) for name, samples in found.items()}
    assert counts["d"] <= counts["c"] <= 8
    assert counts["c"] < counts["b"] < 60
    assert facts(found["c"])["eliminated"] is True
    assert facts(found["a"])["eliminated"] is False
    assert facts(found["c"])["blocks"] == ",".join(["1"] * counts["c"])
    races = {facts(samples)["race"] for samples in found.values()}
    assert len(races) == 1
    again = time_candidates(calls, TimingSettings(limit_s=1e9), timer)
    assert facts(again["a"])["race"] not in races


def test_without_the_race_everyone_gets_every_round() -> None:
    timer = OneByOne()
    calls = {"a": timer.call(1e-4), "b": timer.call(9e-4)}
    found = time_candidates(calls, TimingSettings(rounds=30, race=False), timer)
    assert [len(s.times_us) for s in found.values()] == [30, 30]


def test_a_candidate_alone_gets_the_least_rounds() -> None:
    timer = OneByOne()
    found = time_candidates({"a": timer.call(1e-4)}, TimingSettings(), timer)
    assert len(found["a"].times_us) == timing.LEAST_ROUNDS


def test_equals_stop_when_they_are_shown_to_be_within_epsilon() -> None:
    timer = OneByOne()
    calls = {"a": noisy(timer, 100, 0.001, 1), "b": noisy(timer, 100, 0.001, 2)}
    found = time_candidates(calls, TimingSettings(limit_s=1e9), timer)
    assert len(found["a"].times_us) < 20
    assert not any(facts(s)["eliminated"] for s in found.values())
    assert not any(facts(s)["cut"] for s in found.values())


@pytest.mark.parametrize("call_s", [1e-5, 1e-2])
def test_a_budget_ends_the_race_and_is_recorded(call_s: float) -> None:
    """Two too noisy to settle; everyone has a sample whatever the budget."""
    timer = OneByOne(flush_s=1e-3)
    us = call_s * 1e6
    calls = {name: noisy(timer, us, 0.3, n) for n, name in enumerate("abc")}
    settings = TimingSettings(budget_s=0.5, limit_s=1e9, rounds=10_000)
    start = timer.clock
    found = time_candidates(calls, settings, timer)
    assert timer.clock - start < 0.5 + 5 * (call_s * 2 + 1e-3) + 6 * call_s
    assert all(facts(s)["cut"] is True for s in found.values())
    tiny = time_candidates(calls, TimingSettings(budget_s=1e-9), timer)
    assert all(len(s.times_us) >= 1 for s in tiny.values())


def test_a_hopeless_setting_of_a_search_gets_one_sample() -> None:
    timer = OneByOne()
    settings = TimingSettings(rounds=1, samples_per_round=3, stop_above_us=150.0)
    found = time_candidates({"good": timer.call(1e-4), "bad": timer.call(4e-4)}, settings, timer)
    assert [len(s.times_us) for s in found.values()] == [3, 1]
    assert facts(found["bad"])["stopped_above_us"] == 150.0


def test_who_raises_late_frees_those_it_put_out() -> None:
    """The fastest one breaks after it has eliminated the others: they are raced on."""
    timer = OneByOne()
    count = {"n": 0}

    def breaks() -> None:
        count["n"] += 1
        timer.clock += 1e-5
        if count["n"] > 9:
            raise RuntimeError("late fault")

    calls = {"breaks": breaks, "rival": noisy(timer, 10.0, 0.001, 3),
             "a": noisy(timer, 100, 0.01, 1), "b": noisy(timer, 200, 0.01, 2)}  # fmt: skip
    found = time_candidates(calls, TimingSettings(limit_s=1e9), timer)
    assert str(found["breaks"].error) == "late fault"
    assert facts(found["rival"])["eliminated"] is False


def test_blocks_are_short_where_calls_are_long_and_alike_for_all() -> None:
    timer = ScriptedTimer()  # blocks of five where calls are short
    settings = TimingSettings(limit_s=1e9)
    found = time_candidates({"a": timer.call(1e-4), "b": timer.call(0.2)}, settings, timer)
    assert facts(found["a"])["blocks"].split(",")[0] == "5"
    assert facts(found["b"])["blocks"].split(",")[0] == "5", "as many as its rival's"
    long = time_candidates({"a": timer.call(0.09), "b": timer.call(0.2)}, settings, timer)
    assert facts(long["a"])["blocks"].split(",")[0] == "1"


def test_it_waits_for_a_quiet_machine_and_no_longer_than_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    naps: list[float] = []
    monkeypatch.setattr(timing.time, "sleep", naps.append)
    timer = OneByOne()
    pressed = iter([0.0, 0.2, 0.2, 0.4, 0.4, 0.4] + [0.4] * 1000)
    monkeypatch.setattr(timer, "load", lambda: {"pressure": next(pressed)})
    found = time_candidates({"a": timer.call(1e-4)}, TimingSettings(wait_quiet_s=60), timer)
    assert len(naps) == 3, "two quarters of a second were busy, the third was not"
    assert facts(found["a"])["waited_s"] == 0.75
    naps.clear()
    grows = iter(range(10_000))
    monkeypatch.setattr(timer, "load", lambda: {"pressure": float(next(grows))})
    found = time_candidates({"a": timer.call(1e-4)}, TimingSettings(wait_quiet_s=2), timer)
    assert len(naps) == 8
    at_once = time_candidates({"a": timer.call(1e-4)}, TimingSettings(), timer)
    assert "waited_s" not in facts(at_once["a"])


@pytest.mark.parametrize("name", ["budget_s", "stop_above_us", "epsilon"])
def test_limits_below_zero_are_refused(name: str) -> None:
    with pytest.raises(AutoselError, match=rf"TimingSettings\.{name}"):
        TimingSettings(**{name: 0.0})


# ------------------------------------------------------------------------ the GPU's conditions


class Nvml:
    """pynvml as the timer uses it; ``broken`` names calls that fail."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, *broken: str) -> None:
        self.broken = broken
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        if name == "nvmlDeviceGetCurrentClocksEventReasons" and "old" in self.broken:
            raise AttributeError(name)
        values = {
            "nvmlInit": None, "nvmlDeviceGetHandleByUUID": "handle",
            "nvmlDeviceGetClockInfo": 1755, "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetPowerUsage": 512_000,
            "nvmlDeviceGetCurrentClocksEventReasons": 0x60,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x04,
        }  # fmt: skip

        def call(*args: object) -> Any:
            self.asked += 1
            if name in self.broken:
                raise RuntimeError(f"{name}: not supported")
            return values[name]

        return call


def test_conditions_are_read_where_the_device_tells() -> None:
    found = Conditions("GPU-1", Nvml()).read()
    assert found == {"sm_mhz": 1755.0, "memory_mhz": 1755.0, "celsius": 61.0, "watts": 512.0,
                     "throttle": 96.0}  # fmt: skip
    assert Conditions("GPU-1", Nvml("old")).read()["throttle"] == 4.0
    partly = Conditions("GPU-1", Nvml("nvmlDeviceGetPowerUsage"))
    assert "watts" not in partly.read()
    assert partly.missing == ""


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_conditions_that_cannot_be_read_say_why(broken: str) -> None:
    found = Conditions("GPU-1", Nvml(broken))
    assert found.missing.startswith("not readable: RuntimeError")
    assert found.read() == {}
    assert Conditions(None, Nvml()).missing.startswith("not readable")


def test_a_missing_package_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(timing_nvml.importlib, "import_module", absent)
    assert "pynvml" in Conditions("GPU-1").missing


def test_conditions_are_not_asked_for_at_every_sample() -> None:
    nvml = Nvml()
    found = Conditions("GPU-1", nvml)
    first = found.read()
    asked = nvml.asked
    assert found.read() == first
    assert nvml.asked == asked


def test_throttling_is_said_in_words() -> None:
    assert throttled({"throttle": "0,32,64"}) == "software thermal, hardware thermal"
    assert throttled({"throttle": "1,2"}) == "", "idle and application clocks are no throttling"
    assert throttled({}) == throttled({"throttle": "x,nan"}) == ""


def test_conditions_stand_beside_each_sample() -> None:
    timer = OneByOne()
    timer.sample = lambda call, repeats: Sample(100.0, False, {"sm_mhz": 1755.0})  # type: ignore[method-assign]
    found = time_candidates({"a": timer.call(1e-4)}, TimingSettings(rounds=3), timer)
    assert facts(found["a"])["sm_mhz"] == "1755,1755,1755"


def test_other_processes_are_counted_where_process_numbers_are_ours() -> None:
    class Process:
        def __init__(self, pid: int) -> None:
            self.pid = pid

    def sees(*pids: int) -> dict[str, float]:
        nvml = Nvml()
        nvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: [Process(p) for p in pids]
        return Conditions("GPU-1", nvml).read()

    assert sees(os.getpid())["other_processes"] == 0
    assert sees(os.getpid(), os.getppid())["other_processes"] == 0, "a worker's parent is ours"
    assert sees(os.getpid(), 1_000_001, 1_000_002)["other_processes"] == 2
    assert "other_processes" not in sees(7, 8), "a container sees the numbers of its host"
    assert "other_processes" not in sees()


# --------------------------------------------------------------------- clocks and machines that err


@pytest.mark.parametrize("us", [0.0, -5.0, math.nan, math.inf])
@pytest.mark.parametrize("timer", [ScriptedTimer(), OneByOne()], ids=["blocks", "one by one"])
def test_samples_that_are_no_time_are_made_up_for(timer: ScriptedTimer, us: float) -> None:
    """Every third sample is none."""
    count = itertools.count()
    take = timer.sample

    def sample(call: Call, repeats: int) -> Sample:
        found = take(call, repeats)
        return replace(found, us=us) if next(count) % 3 == 0 else found

    timer.sample = sample  # type: ignore[method-assign]
    settings = TimingSettings(rounds=20, race=False)
    found = time_candidates({"a": timer.call(1e-4), "b": timer.call(2e-4)}, settings, timer)
    for name, value in (("a", 100), ("b", 200)):
        assert found[name].times_us == pytest.approx([value] * len(found[name].times_us))
        assert len(found[name].times_us) >= 20
        assert facts(found[name])["no_time"] > 5


def test_a_clock_that_stands_still_gives_no_sample_and_comes_to_an_end() -> None:
    timer = OneByOne()
    found = time_candidates({"a": lambda: None, "b": timer.call(1e-4)}, TimingSettings(), timer)
    assert found["a"].times_us == ()
    assert facts(found["a"])["no_time"] > 0
    assert found["a"].error is None
    assert found["b"].times_us


@pytest.mark.parametrize("at", [1, 2, 3, 4, 7])
def test_a_machine_that_stands_still_for_an_hour_costs_one_sample(at: int) -> None:
    """Its process is stopped, or its virtual machine: in the warm-up or in the race."""
    timer = OneByOne()
    calls = 0

    def pauses() -> None:
        nonlocal calls
        calls += 1
        timer.clock += 3600.0 if calls == at + 1 else 1e-4

    settings = TimingSettings(rounds=20, race=False)
    found = time_candidates({"a": pauses, "b": timer.call(2e-4)}, settings, timer)
    assert len(found["a"].times_us) == 20
    assert facts(found["a"])["limited"] is False
    assert facts(found["a"])["stood_still_s"] == 3600.0
    assert "stood_still_s" not in facts(found["b"])


def test_only_one_standstill_is_forgiven() -> None:
    """Else a candidate that hangs now and then would take hours."""
    timer = OneByOne()
    calls = itertools.count()

    def hangs() -> None:
        timer.clock += 100.0 if next(calls) % 2 else 1e-4

    start = timer.clock
    time_candidates({"a": hangs}, TimingSettings(rounds=200, race=False), timer)
    assert timer.clock - start < 100.0 * 4, "the limit is kept to within a few calls"


def test_a_clock_that_goes_backwards_ends_nothing() -> None:
    timer = OneByOne()
    real = timer.call(1e-4)
    count = itertools.count()

    def back() -> None:
        real()
        if next(count) == 6:
            timer.clock -= 50.0

    found = time_candidates({"a": back, "b": timer.call(2e-4)}, TimingSettings(rounds=20), timer)
    assert found["a"].error is None
    assert found["a"].times_us == pytest.approx([100.0] * len(found["a"].times_us))
    assert facts(found["a"])["wall_s"] >= 0


# ------------------------------------------------------------------------------- hot against cold


class Cache(ScriptedTimer):
    """Holds one candidate's weights; who finds its own there takes ``hot`` and not ``cold`` us."""

    holds = ""

    def layer(self, name: str, cold: float, hot: float) -> Call:
        def call() -> None:
            self.clock += (hot if self.holds == name else cold) * 1e-6
            self.holds = name

        return call

    def sample(self, call: Call, repeats: int) -> Sample:
        if self.cold:
            self.holds = ""
        return super().sample(call, repeats)


def test_what_the_flush_is_for() -> None:
    """Weights smaller than the cache: without a flush the order is another one."""

    def order(cold: bool) -> list[str]:
        timer = Cache(cold=cold)
        calls = {"small": timer.layer("small", 200, 50), "streams": timer.layer("streams", 100, 95)}
        settings = TimingSettings(cache="cold" if cold else "hot", rounds=10, race=False)
        found = time_candidates(calls, settings, timer)
        return sorted(found, key=lambda name: sorted(found[name].times_us)[2])

    assert order(cold=True) == ["streams", "small"]
    assert order(cold=False) == ["small", "streams"]


# --------------------------------------------------------------------------------- many, and few


def test_hundreds_of_candidates_are_settled_without_a_race_of_each() -> None:
    """A quarter of them are in the running for long, and none of the far ones is."""
    timer = OneByOne()
    truth = {n: 100.0 * (1 + n / 100) for n in range(600)}
    calls = {n: noisy(timer, us, 0.005, n) for n, us in truth.items()}
    found = time_candidates(calls, TimingSettings(limit_s=1e9, rounds=25), timer)
    taken = {n: len(samples.times_us) for n, samples in found.items()}
    assert not facts(found[0])["eliminated"]
    assert sum(taken.values()) < 0.4 * 25 * len(truth)
    assert max(taken[n] for n in truth if truth[n] > 300) <= 12


def test_one_sample_of_each_says_which_looks_faster_and_that_it_is_not_settled() -> None:
    timer = OneByOne()
    calls = {"a": timer.call(1e-4), "b": timer.call(1.05e-4), "c": timer.call(3e-4)}
    found = time_candidates(calls, TimingSettings(rounds=1), timer)
    assert [len(samples.times_us) for samples in found.values()] == [1, 1, 1]
    assert not any(facts(samples)["eliminated"] for samples in found.values())


@pytest.mark.parametrize("budget_s", [1e-12, 1e-6, math.inf])
def test_a_budget_below_one_call_gives_everyone_a_sample(budget_s: float) -> None:
    timer = OneByOne(flush_s=0.01)
    settings = TimingSettings(budget_s=budget_s, limit_s=1e9, rounds=3, race=False)
    found = time_candidates({"a": timer.call(0.5), "b": timer.call(0.2)}, settings, timer)
    counts = [len(samples.times_us) for samples in found.values()]
    assert counts == ([3, 3] if budget_s == math.inf else [1, 1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wait_quiet_s", -1.0), ("wait_quiet_s", math.inf), ("wait_quiet_s", math.nan),
        ("burst_us", 0.0), ("burst_us", math.nan), ("flush_bytes", -1),
        ("limit_s", math.nan), ("budget_s", -1.0), ("epsilon", math.nan), ("confidence", math.nan),
    ],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(name: str, value: float) -> None:
    with pytest.raises(AutoselError, match=rf"TimingSettings\.{name}: value: found"):
        TimingSettings(**{name: value})
