"""The timing engine as a race: who is sampled how often, budgets, limits, and what is recorded."""

from __future__ import annotations

import random
from typing import Any

import pytest

from autosel import timing, timing_nvml
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
    from autosel.errors import AutoselError

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
