"""Candidates that harm the device: only they are marked, and the parent can still use it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from autosel import registry
from autosel.device import detect
from autosel.interfaces import Backend
from autosel.sources import RandomSource
from autosel.store import Store
from autosel.timing import TimingSettings
from autosel.tune import sweep
from autosel.tune_types import SweepSettings
from autosel.worker_compile import CompilePool
from autosel.worker_limits import StepLimits
from autosel.worker_wire import Compile
from tests.fakes import PROBLEM
from tests.worker import misbehaving as m

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LIMIT_S = 20.0


class IllegalAddress(m.Good):
    """Faults asynchronously: the call itself returns, and the fault shows at the next wait."""

    name = "illegal_address"

    def misbehave(self, x: torch.Tensor) -> None:
        from tests.gpu.bad_kernels import write_far_away

        write_far_away[(1,)](x, 1 << 42)


class DeviceAssert(m.Good):
    name = "device_assert"

    def misbehave(self, x: torch.Tensor) -> None:
        x[torch.tensor([1 << 30], device=x.device)]


class EndlessKernel(m.Good):
    name = "endless_kernel"

    def misbehave(self, x: torch.Tensor) -> None:
        for _ in range(1000):
            torch.cuda._sleep(1 << 40)


class TakesDeviceMemory(m.Good):
    name = "device_memory"

    def misbehave(self, x: torch.Tensor) -> None:
        hold = []
        while True:
            hold.append(torch.empty(1 << 30, device=x.device))


class LeaksInTiming(IllegalAddress):
    name = "illegal_in_timing"
    after = 4


BAD: dict[type[m.Good], tuple[str, str]] = {
    IllegalAddress: ("crashed", "illegal memory access"),
    DeviceAssert: ("crashed", "device-side assert"),
    EndlessKernel: ("timeout", f"no end after {LIMIT_S:g} s"),
    TakesDeviceMemory: ("oom", "out of memory"),
    m.Segfault: ("crashed", "SIGSEGV"),
    LeaksInTiming: ("crashed", "illegal memory access"),
}


@pytest.fixture(scope="module", autouse=True)
def _context() -> Iterator[None]:
    torch.ones(1, device="cuda").sum().item()
    yield
    torch.cuda.empty_cache()


def test_only_the_culprit_is_marked_and_the_parents_context_lives(tmp_path: Path) -> None:
    held = torch.arange(1000, device="cuda")
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    kinds = [m.Slow, *BAD, m.Fast]
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(registry.register(kind))
        store = stack.enter_context(Store.open(tmp_path / "a.db"))
        settings = SweepSettings(
            (m.TOKENS,),
            backends=tuple(kind.name for kind in kinds),
            timing=TimingSettings(rounds=3, graph=False, race=False),
            limits=StepLimits(pack_s=60, first_call_s=LIMIT_S, verify_s=120, call_s=LIMIT_S),
        )
        result = sweep(RandomSource(PROBLEM), settings, device=detect("cuda"), store=store)
    rows = {row.candidate.backend: row for row in result.measurements}
    for kind, (status, words) in BAD.items():
        row = rows[kind.name]
        assert (row.status, words in row.reason) == (status, True), (kind.name, row)
    assert rows["slow"].status == rows["fast"].status == "ok"
    # The asynchronous fault is the culprit's and nobody else's; memory is back.
    assert int(held.sum()) == 499500
    torch.cuda.empty_cache()
    after, _ = torch.cuda.mem_get_info()
    assert after > free - (1 << 30)


def test_what_was_compiled_ahead_is_what_the_launch_looks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real call after it builds no further kernel."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    backend: Backend = registry.get("wna16_tiled")
    device = detect("cuda")
    from autosel.core import Problem, QuantScheme
    from autosel.expert_map import localize
    from autosel.routing_synthetic import make_routing

    scheme = QuantScheme(4, 128, True)
    problem = Problem(8, 8, 2, 512, 256, scheme, scheme)
    if not backend.supports(problem, device):
        pytest.skip(str(backend.supports(problem, device)))
    for num_tokens in (1, 16, 256):
        params = backend.space(problem, num_tokens, device).default
        with open(tmp_path / "cases", "w+b") as cases:
            pool = CompilePool(StepLimits(), cases, most=1)
            try:
                (job,) = pool.submit(
                    [Compile(backend.name, None, problem, params, num_tokens, device)]
                )
                pool.wait(lambda job=job: job.is_over)
                assert job.ms is not None, f"nothing was compiled ahead at {num_tokens}"
            finally:
                pool.close()
        ahead = {p.parent.name for p in (tmp_path / "cache").rglob("*.cubin")}
        experts = RandomSource(problem).load("cuda")
        packed = backend.layout(problem, params).pack(experts)
        x = torch.randn(num_tokens, 512, device="cuda", dtype=torch.bfloat16)
        routing = localize(make_routing("uniform", num_tokens, problem, device="cuda"), problem)
        backend.run(packed, x, routing, params, torch.empty_like(x))
        torch.cuda.synchronize()
        built = {p.parent.name for p in (tmp_path / "cache").rglob("*.cubin")}
        assert built == ahead, f"{len(built - ahead)} kernels were built anew at {num_tokens}"


def test_the_worker_uses_the_device_that_is_current_here() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
    index = torch.cuda.device_count() - 1

    class Says(m.Good):
        name = "says"

        def misbehave(self, x: torch.Tensor) -> None:
            raise RuntimeError(f"on {x.device} of {os.getpid()}")

    with torch.cuda.device(index), registry.register(Says):
        settings = SweepSettings((m.TOKENS,), backends=("says",))
        result = sweep(RandomSource(PROBLEM), settings, device=detect("cuda", index))
    assert f"on cuda:{index}" in result.measurements[0].reason
