"""From a file of sweeps to what ships: running, exporting, and answering from what was exported."""

import csv
import io
import json
import lzma
import os
import signal
import sqlite3
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from autosel import presets, registry
from autosel.__main__ import main as autosel_main
from autosel.core import Candidate, Device, TokenBucket
from autosel.decide import decide
from autosel.device import pretend
from autosel.errors import AutoselError
from autosel.evidence import preset_target
from autosel.packs import content, places
from autosel.store import Store
from bench import device_results, remeasure, results_index
from bench.device_results_export import export, read_environment
from bench.device_results_lines import read_lines
from bench.device_results_sweep import Runner, Slot
from bench.results_data import RESULTS, ROOT
from bench.results_layers import slug
from tests.made_evidence import GPU, evidence, row

#: The real one: the other tests must not see what ships.
BUILT_IN = places.built_in
#: Sizes of a published layer, so that labels and commands are about something.
LAYER = presets.get("granite-3-1b-a400m")
CEILINGS = {"read_gbps": 1000.0, "matmul_tflops": 100.0}


# the file of sweeps ------------------------------------------------------------------------


def lines_of(tmp_path, text):
    path = tmp_path / "sweeps.txt"
    path.write_text(text)
    return path


def test_lines_are_read_as_the_command_reads_them(tmp_path):
    text = "# all\nqwen3-30b-a3b --tp 4 --routing zipf # skewed\n\nolmoe-1b-7b --tokens 1,16\n"
    one, two = read_lines(lines_of(tmp_path, text))
    assert one.problems == (presets.get("qwen3-30b-a3b", tp=4),)
    assert (one.routing, one.tokens, one.text) == (
        "zipf", (), "qwen3-30b-a3b --tp 4 --routing zipf",
    )  # fmt: skip
    assert two.tokens == (1, 16)
    assert (one.counts(GPU), two.counts(GPU)) == (14, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("olmoe-1b-7b\nnothing-like-it", ("line 2", "'nothing-like-it'")),
        ("olmoe-1b-7b --tokens x", ("line 1", "--tokens")),
        ("olmoe-1b-7b --tp 3", ("line 1", "divisor")),
        ("olmoe-1b-7b --no-such-option", ("line 1", "--no-such-option")),
        ("olmoe-1b-7b --backends marlin,marlinn", ("line 1", "marlinn")),
        ("olmoe-1b-7b --db x.db", ("line 1", "--db")),
        ("olmoe-1b-7b\nolmoe-1b-7b", ("line 2", "line 1")),
        ("olmoe-1b-7b 'open", ("line 1", "quotation")),
        ("olmoe-1b-7b --help", ("line 1", "--help")),
        ("# nothing\n", ("none",)),
    ],
)
def test_a_wrong_line_is_named_before_anything_runs(tmp_path, capsys, text, words):
    path = lines_of(tmp_path, text)
    assert device_results.main(["sweep", str(path), "--db", str(tmp_path / "x.db")]) == 1
    said = capsys.readouterr().err.strip()
    assert said.startswith(f"error: {path}")
    assert len(said.splitlines()) == 1
    assert all(word in said for word in words), said
    assert not (tmp_path / "x.db").exists()


def test_wrong_use_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        device_results.main(["sweep", "x", "--db", "y", "--deadline", "soon"])
    assert "found 'soon', expected a time" in capsys.readouterr().err
    assert device_results.main(["sweep", str(tmp_path / "none"), "--db", "y"]) == 1
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/sweeps.txt")), ids=lambda p: p.parent.name)
def test_shipped_files_of_sweeps_are_sound(path):
    """Each line is another layer or routing, under the name that the results go by."""
    lines = read_lines(path)
    names = {(line.problems, line.routing) for line in lines}
    assert len(names) == len(lines)
    for line in lines:
        (problem,) = line.problems
        words = preset_target(problem).split()
        assert words[0] == line.words[0]
        assert set(words) <= set(line.words), line.text


# running -----------------------------------------------------------------------------------

