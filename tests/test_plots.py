"""Figures: their tables by hand, and drawings that need no display."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from autosel import registry
from autosel.core import (
    Candidate,
    Decision,
    Device,
    Measurement,
    Problem,
    QuantScheme,
    TokenBucket,
)
from autosel.errors import AutoselError
from autosel.plot_style import Caption, save, styles, wrap
from autosel.plots import latency as plots
from autosel.roofline import Ceilings

ROOT = str(Path(plots.__file__).parents[2])
INT4 = QuantScheme(4, 128, True)
PROBLEM = Problem(8, 8, 2, 256, 128, INT4, INT4)
CPU = Device("cpu", "Test CPU", threads=2, versions=(("torch", "2.13.0"),))
GPU = Device("cuda", "Test GPU", capability=(9, 0))


def measured(backend, tokens, times, *, status="ok", accuracy="exact", device=CPU, **params):
    return Measurement(
        PROBLEM, tokens, "uniform", Candidate.of(backend, params), device, status, accuracy,
        times_us=tuple(map(float, times)), reason="" if status == "ok" else "why",
    )  # fmt: skip


def decided(backend, low, high, at, us, *, tie=False, margin=0.25, accuracy="exact"):
    return Decision(
        PROBLEM, TokenBucket(low, high, at), "uniform", Candidate.of(backend), us,
        Candidate.of("other"), us * (1 + margin), margin, (0.1, 0.4), tie, "why",
        accuracy=accuracy,
    )  # fmt: skip


def test_latency_table_by_hand():
    table = plots.latency_data(
        [
            measured("slow", 4, [10, 20, 30, 40, 50]),
            measured("slow", 1, [1, 2, 3, 4, 5]),
            measured("fast", 4, [5, 5, 5, 5, 5]),
        ]
    )
    assert list(table.columns) == list(plots.LATENCY_COLUMNS)
    assert list(zip(table["backend"], table["num_tokens"], strict=True)) == [
        ("fast", 4),
        ("slow", 1),
        ("slow", 4),
    ]
    row = table.iloc[2]
    assert (row.q25_us, row.median_us, row.q75_us, row.samples) == (20, 30, 40, 5)
    assert row.rank_us == pytest.approx(18)  # the 20 % quantile ranks on a CPU


def test_accelerators_rank_by_the_median():
    table = plots.latency_data([measured("a", 4, [10, 20, 30, 40, 50], device=GPU)])
    assert table["rank_us"][0] == 30


def test_only_the_fastest_candidate_of_a_backend_is_drawn():
    table = plots.latency_data(
        [
            measured("a", 4, [9, 9, 9], block=1),
            measured("a", 4, [7, 7, 7], block=2),
            measured("a", 4, [8, 8, 8], block=3),
        ]
    )
    assert table["candidate"].tolist() == ["a[block=2]"]


def test_what_is_not_correct_is_never_drawn():
    table = plots.latency_data(
        [
            measured("good", 4, [9, 9, 9]),
            measured("cheat", 4, [1, 1, 1], status="wrong"),
            measured("dead", 4, [], status="crashed"),
        ]
    )
    assert table["backend"].tolist() == ["good"]


def test_eight_bit_activations_are_a_series_of_their_own():
    table = plots.latency_data(
        [measured("a", 4, [9, 9]), measured("a", 4, [5, 5], accuracy="a8", quick=True)]
    )
    assert sorted(table["series"]) == ["a", "a (a8)"]


def test_winner_table():
    table = plots.winner_data(
        [decided("b", 5, None, 16, 9, tie=True), decided("a", 1, 4, 2, 3, accuracy="a8")]
    )
    assert table["series"].tolist() == ["a (a8)", "b"]
    assert table["high"].tolist()[0] == 4
    assert table["high"].isna().tolist() == [False, True]
    assert table["settled"].tolist() == ["yes", "no: tie"]


def test_roofline_table_uses_the_experts_really_hit():
    expected = plots.roofline_data(PROBLEM, [16, 1, 16], Ceilings(10, 1))
    real = plots.roofline_data(PROBLEM, [1, 16], Ceilings(10, 1), lambda tokens: (1, 2 * tokens))
    assert expected["num_tokens"].tolist() == [1, 16]
    assert real["experts_hit"].tolist() == [1, 1]
    assert (real["bytes"] < expected["bytes"]).all()
    # flops do not depend on which experts are hit
    assert real["flops"].tolist() == pytest.approx(expected["flops"].tolist())


@pytest.fixture
def tables():
    rng = np.random.default_rng(0)
    counts = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
    measurements = [
        measured(name, n, base * n**0.6 * rng.lognormal(0, 0.1, 20))
        for name, base in (("emulation", 900), ("torch_int4", 300), ("a_rather_long_name", 150))
        for n in counts
    ]
    decisions = [
        decided("torch_int4" if n < 64 else "emulation", n, None if n == 8192 else 2 * n - 1, n, 9,
                tie=n == 8)
        for n in counts
    ]  # fmt: skip
    return (
        plots.latency_data(measurements),
        plots.winner_data(decisions),
        plots.roofline_data(PROBLEM, counts, Ceilings(10, 1)),
    )


CAPTION = Caption("A $title$ with_signs", "subtitle " * 20, ("footer " * 30, "second line"))


def texts(figure):
    import matplotlib.text

    return [item.get_text() for item in figure.findobj(matplotlib.text.Text) if item.get_text()]


@pytest.mark.parametrize("size", [(9.0, 5.6), (5.5, 4.2), (12.0, 7.0)])
def test_the_figure_says_what_it_shows_and_nothing_leaves_the_paper(tables, size):
    figure = plots.plot_latency(*tables, CAPTION, size)
    figure.canvas.draw()
    words = "\n".join(texts(figure))
    for wanted in ("A $title$", "subtitle", "footer", "second line", "torch_int4", "emulation",
                   "Tokens in the call", "Time", "roofline", "chosen", "tie",
                   "ms", "25%"):  # fmt: skip
        assert wanted in words, wanted
    box = figure.bbox
    import matplotlib.text

    for item in figure.findobj(matplotlib.text.Text):
        if item.get_text() and item.get_visible():
            extent = item.get_window_extent()
            assert extent.x0 >= -1, item
            assert extent.x1 <= box.x1 + 1, item
            assert extent.y0 >= -1, item
            assert extent.y1 <= box.y1 + 1, item


def test_both_axes_are_logarithmic_and_lines_go_through_what_decides(tables):
    latency, winners, _ = tables
    figure = plots.plot_latency(latency, winners, None, CAPTION)
    strip, top = figure.axes
    assert (top.get_xscale(), top.get_yscale(), strip.get_xscale()) == ("log", "log", "log")
    drawn = {line.get_label(): line for line in top.get_lines()}
    assert "roofline" not in drawn
    for container in top.containers:
        rows = latency[latency["series"] == container.get_label()].sort_values("num_tokens")
        np.testing.assert_array_equal(container.lines[0].get_xdata(), rows["num_tokens"])
        np.testing.assert_array_equal(container.lines[0].get_ydata(), rows["rank_us"])
        dashes = [line for line in top.get_lines() if line.get_marker() == "_"
                  and line.get_color() == container.lines[0].get_color()
                  and list(line.get_ydata()) == list(rows["median_us"])]  # fmt: skip
        assert len(dashes) == 1
    assert len(top.containers) == 3
    ring = drawn["chosen"]
    at = latency[latency["series"] == "torch_int4"].set_index("num_tokens")["rank_us"]
    assert ring.get_ydata()[0] == at[1]


@pytest.mark.parametrize("counts", [[1], [16], [3, 4], [1000000]])
def test_few_token_counts(counts):
    latency = plots.latency_data([measured("a", n, [3, 4, 5]) for n in counts])
    winners = plots.winner_data([decided("a", 1, None, counts[0], 3)])
    figure = plots.plot_latency(latency, winners, None, CAPTION)
    figure.canvas.draw()


def test_no_decision_is_still_a_figure(tables):
    figure = plots.plot_latency(tables[0], plots.winner_data([]), None, CAPTION)
    figure.canvas.draw()


def test_nothing_to_draw_is_said():
    with pytest.raises(AutoselError, match="found none"):
        plots.plot_latency(plots.latency_data([]), plots.winner_data([]))


def test_series_differ_without_colour():
    names = [f"backend_{i}" for i in range(11)]
    looks = styles(names)
    assert len({look.marker for look in looks.values()}) == len(names)
    assert len({(str(look.line), look.colour) for look in looks.values()}) == len(names)
    assert styles(reversed(names)) == looks


def test_a_backend_looks_the_same_in_every_figure():
    first = styles(["wna16_tiled", "humming", "marlin"])
    second = styles(["moe_wna16", "emulation", "marlin", "wna16_tiled", "anyones", "cpu_native"])
    assert first["wna16_tiled"] == second["wna16_tiled"]
    assert first["marlin"] == second["marlin"]
    assert styles(["marlin (a8)"])["marlin (a8)"] == first["marlin"]
    assert len(set(second.values())) == 6  # also a stranger, and one that shares a place
    known = styles(registry.names())
    assert len(set(known.values())) == len(known)
    ours = {"wna16_tiled", "humming", "marlin", "marlin_int8", "triton", "emulation", "moe_wna16"}
    assert len({known[name].colour for name in ours}) == len(ours)


def test_words_wrap_to_the_width():
    assert wrap("", 5, 9) == []
    assert len(wrap("word " * 100, 5, 9)) > 1
    assert wrap("short", 5, 9) == ["short"]
    hashes = "autosel-kernels sha256:6239c0a9d543aa85bd56, torch 2.11.0+cu130, " * 4
    assert " ".join(wrap(hashes, 5, 7)) == hashes.strip()
    assert "".join(wrap("A" * 300, 5, 7)) == "A" * 300  # a word longer than a line
    for text in (hashes, "A" * 300, "i" * 900):
        figure = Figure(dpi=150)
        renderer = FigureCanvasAgg(figure).get_renderer()
        for line in wrap(text, 5, 7):
            width = renderer.get_text_width_height_descent(line, FontProperties(size=7), False)[0]
            assert width <= 5 * 150


def test_png_and_svg_are_what_they_say_and_repeat(tables, tmp_path):
    for suffix in ("png", "svg"):
        first = save(plots.plot_latency(*tables, CAPTION), tmp_path / f"a.{suffix}")
        second = save(plots.plot_latency(*tables, CAPTION), tmp_path / f"b.{suffix}")
        assert first.read_bytes() == second.read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    root = ET.parse(tmp_path / "a.svg").getroot()
    assert root.tag.endswith("svg")
    words = "".join(root.itertext())
    assert "torch_int4" in words  # text stays text, so that it can be searched
    assert {p.name for p in tmp_path.iterdir()} == {"a.png", "b.png", "a.svg", "b.svg"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("x.jpg", "suffix: found '.jpg'"),
        ("x", "suffix: found ''"),
        ("none/x.png", "expected a folder"),
        (".svg", "suffix: found ''"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused(tables, tmp_path, name, words):
    with pytest.raises(AutoselError, match=words.replace(".", r"\.")):
        save(plots.plot_latency(*tables), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


DRAW = """
import sys
from autosel.plots import latency as plots
from autosel.core import *
from autosel.plot_style import save
q = QuantScheme(4, 128, True)
p = Problem(8, 8, 2, 256, 128, q, q)
m = [Measurement(p, n, "uniform", Candidate("a"), Device("cpu", "c"), "ok", times_us=(1.0, 2.0))
     for n in (1, 4)]
