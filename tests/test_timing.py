"""The engine on a scripted clock, the CPU timer here, the GPU timer on a scripted device."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from autosel import timing_cpu, timing_gpu
from autosel.ceilings import measure_ceilings
from autosel.core import Device, Scalar
from autosel.device import detect
from autosel.errors import AutoselError
from autosel.timing import (
    Call,
    Prepared,
    Sample,
    TimedSamples,
    TimingSettings,
    first_call_ms,
    time_candidates,
    timer_for,
)


class ScriptedTimer:
    """A device whose calls advance a clock of its own; a flush costs ``flush_s``."""

    quantile = 0.2
    block = 5

    def __init__(self, flush_s: float = 0.0, cold: bool = True) -> None:
        self.clock = 0.0
        self.flush_s = flush_s
        self.cold = cold
        self.flushes = 0
        self.busy = 0.0
        self.disturb: Callable[[], bool] = lambda: False

    facts: Mapping[str, Scalar] = {"cache": "cold", "clock": "scripted"}

    def now(self) -> float:
        return self.clock

    def call(self, seconds: float) -> Call:
        def advance() -> None:
            self.clock += seconds

        return advance

    def run(self, call: Call) -> None:
        call()

    def prepare(self, call: Call, settings: TimingSettings) -> Prepared:
        return Prepared(call, {"captured": False})

    def sample(self, call: Call, repeats: int) -> Sample:
        if self.cold:
            self.clock += self.flush_s
            self.flushes += 1
        start = self.clock
        for _ in range(repeats):
            call()
        return Sample((self.clock - start) * 1e6 / repeats, self.disturb(), {"switches": 0.0})

    def load(self) -> Mapping[str, float]:
        return {"pressure": self.clock / 2}


def facts(samples: TimedSamples) -> dict[str, Scalar]:
    return dict(samples.timing)


def test_samples_are_the_calls_time_and_the_flush_is_outside() -> None:
    timer = ScriptedTimer(flush_s=0.5)
    settings = TimingSettings(rounds=3, samples_per_round=4, limit_s=1e9)
    found = time_candidates({"a": timer.call(100e-6), "b": timer.call(300e-6)}, settings, timer)
    assert found["a"].times_us == pytest.approx([100.0] * 12)
    assert found["b"].times_us == pytest.approx([300.0] * 12)
    assert facts(found["a"])["blocks"] == "4,4,4"
    assert facts(found["a"])["pressure_share"] == pytest.approx(0.5)
    assert facts(found["a"])["captured"] is False
    assert timer.flushes >= 24


def test_a_first_call_that_compiles_is_reported_apart_and_does_not_rank() -> None:
    """First call 3 s, then 50 us, against a steady 100 us."""
    timer = ScriptedTimer()
    calls = {"n": 0}

    def compiles() -> None:
        timer.clock += 3.0 if calls["n"] == 0 else 50e-6
        calls["n"] += 1

    settings = TimingSettings(rounds=5, samples_per_round=5, limit_s=1.0, race=False)
    found = time_candidates({"a": compiles, "b": timer.call(100e-6)}, settings, timer)
    assert found["a"].first_call_ms == pytest.approx(3000)
    assert max(found["a"].times_us) == pytest.approx(50)
    assert max(found["a"].times_us) < min(found["b"].times_us)
    assert len(found["a"].times_us) == 25  # the first call does not eat the limit


def test_blocks_are_interleaved_in_an_order_drawn_for_each_round() -> None:
    def orders() -> list[str]:
        timer = ScriptedTimer()
        order: list[str] = []
        settings = TimingSettings(rounds=60, samples_per_round=1, race=False)
        calls = {name: timer.call(1e-4) for name in "abc"}
        time_candidates(calls, settings, timer, progress=lambda key, number: order.append(key))
        return ["".join(order[start : start + 3]) for start in range(0, 180, 3)]

    found = orders()
    assert all(sorted(one) == ["a", "b", "c"] for one in found)
    firsts = [sum(one[place] == "a" for one in found) for place in range(3)]
    assert min(firsts) >= 10, "everyone is first, second and last about as often"
    assert len(set(found)) == 6, "nobody always follows the same other one"
    assert orders() == found, "ranks and reruns take the same order"


def test_drift_hits_every_candidate_alike() -> None:
    """The machine slows down steadily; the faster candidate still looks faster, by as much."""
    timer = ScriptedTimer()

    def drifting(us: float) -> Call:
        def call() -> None:
            timer.clock += us * 1e-6 * (1 + timer.clock * 40)

        return call

    settings = TimingSettings(rounds=8, samples_per_round=4, limit_s=1e9)
    found = time_candidates({"slow": drifting(110), "fast": drifting(100)}, settings, timer)
    ratio = sorted(found["slow"].times_us)[16] / sorted(found["fast"].times_us)[16]
    assert max(found["fast"].times_us) > 1.2 * min(found["fast"].times_us)
    assert ratio == pytest.approx(1.10, abs=0.03)


@pytest.mark.parametrize("call_s", [2e-6, 1e-3, 0.3])
@pytest.mark.parametrize("flush_s", [0.0, 0.04])
def test_wall_time_stays_within_the_limit_whatever_the_size(call_s: float, flush_s: float) -> None:
    """The flush counts: tiny kernels take no longer than large ones. Margin: a call and a flush."""
    timer = ScriptedTimer(flush_s=flush_s)
    settings = TimingSettings(rounds=5, samples_per_round=100, limit_s=1.0)
    found = time_candidates({"a": timer.call(call_s)}, settings, timer)
    wall = facts(found["a"])["wall_s"]
    assert isinstance(wall, float)
    assert wall <= 1.0 + 2 * (call_s + flush_s)
    assert found["a"].times_us
    limited = call_s + flush_s > 1.0 / 500
    assert facts(found["a"])["limited"] is limited
    if limited:  # what is left is spread over the rounds
        assert str(facts(found["a"])["blocks"]).count(",") >= 2 or call_s == 0.3


def test_one_call_longer_than_the_limit_still_gives_a_sample() -> None:
    timer = ScriptedTimer()
    found = time_candidates({"a": timer.call(50.0)}, TimingSettings(limit_s=1.0), timer)
    assert found["a"].times_us == pytest.approx([50e6])
    assert facts(found["a"])["limited"] is True


def test_hot_samples_are_bursts_and_count_one_call() -> None:
    timer = ScriptedTimer(cold=False)
    settings = TimingSettings(
        cache="hot", burst_us=200.0, rounds=5, samples_per_round=5, race=False
    )
    found = time_candidates({"a": timer.call(10e-6), "b": timer.call(1e-3)}, settings, timer)
    assert facts(found["a"])["repeats"] == 20
    assert found["a"].times_us == pytest.approx([10.0] * 25)
    assert facts(found["b"])["repeats"] == 1


def test_a_candidate_that_raises_keeps_its_error_and_the_others_go_on() -> None:
    timer = ScriptedTimer()
    count = {"n": 0}

    def late() -> None:
        count["n"] += 1
        timer.clock += 1e-4
        if count["n"] > 12:
            raise RuntimeError("late fault")

    def early() -> None:
        raise MemoryError("no room")

    calls = {"late": late, "early": early, "good": timer.call(1e-4)}
    found = time_candidates(calls, TimingSettings(), timer)
    assert str(found["late"].error) == "late fault"
    assert 0 < len(found["late"].times_us) < 25
    assert isinstance(found["early"].error, MemoryError)
    assert found["early"].times_us == ()
    assert found["good"].error is None
    assert len(found["good"].times_us) == 25


def test_an_interrupt_is_not_swallowed_and_collection_comes_back() -> None:
    timer = ScriptedTimer()

    def interrupted() -> None:
        raise KeyboardInterrupt

    assert gc.isenabled()
    with pytest.raises(KeyboardInterrupt):
        time_candidates({"a": interrupted}, TimingSettings(), timer)
    assert gc.isenabled()


def test_disturbed_samples_are_kept_and_made_up_for() -> None:
    """With half of the samples disturbed, a block still has its share of clean ones."""
    timer = ScriptedTimer()
    rng = random.Random(0)
    timer.disturb = lambda: rng.random() < 0.5
    settings = TimingSettings(rounds=4, samples_per_round=10)
    found = time_candidates({"a": timer.call(1e-4)}, settings, timer)
    disturbed = facts(found["a"])["disturbed"]
    assert isinstance(disturbed, int)
    assert disturbed > 0
    assert len(found["a"].times_us) - disturbed >= 35
    timer.disturb = lambda: True  # a machine that is never quiet does not loop for ever
    found = time_candidates({"a": timer.call(1e-4)}, settings, timer)
    assert len(found["a"].times_us) == 3 * 40


def test_no_candidates_is_no_error() -> None:
    assert time_candidates({}, TimingSettings(), ScriptedTimer()) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [("cache", "warm"), ("rounds", 0), ("samples_per_round", 0), ("warmup", -1), ("limit_s", 0.0)],
)
def test_bad_settings_are_refused(name: str, value: Any) -> None:
    with pytest.raises(AutoselError, match=rf"TimingSettings\.{name}"):
        TimingSettings(**{name: value})


# ------------------------------------------------------------------------------------- the CPU


def test_the_flush_exceeds_the_last_level_cache_and_is_recorded() -> None:
    device = detect("cpu")
    settings = TimingSettings(rounds=2)
    found = time_candidates({"a": lambda: None}, settings, timer_for(device, settings))
    size = facts(found["a"])["flush_bytes"]
    assert isinstance(size, int)
    assert size == timing_cpu.flush_bytes(device)
    assert size > (device.cache_bytes or 0)
    assert facts(found["a"])["threads"] == torch.get_num_threads()
    assert facts(found["a"])["cache"] == "cold"
    rates = [float(rate) for rate in str(facts(found["a"])["flush_gbps"]).split(",")]
    assert len(rates) == len(found["a"].times_us)
    assert all(0.01 < rate < 10_000 for rate in rates)


def test_the_flush_is_not_inside_the_timed_part() -> None:
    """Doing nothing takes microseconds; the flush before it takes thousands."""
    device = detect("cpu")
    settings = TimingSettings(rounds=2, samples_per_round=3)
    timer = timer_for(device, settings)
    start = time.perf_counter()
    found = time_candidates({"a": lambda: None}, settings, timer)
    wall_us = (time.perf_counter() - start) * 1e6
    assert min(found["a"].times_us) < 1000
    assert min(found["a"].times_us) < wall_us / len(found["a"].times_us) / 2


def test_flush_size_scales_with_the_cache_and_is_bounded_by_memory() -> None:
    def size(cache: int | None, memory: int | None) -> int:
        return timing_cpu.flush_bytes(
            Device(kind="cpu", name="x", cache_bytes=cache, memory_bytes=memory)
        )

    assert size(None, None) == 64 << 20
    assert size(480 << 20, 64 << 30) == 960 << 20
    assert size(480 << 20, 1 << 30) == 256 << 20
    gpu = Device(kind="cuda", name="x", cache_bytes=60 << 20, memory_bytes=141 << 30)
    assert timing_gpu.flush_bytes(gpu) == 256 << 20


def test_the_flush_really_makes_data_cold() -> None:
    """Reading what fits the caches is slower after a flush. Retried, since others may run."""
    device = detect("cpu")
    data = torch.ones(1 << 18)  # 1 MiB: in the second-level cache when hot
    for _ in range(5):
        best = {}
        for cache in ("cold", "hot"):
            settings = TimingSettings(cache=cache, rounds=3, samples_per_round=7, burst_us=1)  # type: ignore[arg-type]
            found = time_candidates({"a": data.sum}, settings, timer_for(device, settings))
            best[cache] = min(found["a"].times_us)
        if best["cold"] > best["hot"]:
            return
    pytest.fail(f"cold {best['cold']} us is not slower than hot {best['hot']} us")


def test_measured_time_follows_a_known_sleep() -> None:
    settings = TimingSettings(rounds=1, samples_per_round=3, flush_bytes=0)
    timer = timer_for(detect("cpu"), settings)
    found = time_candidates({"a": lambda: time.sleep(0.01)}, settings, timer)
    assert min(found["a"].times_us) == pytest.approx(10_000, rel=0.5)
    assert first_call_ms(lambda: time.sleep(0.01), timer) >= 10


@pytest.mark.skipif(timing_cpu.resource is None, reason="the system counts no context switches")
def test_a_busy_machine_is_seen() -> None:
    """With more spinning threads than processors, samples are disturbed."""
    stop = threading.Event()

    def spin() -> None:
        block = torch.randn(256, 256)
        while not stop.is_set():
            torch.mm(block, block)

    spinners = [threading.Thread(target=spin) for _ in range(3 * (os.cpu_count() or 1))]
    for spinner in spinners:
        spinner.start()
    try:
        settings = TimingSettings(rounds=2, samples_per_round=10, flush_bytes=0)
        block = torch.randn(1024, 1024)
        timer = timer_for(detect("cpu"), settings)
        found = time_candidates({"a": lambda: block @ block}, settings, timer)
    finally:
        stop.set()
        for spinner in spinners:
            spinner.join()
    assert facts(found["a"])["disturbed"]


def test_ceilings_are_positive_plausible_and_quick() -> None:
    """float16 too, which many CPUs multiply hundreds of times slower than float32."""
    start = time.perf_counter()
    found = measure_ceilings(detect("cpu"), "float16", repeats=2)
    assert 0.05 < found.read_gbps < 5000
    assert 1e-4 < found.matmul_tflops < 100
    assert time.perf_counter() - start < 20  # half a second on a quiet machine


# ------------------------------------------------------------------------------------- the GPU


class ScriptedGpu:
    """torch.cuda's surface as the timer uses it. Work is queued and done at synchronisation."""

    def __init__(self, capture_fails: bool = False, event_nodes: bool = True) -> None:
        self.gpu_us = 0.0
        self.event_us = 2.5  # that an event takes itself
        self.log: list[str] = []
        self.capture_fails = capture_fails
        self.capturing: list[Any] | None = None
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool, external: bool = False) -> None:
                assert enable_timing
                if external and not event_nodes:
                    raise TypeError("Event() got an unexpected keyword argument 'external'")
                self.external = external
                self.at = -1.0

            def record(self) -> None:
                if gpu.capturing is not None:
                    assert self.external, "an ordinary event cannot be timed in a graph"
                    gpu.capturing.append(self.mark)
                else:
                    gpu.log.append("record")
                    gpu.gpu_us += gpu.event_us
                    self.mark()

            def mark(self) -> None:
                gpu.gpu_us += gpu.event_us * self.external
                self.at = gpu.gpu_us

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) / 1e3

        class Stream:
            def __init__(self, index: int = 0) -> None:
                pass

            def wait_stream(self, other: object) -> None:
                pass

        class CUDAGraph:
            def __init__(self) -> None:
                self.nodes: list[Any] = []

            def replay(self) -> None:
                gpu.log.append("replay")
                gpu.gpu_us += 5.0  # the start of a graph
                for node in self.nodes:
                    node()

        class Capture:
            def __init__(self, graph: CUDAGraph, **how: object) -> None:
                self.graph = graph

            def __enter__(self) -> None:
                gpu.capturing = self.graph.nodes

            def __exit__(self, *exc: object) -> None:
                gpu.capturing = None
                if gpu.capture_fails and exc[0] is None:
                    raise RuntimeError("operation not permitted when stream is capturing")

        class OnStream:
            def __init__(self, stream: object) -> None:
                pass

            def __enter__(self) -> None:
                pass

            def __exit__(self, *exc: object) -> None:
                pass

        self.Event, self.Stream, self.CUDAGraph = Event, Stream, CUDAGraph
        self.graph, self.stream = Capture, OnStream

    def current_device(self) -> int:
        return 0

    def current_stream(self) -> Any:
        return self.Stream()

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def kernel(self) -> None:
        if self.capturing is not None:
            self.log.append("captured")
            self.capturing.append(self.work)
        else:
            self.log.append("launch")
            self.gpu_us += 60.0  # 40 of work and 20 of launch gap

    def work(self) -> None:
        self.gpu_us += 40.0


