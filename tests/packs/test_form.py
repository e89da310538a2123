"""A pack's file against things this project did not write: Python's json, jsonschema, hashlib."""

import hashlib
import json
from dataclasses import fields, replace
from pathlib import Path

import jsonschema
import pytest

from autosel.core import (
    Activation,
    Candidate,
    Device,
    ErrorFigures,
    Problem,
    QuantScheme,
    TokenBucket,
)
from autosel.errors import PackError
from autosel.packs import content
from autosel.packs.model import Measured, Pack
from autosel.samples import summary
from autosel.stats import Summary
from tests.packs.made import FAST, MACHINE, data, entry, model, pack, row

SCHEMA = json.loads(
    (Path(content.__file__).parent / "pack.schema.json").read_text(encoding="utf-8")
)
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
JUDGED = row(verify_ms=12.5)
EVERY = {
    "samples": entry(),
    "summaries only": entry(samples=False),
    "what judging took": entry(measured=(Measured(JUDGED, summary(JUDGED)),)),
    "another device": entry(replace(MACHINE, name="NVIDIA H100", driver=None)),
    "a CPU": entry(Device(kind="cpu", name="Intel Ω (R)", threads=4)),
    "odd numbers": entry(
        problem=Problem(
            4, 2, 2, 32, 16, QuantScheme(4, -1, False), QuantScheme(8, 16, True, True),
            Activation("swigluoai", 7, 1.702, 1.0), "float16", True,
        )
    ),
    "settings": entry(
        winner=Candidate.of(
            "quick", {"BLOCK_M": 16, "split": 0.5, "fast": True, "x": None, "d": "bf16"}
        )
    ),
}  # fmt: skip


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", EVERY)
def test_what_is_written_fits_the_schema_and_reads_back(name, tmp_path):
    made = pack(EVERY[name])
    path = tmp_path / "autosel-pack.json"
    content.write(made, path)
    text = path.read_text(encoding="utf-8")
    VALIDATOR.validate(json.loads(text))
    assert content.read(path) == made
    assert hash(made.entries[0].problem) is not None


def test_the_text_is_canonical_and_the_hash_is_anyones(tmp_path):
    path = tmp_path / "autosel-pack.json"
    content.write(pack(), path)
    raw = path.read_bytes()
    values = json.loads(raw)
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert raw == canonical.encode() + b"\n"
    said = values.pop("sha256")
    body = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert hashlib.sha256(body.encode()).hexdigest() == said


def test_a_reformatted_pack_is_the_same_pack(tmp_path):
    path = tmp_path / "pretty.json"
    path.write_text(json.dumps(data(), indent=4), encoding="utf-8")
    assert content.read(path) == pack()


def test_equal_content_gives_equal_bytes():
    assert content.to_bytes(pack()) == content.to_bytes(pack())
    other = pack(entry(decided="2026-01-30T09:00:00Z"))
    assert other.sha256 != pack().sha256


def test_equal_layers_stand_once():
    sixty = model()
    sixty = replace(sixty, layers=(replace(sixty.layers[0], indices=tuple(range(60))),))
    assert len(data(pack(models=[sixty]))["entries"]) == 1
    assert len(data(pack(models=[sixty]))["problems"]) == 1


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("device", Device),
        ("problem", Problem),
        ("scheme", QuantScheme),
        ("summary", Summary),
        ("errors", ErrorFigures),
        ("bucket", TokenBucket),
    ],
)
def test_the_schema_has_every_field(name, cls):
    assert set(SCHEMA["$defs"][name]["properties"]) == {f.name for f in fields(cls)}


def test_a_device_of_an_older_autosel_lacks_fields_that_are_then_unknown():
    from autosel.packs.grade import grade
    from tests.packs.made import resealed

    values = data()
    for name in ("mig_slice", "max_clock_mhz"):
        del values["sources"][0]["device"][name]
    read = content.from_bytes(resealed(values), "old.json")
    assert read.entries[0].device.mig_slice is None
    assert grade(read.entries[0].source, MACHINE).grade == "foreign"


def test_summary_is_of_the_samples():
    measured = pack().entries[0].measured[0]
    times = sorted(measured.row.times_us)
    assert measured.summary.samples == len(times) == 25
    assert measured.summary.median_us == pytest.approx(times[12])
    assert measured.summary.min_us == times[0]


def test_a_pack_without_its_hash_is_not_written(tmp_path):
    with pytest.raises(PackError, match="sha256"):
        content.write(Pack((), (entry(),)), tmp_path / "x.json")
    assert not list(tmp_path.iterdir())


