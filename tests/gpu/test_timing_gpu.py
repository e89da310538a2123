"""The GPU timer on a real device, against clocks and kernels whose behaviour is known."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
import torch

from autosel.core import Candidate, Device, ErrorFigures, Measurement, Problem, QuantScheme
from autosel.decide import decide
from autosel.device import detect
from autosel.timing import TimedSamples, TimingSettings, time_candidates, timer_for
from autosel.timing_gpu import GpuTimer, flush_bytes
from autosel.timing_nvml import throttled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SCHEME = QuantScheme(4, 128, True)
PROBLEM = Problem(8, 8, 2, 256, 128, SCHEME, SCHEME)
NEAR = ErrorFigures(1e-3, 2e-3, 1e-2, 0.0)


@pytest.fixture(autouse=True)
def _fresh_memory() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def timed(call, **settings) -> TimedSamples:
    chosen = TimingSettings(**{"rounds": 20, "race": False, **settings})
    return time_candidates({"x": call}, chosen, timer_for(detect("cuda"), chosen))["x"]


def median(found: TimedSamples) -> float:
    assert found.error is None, found.error
    ordered = sorted(found.times_us)
    return ordered[len(ordered) // 2]


def facts(found: TimedSamples) -> dict:
    return dict(found.timing)


def test_a_graph_and_eager_calls_agree_for_a_long_kernel() -> None:
    """Milliseconds of work: the launch no longer counts."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)

    def call() -> None:
        torch.mm(a, a, out=out)

    graph, eager = timed(call), timed(call, graph=False)
    assert facts(graph)["captured"] is True
    assert facts(eager)["captured"] is False
    assert (facts(graph)["graph"], facts(eager)["graph"]) == (True, False)
    assert median(graph) == pytest.approx(median(eager), rel=0.05)


def test_a_graph_hides_the_launches_of_many_small_kernels() -> None:
    """100 tiny kernels: eager, the host's launches count; in a graph they do not."""
    a = torch.zeros(64, device="cuda")

    def call() -> None:
        for _ in range(100):
            a.add_(1)

    assert median(timed(call)) < 0.85 * median(timed(call, graph=False))


def test_the_flush_makes_a_small_read_cold() -> None:
    """16 MiB stay in L2 when nothing pushes them out. Reading them from memory takes longer."""
    small = torch.randn(4 << 20, device="cuda")
    out = torch.empty((), device="cuda")

    def call() -> None:
        torch.sum(small, dim=0, out=out)

    cold, hot = timed(call), timed(call, cache="hot")
    assert facts(cold)["flush_bytes"] >= 4 * (detect("cuda").cache_bytes or 0)
    assert facts(hot)["flush_bytes"] == 0
    assert median(cold) > median(hot)


def test_a_flush_that_evicts_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: as long as a flush, but it reads 1 MiB over and over."""
    small = torch.randn(4 << 20, device="cuda")
    out = torch.empty((), device="cuda")
    little, sink = torch.ones(1 << 18, device="cuda"), torch.empty((), device="cuda")

    def call() -> None:
        torch.sum(small, dim=0, out=out)

    cold = timed(call)

    def flush(self: GpuTimer) -> None:
        for _ in range(20):
            torch.sum(little, dim=0, out=sink)

    monkeypatch.setattr(GpuTimer, "_flush", flush)
    assert median(cold) > 1.1 * median(timed(call))


def test_a_sample_has_no_start_of_a_graph() -> None:
    """One small kernel takes about 2 us; events around a replay measure its start as well."""
    a = torch.zeros(64, device="cuda")
    found = timed(lambda: a.add_(1))
    assert facts(found)["event_nodes"] is True
    assert median(found) < 4


def test_the_flush_is_not_inside_the_timed_part() -> None:
    a = torch.zeros(64, device="cuda")
    usual = timed(lambda: a.add_(1), flush_bytes=flush_bytes(detect("cuda")))
    large = timed(lambda: a.add_(1), flush_bytes=2 << 30)
    assert median(large) < median(usual) + 5
    assert median(large) < 30


def test_a_copy_has_a_plausible_bandwidth() -> None:
    """1 GiB read and 1 GiB written, against 2 TB/s to 5 TB/s for an H200 (4.8 TB/s by its data
    sheet) and never more than 10 TB/s on anything."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    gbps = 2 * source.numel() * 4 / median(timed(lambda: target.copy_(source))) / 1e3
    assert 100 < gbps < 10_000
    if "H200" in torch.cuda.get_device_name():
        assert 2500 < gbps < 4900