#: Stands for ``python -m autosel``: stores what a sweep of the line would store. It imports no
#: torch, so that it takes half a second.
CHILD = """
import json, os, sys, time
from autosel.core import Candidate, Decision, Device, Measurement, Problem, TokenBucket
from autosel.store import Store

_, target, *rest = sys.argv[1:]
if target == "mixtral-8x7b":
    print("error: planted: found this, expected that")
    sys.exit(1)
with open(os.path.join(os.path.dirname(__file__), "known.json")) as file:
    known = json.load(file)
device, problem = Device.from_dict(known["device"]), Problem.from_dict(known[target])
settings = {
    "backends": [], "allow_a8": False, "require": [], "trials": 32, "search_within": 1.5, "seed": 0
}
marlin, cold = Candidate.of("marlin"), (("cache", "cold"),)
with Store.open(rest[-1]) as store:
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES")
    number = store.begin_sweep(device, {**settings, "gpu": gpu})
    for count in (1, 4):
        times = (10.0 + count, 10.5 + count)
        store.add_measurement(
            Measurement(problem, count, "uniform", marlin, device, "ok", times_us=times,
                        timing=cold),
            number,
        )
        store.add_decision(
            Decision(problem, TokenBucket(count, count, count), "uniform", marlin, times[0],
                     None, None, None, None, False, "why"),
            device, cold, number,
        )
        if target == "dbrx":
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                sys.exit(130)
"""


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """``runner("olmoe-1b-7b\\n...", devices=[...])`` with sweeps that take no time."""
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    names = ("olmoe-1b-7b", "granite-3-1b-a400m", "qwen3-30b-a3b", "mixtral-8x22b", "dbrx")
    known = {name: presets.get(name).to_dict() for name in names}
    (tmp_path / "known.json").write_text(json.dumps({**known, "device": GPU.to_dict()}))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(Slot, "device", lambda self, kind: GPU)
    said = []

    def make(text, devices=(), **options):
        lines = [
            f"{line} --tokens 1,4" if line and line[0] != "#" else line
            for line in text.splitlines()
        ]
        found = read_lines(lines_of(tmp_path, "\n".join(lines)))
        made = Runner(
            found, tmp_path / "all.db", devices, child=(sys.executable, str(child)),
            say=said.append, poll_s=0.02, **options,
        )  # fmt: skip
        made.said = said
        return made

    return make


def test_failures_are_told_and_the_rest_goes_on(runner, tmp_path):
    run = runner("olmoe-1b-7b\nmixtral-8x7b\ngranite-3-1b-a400m")
    assert run.run() == 1
    first, second, third, summary = run.said
    assert first.startswith("[1/3] olmoe-1b-7b --tokens 1,4: ")
    assert "2 of 2 decided" in first
    assert "failed with status 1" in second
    assert "error: planted: found this" in second
    assert "2 of 2 decided" in third
    assert "3 sweeps" in summary
    assert "2 done, 1 failed" in summary
    # Again: what is there is skipped, what failed is tried.
    again = runner("olmoe-1b-7b\nmixtral-8x7b\ngranite-3-1b-a400m")
    again.said.clear()
    assert again.run() == 1
    assert [("skipped" in line) for line in again.said] == [True, False, True, False]


def test_other_settings_are_another_sweep(runner):
    assert runner("olmoe-1b-7b").run() == 0
    run = runner("olmoe-1b-7b\nolmoe-1b-7b --trials 8\nolmoe-1b-7b --routing zipf")
    run.said.clear()
    run.run()
    assert ["skipped" in line for line in run.said[:3]] == [True, False, False]
    # The stand-in knows the usual settings and uniform routing alone.
    assert "0 of 2 decided" in run.said[1]
    assert "0 of 2 decided" in run.said[2]


