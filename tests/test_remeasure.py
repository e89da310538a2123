"""What ships is measured again: which part, how it is judged, and that a file goes on."""

import math
import random
from dataclasses import replace

import pytest

from bench import remeasure
from bench.remeasure import Cell
from bench.results_data import RESULTS
from tests.made_evidence import GPU, decided, row

SHIPPED = sorted(path.parents[0] for path in RESULTS.glob("*/environment.json"))


def cell(margin=0.25, interval=(0.2, 0.3)):
    winner, rival = row("humming", 16, 100.0), row("marlin", 16, 125.0)
    made = decided(winner, 1, None, runner_up=rival.candidate)
    return Cell("layer", 16, made, rival.candidate, margin, interval, GPU, 0, ("olmoe-1b-7b",))


def raced(winner_us, rival_us, noise=0.01):
    """The two in one race: rounds that share their disturbances."""
    rng = random.Random(0)
    rounds = [rng.gauss(0, 0.05) for _ in range(40)]
    rows = []
    for name, us in (("humming", winner_us), ("marlin", rival_us)):
        times = tuple(us * math.exp(r + rng.gauss(0, noise)) for r in rounds)
        timing = (("blocks", ",".join("2" * 20)), ("cache", "cold"), ("race", "r"))
        rows.append(replace(row(name, 16, us), times_us=times, timing=timing))
    return rows


@pytest.mark.parametrize(
    ("winner_us", "rival_us", "agrees"),
    [(100, 125, "yes"), (200, 250, "yes"), (100, 150, "no"), (100, 105, "no"), (125, 100, "no")],
)
def test_a_cell_agrees_where_the_intervals_overlap(winner_us, rival_us, agrees):
    found = remeasure.judged(cell(), raced(winner_us, rival_us))
    assert found.agrees == agrees, found
    assert found.found_us == pytest.approx(winner_us, rel=0.1)
    assert found.found_margin == pytest.approx(rival_us / winner_us - 1, abs=0.03)
    assert found.found_low < found.found_margin < found.found_high
    assert (found.winner, found.runner_up) == ("humming", "marlin")


def test_what_fails_disagrees_and_what_was_disturbed_is_unknown():
    winner, rival = raced(100, 125)
    wrong = replace(winner, status="wrong", reason="3 sigma", times_us=())
    found = remeasure.judged(cell(), [wrong, rival])
    assert (found.agrees, found.note) == ("no", "humming: wrong: 3 sigma")
    few = [replace(m, times_us=m.times_us[:1], timing=(("cache", "cold"),))
           for m in (winner, rival)]  # fmt: skip
    assert remeasure.judged(cell(), few).agrees == "unknown"


def test_a_file_goes_on_and_the_summary_counts(tmp_path):
    path = tmp_path / "again.csv"
    assert remeasure.read(path) == []
    yes = remeasure.judged(cell(), raced(100, 125))
    no = replace(remeasure.judged(cell(), raced(125, 100)), tokens=1)
    unknown = replace(yes, tokens=2, agrees="unknown", found_us=math.nan)
    for result in (yes, no, unknown):
        remeasure.append(path, result)
    read = remeasure.read(path)
    assert [(r.layer, r.tokens, r.agrees) for r in read] == [
        ("layer", 16, "yes"), ("layer", 1, "no"), ("layer", 2, "unknown"),
    ]  # fmt: skip
    assert read[0].found_margin == pytest.approx(yes.found_margin, rel=1e-4)
    said = remeasure.summary(read)
    assert "1 of 2 cells: the interval" in said
    assert "1 of 2: the winner is not shown" in said
    assert "1 cells: not known" in said
    path.write_text("a,b\n1,2\n")
    assert remeasure.main([str(SHIPPED[0]), "-o", str(path)]) == 2


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda path: path.name)
def test_shipped_cells_are_found_and_sampled_by_seed(folder):
    found = remeasure.cells(folder)
    some = remeasure.sample(found, 0.1, 1)
    assert len(some) == math.ceil(0.1 * len(found))
    assert some == remeasure.sample(found, 0.1, 1) != remeasure.sample(found, 0.1, 2)
    assert remeasure.sample(found, 1.0, 1) == found
    assert all(isinstance(one.command, tuple) and one.command for one in found)


def test_another_machine_is_refused(tmp_path, capsys):
    other = next(path for path in SHIPPED if "h200" in path.name)
    out = tmp_path / "x.csv"
    with remeasure_device("some CPU"):
        assert remeasure.main([str(other), "-o", str(out)]) == 2
    said = capsys.readouterr().err.strip()
    assert "found some CPU, expected NVIDIA H200" in said
    assert len(said.splitlines()) == 1
    assert not out.exists()


def remeasure_device(name):
    from autosel.core import Device
    from autosel.device import pretend

    return pretend(Device("cpu", name))


def test_an_interrupt_is_one_line(tmp_path, capsys, monkeypatch):
    def interrupted(*words):
        raise KeyboardInterrupt

    monkeypatch.setattr(remeasure, "run", interrupted)
    assert remeasure.main([str(SHIPPED[0]), "-o", str(tmp_path / "x.csv")]) == 130
    assert capsys.readouterr().err == "interrupted; the same command goes on\n"
