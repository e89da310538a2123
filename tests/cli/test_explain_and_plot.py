"""``explain`` and ``plot`` on a database made by hand: no device work, every answer known."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from autosel import native, presets
from autosel.core import (
    Candidate,
    Decision,
    Device,
    Measurement,
    Rejected,
    TokenBucket,
)
from autosel.device import pretend
from autosel.store import Store

CPU = Device("cpu", "Pretended CPU", threads=8, versions=(("torch", "2.13.0"),))
GPU = Device("cuda", "Pretended GPU", capability=(9, 0), driver="570.1",
             versions=(("torch", "2.13.0"),))  # fmt: skip
PRESET = "granite-3-1b-a400m"
PROBLEM = presets.get(PRESET)
COLD = (("cache", "cold"), ("clock", "perf_counter"))

FAST, SLOW, BROKEN = (Candidate.of(name, {"block": 2}) for name in ("fast", "slow", "broken"))


def measured(candidate, tokens, us, *, status="ok", reason="", device=CPU, problem=PROBLEM,
             routing="uniform", accuracy="exact"):  # fmt: skip
    times = tuple(us * (1 + 0.01 * i) for i in range(10)) if status == "ok" else ()
    return Measurement(
        problem, tokens, routing, candidate, device, status, accuracy, reason, times,
        timing=COLD if status == "ok" else (),
    )  # fmt: skip


def decided(low, high, at, us, *, problem=PROBLEM, routing="uniform", tie=False):
    return Decision(
        problem, TokenBucket(low, high, at), routing, FAST, us, SLOW, us * 1.5, 0.5, (0.45, 0.55),
        tie, "fast is faster than slow",
        (Rejected(SLOW, "ok", "slower by 50 %", "exact", us * 1.5),
         Rejected(BROKEN, "wrong", "wrong result: token 3 is off by 7 limits")),
    )  # fmt: skip


def fill(path, *, device=CPU, problem=PROBLEM, routing="uniform"):
    with Store.open(path) as store:
        sweep = store.begin_sweep(
            device, {"seed": 0}, ceilings={"read_gbps": 20.0, "matmul_tflops": 0.5}
        )
        for low, high, at, us in ((1, 8, 4, 100.0), (9, None, 16, 220.0)):
            for m in (
                measured(FAST, at, us, device=device, problem=problem, routing=routing),
                measured(SLOW, at, us * 1.5, device=device, problem=problem, routing=routing),
                measured(BROKEN, at, 0, status="wrong", reason="token 3 is off by 7 limits",
                         device=device, problem=problem, routing=routing),
                measured(Candidate.of("gone"), at, 0, status="timeout", reason="ran past 5 s",
                         device=device, problem=problem, routing=routing),
                measured(Candidate.of("odd"), at, 0, status="nonfinite", reason="NaN in token 0",
                         device=device, problem=problem, routing=routing),
            ):  # fmt: skip
                store.add_measurement(m, sweep)
            store.add_decision(
                decided(low, high, at, us, problem=problem, routing=routing), device, COLD, sweep
            )
        store.finish_sweep(sweep)


#: What serves an untuned layer here: our kernel where it can be built.
UNTUNED = "cpu_native" if native.compiler() else "emulation"


@pytest.fixture
def db(tmp_path):
    return tmp_path / "made.db"


@pytest.fixture(autouse=True)
def cpu():
    with pretend(CPU):
        yield


def test_a_decision_is_explained(autosel, db):
    fill(db)
    ran = autosel("explain", PRESET, "--tokens", 5, "--db", db)
    assert ran.status == 0
    for words in ("fast[block=2]", "slow[block=2]", "100 us", "150 us", "50.0 %",
                  "95 % interval 45.0 to 55.0 %", "1-8 tokens", "measured at 4",
                  "fast is faster than slow", "token 3 is off by 7 limits",
                  "Pretended CPU"):  # fmt: skip
        assert words in ran.out, words
    found = autosel("explain", PRESET, "--tokens", 9, "--db", db, "--json").json
    (answer,) = found["answers"]
    assert answer["status"] == "tuned"
    assert answer["decision"]["winner_us"] == 220.0
    assert answer["used"]["key"] == "fast[block=2]"
    assert answer["decision"]["bucket"]["high"] is None
    # Failed candidates are there, with a status, a reason and no time.
    failed = {m["candidate"]["backend"]: m for m in answer["measurements"] if m["status"] != "ok"}
    assert set(failed) == {"broken", "gone", "odd"}
    for m in failed.values():
        assert m["reason"]
        assert m["time_us"] is None
        assert m["times_us"] is None


def test_explaining_does_no_device_work(autosel, db, monkeypatch):
    import torch

    fill(db)

    def never(*args, **kwargs):
        raise AssertionError("device work")

    for name in ("matmul", "randn", "empty"):
        monkeypatch.setattr(torch, name, never)
    assert autosel("explain", PRESET, "--tokens", 5, "--db", db).status == 0


def test_an_empty_database_says_what_was_looked_for_and_what_to_do(autosel, db):
    ran = autosel("explain", PRESET, "--tokens", 5, "--bits", 8, "--group-size", "channel",
                  "--routing", "zipf", "--db", db)  # fmt: skip
    assert ran.status == 0
    problem = presets.get(PRESET, num_bits=8, group_size=-1)
    again = f"autosel sweep {PRESET} --bits 8 --group-size channel --routing zipf"
    for words in ("not tuned", "empty", problem.key, "Pretended CPU", UNTUNED, again):
        assert words in ran.out, words
    found = autosel("explain", PRESET, "--tokens", 5, "--db", db, "--json").json["answers"][0]
    assert found["status"] == "not tuned"
    assert found["nearest"] is None
    assert found["looked_for"]["problem"] == PROBLEM.key
    assert found["used"]["backend"] == UNTUNED


@pytest.mark.parametrize(
    ("stored", "fields"),
    [
        ({"device": GPU}, {"device.kind", "device.name", "device.capability"}),
        ({"device": replace(CPU, versions=(("torch", "2.14.0"),))}, {"versions.torch"}),
        ({"device": replace(CPU, threads=4)}, {"device.threads"}),
        ({"problem": presets.get(PRESET, num_bits=8)}, {"w13.num_bits", "w2.num_bits"}),
        ({"problem": presets.get(PRESET, act_dtype="float16", scale_dtype="bfloat16")},
         {"act_dtype"}),
        ({"routing": "zipf"}, {"routing"}),
    ],
)  # fmt: skip
def test_what_was_tuned_elsewhere_is_named_field_by_field_and_never_used(
    autosel, db, stored, fields
):
    fill(db, **stored)
    ran = autosel("explain", PRESET, "--tokens", 5, "--db", db)
    assert ran.status == 0
    assert "not tuned" in ran.out
    assert "100 us" not in ran.out
    answer = autosel("explain", PRESET, "--tokens", 5, "--db", db, "--json").json["answers"][0]
    assert answer["status"] == "not tuned"
    assert answer["used"]["backend"] == UNTUNED
    assert answer["decision"] is None
    differences = {item["field"]: item for item in answer["nearest"]["differences"]}
    assert fields <= set(differences)
    for name in fields:
        assert name in ran.out
        assert differences[name]["wanted"] != differences[name]["stored"]


def test_a_device_without_a_name_matches_nothing(autosel, db):
    """Unknown is not equal, not even to another unknown one."""
    nameless = replace(CPU, name="")
    fill(db, device=nameless)
    with pretend(nameless):
        ran = autosel("explain", PRESET, "--tokens", 5, "--db", db, "--json")
    (answer,) = ran.json["answers"]
    assert answer["status"] == "not tuned"
    assert "device.name" in {item["field"] for item in answer["nearest"]["differences"]}


def test_measured_with_nothing_usable(autosel, db):
    with Store.open(db) as store:
        store.add_measurement(measured(BROKEN, 4, 0, status="wrong", reason="off by 7 limits"))
        store.add_measurement(
            measured(Candidate.of("none"), 4, 0, status="unsupported", reason="no")
        )
    ran = autosel("explain", PRESET, "--tokens", 5, "--db", db)
    assert "nothing usable" in ran.out
    assert "off by 7 limits" in ran.out
    answer = autosel("explain", PRESET, "--tokens", 5, "--db", db, "--json").json["answers"][0]
    assert answer["status"] == "nothing usable"
    assert {item["status"] for item in answer["rejected"]} == {"wrong", "unsupported"}


def test_another_way_of_timing_is_not_mixed_in(autosel, db):
    fill(db)
    ran = autosel("explain", PRESET, "--tokens", 5, "--cache", "hot", "--db", db)
    assert "never with cache=hot" in ran.out
    assert "--cache hot" in ran.out


def test_a_mistyped_database_is_said_and_not_made(autosel, tmp_path):
    place = tmp_path / "no" / "file.db"
    ran = autosel("explain", PRESET, "--tokens", 5, "--db", place)
    assert ran.status == 0
    assert ran.err == f"no database at {place}; a sweep makes one\n"
    assert "not tuned" in ran.out
    assert not place.parent.exists()


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_writes_the_file(autosel, db, tmp_path, suffix, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setenv("MPLBACKEND", "TkAgg")
    fill(db)
    out = tmp_path / f"a.{suffix}"
    ran = autosel("plot", PRESET, "-o", out, "--db", db)
    assert ran.status == 0
    assert str(out) in ran.out
    if suffix == "png":
        assert out.read_bytes().startswith(b"\x89PNG")
        return
    words = "".join(ET.parse(out).getroot().itertext())
    for wanted in (PRESET, "Pretended CPU", "8 threads", "torch 2.13.0", "measured 2", "fast",
                   "slow", "roofline", "20 GB/s", "50%", "uniform routing"):  # fmt: skip
        assert wanted in words, wanted
    for unwanted in ("broken", "gone", "odd"):
        assert unwanted not in words


def test_plot_says_json_too(autosel, db, tmp_path):
    fill(db)
    ran = autosel("plot", PRESET, "-o", tmp_path / "a.png", "--db", db, "--json")
    assert ran.json["file"] == str(tmp_path / "a.png")


def test_plot_without_ceilings_has_no_roofline(autosel, db, tmp_path):
    with Store.open(db) as store:
        store.add_measurement(measured(FAST, 4, 100.0))
    out = tmp_path / "a.svg"
    assert autosel("plot", PRESET, "-o", out, "--db", db).status == 0
    assert "roofline" not in "".join(ET.parse(out).getroot().itertext()).lower()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-o", "a.jpg"], "found '.jpg'"),
        (["-o", "no/a.png"], "folder"),
        (["-o", "a.png", "--routing", "zipf"], "routing: wanted 'zipf', stored 'uniform'"),
        (["-o", "a.png", "--cache", "hot"], "cache=hot"),
        (["-o", "a.png", "--bits", "8"], "num_bits"),
    ],
)
def test_plot_refuses_in_one_line(autosel, db, tmp_path, monkeypatch, args, words):
    fill(db)
    monkeypatch.chdir(tmp_path)
    ran = autosel("plot", PRESET, *args, "--db", db)
    assert ran.status == 1
    assert words in ran.error
    assert not (tmp_path / "a.png").exists()


def test_plot_without_matplotlib_is_one_line_and_keeps_the_data(autosel, db, tmp_path, monkeypatch):
    import sys

    fill(db)
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = autosel("plot", PRESET, "-o", tmp_path / "a.png", "--db", db)
    assert ran.status == 1
    assert "pip install matplotlib" in ran.error
    assert not (tmp_path / "a.png").exists()
    with Store.open(db) as store:
        assert len(store.measurements()) == 10


def test_export_is_strict_json_with_every_failure(autosel, db, tmp_path):
    fill(db)
    for args in ([], [PRESET], ["--json"]):
        found = autosel("export", *args, "--db", db).json
        assert len(found["measurements"]) == 10
        assert len(found["decisions"]) == 2
        failed = [m for m in found["measurements"] if m["status"] != "ok"]
        assert {m["status"] for m in failed} == {"wrong", "timeout", "nonfinite"}
        assert all(m["reason"] and m["time_us"] is None for m in failed)
    assert autosel("export", PRESET, "--bits", 8, "--db", db).json["measurements"] == []
    out = tmp_path / "out.json"
    ran = autosel("export", "-o", out, "--db", db)
    assert ran.out == f"wrote 10 measurements and 2 decisions to {out}\n"
    assert json.loads(out.read_text()) == autosel("export", "--db", db).json


def test_list_tells_usable_from_stale_and_foreign(autosel, db):
    fill(db)
    fill(db, device=replace(CPU, versions=(("torch", "2.12.0"),)))
    fill(db, device=GPU)
    ran = autosel("list", "--db", db)
    assert ran.status == 0
    lines = [line for line in ran.out.splitlines() if PROBLEM.key in line]
    assert len(lines) == 3
    assert sum(line.rstrip().endswith("yes") for line in lines) == 1
    assert "no, stale: versions.torch: wanted '2.13.0', stored '2.12.0'" in ran.out
    assert "no, another device: device.kind: wanted 'cpu', stored 'cuda'" in ran.out
    entries = autosel("list", "--db", db, "--json").json["entries"]
    assert sorted((e["usable"], e["stale"]) for e in entries) == [
        (False, False),
        (False, True),
        (True, False),
    ]
    assert all(e["token_counts"] == [4, 16] and e["decisions"] == 2 for e in entries)


def test_list_of_an_empty_database(autosel, db):
    ran = autosel("list", "--db", db)
    assert ran.status == 0
    assert "nothing is stored" in ran.out
    assert autosel("list", "--db", db, "--json").json["entries"] == []


def test_the_roofline_counts_the_experts_that_the_sweeps_routing_hit():
    from autosel.evidence import experts_hit

    hit, slots = experts_hit(PROBLEM, "one_hot:3", 16, 0)
    assert (hit, slots) == (1, 16)
    hit, slots = experts_hit(PROBLEM, "uniform", 1, 0)
    assert (hit, slots) == (PROBLEM.top_k, PROBLEM.top_k)


def test_no_module_hides_a_function_of_the_package():
    """A module ``autosel.explain`` would replace the function of that name once imported."""
    import pkgutil

    import autosel as package

    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert not modules & set(package.__all__)