def test_devices_share_the_lines_and_are_merged(runner, tmp_path):
    names = ["olmoe-1b-7b", "granite-3-1b-a400m", "qwen3-30b-a3b", "mixtral-8x22b"]
    run = runner("\n".join(names), devices=["0", "1"])
    assert run.run() == 0
    with Store.open(tmp_path / "all.db") as store:
        assert {d.problem for d in store.decisions()} == set(map(presets.get, names))
        assert {sweep.settings["gpu"] for sweep in store.sweeps()} == {"0", "1"}
        rows = len(store.measurements(history=True))
    assert rows == 4 * 2
    assert (tmp_path / "all-0.db").exists()
    assert (tmp_path / "all-1.db").exists()
    # With the merged file alone everything is known to every device, and nothing is doubled.
    for name in ("all-0.db", "all-1.db"):
        (tmp_path / name).unlink()
    again = runner("\n".join(names), devices=["1", "7"])
    again.said.clear()
    assert again.run() == 0
    assert all("skipped" in line for line in again.said[:4])
    with Store.open(tmp_path / "all.db") as store:
        assert len(store.measurements(history=True)) == rows


def test_the_deadline_ends_what_runs_and_starts_nothing(runner, tmp_path):
    run = runner("dbrx\nolmoe-1b-7b", deadline_s=2.5)
    began = time.monotonic()
    assert run.run() == 0
    assert time.monotonic() - began < 30
    assert "1 cut short, 1 not started; " in run.said[-1]
    assert "goes on" in run.said[-1]
    with Store.open(tmp_path / "all.db") as store:  # what was measured until then is there
        assert {d.problem for d in store.decisions()} == {presets.get("dbrx")}


def test_an_interrupt_keeps_what_there_is(runner, tmp_path):
    run = runner("olmoe-1b-7b\ndbrx\nqwen3-30b-a3b", devices=["0"])

    def interrupt():
        part = tmp_path / "all-0.db.log"
        while not (part.exists() and "dbrx" in part.read_text()):
            time.sleep(0.02)
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert run.run() == 130
    assert run.said[-1].startswith("interrupted; ")
    assert "1 not started" in run.said[-1]
    with Store.open(tmp_path / "all.db") as store:  # merged all the same
        assert presets.get("olmoe-1b-7b") in {d.problem for d in store.decisions()}


# exporting ---------------------------------------------------------------------------------


def own(backend, **params):
    """A candidate that its backend itself would propose for the layer."""
    found = registry.get(backend)
    settings = params or found.space(LAYER, 16, GPU).default
    return Candidate.of(backend, settings, found.layout(LAYER, settings).key)


def measured(backend, tokens, us, problem=LAYER, **more):
    made = row(backend, tokens, us, problem=problem, **more)
    if backend == "emulation" and not made.candidate.params:
        made = replace(made, candidate=own("emulation"))
    return made


def fill(path, problem=LAYER, device=GPU, routing="uniform", cache="cold"):
    """Three backends and a slower setting at 1 and 16 tokens; marlin is not supported."""
    with Store.open(path) as store:
        number = store.begin_sweep(device, {"seed": 0, "trials": 8}, ceilings=CEILINGS)
        for tokens, bucket in ((1, TokenBucket(1, 4, 1)), (16, TokenBucket(5, None, 16))):
            rows = [
                measured("emulation", tokens, 10.0 * tokens, problem),
                measured("triton", tokens, 20.0 * tokens, problem, BLOCK_SIZE_M=16),
                measured("triton", tokens, 40.0 * tokens, problem, BLOCK_SIZE_M=64),
                measured(
                    "marlin", tokens, 1, problem, status="unsupported",
                    reason="capability: found 7.0, required 8.0",
                ),
            ]  # fmt: skip
            lists = (("sm_mhz", "1980," * 19 + "1965"), ("watts", "100.5," * 19 + "99"))
            rows = [
                replace(
                    m, device=device, routing=routing,
                    times_us=tuple(time * (1 + 1e-8) for time in m.times_us),  # as events do
                    timing=tuple(sorted((("cache", cache), *(lists if m.times_us else ())))),
                )
                for m in rows
            ]  # fmt: skip
            store.add_measurements(rows, number)
            store.add_decision(decide(rows, bucket=bucket), device, (("cache", cache),), number)
        store.finish_sweep(number)


