"""Replay: strategies on recordings with known truth, and the files that recordings come from."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from autosel.core import Candidate, Measurement
from autosel.errors import AutoselError
from autosel.replay import (
    EXHAUSTIVE,
    STRATEGIES,
    Cell,
    Choice,
    Score,
    exhaustive,
    fixed_list,
    mean_of_ten,
    median_of_ten,
    minimum_of_ten,
    racing,
    replay,
    summary,
)
from autosel.replay_tables import cell, cells_from_csv, cells_from_measurements
from autosel.store import Store
from bench.synthetic_timings import MACHINES
from bench.synthetic_timings import cell as made_up
from tests.fakes import CPU, PROBLEM, Clock, FakeBackend, registered
from tests.test_tune import run


def constant(*us: float) -> Cell:
    """Candidates without any noise."""
    recorded = {Candidate(f"c{n}"): [[time]] for n, time in enumerate(us)}
    return cell("constant", recorded, 0.5)


def choose(strategy: Callable[..., Choice], where: Cell, seed: int = 0) -> Choice:
    return strategy(where, np.random.default_rng(seed))


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_finds_a_clear_winner(name: str) -> None:
    where = constant(300.0, 100.0, 200.0)
    choice = choose(STRATEGIES[name], where)
    assert where.regret(choice.place) == 0.0
    assert where.regret(2) == pytest.approx(1.0)


def test_samples_and_device_time_are_counted() -> None:
    where = constant(300.0, 100.0)
    full, few = choose(exhaustive, where), choose(median_of_ten, where)
    assert (full.samples, few.samples) == (2 * EXHAUSTIVE, 20)
    assert few.us == pytest.approx(10 * (300 + 100) + 20 * 100)
    quick = choose(racing, where)
    assert 2 * 5 <= quick.samples <= 2 * 12
    assert quick.us == pytest.approx((300 + 100 + 2 * 100) * quick.samples / 2, rel=0.01)


def test_a_fixed_list_measures_nothing() -> None:
    where = constant(300.0, 100.0, 200.0)
    choice = choose(fixed_list(["nobody", "c2", "c1"]), where)
    assert (choice.place, choice.samples, choice.us) == (2, 0, 0.0)
    assert choose(fixed_list(["nobody"]), where).place == 0


def test_what_each_figure_falls_for() -> None:
    """A rare stall fools the mean; a rare lucky sample fools the minimum; neither the race."""
    steady, spiky = [[100.0]] * 40, [[95.0]] * 38 + [[5000.0]] * 2
    stall = cell("stall", {Candidate("steady"): steady, Candidate("spiky"): spiky}, 0.5)
    assert stall.truth_us == (100.0, 95.0)
    means = [choose(mean_of_ten, stall, seed).place for seed in range(30)]
    assert sum(place == 0 for place in means) > 3
    assert {choose(racing, stall, seed).place for seed in range(10)} == {1}
    lucky = [[110.0]] * 30 + [[60.0]] * 10
    luck = cell("luck", {Candidate("steady"): steady, Candidate("lucky"): lucky}, 0.5)
    minima = [choose(minimum_of_ten, luck, seed).place for seed in range(30)]
    assert sum(place == 1 for place in minima) > 15
    assert {choose(racing, luck, seed).place for seed in range(10)} == {0}


def test_a_replay_is_the_same_every_time_and_scores_every_cell() -> None:
    cells = [made_up(n, [100.0, 103.0, 140.0], MACHINES[n], 0.02) for n in ("quiet", "drifting")]
    strategies = {"racing": racing, "median of ten": median_of_ten}
    first, again = (replay(cells, strategies, 4, seed=3) for _ in range(2))
    assert first == again
    assert [(s.cell, s.strategy) for s in first] == [
        (c, s) for c in ("quiet", "drifting") for s in strategies
    ]
    assert all(len(s.regrets) == 4 for s in first)
    sums = summary(first, "racing")
    assert sums["cells"] == 2
    assert sums["regret_max"] <= 0.03
    assert sums["samples"] < 0.5 * 2 * 3 * EXHAUSTIVE
    with pytest.raises(AutoselError, match="reruns"):
        replay(cells, strategies, 0)


def test_flips_count_reruns_and_leave_ties_out_where_told() -> None:
    score = Score("c", "s", (0.0,) * 4, (0, 0, 1, 1), (True, False, False, True), 1.0, 1.0)
    assert score.flips == 0.5
    assert score.settled_flips == 1.0
    agreed = Score("c", "s", (0.0,) * 3, (0, 0, 1), (False, False, True), 1.0, 1.0)
    assert agreed.settled_flips == 0.0
    assert agreed.flips == pytest.approx(1 / 3)


def test_rounds_are_drawn_together() -> None:
    """What a round did to all stays common: the ratio is the same in every drawn round."""
    slow = [1.0, 2.0, 5.0, 1.5]
    recorded = {Candidate(n): [[us * s] for s in slow] for n, us in (("a", 100), ("b", 110))}
    times = cell("x", recorded, 0.5).draw(np.random.default_rng(0), 200)
    assert times.shape == (200, 2, 1)
    assert times[:, 1, 0] / times[:, 0, 0] == pytest.approx(1.1)
    assert len(np.unique(times[:, 0, 0])) == 4


def test_the_store_gives_cells_and_the_command_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from autosel.__main__ import main

    clock = Clock()
    path = tmp_path / "a.db"
    fakes = {"slow": FakeBackend(clock, 300.0), "fast": FakeBackend(clock, 100.0)}
    with Store.open(path) as store, registered(**fakes):
        run(clock, store=store, token_counts=(1, 8))
        cells = cells_from_measurements(store.measurements())
    assert len(cells) == 2
    assert [c.backend for c in cells[0].candidates] == ["fast", "slow"], "canonical order"
    assert cells[0].truth_us == pytest.approx((100.0, 300.0))
    assert cells[0].quantile == 0.2
    assert cells[0].kind == "cpu"
    assert main(["replay", "--db", str(path), "--reruns", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["cells"] == 2
    assert answer["strategies"]["racing"]["regret_max"] == 0.0
    assert main(["replay", "--db", str(tmp_path / "none.db")]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: database: timed candidates")


def test_a_measurement_that_was_always_preempted_is_replayed_as_it_is() -> None:
    timing = (("race", "r"), ("blocks", "1,1,1"), ("switches", "9,9,9"))
    rows = [
        Measurement(PROBLEM, 1, "uniform", Candidate(name), CPU, "ok", times_us=(us,) * 3,
                    timing=timing)
        for name, us in (("a", 100.0), ("b", 200.0))
    ]  # fmt: skip
    (one,) = cells_from_measurements(rows)
    assert one.truth_us == (100.0, 200.0)
    assert choose(racing, one).place == 0


CSV = "layer,candidate,round,us\n" + "\n".join(
    f"{layer},{name},{number},{us + number % 3}"
    for layer in "xy"
    for number in range(20)
    for name, us in (("a[s=1]", 100), ("b", 130))
)


def test_a_csv_gives_cells_by_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "recording.csv"
    path.write_text(CSV, encoding="utf-8")
    both = cells_from_csv(path, by=("layer",))
    assert [c.name for c in both] == ["layer x", "layer y"]
    assert [c.backend for c in both[0].candidates] == ["a", "b"]
    (one,) = cells_from_csv(path)
    assert one.draw(np.random.default_rng(0), 3).shape == (3, 2, 2), "two samples a round"
    assert [choose(racing, c).place for c in both] == [0, 0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "columns: found none, expected one named candidate"),
        ("candidate,time\na,1", "one named us"),
        ("candidate,us\n", "rows: found none"),
        ("candidate,us\na,x", "line 2: time: found 'x'"),
        ("candidate,us\na,1\nb,-3", "line 3: time"),
        ("candidate,us\na,inf", "line 2"),
        ("candidate,us\na", "line 2: time: found None"),
        (b"\xff\xfe\x00\x01", "a CSV in UTF-8"),
        ("candidate,us\n" + '"' + "x" * 200_000, "a CSV in UTF-8|line 2"),
    ],
)
def test_a_recording_that_will_not_do_is_one_line(
    tmp_path: Path, content: str | bytes, words: str
) -> None:
    path = tmp_path / "recording.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(AutoselError, match=words) as caught:
        cells_from_csv(path)
    assert "\n" not in str(caught.value)


def test_the_made_up_machines_do_what_they_say() -> None:
    """Each kind of noise is really there, or the comparisons on it would prove nothing."""
    cells = {n: made_up(n, [100.0, 100.0], m, 0.001) for n, m in MACHINES.items()}

    def logs(name: str, seed: int = 1) -> np.ndarray:
        return np.log(cells[name].draw(np.random.default_rng(seed), 400)[:, :, 0] / 100)

    assert np.abs(logs("quiet")).max() < 0.01
    drifts = [d[-50:].mean() - d[:20].mean() for d in (logs("drifting", s) for s in range(20))]
    assert np.mean(drifts) == pytest.approx(0.09, abs=0.03)
    clocks = logs("two clocks")
    assert np.ptp(np.quantile(clocks, [0.02, 0.98])) == pytest.approx(0.12, abs=0.02)
    assert np.abs(clocks[:, 0] - clocks[:, 1]).mean() < 0.02, "a round's candidates share it"
    tails = logs("heavy tails")
    assert tails.max() > 0.2
    assert np.median(tails) < 0.005
    assert 0.05 < (logs("preempted") > math.log(2)).mean() < 0.3
    ordered = logs("correlated").mean(axis=1)
    assert np.corrcoef(ordered[1:], ordered[:-1])[0, 1] > 0.7
