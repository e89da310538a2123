"""Times that were not measured: known truths, shipped tables, labels, and what to measure next."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autosel import predictions, presets
from autosel.between import interpolate, left_out
from autosel.core import Candidate, Problem
from autosel.cost_model import CostModel, Known, Prediction
from autosel.errors import AutoselError
from autosel.roofline import Ceilings, roofline
from autosel.store import Store
from tests.fakes import Clock, FakeBackend, registered
from tests.test_plans import GPU, row

SHAPES = [
    presets.get(name)
    for name in ("qwen3-30b-a3b", "mixtral-8x7b", "granite-3-1b-a400m", "olmoe-1b-7b")
]
COUNTS = (1, 4, 16, 64, 256, 1024)
CEILINGS = Ceilings(4000.0, 600.0)


def truth(problem: Problem, tokens: int, noise: float = 0.0, seed: int = 0) -> float:
    """A made-up kernel: a launch and 1.4 times what the roofline says."""
    rng = np.random.default_rng([seed, tokens, problem.hidden_size, problem.num_experts])
    us = 6.0 + 1.4 * roofline(problem, tokens, CEILINGS).time_us
    return us * math.exp(noise * rng.standard_normal())


def rows(shapes: list[Problem], noise: float = 0.0, seed: int = 0) -> list[Known]:
    return [Known(p, n, truth(p, n, noise, seed)) for p in shapes for n in COUNTS]


@pytest.mark.parametrize("place", range(len(SHAPES)))
def test_a_shape_left_out_is_predicted(place: int) -> None:
    others = [p for i, p in enumerate(SHAPES) if i != place]
    model = CostModel.fit(rows(others))
    for tokens in COUNTS:
        found = model.predict(SHAPES[place], tokens)
        expected = truth(SHAPES[place], tokens)
        assert found.us == pytest.approx(expected, rel=0.5)
        assert found.label == "predicted"
        assert found.low_us < found.us < found.high_us
    small = model.predict(SHAPES[place], 4)
    assert small.us == pytest.approx(truth(SHAPES[place], 4), rel=0.25)


def test_intervals_hold_what_they_say() -> None:
    """Every shape left out, eight kernels with 3 % noise: at least nine in ten times are held."""
    held = total = 0
    for seed in range(8):
        for place, shape in enumerate(SHAPES):
            others = [p for i, p in enumerate(SHAPES) if i != place]
            model = CostModel.fit(rows(others, 0.03, seed))
            for tokens in COUNTS:
                found = model.predict(shape, tokens)
                held += found.low_us <= truth(shape, tokens, 0.03, seed) <= found.high_us
                total += 1
    assert held >= 0.9 * total


def test_an_interval_that_is_too_narrow_is_seen() -> None:
    """The planted fault of the test above: a quarter of the width holds far fewer."""
    held = total = 0
    for place, shape in enumerate(SHAPES):
        model = CostModel.fit(rows([p for i, p in enumerate(SHAPES) if i != place], 0.03))
        model.widening /= 10
        for tokens in COUNTS:
            found = model.predict(shape, tokens)
            held += found.low_us <= truth(shape, tokens, 0.03) <= found.high_us
            total += 1
    assert held < 0.9 * total


def test_shipped_tables_are_predicted() -> None:
    """Marlin on an H200, one model left out in turn: half of the times within 15 %."""
    from bench.results_data import RESULTS, h200_evidence

    found = h200_evidence(Path(RESULTS / "nvidia-h200" / "kernels.csv"))
    curves = predictions.curves_from([m for e in found for m in e.measurements])
    known = [Known(p, n, us) for p, t in curves["marlin"].items() for n, us in t.items()]
    shapes = list(curves["marlin"])
    if len(shapes) < 3:
        pytest.skip("the shipped table has too few of Marlin's shapes")
    errors = []
    for shape in shapes:
        model = CostModel.fit([k for k in known if k.problem != shape])
        errors += [
            abs(math.log(model.predict(k.problem, k.num_tokens).us / k.us))
            for k in known
            if k.problem == shape
        ]
    assert np.median(errors) < 0.15


@pytest.mark.parametrize(
    ("shapes", "words"), [(SHAPES[:1], "6 times of 1 shapes"), ([], "0 times of 0 shapes")]
)
def test_too_little_is_not_predicted_from(shapes: list[Problem], words: str) -> None:
    with pytest.raises(AutoselError, match=words):
        CostModel.fit(rows(shapes))


def test_nonsense_is_refused() -> None:
    model = CostModel.fit(rows(SHAPES))
    with pytest.raises(AutoselError, match="at least 1"):
        model.predict(SHAPES[0], 0)
    for us in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(AutoselError, match="Known"):
            Known(SHAPES[0], 1, us)


def test_predictions_grow_with_work() -> None:
    model = CostModel.fit(rows(SHAPES))
    times = [model.predict(SHAPES[0], tokens).us for tokens in (1, 8, 64, 512, 4096)]
    assert times == sorted(times)
    assert math.isfinite(model.predict(SHAPES[0], 10**6).us)


# between token counts ---------------------------------------------------------------------------


def test_lines_in_log_log_axes() -> None:
    power = {n: 3.0 * n**0.7 for n in (1, 4, 16, 64)}
    for n in (1, 2, 3, 8, 50, 64):
        assert interpolate(power, n) == pytest.approx(3.0 * n**0.7)
    assert list(left_out(power)) == [4, 16]
    assert all(abs(e) < 1e-9 for e in left_out(power).values())
    assert left_out({1: 1.0, 10: 20.0, 100: 100.0})[10] == pytest.approx(math.log(10 / 20))


@pytest.mark.parametrize("tokens", [0, 65, 10**6])
def test_no_line_beyond_what_was_measured(tokens: int) -> None:
    with pytest.raises(AutoselError, match="in 1 to 64"):
        interpolate({1: 1.0, 64: 2.0}, tokens)
    with pytest.raises(AutoselError, match="in nothing"):
        interpolate({}, tokens)


# from a database -----------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path):
    clock = Clock()
    with (
        registered(one=FakeBackend(clock), two=FakeBackend(clock)),
        Store.open(tmp_path / "a.db") as opened,
    ):
        opened.add_measurements(
            replace(row("x", n, factor * truth(p, n)), problem=p, candidate=Candidate.of(name))
            for name, factor in (("one", 1.0), ("two", 1.3))
            for p in SHAPES[:3]
            for n in COUNTS
        )
        yield opened


def test_an_unseen_layer_is_predicted_by_the_cost_model(store) -> None:
    found = predictions.predict(store, SHAPES[3], GPU, 16)
    assert [(item.backend, item.how) for item in found] == [
        ("one", "cost model"),
        ("two", "cost model"),
    ]
    assert found[0].prediction.us == pytest.approx(truth(SHAPES[3], 16), rel=0.5)
    assert "predicted" in str(found[0])
    assert found[0].to_dict()["label"] == "predicted"


def test_between_counts_a_line_and_at_measured_counts_nothing(store) -> None:
    found = predictions.predict(store, SHAPES[0], GPU, 100)
    assert {item.how for item in found} == {"between measured token counts"}
    assert found[0].prediction.us == pytest.approx(truth(SHAPES[0], 100), rel=0.3)
    beyond = predictions.predict(store, SHAPES[0], GPU, 5000)
    assert {item.how for item in beyond} == {"cost model"}
    assert predictions.predict(store, SHAPES[0], GPU, 16) == ()


def test_other_machines_routings_and_unknown_devices_predict_nothing(store) -> None:
    assert predictions.predict(store, SHAPES[3], replace(GPU, driver="9"), 16) == ()
    assert predictions.predict(store, SHAPES[3], replace(GPU, name=" "), 16) == ()
    assert predictions.predict(store, SHAPES[3], GPU, 16, routing="zipf") == ()


def test_a_prediction_is_no_measurement(store) -> None:
    """Nothing of it reaches the database, decisions or plans."""
    before = len(store.measurements())
    predictions.predict(store, SHAPES[3], GPU, 16)
    predictions.propose(store, SHAPES[3], GPU, COUNTS)
    assert len(store.measurements()) == before
    assert store.decisions(SHAPES[3], GPU) == []
    assert not hasattr(Prediction(1, 1, 1, 0.1, 2), "times_us")


def test_what_to_measure_next_is_what_is_close_and_unknown(store) -> None:
    found = predictions.propose(store, SHAPES[3], GPU, COUNTS)
    assert found
    assert [p.saves_us for p in found] == sorted((p.saves_us for p in found), reverse=True)
    assert {p.backend for p in found} <= {"one", "two"}
    # What is measured already is never proposed.
    measured = predictions.propose(store, SHAPES[0], GPU, COUNTS)
    assert measured == ()


def test_expected_savings_agree_with_drawing() -> None:
    rng = np.random.default_rng(0)
    for us, relative, rival in ((10.0, 0.2, 11.0), (12.0, 0.1, 11.0)):
        guesses = {"sure": (rival, 0.0), "unsure": (us, relative)}
        (found,) = predictions._savings(4, 0.5, guesses)
        drawn = us + us * relative * rng.standard_normal(400_000)
        now = "unsure" if us < rival else "sure"
        blind = drawn if now == "unsure" else np.full_like(drawn, rival)
        saved = 0.5 * np.mean(blind - np.minimum(drawn, rival))
        assert found.saves_us == pytest.approx(saved, rel=0.02)