@pytest.fixture
def db(tmp_path):
    path = tmp_path / "made.db"
    fill(path)
    fill(path, routing="zipf")
    fill(path, presets.get("olmoe-1b-7b", tp=2, symmetric=False))
    return path


def table(path):
    raw = path.read_bytes()
    text = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode()
    return list(csv.DictReader(io.StringIO(text)))


def test_what_is_exported(db, tmp_path, capsys):
    folder = tmp_path / "results" / "some-gpu"
    before = db.read_bytes()
    assert device_results.main(["export", "--db", str(db), "-o", str(folder)]) == 0
    assert db.read_bytes() == before
    assert "3 packs" in capsys.readouterr().out
    assert sorted(path.name for path in folder.glob("packs/*")) == [
        "granite-3-1b-a400m-zipf.json", "granite-3-1b-a400m.json", "olmoe-1b-7b-tp2-asym.json",
    ]  # fmt: skip
    assert sorted(path.name for path in folder.iterdir()) == [
        "decisions.csv", "environment.json", "packs", "samples.csv.xz",
    ]  # fmt: skip
    facts = read_environment(folder)
    layer = facts["layers"]["granite-3-1b-a400m-zipf"]
    assert layer["command"] == "autosel sweep granite-3-1b-a400m --routing zipf --trials 8"
    assert layer["ceilings"] == CEILINGS
    assert [Device.from_dict(found) for found in facts["machines"]] == [GPU]
    assert str(tmp_path) not in (folder / "environment.json").read_text()


def test_every_sample_ships_as_it_was_taken(db, tmp_path):
    """Against the database's own rows, read with nothing of ours."""
    export(db, tmp_path / "x")
    rows = table(tmp_path / "x" / "samples.csv.xz")
    shipped = sorted(json.loads(r["samples_us"] or "[]") for r in rows)
    with sqlite3.connect(db) as connection:
        found = connection.execute("SELECT times_us FROM measurements").fetchall()
    stored = sorted(json.loads(times) for (times,) in found)
    assert shipped == stored
    # Planted: a sample that was rounded on the way would be seen.
    assert shipped != [[round(time, 3) for time in times] for times in stored]
    refused = [r for r in rows if r["status"] != "ok"]
    assert len(refused) == 6
    assert {r["reason"] for r in refused} == {"capability: found 7.0, required 8.0"}
    timed = next(r for r in rows if r["status"] == "ok")
    assert timed["sm_mhz"].endswith("1980,1965")
    assert json.loads(next(r for r in rows if r["backend"] == "triton")["params"])


def test_decisions_say_what_was_decided_and_what_the_order_takes(db, tmp_path):
    export(db, tmp_path / "x")
    rows = {(r["model"], r["tokens"]): r for r in table(tmp_path / "x" / "decisions.csv")}
    assert len(rows) == 6
    one = rows["granite-3-1b-a400m", "16"]
    assert (one["winner"], one["runner_up"], one["vllm_order"]) == ("emulation", "triton", "triton")
    assert (one["low"], one["high"], one["tie"]) == ("5", "", "no")
    assert float(one["winner_us"]) == pytest.approx(160.0)
    # Samples differ by their level alone, so every ratio is that of the levels.
    assert float(one["speedup"]) == pytest.approx(2.0)
    assert float(one["margin"]) == pytest.approx(1.0)
    # 16 tokens with 8 of 32 experts each; bytes and operations by hand for one expert.
    weights = 3 * LAYER.hidden_size * LAYER.intermediate_size
    share = float(one["roofline_us"]) / float(one["winner_us"])
    assert float(one["roofline_share"]) == pytest.approx(share, rel=1e-4)
    most = (32 * weights * (0.5 + 2 / 128) + 4 * 16 * LAYER.hidden_size) / 1000.0 / 1e3
    assert 0.5 * most < float(one["roofline_us"]) <= most * 1.0001