GPU = Device(kind="cuda", name="scripted", capability=(9, 0), cache_bytes=1 << 20)


def test_a_graph_is_captured_once_and_its_replays_are_timed() -> None:
    gpu = ScriptedGpu()
    settings = TimingSettings(rounds=2, samples_per_round=3, flush_bytes=4096)
    timer = timing_gpu.GpuTimer(GPU, settings, api=gpu)
    found = time_candidates({"a": gpu.kernel}, settings, timer)
    assert found["a"].times_us == pytest.approx([40.0] * 6)
    assert gpu.log.count("captured") == 1
    assert facts(found["a"])["captured"] is True
    assert facts(found["a"])["graph"] is True
    assert facts(found["a"])["event_nodes"] is True
    assert facts(found["a"])["overhead_us"] == facts(found["a"])["graph_overhead_us"] == 2.5
    assert "replay,synchronize" in ",".join(gpu.log)


def test_a_call_shorter_than_the_events_own_time_has_a_time() -> None:
    gpu = ScriptedGpu()
    settings = TimingSettings(rounds=1, samples_per_round=1, flush_bytes=4096)
    timer = timing_gpu.GpuTimer(GPU, settings, api=gpu)
    found = time_candidates({"a": lambda: None}, settings, timer)
    assert found["a"].times_us == (timing_gpu.LEAST_US,)


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("answer", [0.0, -0.04, float("nan")])
def test_events_that_are_out_of_order_are_no_short_time(graph: bool, answer: float) -> None:
    """Else a candidate of which they tell nothing would take 1 us and win."""
    gpu = ScriptedGpu()
    settings = TimingSettings(rounds=3, samples_per_round=1, flush_bytes=4096, graph=graph)
    timer = timing_gpu.GpuTimer(GPU, settings, api=gpu)
    gpu.Event.elapsed_time = lambda start, end: answer  # type: ignore[method-assign]
    found = time_candidates({"a": gpu.kernel}, settings, timer)
    assert found["a"].times_us == ()
    assert facts(found["a"])["no_time"] == 9


