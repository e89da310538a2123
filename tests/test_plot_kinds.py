"""Every kind of figure: its table by hand, and a drawing that is whole at two sizes."""

import itertools
import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import matplotlib.text
import numpy as np
import pandas as pd
import pytest

from autosel import figures, plots
from autosel.core import Candidate, Decision, Rejected
from autosel.decide_words import TIED, UNSETTLED
from autosel.errors import AutoselError
from autosel.plots.budget import budget_data
from autosel.plots.bytes import bytes_data
from autosel.plots.cost import REST, cost_data
from autosel.plots.crossover import crossing_tokens, crossover_data
from autosel.plots.noise import noise_data
from autosel.plots.roofline import roofline_share_data
from autosel.plots.speedup import speedup_data, vllm_choice
from autosel.rows import Sweep
from bench.results_data import RESULTS, epyc_evidence, h200_evidence
from tests.made_evidence import GPU, decided, evidence, row

COUNTS = (1, 4, 16, 64)


def grown(label="layer", names=("humming", "marlin", "emulation"), cross=True, **more):
    """Two backends that cross between 4 and 16 tokens, a slow one, and one that failed."""
    rows, decisions = [], []
    bounds = [(1, 2), (3, 8), (9, 32), (33, None)]
    for count, (low, high) in zip(COUNTS, bounds, strict=True):
        first = row(names[0], count, 10 * count**0.5 if cross else 10, weight_bytes=1 << 20)
        second = row(names[1], count, 20 * count**0.25 if cross else 20, weight_bytes=2 << 20)
        third = row(names[2], count, 400 * count**0.3, weight_bytes=4 << 20)
        rows += [first, second, third, row("broken", count, 0, status="wrong")]
        best, other = sorted((first, second), key=lambda m: m.times_us)
        decisions.append(decided(best, low, high, runner_up=other.candidate, tie=count == 4))
    return evidence(rows, decisions, label=label, **more)


def test_the_kinds_are_files_and_each_says_what_it_is():
    from autosel.cli.commands.plot import command

    assert plots.names() == sorted(
        ["latency", "speedup", "roofline", "crossover", "bytes", "budget", "noise", "cost"]
    )
    option = next(param for param in command.params if param.name == "kind")
    assert list(option.type.choices) == plots.names()
    for name in plots.names():
        assert plots.kind(name).summary
        assert f"{name}:" in option.help
    with pytest.raises(AutoselError, match="'pie', expected one of budget"):
        plots.kind("pie")


# tables ------------------------------------------------------------------------------------


def test_speedup_is_the_baselines_time_over_the_chosen_ones():
    table = speedup_data([grown()], "emulation").set_index("num_tokens")
    assert table["baseline_us"][16] == pytest.approx(400 * 16**0.3, rel=1e-6)
    assert table["speedup"][1] == pytest.approx(40, rel=1e-3)
    assert table["low"][1] <= table["speedup"][1] <= table["high"][1]
    assert table["settled"].all()
    assert table["chosen"].tolist() == ["humming", "humming", "humming", "marlin"]


def test_the_default_baseline_is_the_first_of_vllms_order_that_supports_the_layer():
    one = grown()
    assert vllm_choice(one, 1) == "humming"  # before marlin on capability 9.0
    table = speedup_data([one]).set_index("num_tokens")
    assert table["speedup"][1] == 1
    assert table["speedup"][64] == pytest.approx(80 / (20 * 64**0.25), rel=1e-3)
    unsupported = [
        row("humming", 1, 0, status="unsupported"), row("marlin", 1, 8), row("triton", 1, 3)
    ]  # fmt: skip
    assert vllm_choice(evidence(unsupported), 1) == "marlin"
    # One that is supported and wrong is still what vLLM would take: there is no ratio then.
    wrong = [row("humming", 1, 0, status="wrong"), row("marlin", 1, 8)]
    told = speedup_data([evidence(wrong, [decided(wrong[1], 1, None)])])
    assert told["speedup"].isna().all()
    assert told["why"].tolist() == ["humming has no correct time here"]


