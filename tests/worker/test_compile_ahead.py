"""Kernels compiled by helpers, several at once, lie in the cache that the launch looks into."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from contextlib import ExitStack
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
from autosel.worker_compile import NICE, Compilation, CompilePool, compiles_ahead
from autosel.worker_limits import StepLimits
from autosel.worker_wire import Compile, pack_backend
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
        Path(self.folder, "niceness").write_text(str(os.nice(0)))
        deadline = time.monotonic() + 20
        # Both helpers must be at work at once.
        while len(list(Path(self.folder).glob("started-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        Path(self.folder, f"built-{params['tile']}-{num_tokens}").write_text(problem.key)


class Pool:
    """A pool, and jobs for it as the sweep makes them."""

    def __init__(self, folder: Path, limits: StepLimits | None = None, most: int = 64) -> None:
        self.cases = open(folder / "cases", "w+b")  # noqa: SIM115 - closed below
        self.pool = CompilePool(limits or StepLimits(first_call_s=60), self.cases, most)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()
        self.cases.close()

    def submit(self, backend: Backend, points: list[dict[str, Any]]) -> list[Compilation]:
        data = pack_backend(backend)
        return self.pool.submit(
            Compile(backend.name, data, PROBLEM, params, 8, CPU) for params in points
        )

    def finish(self, jobs: list[Compilation]) -> list[bool]:
        """Wait for all; which came to a good end."""
        self.pool.wait(lambda: all(job.is_over for job in jobs))
        return [job.ms is not None for job in jobs]


def test_helpers_work_at_once_and_may_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autosel.cpuinfo.usable_cpus", lambda: {0, 1})
    backend = Compiling(str(tmp_path))
    assert compiles_ahead(backend)
    assert not compiles_ahead(m.Fast())
    before = threading.active_count()
    with Pool(tmp_path) as pool:
        jobs = pool.submit(backend, [{"tile": tile} for tile in (1, 2, 3, 4, 6)])
        assert pool.finish(jobs) == [True, True, False, False, True]
    # Who is waited for goes first.
    assert int(Path(tmp_path, "niceness").read_text()) == max(NICE, os.nice(0))
    built = sorted(path.name for path in tmp_path.glob("built-*"))
    assert built == ["built-1-8", "built-2-8", "built-6-8"]
    assert len(list(tmp_path.glob("started-*"))) >= 2
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before


def test_a_helper_stays_for_the_next_job(tmp_path: Path) -> None:
    """A process asks to be ended with the thread that started it: that thread must stay, too."""
    with Pool(tmp_path, most=1) as pool:
        for tile in (6, 7):  # the second one comes when the first has long been done
            Path(tmp_path, "started-other").touch()
            assert pool.finish(pool.submit(Compiling(str(tmp_path)), [{"tile": tile}])) == [True]
            time.sleep(0.5)
    assert len(list(tmp_path.glob("started-*"))) == 2, "one helper and the one made up here"


def test_a_hanging_compiler_is_ended(tmp_path: Path) -> None:
    with Pool(tmp_path, StepLimits(first_call_s=0.5), most=1) as pool:
        assert pool.finish(pool.submit(Compiling(str(tmp_path)), [{"tile": 5}])) == [False]


def test_helpers_stand_still_while_something_is_timed(tmp_path: Path) -> None:
    """They and what they started, and that time is nobody's; then they go on."""
    limit_s = 4.0
    with Pool(tmp_path, StepLimits(first_call_s=limit_s), most=1) as pool:
        (job,) = pool.submit(Ticking(str(tmp_path)), [{}])
        ticks = [tmp_path / "ticks-own", tmp_path / "ticks-child"]
        deadline = time.monotonic() + 60
        while not all(t.exists() and t.stat().st_size for t in ticks):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pool.pool.standing_still():
            time.sleep(0.2)
            found = [t.stat().st_size for t in ticks]
            time.sleep(limit_s)
            assert [t.stat().st_size for t in ticks] == found
            assert not job.is_over
        (tmp_path / "enough").touch()
        assert pool.finish([job]) == [True]
        assert all(t.stat().st_size > n for t, n in zip(ticks, found, strict=True))
        assert job.ms is not None
        assert job.ms < limit_s * 1e3


class Ticking(m.Good):
    """Writes to a file again and again, and so does a process that it starts."""

    name = "ticking"

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def compile_ahead(
        self, problem: Problem, params: Params, num_tokens: int, device: Device
    ) -> None:
        folder = self.folder
        loop = (
            "while [ ! -e enough ]; do echo >> ticks-child; sleep 0.02; done; echo >> ticks-child"
        )
        child = subprocess.Popen(["/bin/sh", "-c", loop], cwd=folder)
        with open(Path(folder, "ticks-own"), "a") as ticks:
            while not Path(folder, "enough").exists() or child.poll() is None:
                print(file=ticks, flush=True)
                time.sleep(0.02)
            print(file=ticks, flush=True)


