"""How workers begin and end: the parent killed, interrupted, objects that cannot travel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from autosel import registry
from autosel.core import CanonicalExperts
from autosel.errors import AutoselError, CheckpointError
from autosel.process_state import ProcessState
from autosel.sources import RandomSource
from autosel.store import Store
from autosel.timing import TimingSettings
from autosel.tune import sweep
from autosel.tune_types import SweepSettings
from autosel.worker import Worker, WorkerDiedError
from autosel.worker_limits import StepLimits
from tests.fakes import PROBLEM
from tests.worker import misbehaving as m

pytestmark = pytest.mark.skipif(os.name != "posix", reason="workers need sessions of processes")

ROOT = Path(__file__).resolve().parent.parent.parent

#: Prints the worker's number when a candidate is in its first call, which never ends.
HANGING_SWEEP = """
import os, sys
import psutil
from autosel import registry
from autosel.sources import RandomSource
from autosel.store import Store
from autosel.tune import sweep
from autosel.tune_types import Observer, SweepSettings
from tests.fakes import PROBLEM
from tests.worker import misbehaving as m

class Says(Observer):
    def step(self, what, num_tokens, candidate=None):
        if what == "first call":
            mine = psutil.Process().children(recursive=True)
            print(*[p.pid for p in mine], flush=True)

with registry.register(m.LeavesThenHangs), Store.open(sys.argv[1]) as store:
    sweep(RandomSource(PROBLEM), SweepSettings((5,), backends=("leaves_then_hangs",)),
          store=store, observer=Says())
"""


def started(tmp_path: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A sweep in a process of its own whose candidate hangs, and the processes below it."""
    script = tmp_path / "hang.py"
    script.write_text(HANGING_SWEEP, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "a.db")], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr.read() if process.stderr else ""
    pids = [int(word) for word in line.split()]
    assert pids
    return process, pids


def wait_until_gone(pids: list[int]) -> list[int]:
    deadline = time.monotonic() + 20
    left = pids
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [
            pid
            for pid in left
            if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        ]
    return left


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_end_of_the_parent_leaves_no_worker(tmp_path: Path, number: signal.Signals) -> None:
    process, pids = started(tmp_path)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in errors
        assert process.returncode != 0
    else:
        assert process.returncode == -number
    assert wait_until_gone(pids) == []
    # Being stopped is nobody's fault: the candidate is not in quarantine.
    with Store.open(tmp_path / "a.db") as store:
        assert store.incidents() == []


def test_what_cannot_be_sent_is_refused_with_what_to_do() -> None:
    class Locked(m.Good):
        name = "locked"

        def __init__(self) -> None:
            self.lock = threading.Lock()

    class Local(m.Fast):
        """Defined in a function: no other process can import it."""

        name = "local"

    settings = SweepSettings(
        (m.TOKENS,), backends=("locked", "local"),
        timing=TimingSettings(rounds=1, samples_per_round=1, flush_bytes=1 << 20),
    )  # fmt: skip
    with registry.register(Locked), registry.register(Local):
        result = sweep(RandomSource(PROBLEM), settings)
    rows = {row.candidate.backend: row for row in result.measurements}
    assert rows["local"].status == "ok", rows["local"].reason
    assert rows["locked"].status == "unsupported"
    for words in ("locked", "cannot be sent", "isolate=False"):
        assert words in rows["locked"].reason


class DamagedSource(RandomSource):
    def load(self, device: object = "cpu") -> CanonicalExperts:
        raise CheckpointError("model.safetensors: damaged")


class DyingSource(RandomSource):
    def load(self, device: object = "cpu") -> CanonicalExperts:
        os.abort()


class LockedSource(RandomSource):
    def __reduce__(self) -> str:
        raise TypeError("cannot pickle a mapped file")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (DamagedSource, "^model.safetensors: damaged$"),
        (DyingSource, "worker process: load: took its process down: SIGABRT"),
        (LockedSource, "cannot be sent to the worker process: .*mapped file.*isolate=False"),
    ],
)
def test_weights_that_cannot_be_read_are_the_callers_error(
    source: type[RandomSource], words: str
) -> None:
    settings = SweepSettings((m.TOKENS,), backends=("fast",))
    with registry.register(m.Fast), Store.open(":memory:") as store:
        with pytest.raises(AutoselError, match=words):
            sweep(source(PROBLEM), settings, store=store)
        assert store.measurements() == []
        assert store.incidents() == []


def test_a_worker_that_never_starts_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryFile() as cases:
        worker = Worker(StepLimits(start_s=0.01), cases)
        try:
            with pytest.raises(WorkerDiedError, match=r"no end after 0\.01 s"):
                worker.wait_ready()
        finally:
            worker.end()
        assert not psutil.pid_exists(worker.pid)
        monkeypatch.setattr("autosel.worker._START", "import sys; print('no torch'); sys.exit(9)")
        worker = Worker(StepLimits(), cases)
        try:
            with pytest.raises(WorkerDiedError, match="exit status 9; it last printed: no torch"):
                worker.wait_ready()
        finally:
            worker.end()


def test_limits_must_be_above_zero() -> None:
    with pytest.raises(
        AutoselError, match=r"StepLimits\.pack_s: value: found 0, expected more than"
    ):
        StepLimits(pack_s=0)
    with pytest.raises(AutoselError, match=r"StepLimits\.memory_bytes"):
        StepLimits(memory_bytes=-1)


def test_settings_of_the_process_are_put_back_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    state = ProcessState.now()
    assert state.put_back() == ()
    monkeypatch.setenv("AUTOSEL_TEST_LEAK", "1")
    sys.path.append("/nowhere")
    assert state.put_back() == ("environment", "module path")
    assert "AUTOSEL_TEST_LEAK" not in os.environ
    assert "/nowhere" not in sys.path
    assert "signal handlers" not in ProcessState.now(to_send=True).values


def test_a_script_without_a_main_guard_may_sweep(tmp_path: Path) -> None:
    """A worker does not run the caller's script again, and gets its classes by value."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            print("once")
            from autosel import registry
            from autosel.sources import RandomSource
            from autosel.tune import sweep
            from autosel.tune_types import SweepSettings
            from autosel.timing import TimingSettings
            from tests.fakes import PROBLEM
            from tests.worker.misbehaving import Good

            class Mine(Good):
                name = "mine"

            registry.register(Mine)
            timing = TimingSettings(rounds=1, samples_per_round=1, flush_bytes=1 << 20)
            settings = SweepSettings((5,), backends=("mine",), timing=timing)
            print(sweep(RandomSource(PROBLEM), settings).decision(5).winner.key)
            """
        ),
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["once", "mine"]