def test_packs_keep_the_samples_that_matter(db, tmp_path):
    export(db, tmp_path / "x")
    found = content.read(tmp_path / "x" / "packs" / "granite-3-1b-a400m.json")
    (entry,) = found.entries
    assert found.models[0].name == "granite-3-1b-a400m"
    assert entry.routing == "uniform"
    assert entry.source.command == "autosel sweep granite-3-1b-a400m --trials 8"
    rows = [m.row for m in entry.measured if m.row.times_us]
    kept = {
        (row.num_tokens, row.candidate.backend, row.candidate.params_dict.get("BLOCK_SIZE_M"))
        for row in rows
    }
    assert kept == {(c, b, p) for c in (1, 16) for b, p in (("emulation", None), ("triton", 16))}
    # Of the others a decision tells the time, and of what failed the reason stays.
    (at_16,) = (d for d in entry.decisions if d.bucket.measured == 16)
    slow = next(r for r in at_16.rejected if r.candidate.params_dict.get("BLOCK_SIZE_M") == 64)
    assert slow.time_us == pytest.approx(640.0)
    failed = [m.row for m in entry.measured if m.row.status != "ok"]
    assert {(row.candidate.backend, row.num_tokens) for row in failed} == {
        ("marlin", 1), ("marlin", 16),
    }  # fmt: skip
    assert not any("sm_mhz" in dict(m.row.timing) for m in entry.measured)
    # Rounded to a nanosecond and no more.
    with Store.open(db) as store:
        stored = {(m.num_tokens, m.candidate): m.times_us for m in store.measurements(LAYER, GPU)}
    for m in entry.measured:
        if m.row.times_us:
            full = stored[m.row.num_tokens, m.row.candidate]
            assert m.row.times_us == pytest.approx(full, abs=0.0005)


def test_the_same_database_gives_the_same_bytes(db, tmp_path):
    for name in ("one", "two"):
        export(db, tmp_path / name / "gpu")
        time.sleep(1.1)  # packs are dated to the second
    one, two = (
        {p.relative_to(tmp_path / n): p.read_bytes() for p in (tmp_path / n).rglob("*.*")}
        for n in ("one", "two")
    )
    assert len(two) == 6
    for path, raw in one.items():
        assert raw == two[path], path


def test_packs_of_layers_that_are_gone_go_and_others_stay(db, tmp_path):
    folder = tmp_path / "x"
    export(db, folder)
    (folder / "packs" / "by-hand.json").write_bytes(
        (folder / "packs" / "granite-3-1b-a400m.json").read_bytes()
    )
    fewer = tmp_path / "fewer.db"
    fill(fewer)
    export(fewer, folder)
    assert {p.name for p in folder.glob("packs/*")} == {"granite-3-1b-a400m.json", "by-hand.json"}


def test_of_two_versions_the_newest_ships_and_two_devices_need_a_name(db, tmp_path):
    patched = replace(GPU, driver="2")
    fill(db, device=patched)
    export(db, tmp_path / "x")
    facts = read_environment(tmp_path / "x")
    driver = {
        name: facts["machines"][layer["machine"]]["driver"]
        for name, layer in facts["layers"].items()
    }
    assert driver["granite-3-1b-a400m"] == "2"
    assert driver["granite-3-1b-a400m-zipf"] == "1"
    fill(db, device=replace(GPU, name="Another GPU"))
    with pytest.raises(AutoselError, match=r"Another GPU, Test GPU, expected one \(--stored-dev"):
        export(db, tmp_path / "y")
    assert not (tmp_path / "y").exists()
    export(db, tmp_path / "y", device="another")
    assert set(read_environment(tmp_path / "y")["layers"]) == {"granite-3-1b-a400m"}


def test_hot_caches_are_named(tmp_path):
    both, hot = tmp_path / "both.db", tmp_path / "hot.db"
    fill(both)
    fill(both, cache="hot")
    fill(hot, cache="hot")
    export(both, tmp_path / "both")
    assert [path.name for path in (tmp_path / "both/packs").iterdir()] == [
        "granite-3-1b-a400m.json"
    ]
    rows = table(tmp_path / "both" / "decisions.csv")
    assert {(r["model"], r["cache"]) for r in rows} == {
        ("granite-3-1b-a400m", "cold"), ("granite-3-1b-a400m, hot caches", "hot"),
    }  # fmt: skip
    assert [one.label for one in results_index.gather(tmp_path / "both")] == ["granite-3-1b-a400m"]
    export(hot, tmp_path / "hot")
    (one,) = results_index.gather(tmp_path / "hot")
    assert one.label == "granite-3-1b-a400m, hot caches"
    assert one.ceilings is not None