def test_a_ratio_that_noise_may_have_made_is_marked():
    rows = [row("humming", 1, 10, spread=0.5), row("marlin", 1, 10.1, spread=0.5)]
    # Samples of two runs do not rise and fall together.
    rows[1] = replace(rows[1], times_us=rows[1].times_us[3:] + rows[1].times_us[:3])
    table = speedup_data([evidence(rows, [decided(rows[0], 1, None)])], "marlin")
    assert table["settled"].tolist() == [False]
    published = evidence(rows, [decided(rows[0], 1, None)], figures="medians of a table")
    table = speedup_data([published], "marlin")
    assert table["low"].isna().all()
    assert table["settled"].tolist() == [None]


def test_a_baseline_that_was_measured_nowhere_is_refused():
    with pytest.raises(AutoselError, match="'xpu', expected one of emulation, humming, marlin"):
        speedup_data([grown()], "xpu")


def test_crossings_lie_where_straight_lines_on_log_axes_meet():
    # 10 sqrt(M) meets 20 M^(1/4) at M = 16.
    times = {("a", m): 10 * m**0.5 for m in (4, 64)} | {("b", m): 20 * m**0.25 for m in (4, 64)}
    assert crossing_tokens(times, "a", "b", 4, 64) == pytest.approx(16)
    assert crossing_tokens(times, "b", "a", 4, 64) is None
    assert crossing_tokens(times, "a", "c", 4, 64) is None


def test_runs_of_one_backend_are_one_row():
    table = crossover_data([grown()])
    assert table["series"].tolist() == ["humming", "marlin"]
    assert table["low"].tolist() == [1, 33]
    assert table["high"].isna().tolist() == [False, True]
    assert table["counts"].tolist() == [(1, 4, 16), (64,)]
    assert table["settled"].tolist() == [False, True]  # the tie at 4 tokens
    assert table["crossing"][1] == pytest.approx(16, rel=0.01)


def test_token_counts_without_a_winner_are_told():
    rows = [row("a", 1, 5), row("a", 64, 0, status="oom")]
    table = crossover_data([evidence(rows, [decided(rows[0], 1, 8)])])
    assert table["series"].tolist() == ["a", "nothing usable"]


def test_share_of_the_roofline():
    table = roofline_share_data(grown())
    for item in table.itertuples():
        assert item.share == pytest.approx(item.bound_us / item.rank_us)
    assert set(table["series"]) == {"humming", "marlin", "emulation"}
    assert roofline_share_data(grown(ceilings=None)).empty


def test_bytes_and_the_front():
    rows = [
        row("small", 16, 30, layout="s", weight_bytes=10),
        row("fast", 16, 10, layout="f", weight_bytes=20),
        row("worse", 16, 40, layout="w", weight_bytes=20),
        row("unknown", 16, 1, layout="u"),
        row("quick", 16, 5, layout="q", weight_bytes=10, accuracy="a8"),
        row("fast", 16, 12, layout="f", weight_bytes=20, block=2),
    ]
    table = bytes_data(evidence(rows, [decided(rows[1], 1, None)]), 16).set_index("series")
    assert table["front"].to_dict() == {
        "fast": True, "quick (a8)": True, "small": True, "worse": False
    }  # fmt: skip
    assert table["chosen"]["fast"]
    assert table["time_us"]["fast"] == pytest.approx(10)


