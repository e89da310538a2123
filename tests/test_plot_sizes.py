"""Small figures: each is whole and can be read, or one line says which size it needs."""

import itertools
import re

import matplotlib.text
import pytest

from autosel import figures, plots
from autosel.errors import AutoselError
from autosel.plots._common import WIDE
from tests.made_evidence import GPU, decided, evidence, row
from tests.test_plot_kinds import grown, out_of_view, shown

SIZES = [(3.0, 2.5), (4.0, 2.5), (5.0, 3.0), (3.0, 40.0)]
SMALL = re.compile(
    r"plot: size: found ([\d.]+) x ([\d.]+) inches, expected at least ([\d.]+) x ([\d.]+)"
)


def noisy(rows=9):
    """Many candidates of long names, and every note that a footer can have."""
    made = [
        row(f"backend_of_a_long_name_{i}", 16, 10.0 + i, pack_ms=9.0, first_call_ms=400.0,
            timing=(("wall_s", 0.001 if i else 1.0),), weight_bytes=i + 1 << 20)
        for i in range(rows)
    ]  # fmt: skip
    return [evidence(made, [decided(made[0], 1, None)], label="a model", device=GPU)]


def drawn(name, found, size):
    figure = plots.kind(name).figure(found, plots.Options(size=size))
    figure.canvas.draw()
    return figure


def size_that_does(name, found, size):
    """``size``, or what the refusal asks for; None where there is nothing to draw at any size."""
    try:
        drawn(name, found, size)
    except AutoselError as error:
        text = str(error)
    else:
        return size
    if "found none" in text:
        return None
    said = SMALL.fullmatch(text)
    assert said, text
    *asked, width, height = map(float, said.groups())
    assert tuple(asked) == size
    assert width > size[0] or height > size[1]
    return width, height


def check(figure, what):
    """Axes that show something, words inside the paper, labels that do not share a place."""
    width, height = figure.get_size_inches()
    unseen = out_of_view(figure)
    for item in figure.findobj(matplotlib.text.Text):
        if item.get_text() and item.get_visible() and item not in unseen:
            box = item.get_window_extent()
            inside = (box.x0 >= -1, box.y0 >= -1, box.x1 <= figure.bbox.x1 + 1,
                      box.y1 <= figure.bbox.y1 + 1)  # fmt: skip
            assert all(inside), (what, item)
    for axes in figure.axes:
        place = axes.get_position()
        assert place.width * width > 0.13, what
        assert place.height * height > 0.39, what
        for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
            extents = [t.get_window_extent() for t in labels if t.get_text() and t not in unseen]
            for one, two in itertools.pairwise(extents):
                assert not one.overlaps(two), (what, labels)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", plots.names())
def test_a_small_figure_can_be_read_or_says_the_size_that_can(name, size):
    made = shown()
    for found in (made["made"], made["h200"], noisy()):
        enough = size_that_does(name, found, size)
        if enough is not None:
            check(drawn(name, found, enough), (name, enough))


def test_notes_go_before_a_figure_is_refused():
    found = shown()["made"][:1]
    words = {}
    for size in ((9.0, 5.6), (5.0, 3.4)):
        figure = drawn("latency", found, size)
        words[size] = " ".join(t.get_text() for t in figure.texts)
        assert f"measured {found[0].newest[:10]}" in " ".join(words[size].split())
    assert "Ahead by" in words[9.0, 5.6]
    assert "Ahead by" not in words[5.0, 3.4]


def test_what_marks_stand_for_is_said_however_small_the_figure_is():
    figure = drawn("crossover", [grown()], (3.0, 2.5))
    said = " ".join(" ".join(t.get_text() for t in figure.texts).split())
    assert "In narrow bands" in said
    assert "Chosen by" not in said


@pytest.mark.parametrize("name", ["speedup", "crossover"])
def test_many_layers_make_a_figure_higher_where_no_size_was_asked_for(name):
    many = [grown(f"layer {n}", ("marlin", "humming", "emulation")) for n in range(50)]
    figure = drawn(name, many, WIDE)
    assert figure.get_size_inches()[1] > WIDE[1]
    check(figure, name)
    with pytest.raises(AutoselError, match=SMALL):
        drawn(name, many, (9.0, 5.0))


def test_the_command_says_it_in_one_line_and_leaves_no_file(tmp_path):
    with pytest.raises(AutoselError, match=SMALL):
        figures.write("latency", shown()["made"], tmp_path / "x.png", plots.Options(size=(3, 2.5)))
    assert list(tmp_path.iterdir()) == []
