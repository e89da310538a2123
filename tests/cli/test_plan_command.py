"""``plan``: from stored measurements to a plan that is stored, shown and refused."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from autosel import planning, presets
from autosel.core import Candidate, Plan
from autosel.device import detect
from autosel.store import Store
from tests.test_plans import CROSSING, table

NAMES = {"a": "torch_int4", "b": "cpu_native"}


@pytest.fixture
def problem():
    return presets.get("granite-3-1b-a400m")


@pytest.fixture
def measured(autosel, problem):
    """Two backends of this machine with made-up times: each is faster somewhere."""
    here = detect("cpu")
    rows = [
        replace(
            m, problem=problem, device=here, timing=(("cache", "cold"),),
            candidate=Candidate.of(NAMES[m.candidate.layout], {}, m.candidate.layout),
        )
        for m in table(CROSSING)
    ]  # fmt: skip
    with Store.open(os.environ["AUTOSEL_DB"]) as store:
        store.add_measurements(rows)
    return rows


ASK = ("plan", "granite-3-1b-a400m", "--device", "cpu")


def stored(problem):
    with Store.open(os.environ["AUTOSEL_DB"]) as store:
        return [s.plan for s in store.plans(problem)]


def test_the_plan_is_shown_and_stored(autosel, measured, problem):
    ran = autosel(*ASK, "--histogram", "prefill-only")
    assert ran.status == 0
    text = " ".join(ran.out.split())
    assert "prefill-only traffic, weight budget 1.0x, 24 layers" in text
    assert "resident: b; 1000 B a layer, 23.4 KiB in all" in text
    assert "one more copy: nothing to gain" in text
    assert "break-even: a alone is better where more than" in text
    assert "a decode server with one copy: " in text
    (plan,) = stored(problem)
    assert plan.workload.name == "prefill-only"
    assert plan.layers == 24
    assert "stored in" in ran.err
    # The same again adds nothing; another policy does.
    assert "stored in" not in autosel(*ASK, "--histogram", "prefill-only").err
    assert len(stored(problem)) == 1
    autosel(*ASK, "--weight-budget", "2x")
    assert [p.budget for p in stored(problem)] == ["1.0x", "2.0x"]


def test_json_is_the_plan(autosel, measured, problem):
    ran = autosel(*ASK, "--weight-budget", "1.5x", "--dry-run", "--json")
    (answer,) = ran.json["answers"]
    assert Plan.from_dict(answer["plan"]).budget == "1.5x"
    assert ran.json["stored"] == 0
    assert stored(problem) == []


def test_price_of_the_second_copy_in_words(autosel, measured):
    ran = autosel(*ASK, "--histogram", "decode-heavy", "--dry-run")
    assert "one more copy: a and b cost" in ran.out
    assert "over the budget of 1.0x; packing is repaid after" in ran.out


def test_a_histogram_file_decides(autosel, measured, tmp_path):
    file = tmp_path / "calls.csv"
    file.write_text("tokens,calls\n1,9\n16,1\n")
    ran = autosel(*ASK, "--histogram", file, "--json")
    plan = ran.json["answers"][0]["plan"]
    assert [item["layout"] for item in plan["resident"]] == ["a"]
    assert plan["workload"]["name"] == "calls.csv"
    assert [bucket["calls"] for bucket in plan["buckets"]] == pytest.approx([0.9, 0.1, 0])


def test_backends_can_be_left_out(autosel, measured):
    for option, name in (("--exclude", "torch_int4"), ("--backends", "cpu_native")):
        ran = autosel(*ASK, option, name, "--histogram", "decode-only", "--dry-run", "--json")
        plan = ran.json["answers"][0]["plan"]
        assert [item["layout"] for item in plan["resident"]] == ["b"]
        assert name in plan["requirements"][0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--weight-budget", "half"), "weight budget: value: found 'half', expected such as 1.0x"),
        (
            ("--weight-budget", "99999999999999999999TiB"),
            "weight budget: value: found 99999999999999999999TiB, expected less than 2^63 bytes",
        ),
        (("--weight-budget", "10KiB"), "the smallest set of layouts that serves every bucket is"),
        (("--histogram", "no-such"), "histogram: value: found 'no-such', expected a file, or one"),
        (("--exclude", "cpu_nativ"), "cpu_native"),
        (("--backends", "emulation"), "found torch_int4, required emulation"),
        (("--routing", "zipf"), "nothing is stored for"),
    ],
)
def test_refusals_are_one_line(autosel, measured, options, words):
    ran = autosel(*ASK, *options)
    assert ran.status == 1
    assert words in ran.error
    # A sweep helps only where nothing is stored.
    assert ("to measure it" in ran.err) == ("nothing is stored" in words)


def test_explain_refuses_a_budget_beyond_all_bytes(autosel, measured):
    budget = ("--weight-budget", f"{2**63}")
    ran = autosel("explain", "granite-3-1b-a400m", "--tokens", 1, "--device", "cpu", *budget)
    assert ran.status == 1
    assert ran.error.endswith(f"found {2**63}, expected less than 2^63 bytes")


def test_what_to_measure_is_asked_for_as_it_was_asked_for(autosel, measured):
    ran = autosel(*ASK, "--routing", "zipf", "--cache", "hot")
    again = "autosel sweep granite-3-1b-a400m --routing zipf --cache hot --device cpu"
    assert f"to measure it: {again}\n" in ran.err


def test_without_a_sweep_it_says_what_to_do(autosel):
    ran = autosel(*ASK)
    assert ran.status == 1
    assert "nothing is stored for" in ran.error
    assert "autosel sweep granite-3-1b-a400m" in ran.err
    assert not os.path.exists(os.environ["AUTOSEL_DB"])


SWEEP = ("--tokens", "1", "--backends", "emulation,torch_int4", "--limit", "0.02")


def test_a_sweep_says_what_its_winners_cost_and_renews_the_plan(autosel, get_checkpoint):
    example = get_checkpoint("ct-w4-g128-sym-mixtral").path
    ran = autosel("sweep", example, *SWEEP)
    assert ran.status == 0, ran.err
    assert "these winners read " in ran.out
    assert "plan (mixed traffic, 1.0x): " in ran.out
    assert (
        autosel("plan", example, "--histogram", "prefill-only", "--weight-budget", "8x").status == 0
    )
    again = autosel("sweep", example, *SWEEP, "--fresh", "--json")
    plan = Plan.from_dict(again.json["answers"][0]["plan"])
    # The user's workload and budget stay when the times change.
    assert (plan.workload.name, plan.budget) == ("prefill-only", "8.0x")
    # Conditions are the user's; a sweep does not replace a plan that has some.
    autosel("plan", example, "--exclude", "torch_int4")
    with Store.open(os.environ["AUTOSEL_DB"]) as store:
        assert planning.renew(store, plan.problem, plan.device) is None
        assert store.plans()[-1].plan.requirements == ("not backend torch_int4",)


def test_required_properties_must_be_certified(autosel, measured):
    ran = autosel(*ASK, "--require", "deterministic")
    assert ran.status == 1
    assert "deterministic: not checked" in ran.error
    assert "no-such" in autosel(*ASK, "--require", "no-such").err


def test_explain_predicts_an_unmeasured_layer_and_says_so(autosel, measured):
    explain = ("explain", "olmoe-1b-7b", "--tokens", "16", "--device", "cpu")
    assert autosel(*explain, "--json").json["answers"][0]["predicted"] == []
    other = presets.get("qwen3-30b-a3b")
    with Store.open(os.environ["AUTOSEL_DB"]) as store:
        store.add_measurements(
            replace(m, problem=other, times_us=tuple(3 * t for t in m.times_us)) for m in measured
        )
    ran = autosel(*explain)
    assert ran.status == 0
    assert "Not measured, predicted from other layers on this device; nothing is chosen" in ran.out
    assert "used instead: " in ran.out
    guesses = autosel(*explain, "--json").json["answers"][0]["predicted"]
    assert {guess["backend"] for guess in guesses} == {"torch_int4", "cpu_native"}
    assert {guess["label"] for guess in guesses} == {"predicted"}
    # What was measured is not predicted.
    tuned = autosel("explain", "granite-3-1b-a400m", "--tokens", "16", "--device", "cpu", "--json")
    assert tuned.json["answers"][0]["predicted"] == []


def test_explain_says_what_the_layer_runs_by_its_plan(autosel, measured):
    """The winner at 1 token reads another layout than the one that the plan keeps."""
    explain = ("explain", "granite-3-1b-a400m", "--tokens", "1", "--device", "cpu")
    assert autosel(*explain, "--json").json["answers"][0]["planned"] is None
    autosel(*ASK, "--histogram", "prefill-only")
    ran = autosel(*explain)
    text = " ".join(ran.out.split())
    assert "torch_int4" in text
    assert "a layer runs cpu_native: its plan (prefill-only traffic, 1.0x) keeps b resident" in text
    assert "torch_int4 would save" in text
    planned = autosel(*explain, "--json").json["answers"][0]["planned"]
    assert planned["candidate"]["key"] == "cpu_native"
    assert planned["resident"] == ["b"]
