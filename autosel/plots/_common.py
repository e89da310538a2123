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
from autosel.plot_style import Caption
from autosel.safe_text import printable
from autosel.stats import ranking_quantile
from autosel.words import device_text, versions_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE = (9.0, 5.6)
TICK = 0.125  # inches of a label of 8 points on an upright axis


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
    found: Sequence[Evidence],
    options: Options,
    title: str,
    subtitle: str,
    notes: Iterable[str],
    key: Iterable[str] = (),
) -> Caption:
    """The words of a figure; without the lines of ``key`` nobody could read it."""
    lines = (*machine_lines(found), *key)
    return Caption(
        printable(options.title or title),
        printable(subtitle),
        tuple(map(printable, lines)),
        tuple(map(printable, notes)),
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
    axes.set_xticks(counts, labels_that_fit(axes, counts, map(str, counts)), fontsize=8)
    axes.set_xticks([], minor=True)
    name_x(axes, "Tokens in the call (log)", "Tokens (log)")


def labels_that_fit(axes: Axes, ticks: Sequence[float], labels: Iterable[str]) -> list[str]:
    """Labels of a logarithmic x axis, empty where one would run into the label before it."""
    low, high = axes.get_xlim()
    scale = width_inches(axes) / np.log(high / low)
    fitting, edge = [], -np.inf
    for tick, label in zip(ticks, labels, strict=True):
        at, half = scale * np.log(tick), 0.035 * len(label) + 0.03
        fits = at - half > edge
        fitting.append(label if fits else "")
        edge = at + half if fits else edge
    return fitting


def time_axis(axes: Axes, name: str = "Time of one call (log)") -> None:
    """Ticks such as ``200 µs`` and ``1 ms``, at 1 or at 1, 2 and 5 of each decade."""
    low, high = axes.get_ylim()
    ticks = _decade_ticks(low, high, (1,) if high / low > 300 else (1, 2, 5))
    if len(ticks) > 2 and TICK * np.log(high / low) / np.log(2) > height_inches(axes):
        ticks = _decade_ticks(low, high, (1,))
    if len(ticks) < 2:  # a narrow range: its own ends
        ticks = [float(f"{value:.2g}") for value in np.geomspace(low, high, 5)[1:-1]]
    axes.set_yticks(ticks, [time_label(tick) for tick in ticks], fontsize=8)
    axes.set_yticks([], minor=True)
    axes.set_ylim(low, high)
    name_y(axes, name, "Time (log)")


def _decade_ticks(low: float, high: float, steps: Sequence[int]) -> list[float]:
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    return [tick for tick in ticks if low <= tick <= high]


def name_x(axes: Axes, name: str, short: str) -> None:
    """Name the axis of tokens, bytes or times; ``short`` where ``name`` is wider than the axes."""
    axes.set_xlabel(name if text_inches(name, 9) < width_inches(axes) else short, labelpad=2)


def name_y(axes: Axes, name: str, short: str) -> None:
    """The same for the upright axis."""
    axes.set_ylabel(name if text_inches(name, 9) < height_inches(axes) else short)


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