def test_what_could_not_be_read_again_is_not_written(tmp_path):
    bad = content.sealed(Pack((), (entry(routing="../x"),)))
    path = tmp_path / "x.json"
    path.write_text("kept")
    with pytest.raises(PackError, match=r"routing"):
        content.write(bad, path)
    assert path.read_text() == "kept"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_certificates_and_plans_travel(tmp_path):
    from autosel.core import (
        PROPERTIES,
        Certificate,
        CertifiedCase,
        Limits,
        Plan,
        PlannedBucket,
        ResidentLayout,
        Workload,
    )
    from autosel.core.workload import TokenBin
    from tests.fakes import PROBLEM

    certificate = Certificate(
        problem=PROBLEM, candidate=FAST, device=MACHINE, status="ok", level="full",
        limits=Limits(1.0, 2.0, 6.0, 0.1), created="2026-01-31T12:00:00Z", autosel_version="0.1.0",
        code="0123456789abcdef0123", score=0.5,
        cases=(CertifiedCase("M=1", 1, "uniform", 0.5, True),),
        properties=tuple((name, True) for name in PROPERTIES), runs=3,
    )  # fmt: skip
    plan = Plan(
        problem=PROBLEM, device=MACHINE, routing="uniform",
        workload=Workload("decode", (TokenBin(1, 16, 1.0),)), budget="1.0x", budget_bytes=1000,
        copy_bytes=1000, resident=(ResidentLayout("plain", 1000),),
        buckets=(PlannedBucket(TokenBucket(1, 16, 4), FAST, 10.0, FAST, 10.0, 1.0, 1.0),),
        time_us=10.0, best_us=10.0, why="one layout",
    )  # fmt: skip
    made = pack(entry(certificates=(certificate,), plan=plan))
    content.write(made, tmp_path / "p.json")
    back = content.read(tmp_path / "p.json")
    assert back == made
    assert back.entries[0].plan == plan
    assert back.entries[0].certificates == (certificate,)
    VALIDATOR.validate(json.loads((tmp_path / "p.json").read_text()))


@pytest.mark.parametrize("clock", ["device events, net", "device events", "perf_counter"])
def test_a_clock_has_a_name_in_words(tmp_path, clock):
    """What the timers call theirs; control characters stay out."""
    made = pack(entry(timing={"cache": "cold", "clock": clock, "graph": True}))
    content.write(made, tmp_path / "p.json")
    back = content.read(tmp_path / "p.json")
    assert (back.sha256, back.entries[0].timing) == (made.sha256, made.entries[0].timing)
    VALIDATOR.validate(json.loads((tmp_path / "p.json").read_text()))
    hostile = pack(entry(timing={"cache": "cold", "clock": f"{clock}\x1b[31m"}))
    with pytest.raises(PackError, match=r"timing\.clock"):
        content.write(hostile, tmp_path / "q.json")


def test_row_helper_is_stored_as_measured():
    assert row().times_us[0] == 10.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cannot open /home/anna/models/x.so: no", "cannot open .../x.so: no"),
        ("File '/srv/a b/c.py', line 3", "File '.../a b/c.py', line 3"),
        ('"/opt/x/y.so"', '".../y.so"'),
        ("C:\\Users\\anna\\x.dll is missing", ".../x.dll is missing"),
        ("found 1/2, and/or a/b/c at 3.5 us/call", "found 1/2, and/or a/b/c at 3.5 us/call"),
        ("see https://docs.example.org/a/b", "see https://docs.example.org/a/b"),
        ("two\nlines\tand \x1b[31mred", "two lines and \\x1b[31mred"),
        ("/ and /x stay", "/ and /x stay"),
        ("a" * 5000, "a" * 3996 + " ..."),
    ],
)
def test_reasons_tell_nothing_about_somebodys_folders(text, expected):
    from autosel.packs.build import line

    assert line(text) == expected


def test_what_ships_is_sound():
    """Every pack among the results: whole, canonical, of known backends, with its origin."""
    from autosel.packs.library import unknown_backends

    root = Path(__file__).resolve().parents[2] / "results"
    for path in sorted(root.glob("*/packs/*.json")):
        found = content.read(path)
        assert path.read_bytes() == content.to_bytes(found), f"{path} is not canonical"
        assert unknown_backends(found) == (), path
        assert found.models, path
        assert all(source.device.name for source in found.sources), path
