"""Plans from measurements: budgets, noise, prices, split servers, and what the type refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from autosel.buckets import buckets
from autosel.core import Candidate, Device, Measurement, Plan, TokenBin, Workload
from autosel.decide import backends_only, decide
from autosel.errors import AutoselError, NothingUsableError
from autosel.plan_traffic import DECODE_TOKENS, split
from autosel.plans import plan
from autosel.weight_budget import WeightBudget
from autosel.workload import PRESETS, shares
from tests.fakes import CPU, PROBLEM

GPU = Device(kind="cuda", name="scripted GPU", capability=(9, 0))
MODE = (("cache", "cold"), ("graph", True))


def row(
    layout: str,
    tokens: int,
    us: float,
    *,
    noise: float = 0.001,
    nbytes: int | None = 1000,
    seed: int = 0,
    samples: int = 40,
    **more: object,
) -> Measurement:
    rng = np.random.default_rng([seed, tokens, *layout.encode()])
    times = us * np.exp(noise * rng.standard_normal(samples))
    fields: dict[str, object] = {
        "problem": PROBLEM,
        "num_tokens": tokens,
        "routing": "uniform",
        "candidate": Candidate.of(f"backend_{layout}", {}, layout),
        "device": GPU,
        "status": "ok",
        "times_us": tuple(map(float, times)),
        "weight_bytes": nbytes,
        "pack_ms": 5.0,
        "timing": MODE,
    }
    return Measurement(**{**fields, **more})  # type: ignore[arg-type]


def table(times: Mapping[str, Mapping[int, float]], **more: object) -> list[Measurement]:
    return [
        row(layout, tokens, us, **more)  # type: ignore[arg-type]
        for layout, by_tokens in times.items()
        for tokens, us in by_tokens.items()
    ]


#: a is the decode layout, b the prefill layout.
CROSSING = {"a": {1: 10.0, 16: 20.0, 1024: 400.0}, "b": {1: 14.0, 16: 22.0, 1024: 300.0}}


def calls(**by_tokens: float) -> Workload:
    bins = sorted((int(name[1:]), share) for name, share in by_tokens.items())
    return Workload("test", tuple(TokenBin(count, count, share) for count, share in bins))


def test_one_copy_goes_to_whichever_layout_the_traffic_prefers() -> None:
    rows = table(CROSSING)
    decode = plan(rows, workload=calls(m1=0.9, m16=0.1))
    prefill = plan(rows, workload=calls(m1=0.5, m1024=0.5))
    assert [item.layout for item in decode.resident] == ["a"]
    assert [item.layout for item in prefill.resident] == ["b"]
    assert decode.time_us == pytest.approx(0.9 * 10 + 0.1 * 20, rel=0.01)
    assert prefill.best_us == pytest.approx(0.5 * 10 + 0.5 * 300, rel=0.01)
    for made in (decode, prefill):
        assert made.resident_bytes == made.copy_bytes == 1000
        assert made.budget == "1.0x"
        assert made.resident_bytes <= made.budget_bytes < 2000


def test_two_copies_run_every_buckets_winner() -> None:
    rows = table(CROSSING)
    made = plan(rows, workload=PRESETS["mixed"], budget=WeightBudget.parse("2x"))
    assert [item.layout for item in made.resident] == ["a", "b"]
    assert made.time_us == made.best_us
    for item in made.buckets:
        here = [m for m in rows if m.num_tokens == item.bucket.measured]
        decision = decide(here, bucket=item.bucket)
        assert item.candidate == item.best == decision.winner
        assert item.time_us == decision.winner_us
    assert made.next_copy is None
    assert made.break_even is None


def test_price_of_the_second_copy_and_break_even_traffic() -> None:
    made = plan(table(CROSSING, noise=1e-6), workload=calls(m1=0.8, m16=0.1, m1024=0.1))
    assert [item.layout for item in made.resident] == ["b"]
    price = made.next_copy
    assert price is not None
    # By hand: a saves 4 us of 0.8 of the calls and 2 us of 0.1.
    assert price.gain_us == pytest.approx(0.8 * 4 + 0.1 * 2, rel=1e-4)
    assert price.extra_bytes == 1000
    assert price.worth
    assert not price.fits
    assert price.break_even_calls == pytest.approx(5000 / 3.4, rel=1e-4)
    even = made.break_even
    assert even is not None
    # By hand: small calls gain (0.8 * 4 + 0.1 * 2) / 0.9 us with a, large ones lose 100.
    gained = 3.4 / 0.9
    assert (even.layout, even.buckets) == ("a", ("1-4", "5-128"))
    assert even.share == pytest.approx(0.9)
    assert even.break_even == pytest.approx(100 / (100 + gained), rel=1e-4)
    # At that share of small calls both layouts take equally long.
    s = even.break_even
    a = s * (0.8 * 10 + 0.1 * 20) / 0.9 + (1 - s) * 400
    b = s * (0.8 * 14 + 0.1 * 22) / 0.9 + (1 - s) * 300
    assert a == pytest.approx(b, rel=1e-4)


def test_split_servers_get_their_own_single_layout() -> None:
    made = plan(table(CROSSING), workload=calls(m1=0.6, m16=0.2, m1024=0.2))
    answers = {item.server: item for item in made.single}
    assert answers["decode"].layout == "a"
    assert answers["prefill"].layout == "b"
    assert answers["prefill"].time_us == pytest.approx(300, rel=0.01)
    parts = split(PRESETS["mixed"])
    assert max(item.high or 0 for item in parts["decode"].bins) == DECODE_TOKENS
    assert min(item.low for item in parts["prefill"].bins) > DECODE_TOKENS
    # A server without prefill calls is answered for by the preset.
    assert split(calls(m1=1.0))["prefill"] == PRESETS["prefill-only"]


def test_split_cuts_a_bin_where_it_must() -> None:
    whole = Workload("wide", (TokenBin(1, 4096, 8.0),))
    parts = split(whole)
    total = sum(item.calls for part in parts.values() for item in part.bins)
    assert total == pytest.approx(8.0)
    assert parts["decode"].bins[0].high == DECODE_TOKENS


def test_a_second_copy_within_the_noise_is_not_bought() -> None:
    """b is 3 % faster at one count, and the samples scatter by 20 %."""
    times = {"a": {1: 100.0, 16: 100.0}, "b": {1: 97.0, 16: 130.0}}
    traffic = calls(m1=0.9, m16=0.1)
    for seed in range(10):
        noisy = table(times, noise=0.2, seed=seed, samples=12)
        made = plan(noisy, workload=traffic, budget=WeightBudget.parse("2x"))
        assert [item.layout for item in made.resident] == ["a"], seed
    quiet = plan(table(times, noise=0.002), workload=traffic, budget=WeightBudget.parse("2x"))
    assert [item.layout for item in quiet.resident] == ["a", "b"]


def test_a_gain_below_epsilon_is_not_bought_however_certain() -> None:
    times = {"a": {1: 100.0, 16: 100.0}, "b": {1: 99.5, 16: 101.0}}
    made = plan(
        table(times, noise=1e-6), workload=calls(m1=0.5, m16=0.5), budget=WeightBudget.parse("2x")
    )
    assert len(made.resident) == 1
    assert made.next_copy is not None
    assert made.next_copy.fits
    assert not made.next_copy.worth
    assert "nothing that clears the noise" in made.why


def test_single_samples_buy_nothing() -> None:
    made = plan(
        table(CROSSING, samples=1), workload=calls(m1=0.5, m1024=0.5),
        budget=WeightBudget.parse("2x"),
    )  # fmt: skip
    assert len(made.resident) == 1
    assert made.next_copy is not None
    assert made.next_copy.gain_interval is None
    assert "whether one more copy gains is not settled" in made.why


def test_ties_of_single_layouts_fall_the_same_way_whatever_the_noise() -> None:
    same = {"a": {1: 100.0, 16: 200.0}, "b": {1: 100.0, 16: 200.0}}
    for seed in range(20):
        rows = [
            replace(m, weight_bytes=1000 if m.candidate.layout == "b" else 1010)
            for m in table(same, noise=0.05, seed=seed)
        ]
        made = plan(rows, workload=calls(m1=0.5, m16=0.5))
        assert [item.layout for item in made.resident] == ["b"]


def test_wide_copies_are_not_one_copy() -> None:
    """16-bit weights are four copies of 4-bit ones; a little padding is one."""
    rows = table({"packed": {1: 10.0, 1024: 400.0}}) + table(
        {"dense": {1: 40.0, 1024: 100.0}}, nbytes=4000
    )
    traffic = calls(m1=0.1, m1024=0.9)
    assert [r.layout for r in plan(rows, workload=traffic).resident] == ["packed"]
    four = plan(rows, workload=traffic, budget=WeightBudget.parse("4x"))
    assert [r.layout for r in four.resident] == ["dense"]
    padded = [replace(m, weight_bytes=1100) if m.weight_bytes == 4000 else m for m in rows]
    assert [r.layout for r in plan(padded, workload=traffic).resident] == ["dense"]


def test_a_budget_in_bytes_is_that_of_all_layers_and_exact() -> None:
    rows = table(CROSSING)
    traffic = calls(m1=0.5, m1024=0.5)
    enough = plan(rows, workload=traffic, budget=WeightBudget.parse("20000"), layers=10)
    assert len(enough.resident) == 2
    assert enough.budget_bytes == 2000
    assert enough.step_us == pytest.approx(10 * enough.time_us)
    short = plan(rows, workload=traffic, budget=WeightBudget.parse("19999"), layers=10)
    assert len(short.resident) == 1
    with pytest.raises(NothingUsableError, match=r"999, expected a set that fits; .*1000 bytes"):
        plan(rows, workload=traffic, budget=WeightBudget.parse("9999"), layers=10)


def test_what_failed_somewhere_serves_no_such_bucket() -> None:
    """a runs out of memory at 1024 tokens: it alone is no plan, and b is."""
    rows = [
        m if (m.candidate.layout, m.num_tokens) != ("a", 1024) else
        replace(m, status="oom", reason="did not fit", times_us=(), weight_bytes=None)
        for m in table(CROSSING)
    ]  # fmt: skip
    made = plan(rows, workload=calls(m1=1.0))
    assert [item.layout for item in made.resident] == ["b"]
    only_a = [m for m in rows if m.candidate.layout == "a"]
    left = plan(only_a, workload=calls(m1=1.0))
    assert left.bucket(2000) is None
    assert left.bucket(1) is not None


def test_token_counts_that_not_all_were_tried_at_compare_nothing() -> None:
    rows = table(CROSSING) + table({"a": {64: 60.0}, "c": {16: 1.0}})
    made = plan(rows, workload=PRESETS["mixed"])
    assert [item.bucket.measured for item in made.buckets] == [1, 16, 1024]
    assert "layout c was not tried at every token count" in made.why
    assert "64 tokens were not tried with every layout" in made.why


def test_requirements_and_8_bit_activations_are_respected() -> None:
    rows = table(CROSSING) + [
        replace(m, accuracy="a8", times_us=tuple(t / 3 for t in m.times_us),
                candidate=Candidate.of("eight", {}, "a"))
        for m in table({"a": CROSSING["a"]})
    ]  # fmt: skip
    traffic = calls(m1=0.5, m16=0.5)
    assert plan(rows, workload=traffic).buckets[0].candidate.backend == "backend_a"
    allowed = plan(rows, workload=traffic, allow_a8=True)
    assert allowed.buckets[0].candidate.backend == "eight"
    assert allowed.buckets[0].accuracy == "a8"
    required = plan(
        rows, workload=traffic, require=[backends_only(["backend_b"])], requirements=["backend_b"]
    )
    assert [item.layout for item in required.resident] == ["b"]
    assert required.requirements == ("backend_b",)
    # What a requirement forbids is no winner that the plan falls short of either.
    assert required.time_us == required.best_us


def test_nothing_usable_is_one_line_with_reasons() -> None:
    bad = [replace(m, status="wrong", reason="off by one", times_us=()) for m in table(CROSSING)]
    with pytest.raises(NothingUsableError, match="off by one"):
        plan(bad)
    with pytest.raises(NothingUsableError, match="nothing was measured"):
        plan([])


def test_measurements_of_several_layers_or_machines_are_refused() -> None:
    rows = table(CROSSING)
    with pytest.raises(AutoselError, match="device: found"):
        plan([*rows, replace(rows[0], device=CPU)])
    with pytest.raises(AutoselError, match="routing: found"):
        plan([*rows, replace(rows[0], routing="zipf")])


def test_calls_far_beyond_what_was_measured_are_named() -> None:
    made = plan(table({"a": {1: 10.0, 16: 20.0}}), workload=calls(m1=0.75, m4096=0.25))
    assert "25 % of calls have more than twice the 16 tokens" in made.why


def test_intervals_cover_the_true_gain() -> None:
    """120 tunings of known truth: the 95 % interval of the gain holds it in at least 90 %."""
    truth = 0.5 * (14 - 10) + 0.25 * (22 - 20)
    hits = 0
    for seed in range(120):
        rows = table(CROSSING, noise=0.05, seed=seed, samples=25)
        made = plan(rows, workload=calls(m1=0.5, m16=0.25, m1024=0.25))
        assert made.next_copy is not None
        assert made.next_copy.gain_interval is not None
        low, high = made.next_copy.gain_interval
        hits += low <= truth <= high
    assert hits >= 0.9 * 120


# the type -----------------------------------------------------------------------------------


def example() -> Plan:
    return plan(table(CROSSING), workload=calls(m1=0.8, m16=0.1, m1024=0.1), layers=3)


def test_a_plan_survives_json_unchanged() -> None:
    made = example()
    text = json.dumps(made.to_dict(), allow_nan=False)
    assert Plan.from_dict(json.loads(text)) == made


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("version",), 2, "version"),
        (("time_us",), math.nan, "time_us"),
        (("time_us",), 1.0, "the buckets' mean"),
        (("time_us",), "1", "time_us"),
        (("layers",), 0, "layers"),
        (("resident",), [], "resident"),
        (("resident", 0, "nbytes"), 10**9, "at most the budget"),
        (("resident", 0, "nbytes"), -1, "nbytes"),
        (("resident", 0, "layout"), "elsewhere", "layout"),
        (("resident", 0), "a", "record"),
        (("buckets",), [], "buckets"),
        (("buckets", 0, "bucket", "high"), 500, "sorted, apart"),
        (("buckets", 0, "bucket", "low"), 0, "token counts from 1"),
        (("buckets", 0, "bucket", "measured"), True, "token counts from 1"),
        (("buckets", 0, "calls"), 0.1, "calls in all"),
        (("buckets", 0, "calls"), -0.5, "a share"),
        (("buckets", 0, "candidate", "layout"), "b2", "layout"),
        (("buckets", 0, "candidate", "params"), {"x": [1]}, "params"),
        (("buckets", 0, "accuracy"), "perfect", "accuracy"),
        (("buckets", 0), 7, "record"),
        (("workload", "bins"), [], "calls in all"),
        (("workload", "weighted_by"), "luck", "weighted_by"),
        (("problem", "top_k"), 99, "top_k"),
        (("device",), None, "record"),
        (("next_copy", "gain_interval"), [1], "record"),
        (("next_copy", "gain_us"), "1", "gains"),
        (("next_copy", "extra_bytes"), 0.5, "extra_bytes"),
        (("next_copy", "break_even_calls"), -1, "break_even_calls"),
        (("next_copy", "fits"), 1, "fits"),
        (("layers",), "1", "layers"),
        (("copy_bytes",), -1, "copy_bytes"),
        (("copy_bytes",), True, "copy_bytes"),
        (("budget_bytes",), 1e300, "budget_bytes"),
        (("single", 0, "time_us"), "1", "single"),
        (("single", 0, "nbytes"), 2**63, "single"),
        (("single", 0, "server"), "both", "single"),
    ],
)
def test_damaged_plans_are_refused_in_one_line(
    path: tuple[str | int, ...], value: object, words: str
) -> None:
    data = json.loads(json.dumps(example().to_dict()))
    place = data
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(AutoselError) as caught:
        Plan.from_dict(data)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(example().to_dict()))
def test_missing_fields_are_named(name: str) -> None:
    data = example().to_dict()
    del data[name]
    if name == "problem_key":
        assert Plan.from_dict(data) == example()
        return
    with pytest.raises(AutoselError, match=name):
        Plan.from_dict(data)


def test_lookup_by_token_count() -> None:
    made = example()
    assert made.bucket(0) is None
    for count in (1, 4, 5, 128, 129, 10**9):
        found = made.bucket(count)
        assert found is not None
        assert count in found.bucket


# budgets and shares ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.0x", WeightBudget(1.0, None)),
        ("1.5X", WeightBudget(1.5, None)),
        (" 2x ", WeightBudget(2.0, None)),
        ("12GiB", WeightBudget(None, 12 << 30)),
        ("12 gib", WeightBudget(None, 12 << 30)),
        ("1.5GB", WeightBudget(None, 1_500_000_000)),
        ("800m", WeightBudget(None, 800 << 20)),
        ("1000000", WeightBudget(None, 1_000_000)),
        ("1.23456789x", WeightBudget(1.23456789, None)),
        ("1000000x", WeightBudget(1e6, None)),
        (f"{2**63 - 1}B", WeightBudget(None, 2**63 - 1)),
        (f"{2**53 + 1}B", WeightBudget(None, 2**53 + 1)),
    ],
)
def test_budgets_are_read(text: str, expected: WeightBudget) -> None:
    assert WeightBudget.parse(text) == expected
    assert WeightBudget.parse(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "0.5x",
        "0x",
        "-1x",
        "1.5",
        "2",
        "0",
        "nanx",
        "infx",
        "1e9x",
        "12 PiB",
        "1x2",
        "9" * 30,
        f"{2**63}",
        "8388608TiB",
        "99999999999999999999TiB",
        "1000001x",
        "99999999999999999999x",
    ],
)
def test_other_budgets_are_refused(text: str) -> None:
    with pytest.raises(AutoselError, match="weight budget"):
        WeightBudget.parse(text)


def test_copies_of_too_many_bytes_are_refused() -> None:
    most = WeightBudget.parse("1000000x")
    assert most.bytes(2**43, 1) < 2**63
    with pytest.raises(AutoselError, match=r"1000000\.0x of 9223372036855 bytes, expected less"):
        most.bytes(9223372036855, 1)


def test_shares_add_up_and_follow_the_log_axis() -> None:
    parts = shares(Workload("w", (TokenBin(1, 4096, 3.0),)), buckets([1, 16, 256, 4096]))
    assert sum(parts.calls) == pytest.approx(1)
    assert sum(parts.tokens) == pytest.approx(1)
    assert parts.uncovered == pytest.approx(0, abs=1e-12)
    # Against the sum over every token count.
    weight = [math.log((m + 0.5) / (m - 0.5)) for m in range(1, 4097)]
    assert parts.calls[1] == pytest.approx(sum(weight[4:64]) / sum(weight))
    tokens = [m * w for m, w in enumerate(weight, 1)]
    assert parts.tokens[1] == pytest.approx(sum(tokens[4:64]) / sum(tokens))