def test_noise_says_what_the_decision_said():
    rows = [row("won", 16, 10), row("tied", 16, 10.1), row("open", 16, 14), row("slow", 16, 30),
            row("quick", 16, 5, accuracy="a8"), row("bad", 16, 0, status="wrong")]  # fmt: skip
    said = {"tied": f"{TIED} 1 %", "open": f"{UNSETTLED} 40 %", "slow": "slower by 200 %",
            "quick": "not allowed (quantises activations to 8 bits)"}  # fmt: skip
    rejected = [
        Rejected(m.candidate, m.status, said.get(m.candidate.backend, "no"), m.accuracy)
        for m in rows[1:]
    ]
    table = noise_data(evidence(rows, [decided(rows[0], 1, None, rejected=rejected)]), 16)
    assert dict(zip(table["candidate"], table["verdict"], strict=True)) == {
        "won": "chosen", "quick": "not allowed", "tied": "tied", "open": "not settled",
        "slow": "slower",
    }  # fmt: skip
    slow = table.set_index("candidate").loc["slow"]
    assert slow.ratio == pytest.approx(3, rel=1e-6)
    assert slow.low <= 3 <= slow.high
    assert len(slow.sample_ratios) == slow.samples == 20
    assert table["candidate"][0] == "won"


def test_a_second_copy_is_a_step_with_its_price():
    rows = []
    for count, a, b in ((1, 10, 40), (64, 400, 100)):
        rows += [row("a", count, a, layout="la", weight_bytes=1000),
                 row("b", count, b, layout="lb", weight_bytes=1100)]  # fmt: skip
    table = budget_data(evidence(rows), "mixed")
    assert table["copies"].tolist() == [1, 2]
    assert table["resident_bytes"].tolist() in ([1000, 2100], [1100, 2100])
    assert table["layouts"][1] == "la, lb"
    assert table["time_us"][1] == pytest.approx(table["best_us"][1])
    assert table["time_us"][0] > table["time_us"][1]
    one = budget_data(evidence(rows[:1] + rows[2:3]), "mixed")
    assert one["copies"].tolist() == [1]


def test_cost_counts_a_packed_copy_once_and_names_the_rest():
    facts = (("wall_s", 2.0),)
    rows = [
        row("a", n, 5, layout="l", pack_ms=1000.0, first_call_ms=250.0, verify_ms=judged,
            timing=facts)
        for n, judged in ((1, 1000.0), (16, None))
    ]  # fmt: skip
    rows.append(row("b", 1, 5, layout="l", pack_ms=1000.0))
    sweep = Sweep(1, GPU, "x", {}, None, "2026-11-29T10:00:00Z", "2026-11-29T10:00:20Z")
    table = cost_data([evidence(rows, sweeps=(sweep,)), evidence([], sweeps=(sweep,))])
    spent = {(r.backend, r.step): r.seconds for r in table.itertuples()}
    assert spent == pytest.approx(
        {("a", "pack"): 1, ("a", "first call"): 0.5, ("a", "verify"): 1, ("a", "timing"): 4,
         (REST, "rest"): 13.5}
    )  # fmt: skip


# drawings ----------------------------------------------------------------------------------


def shown():
    made = [grown(f"a model with a rather long name, layer {i}") for i in range(3)]
    rows = [row("one", 16, 10, pack_ms=9.0, first_call_ms=400.0, timing=(("wall_s", 1.0),))]
    return {
        "made": [*made, evidence(rows, [decided(rows[0], 1, None)], label="cost")],
        "h200": h200_evidence(RESULTS / "nvidia-h200" / "kernels.csv"),
        "epyc": epyc_evidence(RESULTS / "amd-epyc-2-cores" / "cpu.csv"),
    }


#: What tables without samples and without a sweep do not have.
LACKING = {
    "made": set(),
    "h200": {"budget", "bytes", "noise", "cost", "roofline"},
    "epyc": {"budget", "noise", "cost", "roofline"},
}


def out_of_view(figure):
    """Labels of ticks beyond the ends of their axis, which matplotlib makes and does not draw."""
    found = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks():
                if not low <= tick.get_loc() <= high:
                    found |= {tick.label1, tick.label2}
    return found


