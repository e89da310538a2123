"""What is compiled ahead for later lines of a file of sweeps."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from autosel import neighbours, presets
from autosel.core import Device
from autosel.interfaces import Space
from autosel.store import Store
from autosel.verify_sizes import full_counts, quick_counts
from bench import device_results_ahead as ahead
from bench.device_results_lines import read_words
from bench.device_results_sweep import Runner
from tests.fakes import registered
from tests.made_evidence import GPU

LAYER = "granite-3-1b-a400m"
WORDS = (LAYER, "--tokens", "4,16", "--trials", "3", "--backends", "ahead")


class Compiling:
    """A backend that says what it is asked to compile."""

    def __init__(self) -> None:
        from tests.fakes import FakeBackend

        self.asked = []
        asked = self.asked

        class Backend(FakeBackend):
            name = "ahead"

            def compile_ahead(self, problem, params, num_tokens, device):
                asked.append((problem, params["n"], num_tokens))

            def compiled_counts(self, problem, params, token_counts, device):
                return tuple(token_counts)

        self.backend = Backend(None, 1.0, space=Space({"n": 0}, {"n": tuple(range(40))}))


@pytest.fixture
def compiling(monkeypatch):
    made = Compiling()
    monkeypatch.setattr(neighbours, "known_good", lambda *words: [{"n": 17}])
    with registered(ahead=made.backend):
        yield made


def test_a_line_asks_for_own_and_known_good_settings_and_for_what_verifying_calls(compiling):
    problem = presets.get(LAYER)
    with Store.open(":memory:") as store:
        found = list(ahead.jobs(read_words(WORDS, "line"), store, GPU))
    assert len({(j.problem, j.params["n"], j.num_tokens) for j in found}) == len(found)
    own = [job for job in found if job.problem == problem]
    assert [job.params["n"] for job in own if job.num_tokens == 4][:2] == [0, 17]
    assert len({job.params["n"] for job in own}) >= 3  # as many as there are trials
    for settings, counts in ((0, full_counts(problem, (4, 16))), (17, quick_counts(problem))):
        assert {*counts, 4, 16} <= {j.num_tokens for j in own if j.params["n"] == settings}
    assert {job.params["n"] for job in found if job.problem != problem} == {0, 17}  # proofs


def test_what_cannot_be_compiled_is_left_to_the_sweep(compiling, monkeypatch):
    def broken(*words):
        raise RuntimeError("no space")

    monkeypatch.setattr(type(compiling.backend), "space", broken)
    with Store.open(":memory:") as store:
        assert list(ahead.jobs(read_words(WORDS, "line"), store, GPU)) == []
        words = (LAYER, "--backends", "emulation")  # compiles nothing
        assert list(ahead.jobs(read_words(words, "line"), store, GPU)) == []


class AtOnce:
    """An executor without processes."""

    def __init__(self, helpers, initializer):
        assert helpers == 2

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit(self, call, *words):
        done = Future()
        done.set_result(call(*words))
        return done


def test_lines_that_run_already_are_left_out(compiling, tmp_path, monkeypatch):
    monkeypatch.setattr(ahead, "ProcessPoolExecutor", AtOnce)
    second = ("olmoe-1b-7b", *WORDS[1:])
    told = {
        "lines": [WORDS, second], "db": str(tmp_path / "none.db"), "device": GPU.to_dict(),
        "helpers": 2, "skip": 1,
    }  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(told)))
    assert ahead.main() == 0
    assert {size for size, *_ in compiling.asked if size.num_experts > 8} == {
        presets.get("olmoe-1b-7b")
    }
    assert not (tmp_path / "none.db").exists()


def test_a_failure_to_compile_ends_nothing(compiling, monkeypatch):
    def failing(*words):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(type(compiling.backend), "compile_ahead", failing)
    ahead._compile(ahead.Job("ahead", presets.get(LAYER), {"n": 0}, 4), GPU)


def runner(tmp_path, device, monkeypatch, **more):
    from bench.device_results_sweep import Slot

    monkeypatch.setattr(Slot, "device", lambda self, kind: device)
    lines = [read_words((LAYER, "--tokens", str(n)), "line") for n in (1, 2, 4)]
    return Runner(lines, tmp_path / "all.db", **more)


def test_a_cpu_has_no_helpers(tmp_path, monkeypatch):
    monkeypatch.setattr(ahead, "start", lambda *words, **more: pytest.fail("started"))
    cpu = Device("cpu", "some CPU")
    assert runner(tmp_path, cpu, monkeypatch, ahead=4)._compile_ahead() is None
    assert runner(tmp_path, GPU, monkeypatch, ahead=0)._compile_ahead() is None


def test_helpers_end_with_the_sweeps(tmp_path, monkeypatch):
    """Their own process, and its children with it."""
    script = "import subprocess, sys, time; c = subprocess.Popen(['sleep', '60']); " \
        "open(sys.argv[1], 'w').write(str(c.pid)); time.sleep(60)"  # fmt: skip
    seen = tmp_path / "pid"
    process = subprocess.Popen([sys.executable, "-c", script, str(seen)], start_new_session=True)
    monkeypatch.setattr(ahead, "start", lambda *words, **more: process)
    while not (seen.exists() and seen.read_text()):
        time.sleep(0.02)
    run = runner(tmp_path, GPU, monkeypatch, ahead=2, child=("false",))
    run.run()
    assert process.returncode == -signal.SIGKILL
    for _ in range(100):  # nobody may be there to collect it
        if not is_running(int(seen.read_text())):
            break
        time.sleep(0.05)
    assert not is_running(int(seen.read_text()))


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_process_takes_what_it_is_told_from_its_input(tmp_path):
    """With nothing left to do it ends by itself."""
    lines = [read_words((LAYER, "--tokens", "1"), "line")]
    process = ahead.start(lines, tmp_path / "none.db", GPU, os.environ, helpers=1, skip=1)
    assert process.wait(timeout=60) == 0
    ahead.end(process)
