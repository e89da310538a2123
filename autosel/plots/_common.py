"""What the kinds of figures share: how one is described, axes of tokens and times, the footer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

import autosel
from autosel.core import Device
from autosel.errors import AutoselError, field_error
from autosel.evidence import Evidence
from autosel.plot_style import Caption, Frame, new_frame
from autosel.safe_text import printable
from autosel.stats import ranking_quantile
from autosel.words import device_text, versions_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE = (9.0, 5.6)
NARROW = 7.0  # inches; below it a legend stands above the axes instead of beside them


@dataclass(frozen=True, slots=True)
class Options:
    """What a figure can be asked for.

    title       of the figure; the layer's label when empty
    baseline    backend that others are compared with; None: the one vLLM's fixed order takes
    num_tokens  for figures of one token count; None: the measured one nearest to 16
    workload    traffic that plans are made for: a preset's name or a file
    size        inches
    """

    title: str = ""
    baseline: str | None = None
    num_tokens: int | None = None
    workload: str = "mixed"
    size: tuple[float, float] = WIDE


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of figure. ``several``: it shows many layers, else it shows the first one given.

    table     the data that is drawn; empty where there is nothing to draw
    figure    the drawing; AutoselError in one line where the table is empty
    describe  the figure in words, for those who cannot see it
    """

    summary: str
    table: Callable[[Sequence[Evidence], Options], pd.DataFrame]
    figure: Callable[[Sequence[Evidence], Options], Figure]
    describe: Callable[[pd.DataFrame], str]
    several: bool = False


def series_name(backend: str, accuracy: str) -> str:
    """What the legend calls a backend; 8-bit activations are always marked."""
    name = printable(backend)
    return name if accuracy == "exact" else f"{name} ({accuracy})"


def need(table: pd.DataFrame, what: str, expected: str = "at least one to draw") -> None:
    """AutoselError in one line when there is nothing to draw."""
    if table.empty:
        raise AutoselError(field_error("plot", what, "none", expected))


def tokens_or_default(one: Evidence, num_tokens: int | None) -> int:
    """``num_tokens`` if it was measured; the measured count nearest to 16 where none is given."""
    counts = one.token_counts
    if not counts:
        raise AutoselError(field_error("plot", "measured token counts", "none", "at least one"))
    if num_tokens is None:
        return min(counts, key=lambda count: (abs(np.log(count / 16)), count))
    if num_tokens not in counts:
        known = ", ".join(map(str, counts))
        raise AutoselError(field_error("plot", "tokens", num_tokens, f"a measured count: {known}"))
    return num_tokens


def machine_lines(found: Iterable[Evidence]) -> list[str]:
    """Device, versions and date of what is shown, a line for each machine."""
    days: dict[Device, list[str]] = {}
    for one in found:
        days.setdefault(one.device, []).append(day(one.newest))
    lines = []
    for device, when in days.items():
        first, last = min(when), max(when)
        span = first if first == last else f"{first} to {last}"
        versions = versions_text(device)
        parts = [device_text(device), *([versions] if versions else [])]
        lines.append(f"{'; '.join(parts)}; autosel {autosel.__version__}; measured {span}")
    return lines


def figure_words(one: Evidence) -> str:
    """Which figure of the samples is shown, in words."""
    if one.figures:
        return one.figures
    quantile = ranking_quantile(one.device.kind)
    what = "median" if quantile == 0.5 else f"{quantile:.0%} quantile"
    cache = dict(one.timing).get("cache", "cold")
    return f"{what} of samples, {cache} caches"


def caption(
    found: Sequence[Evidence], options: Options, title: str, subtitle: str, footer: Iterable[str]
) -> Caption:
    lines = (*machine_lines(found), *footer)
    return Caption(
        printable(options.title or title), printable(subtitle), tuple(map(printable, lines))
    )


def routings(found: Iterable[Evidence]) -> str:
    """The routings that were timed, in words: ``uniform and zipf routing``."""
    names = list(dict.fromkeys(sorted(one.routing for one in found)))
    several = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    return f"{several} routing"


def day(when: str) -> str:
    """The date of an ISO 8601 time; words where it is not known."""
    try:
        return datetime.fromisoformat(when).date().isoformat()
    except ValueError:
        return when or "at an unknown time"


def width_inches(axes: Axes) -> float:
    figure: Any = axes.figure
    return float(axes.get_position().width * figure.get_size_inches()[0])


def height_inches(axes: Axes) -> float:
    figure: Any = axes.figure
    return float(axes.get_position().height * figure.get_size_inches()[1])


def token_axis(axes: Axes, counts: Sequence[int]) -> None:
    """A logarithmic axis with a tick at each measured count, labelled where there is room."""
    axes.set_xscale("log")
    axes.set_xlim(0.75 * counts[0], 1.35 * counts[-1])
    axes.set_xticks(counts, _labels_that_fit(counts, width_inches(axes)), fontsize=8)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("Tokens in the call (log)", labelpad=2)


