"""A pack opened on another machine is graded right for every single field that may differ."""

from dataclasses import fields, replace

import pytest

import autosel
from autosel.core import Candidate, Device
from autosel.packs.grade import RULES, bystanders, grade
from tests.packs.made import FAST, MACHINE, entry, source

EXACT, COMPATIBLE, FOREIGN = "exact", "compatible", "foreign"

#: field, another value, grade. None is "not known here".
CHANGES = [
    ("kind", "rocm", FOREIGN),
    ("name", "NVIDIA H200 NVL", FOREIGN),
    ("name", "NVIDIA H100", FOREIGN),
    ("name", "nvidia h200", FOREIGN),
    ("name", "", FOREIGN),
    ("capability", (8, 0), FOREIGN),
    ("capability", (9, 1), FOREIGN),
    ("capability", None, FOREIGN),
    ("multiprocessors", 114, FOREIGN),
    ("multiprocessors", None, FOREIGN),
    ("memory_bytes", 149_000_000_000, COMPATIBLE),
    ("memory_bytes", 152_000_000_000, COMPATIBLE),
    ("memory_bytes", 80_000_000_000, FOREIGN),
    ("memory_bytes", 146_000_000_000, FOREIGN),
    ("memory_bytes", None, FOREIGN),
    ("cache_bytes", 52_428_800, FOREIGN),
    ("cache_bytes", None, FOREIGN),
    ("shared_memory_bytes", 101_376, FOREIGN),
    ("shared_memory_bytes", None, FOREIGN),
    ("flags", ("sm_90a",), FOREIGN),
    ("flags", (), FOREIGN),
    ("threads", 8, FOREIGN),
    ("threads", None, FOREIGN),
    ("driver", "570.124.06", COMPATIBLE),
    ("driver", "570.86.16", COMPATIBLE),
    ("driver", "575.51.03", FOREIGN),
    ("driver", "57.86.15", FOREIGN),
    ("driver", "CUDA 12080", FOREIGN),
    ("driver", None, FOREIGN),
    ("max_clock_mhz", 1755, FOREIGN),
    ("max_clock_mhz", None, FOREIGN),
    ("mig_slice", "2g.35gb", FOREIGN),
    ("mig_slice", None, FOREIGN),
]

#: package, another version, grade.
VERSIONS = [
    ("autosel-kernels", "sha256:ffffffffffffffffffff", FOREIGN),
    ("autosel-kernels", None, FOREIGN),
    ("c++", "g++ (Debian 12.2.1-1) 12.2.1", COMPATIBLE),
    ("c++", "g++ (Debian 12.3.0-1) 12.3.0", FOREIGN),
    ("c++", "clang version 12.2.0", FOREIGN),
    ("c++", None, FOREIGN),
    ("cuda", "12.8.1", COMPATIBLE),
    ("cuda", "12.9", FOREIGN),
    ("cuda", "13.8", FOREIGN),
    ("cuda", None, FOREIGN),
    ("torch", "2.9.2+cu128", COMPATIBLE),
    ("torch", "2.9.0+cu128", COMPATIBLE),
    ("torch", "2.9.1+cu126", FOREIGN),
    ("torch", "2.9.1", FOREIGN),
    ("torch", "2.10.0+cu128", FOREIGN),
    ("torch", "3.9.1+cu128", FOREIGN),
    ("torch", "2.9.2.dev20260101+cu128", FOREIGN),
    ("torch", "2.9.2rc1+cu128", FOREIGN),
    ("torch", "a build of my own", FOREIGN),
    ("torch", None, FOREIGN),
    ("triton", "3.5.1", COMPATIBLE),
    ("triton", "3.6.0", FOREIGN),
    ("triton", None, FOREIGN),
    ("vllm", "0.11.3", COMPATIBLE),
    ("vllm", "0.12.2", FOREIGN),
    ("vllm", None, FOREIGN),
    ("flashinfer-python", "0.5.2", FOREIGN),  # here only: nobody tried it there
]


def with_version(device, package, version):
    versions = {**dict(device.versions), package: version}
    found = tuple(sorted((k, v) for k, v in versions.items() if v is not None))
    return replace(device, versions=found)


def both_ways(made, here, expected, field):
    """Which side has which value does not matter, and exactly that field is named."""
    for one, two in ((made, here), (here, made)):
        found = grade(source(one), two)
        assert found.grade == expected, str(found)
        assert [item.field for item in found.differences] == [field]
        assert found.differences[0].grade == expected
        assert field in str(found)


