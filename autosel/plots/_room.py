"""Where a figure's axes stand: room for labels and a legend, and what a figure is too small for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from autosel.errors import AutoselError, field_error
from autosel.plot_style import Caption, Frame, new_frame
from autosel.plots._common import WIDE, shortened, text_inches

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NARROW = 7.0  # inches; below it a legend stands above the axes instead of beside them

#: Least width and height, in inches, of axes with lines or points.
LINES = (1.2, 0.8)
#: Least height of a row with points or a bar: its label is of 8 points.
ROW = 0.15

Legend = Callable[[Any, Any], None]
#: Inches that labels and the legend take at the left, bottom, right and top of a frame's free box.
Margins = Callable[[Frame], tuple[float, float, float, float]]
#: Left and lower edge, width and height of axes in fractions of the figure.
Rect = tuple[float, float, float, float]


def row_room(rows: int, width: float = 1.2, row: float = ROW) -> tuple[float, float]:
    """Least inches of axes with ``rows`` rows; a single one still needs a scale beside it."""
    return width, max(0.4, row * rows)


def label_room(frame: Frame, labels: Iterable[str], points: float, share: float) -> float:
    """Inches for the rows' labels, at most that ``share`` of the figure's width."""
    most = share * float(frame.figure.get_size_inches()[0])
    return min(max(text_inches(label, points) for label in labels) + 0.1, most)


def placed(
    size: tuple[float, float],
    words: Caption,
    margins: Margins,
    least: tuple[float, float] = LINES,
    most: float = math.inf,
) -> tuple[Frame, Rect]:
    """A captioned figure of ``size`` inches and the place of its axes, at least ``least`` inches.

    Where ``size`` has no room, the caption's notes are left out, the last one first; the size that
    is meant where nobody asked for one grows instead. AutoselError in one line where that is not
    enough. ``most`` is the highest free box of use: a figure with less to show is lower.
    """
    if size == WIDE and _lack(new_frame(size, words), margins, least) != (0, 0):
        size = _enough(size, words, margins, least)
    for kept in range(len(words.notes), -1, -1):
        fewer = _with_notes(words, kept)
        frame = new_frame(size, fewer)
        if _lack(frame, margins, least) == (0, 0):
            spare = frame.inches[1] - most
            if spare > 0:
                frame = new_frame((size[0], size[1] - spare), fewer)
            return frame, _rect(frame, margins)
    width, height = _enough(size, _with_notes(words, 0), margins, least)
    found = f"{size[0]:g} x {size[1]:g} inches"
    raise AutoselError(field_error("plot", "size", found, f"at least {width:g} x {height:g}"))


def _with_notes(words: Caption, kept: int) -> Caption:
    return Caption(words.title, words.subtitle, words.footer, words.notes[:kept])


def _lack(frame: Frame, margins: Margins, least: tuple[float, float]) -> tuple[float, float]:
    """Inches by which the axes would be too narrow and too low; a hair is not counted."""
    left, bottom, right, top = margins(frame)
    inner = frame.inches[0] - left - right, frame.inches[1] - bottom - top
    width, height = (want - have for want, have in zip(least, inner, strict=True))
    return (width if width > 1e-6 else 0, height if height > 1e-6 else 0)


def _enough(
    size: tuple[float, float], words: Caption, margins: Margins, least: tuple[float, float]
) -> tuple[float, float]:
    """The least size from ``size`` on that has the room, in tenths of an inch.

    The width first: a wider figure wraps its words into fewer lines and needs less height.
    """
    tenths = [max(1, math.ceil(10 * inches - 1e-6)) for inches in size]
    for side in (0, 1):
        while lack := _lack(new_frame((tenths[0] / 10, tenths[1] / 10), words), margins, least)[
            side
        ]:
            tenths[side] += max(1, math.floor(10 * lack))
    return tenths[0] / 10, tenths[1] / 10


def _rect(frame: Frame, margins: Margins) -> Rect:
    width, height = map(float, frame.figure.get_size_inches())
    left, bottom, right, top = margins(frame)
    x, y = frame.left + left / width, frame.bottom + bottom / height
    return x, y, frame.right - right / width - x, frame.top - top / height - y


def legend_room(frame: Frame, entries: Iterable[str]) -> tuple[float, float, Legend]:
    """Inches that a legend takes at the right and at the top, and what draws it.

    It stands at the right of a wide figure and above the axes of a narrow one.
    """
    width, height = map(float, frame.figure.get_size_inches())
    names = list(entries)
    beside = frame.inches[0] >= NARROW
    # Line sample and name, in inches; a name is cut rather than the axes.
    most = frame.inches[0] * (0.33 if beside else 1.0)
    entry = min(0.62 + 0.07 * max(map(len, names)), most)
    columns = 1 if beside else max(1, int(frame.inches[0] // entry))
    rows = 0 if beside else -(-len(names) // columns)
    right = entry if beside else 0.05
    top = rows * 0.185 + 0.08 * bool(rows)

    def legend(handles: Any, labels: Any) -> None:
        above = (frame.left, frame.top)
        at = (frame.right - (right - 0.08) / width, frame.top - top / height) if beside else above
        fitting = [shortened(label, (entry - 0.62) * 1.15, 8.5) for label in labels]
        frame.figure.legend(
            handles, fitting, ncols=columns, borderaxespad=0, borderpad=0.1, handlelength=3,
            labelspacing=0.35, columnspacing=1.0, loc="upper left", bbox_to_anchor=at,
        )  # fmt: skip

    return right, top, legend


def placed_with_legend(
    size: tuple[float, float],
    words: Caption,
    entries: Iterable[str],
    left: float = 0.72,
    bottom: float = 0.42,
    least: tuple[float, float] = LINES,
    most: float = math.inf,
) -> tuple[Figure, Rect, Legend]:
    """A figure, the place of its axes beside or below a legend, and what draws the legend.

    ``left`` and ``bottom`` are inches for labels; the others are as in :func:`placed`.
    """
    names = list(entries)

    def margins(frame: Frame) -> tuple[float, float, float, float]:
        right, top, _ = legend_room(frame, names)
        return left, bottom, right, top

    frame, rect = placed(size, words, margins, least, most)
    return frame.figure, rect, legend_room(frame, names)[2]