def test_a_sweep_compiles_ahead_and_reports_the_time_with_the_first_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autosel.cpuinfo.usable_cpus", lambda: {0, 1})

    class Tiles(Compiling):
        """Compiles for a while, which a first call alone does not take."""

        def space(self, problem: Problem, num_tokens: int, device: Device) -> Space:
            return Space({"tile": 0}, {"tile": (0, 1, 2, 3)})

        def compile_ahead(
            self, problem: Problem, params: Params, num_tokens: int, device: Device
        ) -> None:
            Path(tmp_path, "started-other").touch()
            super().compile_ahead(problem, params, num_tokens, device)
            time.sleep(0.5)

    settings = SweepSettings((m.TOKENS,), backends=("compiling",), timing=QUICK)
    with registry.register(Tiles(str(tmp_path))):
        result = sweep(RandomSource(PROBLEM), settings)
    rows = {row.candidate.params_dict["tile"]: row for row in result.measurements}
    assert {row.status for row in rows.values()} == {"ok"}, [r.reason for r in rows.values()]
    # The helper of the last setting died; its own first call is all that it took.
    for tile in (0, 1, 2):
        first_call_ms = rows[tile].first_call_ms
        assert first_call_ms is not None
        assert first_call_ms >= 500
    built = sorted(p.name for p in tmp_path.glob(f"built-*-{m.TOKENS}"))
    assert built == ["built-0-5", "built-1-5", "built-2-5"]


QUICK = TimingSettings(rounds=1, samples_per_round=1, flush_bytes=1 << 20)


#: For a proof the winner's kernels on a layer of extreme weights are compiled, from one token on.
PROOF = {"first-compiled-1", "second-compiled-1"}


class Waits(m.Good):
    """Compiles as long as others have not said that they were there."""

    def __init__(self, folder: str, until: str, counts: tuple[int, ...] = ()) -> None:
        self.folder, self.until, self.counts = folder, until, counts

    def compile_ahead(
        self, problem: Problem, params: Params, num_tokens: int, device: Device
    ) -> None:
        Path(self.folder, f"{self.name}-compiles-{num_tokens}").touch()
        deadline = time.monotonic() + 60
        while not Path(self.folder, self.until).exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.until} never came")
            time.sleep(0.01)
        Path(self.folder, f"{self.name}-compiled-{num_tokens}").touch()

    def compiled_counts(
        self, problem: Problem, params: Params, token_counts: Any, device: Device
    ) -> Any:
        return [n for n in token_counts if n in (token_counts[0], *self.counts)]

    def run(self, packed: Any, x: Any, routing: Any, params: Any, out: Any) -> Any:
        Path(self.folder, f"{self.name}-runs").touch()
        Path(self.folder, f"{self.name}-runs-{len(x)}").touch()
        return super().run(packed, x, routing, params, out)


class First(Waits):
    name = "first"


class Second(Waits):
    name = "second"


class Plain(m.Good):
    name = "plain"

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def run(self, packed: Any, x: Any, routing: Any, params: Any, out: Any) -> Any:
        Path(self.folder, "plain-runs").touch()
        return super().run(packed, x, routing, params, out)


def swept(tmp_path: Path, *backends: Backend, **options: Any) -> tuple[Any, list[str]]:
    """A sweep with these backends; whose first calls and compilers it said it waited for."""
    steps: list[str] = []

    class Says(Observer):
        def step(self, what: str, num_tokens: int, candidate: Candidate | None = None) -> None:
            if what in ("compile", "first call") and candidate is not None:
                steps.append(f"{what} {candidate.backend}")

    names = tuple(backend.name for backend in backends)
    counts = options.pop("counts", (m.TOKENS,))
    settings = SweepSettings(counts, backends=names, timing=QUICK, **options)
    with ExitStack() as stack:
        for backend in backends:
            stack.enter_context(registry.register(backend))
        return sweep(RandomSource(PROBLEM), settings, observer=Says()), steps


