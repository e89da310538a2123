"""Every end of a run has its status and its one line; nothing but the report is on stdout."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
import warnings

import click
import pytest

from autosel.cli import commands
from autosel.cli.group import Command, Group, cli
from autosel.cli.report import Report
from autosel.errors import AutoselError

NAMES = sorted(module.name for module in pkgutil.iter_modules(commands.__path__))


@pytest.fixture
def command(monkeypatch):
    """``command(function)`` is reachable as ``autosel scripted``."""

    def install(function):
        made = click.command("scripted", cls=Command)(function)
        found = type(cli).get_command
        monkeypatch.setattr(
            type(cli),
            "get_command",
            lambda self, ctx, name: made if name == "scripted" else found(self, ctx, name),
        )

    return install


def raising(error):
    def function():
        raise error

    return function


def test_every_command_has_help_that_says_what_it_does(autosel):
    assert len(NAMES) >= 8
    listed = autosel("--help")
    assert listed.status == 0
    for name in NAMES:
        made = importlib.import_module(f"autosel.cli.commands.{name}").command
        assert f"  {name}" in listed.out
        if isinstance(made, Group):
            within = autosel(name, "--help")
            assert within.status == 0
            for inner in made.list_commands(click.Context(made)):
                assert f"  {inner}" in within.out
        for words, command in leaves((name,), made):
            assert isinstance(command, Command), words
            assert command.help, words
            assert command.help.splitlines()[0].endswith("."), words
            for param in command.params:
                if isinstance(param, click.Option):
                    assert param.help, f"{words} {param.opts}"
            ran = autosel(*words, "--help")
            assert ran.status == 0
            assert "--json" in ran.out


def leaves(words, command):
    """A command, or those inside a group, each with the words that name it."""
    if not isinstance(command, Group):
        yield words, command
        return
    assert command.help, words
    context = click.Context(command)
    for name in command.list_commands(context):
        yield from leaves((*words, name), command.get_command(context, name))


def test_version(autosel):
    import autosel as package

    ran = autosel("--version")
    assert ran.status == 0
    assert ran.out.startswith(f"autosel {package.__version__} (torch ")


def test_no_arguments_is_wrong_usage_and_shows_the_commands(autosel):
    ran = autosel()
    assert ran.status == 2
    assert "Commands:" in ran.err
    assert ran.out == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["swep"], "did you mean 'sweep'"),
        (["zzzz"], "the commands: "),
        (["devices", "--nonsense"], "--nonsense"),
        (["devices", "extra"], "extra"),
        (["explain"], "CHECKPOINT|PRESET"),
    ],
)
def test_wrong_usage_is_status_2_and_one_line(autosel, args, words):
    ran = autosel(*args)
    assert ran.status == 2
    assert words in ran.error
    assert ran.out == ""
    as_json = autosel(*args, "--json")
    assert as_json.status == 2
    assert words in as_json.json["error"]["message"]


def test_a_refusal_is_one_line_even_when_its_message_is_not(autosel, command):
    command(raising(AutoselError("first\nsecond \x1b[31m")))
    ran = autosel("scripted")
    assert ran.status == 1
    assert ran.err == "error: first second \\x1b[31m\n"
    assert ran.out == ""
    ran = autosel("scripted", "--json")
    assert ran.json == {"error": {"type": "AutoselError", "message": "first second \\x1b[31m"}}


def test_the_unexpected_is_named_without_a_traceback(autosel, command):
    command(raising(ZeroDivisionError("what")))
    ran = autosel("scripted")
    assert ran.status == 1
    assert ran.err.count("\n") == 1
    assert "ZeroDivisionError: what" in ran.err
    assert "--debug" in ran.err


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("what"), AutoselError("what"), OSError(28, "full")]
)
@pytest.mark.parametrize("where", ["before", "after"])
def test_debug_shows_the_traceback(autosel, command, error, where):
    command(raising(error))
    ran = autosel(*(["--debug", "scripted"] if where == "before" else ["scripted", "--debug"]))
    assert ran.status == 1
    assert "Traceback" in ran.err
    assert "in function" in ran.err


def test_a_system_error_is_a_plain_refusal(autosel, command):
    command(raising(PermissionError(13, "Permission denied", "/some/file")))
    ran = autosel("scripted")
    assert (ran.status, ran.err) == (1, "error: /some/file: Permission denied\n")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_a_full_memory_is_no_fault_to_report(autosel, command, error):
    import torch  # noqa: F401  (its errors are known once it is there)

    command(raising(error))
    ran = autosel("scripted")
    assert ran.status == 1
    assert ran.error.startswith("error: out of memory: ")
    assert "report" not in ran.err


@pytest.mark.parametrize("name", ["", "\udcff", "a\nb", "x" * 5000, "/nowhere/\x1b[31m"])
def test_names_that_no_file_has(autosel, name):
    for args in (["inspect", name], ["explain", name, "--tokens", 4], ["inspect", name, "--json"]):
        ran = autosel(*args)
        assert ran.status == 1
        assert ran.error
        assert "unexpected" not in ran.err
        assert "\x1b" not in ran.err


def test_interruption_is_130(autosel, command):
    command(raising(KeyboardInterrupt()))
    ran = autosel("scripted")
    assert ran.status == 130
    assert ran.error == "error: interrupted"


def test_what_a_command_prints_never_mixes_with_its_report(autosel, command):
    def function():
        print("noise of a library")
        return Report({"x": 1}, ["done"])

    command(function)
    assert autosel("scripted", "--json").json == {"x": 1}
    ran = autosel("scripted")
    assert ran.out == "done\n"
    assert "noise" in ran.err


def test_warnings_are_one_line_on_stderr_and_the_old_way_is_put_back(autosel, command):
    def function():
        warnings.warn("something\nto know", stacklevel=1)
        return Report({})

    before = warnings.showwarning
    command(function)
    ran = autosel("scripted", "--json")
    assert ran.err == "warning: something to know\n"
    assert ran.json == {}
    assert warnings.showwarning is before


def test_a_report_says_its_own_status(autosel, command):
    command(lambda: Report({"a": 1}, ["text"], exit_code=3))
    assert autosel("scripted").status == 3


def test_a_command_without_a_report_is_a_fault_of_ours(autosel, command):
    command(lambda: None)
    ran = autosel("scripted")
    assert ran.status == 1
    assert "expected a Report" in ran.err


PROGRAM = """
import os, sys
import click
from autosel.__main__ import main
from autosel.cli.group import Command, cli
from autosel.cli.report import Report, Table

