"""Runs the command line inside this process, and the few things every run must keep to."""

import json
from dataclasses import dataclass

import pytest

from autosel.__main__ import main


@dataclass
class Ran:
    status: int
    out: str
    err: str

    @property
    def json(self):
        def refuse(word):
            raise AssertionError(f"not strict JSON: {word}")

        return json.loads(self.out, parse_constant=refuse)

    @property
    def error(self):
        """The one line that says what is wrong."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        return lines[0]


@pytest.fixture
def autosel(capsys, monkeypatch, tmp_path):
    """``autosel("devices", "--json")`` as a user would type it, with a database of its own."""
    monkeypatch.setenv("AUTOSEL_DB", str(tmp_path / "autosel.db"))
    monkeypatch.setenv("COLUMNS", "100")

    def run(*args):
        capsys.readouterr()
        status = main([str(arg) for arg in args])
        ran = Ran(status, *capsys.readouterr())
        if "--debug" not in args:
            assert "Traceback" not in ran.err
        if status in (1, 2):
            assert ran.err.strip(), "failed without a word"
        if "--json" in args and status != 130:
            assert ran.json is not None
        return ran

    return run