@pytest.mark.parametrize("size", [(9.0, 5.6), (5.5, 4.2)], ids=["wide", "narrow"])
@pytest.mark.parametrize("name", plots.names())
@pytest.mark.parametrize("where", ["made", "h200", "epyc"])
def test_a_figure_is_whole_at_both_sizes(where, name, size):
    found = shown()[where]
    kind = plots.kind(name)
    options = plots.Options(size=size)
    if name in LACKING[where]:
        with pytest.raises(AutoselError, match=r"^plot: .*: found none, expected "):
            kind.figure(found, options)
        return
    figure = kind.figure(found, options)
    figure.canvas.draw()
    box = figure.bbox
    words = []
    unseen = out_of_view(figure)
    for item in figure.findobj(matplotlib.text.Text):
        if not (item.get_text() and item.get_visible()) or item in unseen:
            continue
        words.append(item.get_text())
        extent = item.get_window_extent()
        for inside in (extent.x0 >= -1, extent.y0 >= -1, extent.x1 <= box.x1 + 1,
                       extent.y1 <= box.y1 + 1):  # fmt: skip
            assert inside, (name, item)
    text = " ".join("\n".join(words).split())
    # Units stand on the axes, the machine and the date in the footer.
    assert "autosel 0." in text
    assert f"measured {found[0].newest[:10]}" in text
    assert any(
        unit in text
        for unit in ("µs", "ms", "(%)", "MiB", "(s)", "Tokens in the call", "Time over the chosen")
    )
    assert kind.describe(kind.table(found, options)).endswith(".")


@pytest.mark.parametrize("size", [(9.0, 5.6), (5.5, 4.2)], ids=["wide", "narrow"])
@pytest.mark.parametrize("name", plots.names())
def test_axis_labels_do_not_run_into_each_other(name, size):
    for found in shown().values():
        try:
            figure = plots.kind(name).figure(found, plots.Options(size=size))
        except AutoselError:
            continue
        figure.canvas.draw()
        for axes in figure.axes:
            unseen = out_of_view(figure)
            for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
                seen = [t for t in labels if t.get_text() and t not in unseen]
                extents = [t.get_window_extent() for t in seen]
                for one, two in itertools.pairwise(extents):
                    assert not one.overlaps(two), (name, size)


@pytest.mark.parametrize("name", plots.names())
def test_nothing_measured_is_one_line_and_no_file(name, tmp_path):
    nothing = [[], [evidence([])]]
    # That nothing may be chosen is something to say for what shows choices.
    if name not in ("crossover", "speedup"):
        nothing.append([evidence([row("a", 1, 0, status="oom")])])
    for found in nothing:
        for suffix in ("png", "svg", "csv"):
            with pytest.raises(AutoselError) as caught:
                figures.write(name, found, tmp_path / f"x.{suffix}")
            assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [None, (9.0, 4.0), (6.0, 12.0)])
def test_words_of_many_layers_do_not_run_into_those_of_the_next(size):
    many = [grown(f"layer {n}", ("marlin", "humming", "emulation")) for n in range(20)]
    options = plots.Options() if size is None else plots.Options(size=size)
    figure = plots.kind("crossover").figure(many, options)
    figure.canvas.draw()
    words = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(words) == 40
    for one, two in itertools.combinations(words, 2):
        # The small gap between lines of text may be shared, letters may not.
        shared = min(one.y1, two.y1) - max(one.y0, two.y0)
        beside = min(one.x1, two.x1) <= max(one.x0, two.x0)
        assert beside or shared < 0.25 * one.height, (one, two)


def test_every_routing_that_was_timed_is_named():
    found = [grown("a"), replace(grown("b"), routing="zipf")]
    for name in ("crossover", "speedup"):
        figure = plots.kind(name).figure(found, plots.Options())
        said = " ".join(t.get_text() for t in figure.findobj(matplotlib.text.Text))
        assert "uniform and zipf routing" in said, name


@pytest.mark.parametrize("name", ["latency", "speedup", "crossover", "bytes", "noise"])
@pytest.mark.parametrize("suffix", ["png", "svg", "csv"])
def test_every_kind_reaches_a_file(name, suffix, tmp_path):
    path = figures.write(name, [grown()], tmp_path / f"x.{suffix}")
    head = path.read_bytes()[:5]
    if suffix == "csv":
        assert len(pd.read_csv(path)) == len(plots.kind(name).table([grown()], plots.Options()))
    else:
        assert head == (b"\x89PNG\r" if suffix == "png" else b"<?xml")