def test_all_backends_compile_at_once_while_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first compiles until the plain one runs, the second until the first compiles for a
    token count of verification: one after the other, neither would ever end."""
    monkeypatch.setattr("autosel.cpuinfo.usable_cpus", lambda: {0, 1, 2})
    where = str(tmp_path)
    first = First(where, "plain-runs", (17, 64))
    second = Second(where, "first-compiles-17")
    result, steps = swept(tmp_path, first, second, Plain(where))
    assert {row.status for row in result.measurements} == {"ok"}
    assert next(s for s in steps if s.startswith("first call")) == "first call plain"
    compiled = {path.name for path in tmp_path.glob("*-compiled-*")} - PROOF
    assert compiled == {
        "first-compiled-5", "first-compiled-17", "first-compiled-64", "second-compiled-5",
    }  # fmt: skip


def test_who_fails_to_compile_ahead_says_why_in_its_own_first_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autosel.cpuinfo.usable_cpus", lambda: {0, 1})

    class Broken(First):
        def compile_ahead(self, *_: Any) -> None:
            raise RuntimeError("from the helper")

        def run(self, packed: Any, x: Any, routing: Any, params: Any, out: Any) -> Any:
            raise RuntimeError("no such instruction on this device")

    class Dies(Second):
        def compile_ahead(self, *_: Any) -> None:
            os.abort()

    result, _ = swept(tmp_path, Broken("", ""), Dies(str(tmp_path), ""))
    rows = {row.candidate.backend: row for row in result.measurements}
    assert rows["first"].status == "failed"
    assert "no such instruction" in rows["first"].reason
    assert rows["second"].status == "ok"
    assert rows["second"].first_call_ms is not None


def test_a_compiler_that_hung_is_not_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One such kernel cost its limit twice, and at every token count anew."""
    monkeypatch.setattr("autosel.cpuinfo.usable_cpus", lambda: {0, 1})

    class Hangs(First):
        def compile_ahead(self, *_: Any) -> None:
            time.sleep(1000)

        def run(self, packed: Any, x: Any, routing: Any, params: Any, out: Any) -> Any:
            Path(self.folder, "called").touch()
            raise RuntimeError("it was called all the same")

    result, _ = swept(
        tmp_path, Hangs(str(tmp_path), ""), Second(str(tmp_path), ""),
        limits=StepLimits(first_call_s=8),
    )  # fmt: skip
    rows = {row.candidate.backend: row for row in result.measurements}
    assert (rows["first"].status, rows["second"].status) == ("timeout", "ok")
    assert rows["first"].reason.startswith("first compile: no end after 8 s")
    assert not (tmp_path / "called").exists()


def test_time_that_is_up_ends_the_waiting_and_what_has_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose compiler never ends is left out; whose job waited for that helper never compiles."""
    monkeypatch.setattr("autosel.cpuinfo.usable_cpus", lambda: {0})
    where = str(tmp_path)
    never = First(where, "no-such-file")
    behind = Second(where, "plain-runs")
    result, _ = swept(tmp_path, Plain(where), never, behind, budget_s=4.0)
    assert {row.candidate.backend for row in result.measurements} == {"plain"}
    assert result.decision(m.TOKENS).winner.backend == "plain"
    (cut,) = result.cuts
    assert {text.split()[0].split("[")[0] for text in cut.untried} == {"first", "second"}
    assert {p.name for p in tmp_path.glob("*-compiles-*")} == {"first-compiles-5"}


def test_a_worker_that_dies_while_others_compile_loses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autosel.cpuinfo.usable_cpus", lambda: {0, 1})

    class Falls(Plain):
        name = "falls"

        def run(self, packed: Any, x: Any, routing: Any, params: Any, out: Any) -> Any:
            Path(self.folder, "fell").touch()
            os.abort()

    late = First(str(tmp_path), "fell", (17,))
    result, _ = swept(tmp_path, Falls(str(tmp_path)), late)
    rows = {row.candidate.backend: row.status for row in result.measurements}
    assert rows == {"falls": "crashed", "first": "ok"}
    compiled = {path.name for path in tmp_path.glob("*-compiled-*")} - PROOF
    assert compiled == {"first-compiled-5", "first-compiled-17"}


def test_the_next_token_count_compiles_while_this_one_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autosel.cpuinfo.usable_cpus", lambda: {0, 1})

    class Patient(Plain):
        """Its calls wait for a compiler of the token count that comes after."""

        def run(self, packed: Any, x: Any, routing: Any, params: Any, out: Any) -> Any:
            deadline = time.monotonic() + 60
            while not Path(self.folder, "first-compiled-11").exists():
                if time.monotonic() > deadline:
                    raise RuntimeError("nothing was compiled for the next token count")
                time.sleep(0.01)
            return super().run(packed, x, routing, params, out)

    where = str(tmp_path)
    # A count of verification too: a candidate that was right is not verified, nor compiled, again.
    first = First(where, "first-compiles-5", (17,))
    result, _ = swept(tmp_path, Patient(where), first, counts=(m.TOKENS, 11))
    assert {row.status for row in result.measurements} == {"ok"}
    assert len(result.measurements) == 4


def test_what_was_dropped_is_compiled_when_it_is_wanted_again(tmp_path: Path) -> None:
    with Pool(tmp_path, most=1) as pool:
        first, second = pool.submit(Ticking(str(tmp_path)), [{}, {}])
        pool.pool.wait(lambda: (tmp_path / "ticks-own").exists())
        pool.pool.drop([first, second])
        assert not first.is_over
        assert second.was_dropped
        (tmp_path / "enough").touch()
        assert pool.finish([first, second]) == [True, False]
        assert pool.finish(pool.submit(Ticking(str(tmp_path)), [{}])) == [True]


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
        with Pool(tmp_path, StepLimits(), most=1) as pool:
            jobs = pool.pool.submit([Compile(backend.name, None, problem, point, 1, HOPPER)])
            assert pool.finish(jobs) == [True]
        built.append({str(p) for p in (tmp_path / "cache").rglob("*.cubin")})
    assert built[0], "nothing was compiled"
    assert built[0] == built[1]
