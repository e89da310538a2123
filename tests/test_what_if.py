"""What would be chosen under other conditions, from stored samples alone."""

import json

import pytest

from autosel import presets
from autosel.core import Candidate, Device, Measurement
from autosel.decide import decide
from autosel.device import pretend
from autosel.errors import AutoselError
from autosel.explanation import explain
from autosel.planning import Policy
from autosel.store import Store
from autosel.weight_budget import WeightBudget
from autosel.what_if import what_if, why_not
from autosel.workload import PRESETS
from tests.made_evidence import COLD, samples

CPU = Device("cpu", "Pretended CPU", threads=8, versions=(("torch", "2.13.0"),))
PRESET = "granite-3-1b-a400m"
PROBLEM = presets.get(PRESET)
#: backend, layout, bytes, microseconds at 1 and at 64 tokens, accuracy
ROWS = (
    ("cpu_native", "panel", 100_000, 10.0, 400.0, "exact"),
    ("torch_int4", "aten", 100_000, 20.0, 300.0, "exact"),
    ("emulation", "dense", 400_000, 100.0, 350.0, "exact"),
    ("zen_cpu", "zen", 100_000, 5.0, 100.0, "a8"),
)


def rows(count):
    column = {1: 3, 64: 4}[count]
    found = [
        Measurement(
            PROBLEM, count, "uniform", Candidate(r[0], (), r[1]), CPU, "ok", r[5],
            times_us=samples(r[column]), weight_bytes=r[2], timing=COLD,
        )
        for r in ROWS
    ]  # fmt: skip
    found.append(Measurement(PROBLEM, count, "uniform", Candidate("cpu_dense"), CPU, "wrong",
                             reason="token 3 is off", timing=COLD))  # fmt: skip
    return found


@pytest.fixture
def db(tmp_path):
    from autosel.buckets import buckets

    path = tmp_path / "a.db"
    with Store.open(path) as store:
        for bucket in buckets([1, 64]):
            found = rows(bucket.measured)
            store.add_measurements(found)
            store.add_decision(decide(found, bucket=bucket), CPU, COLD)
    return path


@pytest.fixture
def answer(db):
    with Store.open(db) as store:
        yield lambda tokens: explain(store, PROBLEM, CPU, tokens)


def test_excluding_the_winner_gives_the_next_and_what_that_costs(answer):
    found = what_if(answer(1), Policy(exclude=("cpu_native",)))
    assert found.chosen == Candidate("torch_int4", (), "aten")
    assert found.ratio == pytest.approx(2, rel=0.01)
    assert found.interval[0] <= found.ratio <= found.interval[1]
    assert found.conditions == ("not backend cpu_native",)
    excluded = {r.candidate.backend: r.reason for r in found.outcome.rejected}["cpu_native"]
    assert "not cpu_native" in excluded


def test_allowing_eight_bits(answer):
    assert answer(1).used.backend == "cpu_native"
    found = what_if(answer(1), Policy(allow_a8=True))
    assert found.chosen.backend == "zen_cpu"
    assert found.ratio == pytest.approx(0.5, rel=0.01)


def test_excluding_everything_says_why_each(answer):
    names = tuple(r[0] for r in ROWS)
    found = what_if(answer(1), Policy(exclude=names))
    assert found.chosen is None
    assert "nothing usable" in found.refused


def test_a_budget_makes_a_plan(db, answer):
    with Store.open(db) as store:
        everything = store.measurements(PROBLEM, CPU, "uniform")
    for copies, prefill in ((1.0, None), (2.0, "torch_int4")):
        policy = Policy(budget=WeightBudget(copies), workload=PRESETS["decode-heavy"])
        found = what_if(answer(64), policy, planned=True, everything=everything)
        assert found.plan is not None
        assert found.plan.resident_bytes <= found.plan.budget_bytes
        if prefill:
            assert found.chosen.backend == prefill
    assert found.plan.bucket(1).candidate.backend == "cpu_native"


def test_why_not(answer):
    slow = why_not(answer(1), "emulation")
    assert (slow.status, slow.candidate.backend) == ("ok", "emulation")
    assert slow.ratio == pytest.approx(10, rel=0.01)
    wrong = why_not(answer(1), "cpu_dense")
    assert (wrong.status, wrong.reason) == ("wrong", "token 3 is off")
    assert why_not(answer(1), "cpu_native").status == "chosen"
    assert "not allowed" in why_not(answer(1), "zen_cpu").reason
    unsupported = why_not(answer(1), "xpu")
    assert unsupported.status == "unsupported"
    assert "required xpu" in unsupported.reason
    with pytest.raises(AutoselError, match="nonsense"):
        why_not(answer(1), "nonsense")


def test_nothing_measured_is_said(tmp_path):
    with Store.open(tmp_path / "empty.db") as store:
        asked = explain(store, PROBLEM, CPU, 1)
    found = what_if(asked, Policy(exclude=("triton",)))
    assert found.chosen is None
    assert "nothing was measured" in found.refused
    assert json.dumps(found.to_dict())


@pytest.fixture
def run(capsys, db):
    from autosel.__main__ import main

    def call(*args):
        with pretend(CPU):
            status = main(["explain", PRESET, "--db", str(db), *map(str, args)])
        return status, *capsys.readouterr()

    return call


def test_the_command_answers_people_and_machines(run, monkeypatch):
    import torch

    def never(*args, **kwargs):
        raise AssertionError("device work")

    for name in ("matmul", "randn", "empty"):
        monkeypatch.setattr(torch, name, never)
    status, out, _ = run("--tokens", 1, "--exclude", "cpu_native", "--why-not", "emulation,xpu")
    assert status == 0
    for words in ("not backend cpu_native", "torch_int4", "100.0 % longer", "95 % interval",
                  "900.0 % longer", "required xpu"):  # fmt: skip
        assert words in out, words
    status, out, _ = run("--tokens", 64, "--weight-budget", "2.0x", "--allow-a8", "--json")
    (found,) = json.loads(out)["answers"]
    assert found["used"]["backend"] == "torch_int4"
    assert found["what_if"]["chosen"]["backend"] == "zen_cpu"
    assert found["what_if"]["plan"]["budget"] == "2.0x"
    status, out, _ = run("--tokens", 64, "--json")
    (found,) = json.loads(out)["answers"]
    assert (found["what_if"], found["why_not"]) == (None, [])


def test_who_is_not_certified_may_not_be_chosen(run):
    """Nothing was certified here, and unknown is not proven."""
    status, out, _ = run("--tokens", 1, "--require", "deterministic", "--allow-a8", "--json")
    assert status == 0
    (found,) = json.loads(out)["answers"]
    then = found["what_if"]
    assert then["chosen"] is None
    assert then["conditions"] == ["8-bit activations allowed", "certified deterministic"]
    assert any("deterministic: not checked" in r["reason"] for r in then["rejected"])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--exclude", "nonsense"], "nonsense"),
        (["--require", "nonsense"], "nonsense"),
        (["--why-not", "nonsense"], "nonsense"),
        (["--weight-budget", "much"], "weight budget"),
        (["--histogram", "no/such/file.csv"], "no/such/file.csv"),
    ],
)
def test_bad_conditions_are_one_line(run, args, words):
    status, out, err = run("--tokens", 1, *args)
    assert status in (1, 2)
    lines = err.splitlines()
    assert len(lines) == 1
    assert words in lines[0]
    assert out == ""
