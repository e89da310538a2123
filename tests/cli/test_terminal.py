"""The command as a person runs it: a process of its own, on a terminal, stopped with Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.integration

EXAMPLE = "ct-w4-g128-sym-mixtral"


def command(path, *args):
    return [sys.executable, "-m", "autosel", "sweep", str(path), "--backends", "emulation",
            "--budget", "1", "--limit", "0.05", *args]  # fmt: skip


def environment(tmp_path):
    return {**os.environ, "AUTOSEL_DB": str(tmp_path / "a.db"), "OMP_NUM_THREADS": "1",
            "TERM": "xterm-256color", "PYTHONUNBUFFERED": "1"}  # fmt: skip


def test_on_a_terminal_progress_is_live_and_tables_fit(get_checkpoint, tmp_path):
    pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 70, 0, 0))
    args = command(get_checkpoint(EXAMPLE).path, "--tokens", "1")
    variables = {k: v for k, v in environment(tmp_path).items() if k != "COLUMNS"}
    process = subprocess.Popen(args, stdout=theirs, stderr=theirs, env=variables)
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # the other end closed
            break
    assert process.wait(timeout=120) == 0
    text = shown.decode()
    assert "\x1b[?25l" in text  # a live display hid the cursor
    assert text.rstrip().endswith("chosen") or "\x1b[?25h" in text  # and showed it again
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "Traceback" not in plain
    assert "emulation" in plain
    lines = plain.splitlines()
    head = next(number for number, line in enumerate(lines) if "runner-up" in line)
    table = lines[head : head + 4]
    assert any("emulation" in line for line in table)
    assert max(map(len, table)) <= 70


def test_ctrl_c_in_the_middle_keeps_results_and_resumes(get_checkpoint, tmp_path):
    args = command(get_checkpoint(EXAMPLE).path, "--tokens", "1,2,4,8,16,32,64,128")
    variables = environment(tmp_path)
    process = subprocess.Popen(
        args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables
    )
    seen = ""
    deadline = time.monotonic() + 120
    for line in process.stderr:
        seen += line
        if re.search(r"\] 1 token: emulation", line):
            break
        assert time.monotonic() < deadline, seen
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, seen + err
    assert "Traceback" not in err
    assert "the same command goes on from here: autosel sweep" in err
    done = subprocess.run(args, capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 0, done.stderr
    measured, taken = re.search(
        r"(\d+) measured, (\d+) taken from the database", done.stderr
    ).groups()
    assert int(taken) >= 1
    assert int(measured) + int(taken) == 8
