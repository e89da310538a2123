"""Places, files and numbers that nobody plans for: one line, and nothing that was there is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from autosel.cli.group import Group, cli
from autosel.store import Store

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "checkpoints"
MODEL = FIXTURES / "ct-w4-g128-sym-mixtral"

#: Root without the right to pass over permissions is refused like anybody else.
AS_ANYBODY = ("setpriv", "--bounding-set=-dac_override,-dac_read_search",
              "--inh-caps=-dac_override,-dac_read_search")  # fmt: skip


def commands(group=cli, path=()):
    with click.Context(group) as context:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            if isinstance(command, Group):
                yield from commands(command, (*path, name))
            else:
                yield (*path, name), command


def copied(folder):
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((MODEL / name).read_bytes())


def ranges(kind):
    return kind.types if isinstance(kind, click.Tuple) else [kind]


def test_no_option_takes_nan_for_a_number(autosel):
    """NaN is below nothing and above nothing, so a range lets it through."""
    tried = 0
    for path, command in commands():
        for option in command.params:
            kinds = [k for k in ranges(option.type) if isinstance(k, click.types.FloatParamType)]
            if not kinds:
                continue
            tried += 1
            needed = ["x" for p in command.params if isinstance(p, click.Argument) and p.required]
            output = ["-o", "x"] if any("-o" in p.opts for p in command.params) else []
            ran = autosel(*path, *needed, option.opts[0], *["nan"] * len(kinds), *output)
            assert ran.status == 2, (path, option.name)
            assert option.opts[0] in ran.error
            assert "finite number" in ran.error
    assert tried >= 4


@pytest.mark.parametrize("args", [("export",), ("db", "export")])
def test_a_report_never_replaces_a_database(autosel, tmp_path, args):
    path = tmp_path / "mine.db"
    Store.open(path).close()
    before = path.read_bytes()
    ran = autosel(*args, "--db", path, "-o", path)
    assert ran.status == 1
    assert "found a database" in ran.error
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_report_never_replaces_a_checkpoints_file(autosel, tmp_path, name):
    path = tmp_path / name
    path.write_text("{}")
    Store.open(tmp_path / "a.db").close()
    ran = autosel("export", "-o", path, "--db", tmp_path / "a.db")
    assert ran.status == 1
    assert "part of a checkpoint" in ran.error
    assert path.read_text() == "{}"


def test_a_hyphen_is_standard_output(autosel, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert autosel("export", "-o", "-").json == autosel("export").json
    assert not (tmp_path / "-").exists()


def test_databases_named_from_the_working_folder(autosel, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Store.open("a b?#%.db").close()
    ran = autosel("diff", "a b?#%.db", "a b?#%.db")
    assert ran.status == 2
    assert "found none, expected at least one" in ran.error  # it was read
    assert autosel("db", "merge", "a b?#%.db", "--db", "other.db").status == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has names that are no text")
def test_a_folder_whose_name_is_not_utf_8(autosel, tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    copied(folder)
    ran = autosel("inspect", folder, "--json")
    assert ran.status == 1
    assert "found one that is not UTF-8" in ran.error
    assert "damaged" not in ran.error


@pytest.mark.skipif(sys.platform != "linux", reason="Windows and macOS have no such encoding")
def test_a_name_in_utf_8_where_the_encoding_is_ascii(tmp_path):
    folder = tmp_path / "ünï 日本" / "my módel"
    copied(folder)
    args = ("sweep", str(folder), "--tokens", "1", "--backends", "emulation", "--trials", "1",
            "--limit", "0.02", "--db", ":memory:", "--json")  # fmt: skip
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ran = subprocess.run(
        [sys.executable, "-m", "autosel", *args],
        capture_output=True, env={**os.environ, **ascii_only}, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["answers"][0]["decisions"]


def test_a_name_that_is_too_long_for_the_sites_database(autosel, monkeypatch):
    monkeypatch.setenv("AUTOSEL_SITE_DB", f"/{'x' * 300}/a.db")
    ran = autosel("explain", MODEL, "--tokens", "1")
    assert ran.status == 0
    assert "warning: site database" in ran.err
    assert "File name too long" in ran.err
    assert autosel("db", "info").status == 0


def refused(*args, **more):
    command = [*AS_ANYBODY, sys.executable, "-m", "autosel", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **more)


@pytest.fixture
def closed(tmp_path):
    """A folder that nobody but its (other) owner may enter."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root can give a file to somebody else")
    folder = tmp_path / "closed"
    folder.mkdir(parents=True)
    Store.open(folder / "site.db").close()
    os.chown(folder, 65534, 65534)
    folder.chmod(0o700)
    return folder