def test_a_token_count_that_was_not_measured_is_named():
    with pytest.raises(AutoselError, match="found 3, expected a measured count: 1, 4, 16, 64"):
        plots.kind("noise").table([grown()], plots.Options(num_tokens=3))


def test_hostile_names_do_not_break_a_figure(tmp_path):
    names = ["$\\frac{x}{", "<script>&\"'", "\x1b[31m\x00\u202e", "名前 имя", "x" * 300]
    for name in names:
        one = grown(label=name, names=(name, "marlin", "emulation"))
        for kind in ("latency", "speedup", "crossover", "bytes", "noise"):
            options = plots.Options(baseline="emulation")
            path = figures.write(kind, [one], tmp_path / "x.svg", options)
            text = path.read_text(encoding="utf-8")
            assert "<script" not in text
            ET.fromstring(text)


def test_the_heat_map_says_every_number_and_hatches_what_has_none():
    one = grown()
    figure = plots.kind("speedup").figure([one, *h200_evidence(Path(RESULTS / "nvidia-h200" /
                                          "kernels.csv"))[:1]], plots.Options())  # fmt: skip
    words = [t.get_text() for t in figure.findobj(matplotlib.text.Text)]
    table = speedup_data([one])
    for ratio in table["speedup"]:
        assert any(word.startswith(f"{ratio:.2f}") for word in words)


def test_planted_fault_a_wrong_time_never_wins_a_cell():
    """A wrong candidate ten times faster changes no table."""
    one = grown()
    cheat = [row("cheat", n, 0.1, status="ok") for n in COUNTS]
    wrong = [row("cheat", n, 0, status="wrong") for n in COUNTS]
    honest = evidence([*one.measurements, *wrong], one.decisions)
    assert speedup_data([honest], "emulation").equals(speedup_data([one], "emulation"))
    assert "cheat" not in set(bytes_data(honest, 16)["series"])
    # The same candidate, were it right, would be seen: the check can fail.
    seen = evidence([*one.measurements, *cheat], one.decisions)
    assert not roofline_share_data(seen).equals(roofline_share_data(honest))


def test_decisions_are_made_where_none_is_stored():
    rows = [row("a", 1, 5), row("b", 1, 9), row("a", 64, 7)]
    one = evidence(rows, [decided(rows[0], 1, 8)])
    outcome = one.outcome(64)
    assert isinstance(outcome, Decision)
    assert outcome.winner == Candidate("a")
    assert math.isclose(outcome.winner_us, 7, rel_tol=1e-6)
    assert np.isclose(one.outcome(1).winner_us, 5)


def test_marks_in_narrow_bands_are_told_in_the_footer():
    figure = plots.kind("crossover").figure([grown()], plots.Options())
    words = " ".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))
    assert "In narrow bands: " in words
    assert "humming" in words.partition("In narrow bands: ")[2]
    assert "marlin" in words.partition("In narrow bands: ")[2]


def test_another_setting_of_one_backend_is_no_slower_choice():
    """vLLM's own backend is chosen with a setting that ties with its fastest one."""
    fast, chosen = row("humming", 16, 10.0, rows=8), row("humming", 16, 10.3, rows=16)
    other = row("emulation", 16, 20.0)
    one = evidence([fast, chosen, other], [decided(chosen, 1, None, runner_up=other.candidate)])
    kind = plots.kind("speedup")
    told = kind.describe(kind.table([one], plots.Options(baseline="humming")))
    assert "0 cells where the chosen one is clearly slower, 1 where another setting" in told
    worse = evidence([fast, other], [decided(other, 1, None, runner_up=fast.candidate)])
    told = kind.describe(kind.table([worse], plots.Options(baseline="humming")))
    assert told.endswith("1 cells where the chosen one is clearly slower.")
