"""Kernels compiled by helpers, several at once, lie in the cache that the launch looks into."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from autosel import registry
from autosel.core import Candidate, Device, Params, Problem, QuantScheme
from autosel.interfaces import Backend, Space
from autosel.sources import RandomSource
from autosel.timing import TimingSettings
from autosel.tune import sweep
from autosel.tune_types import Observer, SweepSettings
from autosel.worker_compile import CompilePool, compiles_ahead
from autosel.worker_limits import StepLimits
from autosel.worker_wire import pack_backend
from tests.fakes import CPU, PROBLEM
from tests.worker import misbehaving as m

pytestmark = pytest.mark.skipif(os.name != "posix", reason="workers need sessions of processes")

HOPPER = Device(kind="cuda", name="pretended", capability=(9, 0), shared_memory_bytes=232448)


class Compiling(m.Good):
    """Writes a file for every setting; some settings take the compiler down."""

    name = "compiling"

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def compile_ahead(
        self, problem: Problem, params: Params, num_tokens: int, device: Device
    ) -> None:
        if params["tile"] == 3:
            os.abort()
        if params["tile"] == 4:
            raise RuntimeError("no such tile")
        if params["tile"] == 5:
            time.sleep(1000)
        started = Path(self.folder, f"started-{os.getpid()}")
        started.touch()
        deadline = time.monotonic() + 20
        # Both helpers must be at work at once.
        while len(list(Path(self.folder).glob("started-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        Path(self.folder, f"built-{params['tile']}-{num_tokens}").write_text(problem.key)


def test_helpers_work_at_once_and_may_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autosel.cpuinfo.usable_cpus", lambda: {0, 1})
    backend = Compiling(str(tmp_path))
    assert compiles_ahead(backend)
    assert not compiles_ahead(m.Fast())
    before = threading.active_count()
    with open(tmp_path / "cases", "w+b") as cases:
        pool = CompilePool(StepLimits(first_call_s=30), cases)
        try:
            points: list[dict[str, Any]] = [{"tile": tile} for tile in (1, 2, 3, 4, 6)]
            args = (backend.name, pack_backend(backend), PROBLEM, CPU)
            took = pool.compile(*args, points, 8)
        finally:
            pool.close()
    assert [ms is not None for ms in took] == [True, True, False, False, True]
    built = sorted(path.name for path in tmp_path.glob("built-*"))
    assert built == ["built-1-8", "built-2-8", "built-6-8"]
    assert len(list(tmp_path.glob("started-*"))) >= 2
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before


def test_a_hanging_compiler_is_ended(tmp_path: Path) -> None:
    backend = Compiling(str(tmp_path))
    with open(tmp_path / "cases", "w+b") as cases:
        pool = CompilePool(StepLimits(first_call_s=0.5), cases, most=1)
        try:
            args = (backend.name, pack_backend(backend), PROBLEM, CPU)
            assert pool.compile(*args, [{"tile": 5}], 8) == [None]
        finally:
            pool.close()


def test_a_sweep_compiles_ahead_and_reports_the_time_with_the_first_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autosel.cpuinfo.usable_cpus", lambda: {0, 1})
    steps: list[tuple[str, str]] = []

    class Says(Observer):
        def step(self, what: str, num_tokens: int, candidate: Candidate | None = None) -> None:
            steps.append((what, candidate.backend if candidate else ""))

    class Tiles(Compiling):
        """Compiles for a while, which a first call alone does not take."""

        def space(self, problem: Problem, num_tokens: int, device: Device) -> Space:
            return Space({"tile": 0}, {"tile": (0, 1, 2, 3)})

        def compile_ahead(
            self, problem: Problem, params: Params, num_tokens: int, device: Device
        ) -> None:
            super().compile_ahead(problem, params, num_tokens, device)
            time.sleep(0.5)

    settings = SweepSettings(
        (m.TOKENS,), backends=("compiling",),
        timing=TimingSettings(rounds=1, samples_per_round=1, flush_bytes=1 << 20),
    )  # fmt: skip
    with registry.register(Tiles(str(tmp_path))):
        result = sweep(RandomSource(PROBLEM), settings, observer=Says())
    rows = {row.candidate.params_dict["tile"]: row for row in result.measurements}
    assert {row.status for row in rows.values()} == {"ok"}, [r.reason for r in rows.values()]
    # The default is tried at once; the others are compiled together before they are.
    assert [s for s, _ in steps if s in ("compile", "first call")] \
        == ["first call", "compile", *["first call"] * 3]  # fmt: skip
    # The helper of the last setting died; its own first call is all that it took.
    for tile in (1, 2):
        first_call_ms = rows[tile].first_call_ms
        assert first_call_ms is not None
        assert first_call_ms >= 500
    assert sorted(p.name for p in tmp_path.glob("built-*")) == ["built-1-5", "built-2-5"]


@pytest.mark.slow
def test_our_kernels_compile_ahead_into_tritons_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU; a second compilation of the same setting builds nothing."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    backend: Backend = registry.get("wna16_tiled")
    assert compiles_ahead(backend)
    scheme = QuantScheme(4, 128, True)
    problem = Problem(8, 8, 2, 512, 256, scheme, scheme)
    point = backend.space(problem, 1, HOPPER).default
    built = []
    for _ in range(2):
        with open(tmp_path / "cases", "w+b") as cases:
            pool = CompilePool(StepLimits(), cases, most=1)
            try:
                (ms,) = pool.compile(backend.name, None, problem, HOPPER, [point], 1)
            finally:
                pool.close()
        assert ms is not None
        built.append({str(p) for p in (tmp_path / "cache").rglob("*.cubin")})
    assert built[0], "nothing was compiled"
    assert built[0] == built[1]