def test_a_sites_database_that_may_not_be_read_costs_one_warning(closed, tmp_path):
    environment = dict(os.environ, AUTOSEL_SITE_DB=str(closed / "site.db"))
    db = tmp_path / "mine.db"
    Store.open(db).close()
    ran = refused("explain", MODEL, "--tokens", "1", "--db", db, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("Permission denied") == 1
    assert "warning: site database" in ran.stderr


def test_weights_that_may_not_be_read_are_said_to_be_so(closed, tmp_path):
    folder = tmp_path / "model"
    copied(folder)
    weights = folder / "model.safetensors"
    os.chown(weights, 65534, 65534)
    weights.chmod(0o600)
    ran = refused("inspect", folder)
    assert ran.returncode == 1
    assert ran.stderr == f"error: {weights}: cannot be read: Permission denied\n"


def test_a_database_that_may_not_be_read_does_not_end_a_command(closed, tmp_path):
    db = tmp_path / "theirs.db"
    Store.open(db).close()
    os.chown(db, 65534, 65534)
    db.chmod(0o600)
    ran = refused("list", "--db", db)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.startswith(f"warning: database {db}: ")
    assert ran.stderr.count("\n") == 1


def test_a_mistyped_database_replaces_no_export(autosel, tmp_path):
    good = tmp_path / "good.json"
    good.write_text("kept")
    for command in (("export",), ("db", "export")):
        ran = autosel(*command, "--db", tmp_path / "nowhere.db", "-o", good)
        assert ran.status == 1
        assert "nowhere.db: file: found nothing, expected a database" in ran.error
        assert good.read_text() == "kept"
    assert autosel("export", "--db", tmp_path / "nowhere.db").status == 0  # shown, and nothing lost


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("plot", "--bits", "8", "-o", "x.png"), "--bits: name the checkpoint or preset"),
        (("report", "--layer", "3", "--asym", "-o", "x.html"), "--layer, --asym: name the"),
        (("export", "--experts", "4"), "--experts: name the checkpoint or preset"),
        (("export", "--routing", "zipf"), "--routing: json takes in every routing and device"),
        (("export", "--device", "cpu"), "--device: json takes in every routing and device"),
        (("report", "--from", "a.db", "--bits", "8", "-o", "x.html"), "--bits: name the"),
        (("report", "--from", "a.db", "--routing", "zipf", "-o", "x.html"), "--routing: --from"),
        (("report", "--from", "a.db", "--device", "cuda", "-o", "x.html"), "--device: --from"),
    ],
)
def test_options_without_effect_are_refused(autosel, tmp_path, monkeypatch, args, words):
    """A script that asks for int8 must not be given int4 figures."""
    monkeypatch.chdir(tmp_path)
    Store.open("a.db").close()
    ran = autosel(*args)
    assert ran.status == 2
    assert words in ran.error
    assert not [*tmp_path.glob("x.*")]


def test_a_preset_has_no_more_experts_than_the_model(autosel):
    ran = autosel("explain", "granite-3-1b-a400m", "--experts", "400", "--tokens", "1")
    assert ran.status == 1
    assert "preset granite-3-1b-a400m: experts: found 400, expected at most 32" in ran.error


def test_identical_results_are_settled(autosel, tmp_path):
    from tests.made_evidence import COLD, GPU, decided, row

    found = row("a", 4, 50.0)
    with Store.open(tmp_path / "a.db") as store:
        store.add_measurements([found])
        store.add_decision(decided(found, 1, None), GPU, COLD)
    ran = autosel("diff", tmp_path / "a.db", tmp_path / "a.db", "--all")
    assert ran.status == 0
    assert "1.000" in ran.out
    assert "not settled" not in ran.out