def _labels_that_fit(counts: Sequence[int], inches: float) -> list[str]:
    """Tick labels, empty where one would run into the label before it."""
    scale = inches / np.log(1.35 * counts[-1] / (0.75 * counts[0]))
    labels, edge = [], -np.inf
    for count in counts:
        at, half = scale * np.log(count), 0.035 * len(str(count)) + 0.03
        fits = at - half > edge
        labels.append(str(count) if fits else "")
        edge = at + half if fits else edge
    return labels


def time_axis(axes: Axes, name: str = "Time of one call (log)") -> None:
    """Ticks such as ``200 µs`` and ``1 ms``, at 1 or at 1, 2 and 5 of each decade."""
    low, high = axes.get_ylim()
    steps = (1,) if high / low > 300 else (1, 2, 5)
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    ticks = [tick for tick in ticks if low <= tick <= high]
    if len(ticks) < 2:  # a narrow range: its own ends
        ticks = [float(f"{value:.2g}") for value in np.geomspace(low, high, 5)[1:-1]]
    axes.set_yticks(ticks, [time_label(tick) for tick in ticks], fontsize=8)
    axes.set_yticks([], minor=True)
    axes.set_ylim(low, high)
    axes.set_ylabel(name if text_inches(name, 9) < height_inches(axes) else "Time (log)")


def time_label(microseconds: float) -> str:
    for factor, unit in ((1e6, "s"), (1e3, "ms"), (1.0, "µs")):
        if microseconds >= factor:
            return f"{microseconds / factor:g} {unit}"
    return f"{microseconds * 1e3:g} ns"


def three_digits(value: float) -> str:
    """Three significant digits without an exponent: ``3,810`` and ``0.75``."""
    return f"{float(f'{value:.3g}'):,g}" if value < 1000 else f"{float(f'{value:.3g}'):,.0f}"


def short_time(microseconds: float) -> str:
    """Three significant digits with a unit, for text beside a point."""
    return time_label(float(f"{microseconds:.3g}"))


def text_inches(text: str, points: float) -> float:
    """About how wide ``text`` is drawn: DejaVu Sans letters are 0.58 of the font size wide."""
    return len(text) * points * 0.58 / 72


def shortened(text: str, inches: float, points: float) -> str:
    """``text``, its middle left out where it would be wider than ``inches``; safe to draw."""
    text = printable(text)
    room = max(int(inches * 72 / (points * 0.58)), 5)
    if len(text) <= room:
        return text
    head = (room - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (room - 1 - head) :]}"


def fitted(size: tuple[float, float], words: Caption, inches: float) -> Frame:
    """A captioned frame whose free box is ``inches`` high, or less where ``size`` has no room."""
    frame = new_frame(size, words)
    spare = frame.inches[1] - inches
    return new_frame((size[0], size[1] - spare), words) if spare > 0 else frame


Legend = Callable[[Any, Any], None]


def legend_room(frame: Frame, entries: Iterable[str]) -> tuple[float, float, Legend]:
    """Right and upper edge left for axes, in fractions of the figure, and what draws the legend.

    The legend stands at the right of a wide figure and above the axes of a narrow one.
    """
    width, height = map(float, frame.figure.get_size_inches())
    names = list(entries)
    beside = frame.inches[0] >= NARROW
    # Line sample and name, in inches; a name is cut rather than the axes.
    most = frame.inches[0] * (0.33 if beside else 1.0)
    entry = min(0.62 + 0.07 * max(map(len, names)), most)
    columns = 1 if beside else max(1, int(frame.inches[0] // entry))
    rows = 0 if beside else -(-len(names) // columns)
    right = frame.right - (entry / width if beside else 0.05 / width)
    ceiling = frame.top - (rows * 0.185 + 0.08 * bool(rows)) / height

    def legend(handles: Any, labels: Any) -> None:
        at = (right + 0.08 / width, ceiling) if beside else (frame.left, frame.top)
        fitting = [shortened(label, (entry - 0.62) * 1.15, 8.5) for label in labels]
        frame.figure.legend(
            handles, fitting, ncols=columns, borderaxespad=0, borderpad=0.1, handlelength=3,
            labelspacing=0.35, columnspacing=1.0, loc="upper left", bbox_to_anchor=at,
        )  # fmt: skip

    return right, ceiling, legend


def place_legend(
    frame: Frame, entries: Iterable[str], left: float = 0.72, bottom: float = 0.42
) -> tuple[Axes, Legend]:
    """Axes that leave room for a legend, and what draws it; ``left`` and ``bottom`` in inches."""
    width, height = map(float, frame.figure.get_size_inches())
    right, ceiling, legend = legend_room(frame, entries)
    x, y = frame.left + left / width, frame.bottom + bottom / height
    return frame.figure.add_axes((x, y, right - x, ceiling - y)), legend
