"""Standard streams that are full or have no reader."""

import errno
import io
import os
import subprocess
import sys

import pytest

from autosel.__main__ import main
from autosel.cli import report
from autosel.cli.progress import SweepProgress
from autosel.core import Device, Problem, QuantScheme

INT4 = QuantScheme(4, 128, True)
PROBLEM = Problem(8, 8, 2, 256, 128, INT4, INT4)
EXAMPLE = "ct-w4-g128-sym-mixtral"

#: With an encoding that narrow, click goes around sys.stderr to its bytes.
NARROW = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")


class Full(io.StringIO):
    """A terminal that takes nothing."""

    def isatty(self):
        return True

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self):
        self.write("")


def run(*args, **kwargs):
    environment = {**os.environ, **kwargs.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", "autosel", *map(str, args)],
        env=environment, check=False, timeout=120, **kwargs,
    )  # fmt: skip


@pytest.fixture
def no_reader():
    """The end of a pipe that nobody reads any more."""
    ours, theirs = os.pipe()
    os.close(ours)
    yield theirs
    os.close(theirs)


@needs_full
def test_a_sweep_goes_on_where_standard_error_is_full(get_checkpoint, tmp_path):
    path = get_checkpoint(EXAMPLE).path
    args = ("sweep", path, "--backends", "emulation", "--tokens", 1, "--trials", 1,
            "--limit", 0.05, "--db", tmp_path / "a.db")  # fmt: skip
    with open("/dev/full", "wb") as full:
        done = run(*args, stdout=subprocess.PIPE, stderr=full)
    assert done.returncode == 0
    assert b"emulation" in done.stdout
    assert (tmp_path / "a.db").exists()


@pytest.mark.parametrize(
    "env", [{}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
@pytest.mark.parametrize(("args", "status"), [([], 2), (["bogus"], 2), (["presets"], 0)])
@needs_full
def test_a_full_standard_error_changes_no_status(args, status, env):
    with open("/dev/full", "wb") as full:
        assert run(*args, stdout=subprocess.DEVNULL, stderr=full, env=env).returncode == status


def test_a_live_display_on_a_terminal_that_takes_nothing(monkeypatch):
    def sweep(*args):
        with SweepProgress() as progress:
            assert progress._live is not None
            progress.label = "layer"
            progress.started(PROBLEM, Device("cpu", "here"), (1, 2), 3)
            progress.step("pack", 1)
            report.note("between")
        return 0

    monkeypatch.setattr("autosel.__main__.cli.main", lambda *_, **__: sweep())
    full = Full()
    monkeypatch.setattr(sys, "stderr", full)
    assert main(["sweep"]) == 0
    assert sys.stderr is full


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("args", [["--help"], ["--version"], ["sweep", "--help"], ["presets"]])
def test_output_without_a_reader_is_141_without_a_word(args, unbuffered, no_reader):
    env = {"PYTHONUNBUFFERED": unbuffered}
    done = run(*args, stdout=no_reader, stderr=subprocess.PIPE, env=env)
    assert done.returncode == 141
    assert done.stderr == b""


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_wrong_usage_stays_wrong_usage_without_a_reader(options, no_reader):
    assert run("bogus", *options, stdout=no_reader, stderr=no_reader).returncode == 2


def test_the_pipe_of_a_helper_is_not_taken_for_our_readers():
    with pytest.raises(RuntimeError, match="a helper process went away"):  # noqa: SIM117
        with report.stdout_reserved():
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_the_help_names_every_status(autosel):
    from autosel import __main__ as statuses

    said = " ".join(autosel("--help").out.split()).partition("Exit status: ")[2]
    for status in (statuses.DONE, statuses.REFUSED, statuses.USAGE, statuses.INTERRUPTED,
                   statuses.READER_GONE):  # fmt: skip
        assert f"{int(status)} " in said