def test_events_agree_with_the_wall_clock_over_many_replays() -> None:
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    settings = TimingSettings(cache="hot", burst_us=1)
    timer = GpuTimer(detect("cuda"), settings)
    call = timer.prepare(lambda: torch.mm(a, a, out=out), settings).call
    for _ in range(50):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    by_events = timer.sample(call, 500).us
    by_wall = (time.perf_counter() - start) * 1e6 / 500
    assert by_events == pytest.approx(by_wall, rel=0.05)


@pytest.mark.parametrize(("size", "real"), [(512, 0.05), (2048, 0.0)])
def test_equal_candidates_have_no_winner(size: int, real: float) -> None:
    """The same work on the same memory under two names: a tie, and the order decides.

    Two copies would not be equal: where a copy lies in memory is a real difference. So is, for 3 us
    of work, where a graph lies: 3 of 10 pairs on an H200 were told apart, by a per cent or two.
    """
    device = detect("cuda")
    settings = TimingSettings()
    weights = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(weights)

    def call() -> None:
        torch.mm(weights, weights, out=out)

    false_winners = 0
    for _ in range(10):
        timer = timer_for(device, settings)
        found = time_candidates({"a": call, "b": lambda: call()}, settings, timer)
        decision = decide([row(name, device, samples) for name, samples in found.items()])
        assert decision.margin is not None
        false_winners += not decision.tie and decision.margin > real
    assert false_winners <= 1


def row(name: str, device: Device, found: TimedSamples) -> Measurement:
    assert found.error is None
    return Measurement(
        PROBLEM, 1, "uniform", Candidate.of(name), device, "ok",
        times_us=found.times_us, timing=found.timing, errors=NEAR,
    )  # fmt: skip


def test_a_clear_winner_needs_few_samples() -> None:
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    device, settings = detect("cuda"), TimingSettings()

    def call(times: int) -> None:
        for _ in range(times):
            torch.mm(a, a, out=out)

    found = time_candidates(
        {"once": lambda: call(1), "twice": lambda: call(2), "four": lambda: call(4)},
        settings,
        timer_for(device, settings),
    )
    decision = decide([row(name, device, samples) for name, samples in found.items()])
    assert (decision.winner.backend, decision.tie) == ("once", False)
    assert facts(found["four"])["eliminated"] is True
    assert len(found["four"].times_us) <= 30


def test_what_cannot_be_captured_is_timed_eagerly_and_harms_nothing() -> None:
    """``item`` synchronises, which a capture forbids. The next candidate is captured as usual."""
    a = torch.randn(1024, 1024, device="cuda")
    out = torch.empty_like(a)

    def synchronises() -> None:
        torch.mm(a, a, out=out)
        float(out[0, 0].item())

    settings = TimingSettings(rounds=10, race=False)
    found = time_candidates(
        {"bad": synchronises, "good": lambda: torch.mm(a, a, out=out)},
        settings,
        timer_for(detect("cuda"), settings),
    )
    assert found["bad"].error is None
    assert facts(found["bad"])["captured"] is False
    assert facts(found["bad"])["capture_error"]
    assert "\n" not in str(facts(found["bad"])["capture_error"])
    assert len(found["bad"].times_us) == 10
    assert facts(found["good"])["captured"] is True
    torch.cuda.synchronize()


def test_compilation_is_the_first_call_and_does_not_rank() -> None:
    """A first call that takes long on the host."""
    a = torch.zeros(1 << 20, device="cuda")
    calls = []

    def call() -> None:
        if not calls:
            time.sleep(0.3)
        calls.append(1)
        a.add_(1)

    found = timed(call)
    assert found.first_call_ms is not None
    assert found.first_call_ms >= 300
    assert max(found.times_us) < 100_000


def test_memory_is_returned() -> None:
    def once() -> None:
        a = torch.randn(4096, 4096, device="cuda")
        settings = TimingSettings(rounds=5)
        timer = timer_for(detect("cuda"), settings)
        time_candidates({"x": lambda: a @ a, "y": lambda: a + a}, settings, timer)

    def held() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    once()  # handles and workspaces of libraries stay
    before = held()
    for _ in range(3):
        once()
    assert held() <= before + (1 << 20)


def test_conditions_are_read_or_said_to_be_missing() -> None:
    a = torch.randn(4096, 4096, device="cuda")
    found = timed(lambda: a @ a)
    if "clocks" in facts(found):
        assert str(facts(found)["clocks"]).startswith("not readable: ")
        return
    mhz = [float(x) for x in str(facts(found)["sm_mhz"]).split(",")]
    assert len(mhz) == len(found.times_us)
    assert all(100 < x < 5000 for x in mhz)
    celsius = [float(x) for x in str(facts(found)["celsius"]).split(",")]
    assert all(0 < x < 120 for x in celsius)
    assert isinstance(throttled(facts(found)), str)
    assert 0 <= float(facts(found)["overhead_us"]) < 20