def test_nothing_to_export_is_one_line(tmp_path, capsys):
    with Store.open(tmp_path / "empty.db"):
        pass
    for name in ("empty.db", "missing.db"):
        assert device_results.main(["export", "--db", str(tmp_path / name), "-o", "x"]) == 1
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


# what is made of it ------------------------------------------------------------------------


def test_the_index_reads_packs_with_their_ceilings_and_doubles_nothing(db, tmp_path):
    folder = tmp_path / "results" / "some-gpu"
    export(db, folder)
    found = results_index.gather(folder)
    assert [one.label for one in found] == [
        "granite-3-1b-a400m", "granite-3-1b-a400m, zipf", "olmoe-1b-7b TP2 asym",
    ]  # fmt: skip
    assert all(one.ceilings is not None and one.target for one in found)
    # The same layers again in a database and in an export: once each.
    (folder / "made.db").write_bytes(db.read_bytes())
    assert autosel_main(["export", "--db", str(db), "-o", str(folder / "export.json")]) == 0
    again = results_index.gather(folder)
    assert len(again) == 3
    assert {len(one.measurements) for one in again} == {8}  # the database's, which has all
    index = results_index.make_index(tmp_path / "results")
    text = index.read_text()
    assert "Use emulation at 16 tokens: 160 us a call." in text
    assert 'href="some-gpu/packs/granite-3-1b-a400m.json"' in text
    names = {path.name for path in (folder / "plots").iterdir()}
    assert {"speedup.svg", "latency-granite-3-1b-a400m-zipf.svg"} <= names


def test_samples_stand_in_for_a_tables_layer(tmp_path):
    folder = tmp_path / "results" / "epyc"
    folder.mkdir(parents=True)
    (folder / "cpu.csv").write_bytes((RESULTS / "amd-epyc-2-cores" / "cpu.csv").read_bytes())
    alone = results_index.gather(folder)
    b = next(one for one in alone if one.label.startswith("B:"))
    made = tmp_path / "b.db"
    fill(made, b.problem)
    export(made, folder)
    labels = [one.label for one in results_index.gather(folder)]
    others = [one.label for one in alone if one is not b]
    assert labels == ["qwen3-30b-a3b 32 experts", *others]