@click.command(cls=Command)
def scripted():
    print("from python", flush=True)
    os.system("echo from a child")
    os.write(1, b"from C\\n")
    return Report({"rows": [1, 2]}, [Table(("n",), [(i,) for i in range(40000)])])

type(cli).get_command = lambda self, ctx, name: scripted
sys.exit(main())
"""


def in_a_process(*args, **kwargs):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "scripted", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        **kwargs,
    )


def test_libraries_and_children_that_print_do_not_spoil_the_json():
    out, err = in_a_process("--json").communicate(timeout=60)
    assert json.loads(out) == {"rows": [1, 2]}
    for words in (b"from python", b"from a child", b"from C"):
        assert words in err


def test_a_reader_that_goes_away_ends_it_quietly():
    process = in_a_process()
    assert process.stdout.read(10).startswith(b"n")
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert b"Traceback" not in err
    assert b"Exception ignored" not in err
    assert b"error" not in err


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_full_disk_is_one_line(options, unbuffered):
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "autosel", "presets", *options],
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr.decode().splitlines() == ["error: No space left on device"]


def test_help_and_refusals_start_fast():
    """Help, usage errors and a mere table must not wait for torch."""
    code = (
        "import sys; from autosel.__main__ import main; main(['--help']);"
        "main(['sweep', '--help']); main(['presets']);"
        "main(['explain', '--nonsense']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.name != "posix", reason="closing standard streams is a POSIX shell's habit")
@pytest.mark.parametrize(
    ("closed", "args", "status"),
    [
        (">&-", "presets", 0),
        (">&- 2>&-", "presets --json", 0),
        ("<&- >&- 2>&-", "explain mixtral-8x7b --tokens 4", 0),
        ("2>&-", "explain no-such-model --tokens 4", 1),
    ],
)
def test_closed_standard_streams(tmp_path, closed, args, status):
    """Nothing is printed into a file that happens to get the number of a closed stream."""
    database = tmp_path / "autosel.db"
    line = f"{sys.executable} -m autosel {args} {closed}"
    env = {**os.environ, "AUTOSEL_DB": str(database)}
    ran = subprocess.run(["sh", "-c", line], env=env, capture_output=True, timeout=60)
    assert ran.returncode == status
    assert b"unexpected" not in ran.stderr
    if database.exists():
        assert database.read_bytes()[:15] == b"SQLite format 3"