save(plots.plot_latency(plots.latency_data(m), plots.winner_data([])), sys.argv[1])
print("pyplot" if "matplotlib.pyplot" in sys.modules else "no pyplot")
"""


#: One process imports what takes seconds, and forks before Matplotlib looks at its environment.
FORKED = """
import json, os, sys
import autosel.plots.latency
assert not any(name.partition(".")[0] == "matplotlib" for name in sys.modules)
draw, environments = json.loads(sys.argv[1])
for number, environment in enumerate(environments):
    pid = os.fork()
    if pid == 0:
        os.environ.update(environment)
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{name}", os.O_WRONLY | os.O_CREAT), stream)
        sys.argv[1] = f"{number}.png"
        exec(draw, {"__name__": "__main__"})
        sys.exit()
    os.waitpid(pid, 0)
"""
ENVIRONMENTS = [
    {"DISPLAY": ""},
    {"DISPLAY": "nowhere:99", "MPLBACKEND": "TkAgg"},
    {"MPLBACKEND": "nonsense"},
    {"MPLBACKEND": "module://nowhere"},
    {"HOME": "/nonexistent", "MPLCONFIGDIR": "/proc/nowhere"},
]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_no_display_and_no_setting_stops_it(tmp_path):
    base = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MPLBACKEND")}
    (tmp_path / "matplotlibrc").write_text("axes.facecolor: broken colour\nfont.size: 40\n")
    subprocess.run(
        [sys.executable, "-c", FORKED, json.dumps([DRAW, ENVIRONMENTS])],
        env={**base, "PYTHONPATH": ROOT},
        cwd=tmp_path,
        check=True,
    )
    for number, environment in enumerate(ENVIRONMENTS):
        out = (tmp_path / f"{number}.out").read_text()
        assert out == "no pyplot\n", (environment, (tmp_path / f"{number}.err").read_text())
        assert (tmp_path / f"{number}.png").read_bytes().startswith(b"\x89PNG"), environment


def test_a_users_matplotlibrc_changes_nothing(tmp_path):
    made = []
    for text in ("", "font.size: 40\naxes.facecolor: red\n"):
        (tmp_path / "matplotlibrc").write_text(text)
        out = tmp_path / "x.svg"
        subprocess.run(
            [sys.executable, "-c", DRAW, str(out)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": ROOT},
            check=True,
            capture_output=True,
        )
        made.append(out.read_bytes())
    assert made[0] == made[1]


def test_without_matplotlib_it_is_one_line_and_the_tables_work(tmp_path):
    import os

    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        + DRAW.replace(
            "save(plots.plot",
            "table = plots.latency_data(m); assert len(table) == 2\ntry:\n save(plots.plot",
        )
        + "\n"
    )
    code = code.replace(
        "sys.argv[1])\n",
        "sys.argv[1])\nexcept Exception as error:\n"
        " print(type(error).__name__, error)\n sys.exit()\n",
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x.png")],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("MissingPackageError"), done.stdout + done.stderr
    assert "pip install matplotlib" in done.stdout
    assert done.stdout.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_tables_are_plain_dataframes(tables):
    assert all(isinstance(table, pd.DataFrame) for table in tables)
