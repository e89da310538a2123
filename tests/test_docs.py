"""The documentation is true: its code runs, its links lead somewhere, no command is left out."""

import importlib
import pkgutil
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from autosel.__main__ import main
from autosel.cli import commands
from tests.fakes import judge_one_case

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = sorted(module.name for module in pkgutil.iter_modules(commands.__path__))

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)\)")

#: Programs of the shell blocks that other tests cover (scripts, packaging, the suite itself).
COVERED = {"pip", "scripts/quickstart", "scripts/test", "scripts/check", "python"}

#: Programs that are run as they stand.
RUN = {"cp", "openssl"}


def blocks(page, language):
    return [body for name, body in BLOCK.findall(page.read_text()) if name == language]


def shell_lines(page):
    """Commands of a page's shell blocks, without comments, in order."""
    lines = "\n".join(blocks(page, "sh")).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder that looks like the checkout to commands and code, with a database of its own."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (tmp_path / "autosel-out").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOSEL_DB", str(tmp_path / "docs.db"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small matmuls on a busy machine
    yield tmp_path
    torch.set_num_threads(before)


@pytest.fixture
def short(monkeypatch):
    """Timing for a moment and one verification case: what is shown is how, not how fast."""
    from autosel import timing

    settings = timing.TimingSettings
    names = list(settings.__dataclass_fields__)
    defaults = list(settings.__init__.__defaults__)
    defaults[names.index("limit_s")] = 0.05
    monkeypatch.setattr(settings.__init__, "__defaults__", tuple(defaults))
    monkeypatch.setattr(
        timing, "TimingSettings", lambda **given: settings(**{**given, "limit_s": 0.05})
    )
    judge_one_case(monkeypatch)


PYTHON_PAGES = [page for page in PAGES if blocks(page, "python")]
SHELL_PAGES = [page for page in PAGES if shell_lines(page)]


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, place, short, capsys):
    namespace = {"__name__": "documentation"}
    for number, body in enumerate(blocks(page, "python")):
        exec(compile(body, f"{page.name} block {number}", "exec"), namespace)
    if page == README:
        assert (place / "autosel-out" / "latency.svg").stat().st_size > 1000
        assert " us: " in capsys.readouterr().out


@pytest.mark.parametrize("page", SHELL_PAGES, ids=lambda page: page.name)
def test_commands_run(page, place, short, capsys):
    ran = 0
    for program, *args in shell_lines(page):
        if program == "autosel":
            if args[0] == "sweep" and page != README and "--no-isolate" not in args:
                args.append("--no-isolate")  # the README's workers are enough; each takes seconds
            assert main(args) == 0, (args, capsys.readouterr().err)
            ran += 1
        elif program in RUN:
            if shutil.which(program) is None:
                pytest.skip(f"{program} is not installed")
            subprocess.run([program, *args], check=True, capture_output=True)
        else:
            assert program in COVERED, program
    if page == README:
        assert ran >= len(COMMANDS)
        assert (place / "autosel-out" / "latency.png").exists()
        assert (place / "autosel-out" / "layer0.safetensors").exists()


def test_scripts_that_are_named_exist():
    for page in PAGES:
        for program, *_ in shell_lines(page):
            if program.startswith("scripts/"):
                assert (ROOT / program).is_file(), (page.name, program)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    for name in re.findall(
        r"`((?:autosel|tests|docs|bench|results|scripts)/[\w./-]+)`", page.read_text()
    ):
        assert list(ROOT.glob(name.rstrip("/"))) or "NAME" in name or name == "results/", name


def test_every_command_is_in_the_readme():
    shown = {args[0] for program, *args in shell_lines(README) if program == "autosel"}
    assert shown == set(COMMANDS)


def test_the_command_reference_is_fresh():
    from autosel.cli.reference import reference

    text = (ROOT / "docs" / "cli.md").read_text()
    assert text == reference(), "run: python -m autosel.cli.reference > docs/cli.md"
    for name in COMMANDS:
        made = importlib.import_module(f"autosel.cli.commands.{name}").command
        assert f"## autosel {name}\n" in text
        for param in made.params:
            for option in param.opts:
                if option.startswith("--"):
                    assert f"`{option}" in text or f", {option}" in text, option


def test_every_backend_is_in_the_readme():
    from autosel.backends import __path__ as places

    files = {m.name for m in pkgutil.iter_modules(places) if not m.name.startswith("_")}
    rows = set(re.findall(r"^\| `(\w+)`", README.read_text(), re.MULTILINE))
    assert rows == files


def test_every_status_and_status_code_is_explained():
    from typing import get_args

    from autosel.core import Status

    page = (ROOT / "docs" / "how-decisions-are-made.md").read_text()
    for status in get_args(Status):
        assert status == "ok" or f"`{status}`" in page, status


def test_pages_speak_of_the_project_alone():
    for page in PAGES:
        for word in ("/work/", "shared/", "issue #", "TODO", "FIXME"):
            assert word not in page.read_text(), (page.name, word)