def test_without_event_nodes_the_events_stand_around_the_replay() -> None:
    gpu = ScriptedGpu(event_nodes=False)
    settings = TimingSettings(rounds=2, samples_per_round=3, flush_bytes=4096)
    timer = timing_gpu.GpuTimer(GPU, settings, api=gpu)
    found = time_candidates({"a": gpu.kernel}, settings, timer)
    assert found["a"].times_us == pytest.approx([45.0] * 6), "the start of a graph is in it"
    assert facts(found["a"])["event_nodes"] is False
    assert "record,replay,record,synchronize" in ",".join(gpu.log)


def test_what_cannot_be_captured_is_timed_eagerly_and_says_so() -> None:
    gpu = ScriptedGpu(capture_fails=True)
    settings = TimingSettings(rounds=2, samples_per_round=3, flush_bytes=4096)
    timer = timing_gpu.GpuTimer(GPU, settings, api=gpu)
    found = time_candidates({"a": gpu.kernel}, settings, timer)
    assert found["a"].error is None
    assert found["a"].times_us == pytest.approx([60.0] * 6)
    assert facts(found["a"])["captured"] is False
    assert "capturing" in str(facts(found["a"])["capture_error"])


def test_eager_is_an_option_and_another_way_of_timing() -> None:
    gpu = ScriptedGpu()
    settings = TimingSettings(graph=False, rounds=5, flush_bytes=4096)
    found = time_candidates({"a": gpu.kernel}, settings, timing_gpu.GpuTimer(GPU, settings, gpu))
    assert "captured" not in gpu.log
    assert found["a"].times_us == pytest.approx([60.0] * 5)
    assert facts(found["a"])["graph"] is False


def test_hot_gpu_samples_do_not_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = ScriptedGpu()
    settings = TimingSettings(cache="hot", burst_us=400, rounds=5)
    timer = timing_gpu.GpuTimer(GPU, settings, api=gpu)
    assert timer.facts["flush_bytes"] == 0
    found = time_candidates({"a": gpu.kernel}, settings, timer)
    assert facts(found["a"])["repeats"] == 9
    assert found["a"].times_us == pytest.approx([45.0] * 5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_times_a_copy_near_its_bandwidth() -> None:
    device = detect("cuda")
    settings = TimingSettings()
    source = torch.randn(1 << 28, device="cuda")  # 1 GiB
    target = torch.empty_like(source)
    found = time_candidates(
        {"copy": lambda: target.copy_(source)}, settings, timer_for(device, settings)
    )
    assert facts(found["copy"])["captured"] is True
    gbps = 2 * source.numel() * 4 / min(found["copy"].times_us) / 1e3
    assert gbps < 10_000
    assert gbps > 0.5 * measure_ceilings(device).read_gbps