def explained(capsys, device, *words):
    capsys.readouterr()
    with pretend(device):
        assert autosel_main(["explain", "granite-3-1b-a400m", *words, "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    return answer


def test_explain_answers_from_what_was_exported(db, tmp_path, monkeypatch, capsys):
    """A machine that never swept: the built-in tier has this device, and no other."""
    results = tmp_path / "results"
    export(db, results / "some-gpu")
    packs = tuple(sorted(results.glob("*/packs/*.json")))
    monkeypatch.setattr(places, "built_in", lambda: packs)
    monkeypatch.setenv("AUTOSEL_DB", str(tmp_path / "nobody" / "autosel.db"))
    monkeypatch.setenv("AUTOSEL_SITE_DB", str(tmp_path / "nobody" / "site.db"))
    told = explained(capsys, GPU, "--tokens", "16")
    assert told["status"] == "tuned"
    assert told["used"]["backend"] == "emulation"
    assert (told["origin"]["tier"], told["origin"]["grade"]) == ("built-in", "exact")
    assert told["origin"]["place"] == str(results / "some-gpu/packs/granite-3-1b-a400m.json")
    zipf = explained(capsys, GPU, "--tokens", "16", "--routing", "zipf")
    assert zipf["origin"]["place"].endswith("granite-3-1b-a400m-zipf.json")
    # Another driver is another machine: told, and not used.
    other = explained(capsys, replace(GPU, name="Another GPU"), "--tokens", "16")
    assert other["status"] == "not tuned"
    assert other["told"][0]["origin"]["grade"] == "foreign"


@pytest.mark.parametrize(
    "path", sorted(RESULTS.glob("*/packs/*.json")), ids=lambda p: f"{p.parts[-3]}-{p.stem}"
)
def test_shipped_packs_answer_on_their_machine(path, tmp_path, monkeypatch):
    """Every pack that ships answers for its layer at 16 tokens on the machine it was made on."""
    from autosel.explanation import explain
    from autosel.tiers import open_tiers

    monkeypatch.setattr(places, "built_in", BUILT_IN)
    monkeypatch.setenv("AUTOSEL_SITE_DB", str(tmp_path / "site.db"))
    (entry,) = content.read(path).entries
    with open_tiers(tmp_path / "empty.db") as tiers:
        told = explain(tiers, entry.problem, entry.device, 16, routing=entry.routing)
    assert told.status == "tuned", told.why
    assert told.origin.tier == "built-in"
    assert Path(told.origin.place).samefile(path)
    assert told.used == next(d.winner for d in entry.decisions if 16 in d.bucket)
    facts = read_environment(path.parents[1])["layers"][path.stem]
    assert slug(facts["label"]) == path.stem
    assert path.stat().st_size < 400_000


@pytest.mark.slow
def test_from_a_file_of_sweeps_to_an_answer(tmp_path, monkeypatch, capsys):
    """The two commands with real sweeps, then a machine like this one that never swept."""
    words = "granite-3-1b-a400m --experts 2"
    options = "--tokens 1 --backends emulation,torch_int4 --limit 0.5 --trials 1 --device cpu"
    path, db = lines_of(tmp_path, f"{words} {options}"), tmp_path / "all.db"
    assert device_results.main(["sweep", str(path), "--db", str(db)]) == 0
    assert "1 of 1 decided" in capsys.readouterr().out
    assert device_results.main(["sweep", str(path), "--db", str(db)]) == 0
    assert "skipped" in capsys.readouterr().out
    folder = tmp_path / "results" / "here"
    assert device_results.main(["export", "--db", str(db), "-o", str(folder)]) == 0
    again = tmp_path / "again.csv"
    monkeypatch.setattr(remeasure, "QUIET_S", 0.0)
    assert remeasure.main([str(folder), "-o", str(again)]) == 0
    (result,) = remeasure.read(again)
    assert {result.winner.split("[")[0], result.runner_up.split("[")[0]} == {
        "emulation", "torch_int4",
    }  # fmt: skip
    assert "unsupported" not in result.note
    (pack,) = (folder / "packs").iterdir()
    monkeypatch.setattr(places, "built_in", lambda: (pack,))
    monkeypatch.setenv("AUTOSEL_DB", str(tmp_path / "nobody.db"))
    monkeypatch.setenv("AUTOSEL_SITE_DB", str(tmp_path / "nobody" / "site.db"))
    capsys.readouterr()
    asked = ["explain", *words.split(), "--tokens", "1", "--device", "cpu", "--json"]
    assert autosel_main(asked) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    assert answer["status"] == "tuned"
    assert (answer["origin"]["tier"], answer["origin"]["grade"]) == ("built-in", "exact")


def test_the_best_that_any_sweep_measured_of_a_device_is_every_layers_ceiling():
    from autosel.roofline import Ceilings
    from bench.results_layers import with_best_ceilings

    def one(read, rate, **more):
        return evidence([row("emulation", 16, 10.0)], ceilings=Ceilings(read, rate), **more)

    half = replace(one(1.0, 900.0), problem=replace(LAYER, act_dtype="float16"))
    other = replace(one(9000.0, 9.0), device=replace(GPU, name="Another GPU"))
    without = replace(one(1.0, 1.0), ceilings=None)
    found = with_best_ceilings([one(4000.0, 700.0), one(4300.0, 600.0), half, other, without])
    assert [item.ceilings for item in found] == [
        Ceilings(4300.0, 700.0), Ceilings(4300.0, 700.0), Ceilings(4300.0, 900.0),
        Ceilings(9000.0, 9.0), None,
    ]  # fmt: skip