def test_the_same_machine_is_exact():
    assert grade(source(), MACHINE) == grade(source(), replace(MACHINE))
    assert grade(source(), MACHINE).grade == EXACT
    assert grade(source(), MACHINE).differences == ()


@pytest.mark.parametrize(("field", "value", "expected"), CHANGES)
def test_a_single_field(field, value, expected):
    both_ways(MACHINE, replace(MACHINE, **{field: value}), expected, f"device.{field}")


@pytest.mark.parametrize(("package", "version", "expected"), VERSIONS)
def test_a_single_version(package, version, expected):
    here = with_version(MACHINE, package, version)
    both_ways(MACHINE, here, expected, f"versions.{package}")


def test_no_field_of_a_device_is_left_out():
    """A field that is added to Device needs a line above: what does a difference in it mean?"""
    assert {name for name, *_ in CHANGES} | {"versions"} == {f.name for f in fields(Device)}
    assert {name for name, *_ in VERSIONS} >= set(dict(MACHINE.versions))
    for name, rule in RULES.items():
        known = {f"device.{f.name}" for f in fields(Device)} | {"autosel.version", "versions.*"}
        assert name in known or name.startswith("versions."), name
        assert rule.words


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.1.0", EXACT), ("0.1.7", COMPATIBLE), ("0.2.0", FOREIGN), ("1.1.0", FOREIGN)],
)
def test_the_version_of_autosel(monkeypatch, version, expected):
    monkeypatch.setattr(autosel, "__version__", "0.1.0")
    found = grade(source(autosel_version=version), MACHINE)
    assert found.grade == expected


def test_the_commit_and_the_date_are_no_part_of_the_machine():
    other = source(commit=None, created="2020-01-01T00:00:00Z", command="autosel pack y")
    assert grade(other, MACHINE).grade == EXACT


def test_the_worst_field_counts():
    here = replace(with_version(MACHINE, "torch", "2.9.2+cu128"), driver="570.124.06")
    assert grade(source(), here).grade == COMPATIBLE
    assert len(grade(source(), here).differences) == 2
    assert grade(source(), replace(here, threads=3)).grade == FOREIGN
    assert len(grade(source(), replace(here, threads=3)).differences) == 3


def test_an_unknown_device_matches_nothing_not_even_itself():
    nameless = replace(MACHINE, name="")
    assert grade(source(nameless), nameless).grade == FOREIGN
    blank = replace(MACHINE, name="  ")
    assert grade(source(blank), blank).grade == FOREIGN


@pytest.mark.parametrize("name", ["Grafikkarte Ω (R)", "a/b", "[x] y", "名前"])
def test_names_of_any_letters_are_names(name):
    device = replace(MACHINE, name=name)
    assert grade(source(device), device).grade == EXACT
    assert grade(source(device), MACHINE).grade == FOREIGN


def test_the_guide_has_every_rule():
    from pathlib import Path

    page = (Path(__file__).resolve().parents[2] / "docs" / "packs.md").read_text()
    for name, rule in RULES.items():
        assert rule.words in page, name


OURS, THEIRS = Candidate.of("wna16_tiled", {}, "x"), Candidate.of("marlin", {}, "y")


@pytest.mark.parametrize("version", ["0.12.2", "1.0", None])
def test_packages_of_rivals_ask_for_a_check_and_no_more(version):
    """vLLM, or none of it, beside results that our own kernels won; and where vLLM's won."""
    made, here = entry(winner=OURS, other=THEIRS), with_version(MACHINE, "vllm", version)
    beside = bystanders(made)
    assert {"vllm", "humming-kernels"} <= beside
    assert not {"torch", "triton", "cuda", "c++", "autosel-kernels"} & beside
    found = grade(made.source, here, bystanders=beside)
    assert found.grade == COMPATIBLE
    assert [str(item.field) for item in found.differences] == ["versions.vllm"]
    theirs = entry(winner=THEIRS, other=OURS)
    assert grade(theirs.source, here, bystanders=bystanders(theirs)).grade == FOREIGN


@pytest.mark.parametrize("package", ["torch", "triton", "autosel-kernels", "cuda"])
def test_what_a_winner_runs_on_is_no_rivals(package):
    made = entry(winner=OURS, other=THEIRS)
    here = with_version(MACHINE, package, "99")
    assert grade(made.source, here, bystanders=bystanders(made)).grade == FOREIGN


def test_of_a_winner_that_nobody_knows_everything_counts():
    assert bystanders(entry(winner=FAST)) == frozenset()
