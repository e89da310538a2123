"""Figures: for each one a ``*_data`` function giving a table, and a ``plot_*`` that only draws it.

Times are microseconds a call. The drawing needs matplotlib and never a display
(:mod:`autosel.plot_style`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from autosel import samples
from autosel.core import Decision, Measurement, Problem
from autosel.errors import AutoselError, field_error
from autosel.plot_style import Caption, Frame, Style, drawing, new_frame, styles
from autosel.roofline import Ceilings, roofline
from autosel.words import settled_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LATENCY_COLUMNS = (
    "series", "backend", "accuracy", "num_tokens", "candidate", "samples",
    "rank_us", "median_us", "q25_us", "q75_us",
)  # fmt: skip
WINNER_COLUMNS = (
    "low",
    "high",
    "measured",
    "series",
    "candidate",
    "winner_us",
    "margin",
    "settled",
)
ROOFLINE_COLUMNS = ("num_tokens", "experts_hit", "bytes", "flops", "time_us", "bound")

CHOSEN, BOUND = "chosen", "roofline"

#: (local experts hit, slots served here) at a token count.
Hits = Callable[[int], tuple[float, float]]


def series_name(backend: str, accuracy: str) -> str:
    """What the legend calls a backend; 8-bit activations are always marked."""
    return backend if accuracy == "exact" else f"{backend} ({accuracy})"


def latency_data(measurements: Iterable[Measurement]) -> pd.DataFrame:
    """One row for each backend, accuracy class and token count: its fastest correct candidate.

    ``rank_us`` is the figure that decisions compare (:mod:`autosel.stats`); ``q25_us`` to
    ``q75_us`` holds the middle half of the samples. Candidates that are not correct, or have no
    time, are left out. Columns: :data:`LATENCY_COLUMNS`.
    """
    best: dict[tuple[str, str, int], dict[str, Any]] = {}
    for item in measurements:
        summary = samples.summary(item)
        if summary is None:
            continue
        backend = item.candidate.backend
        row = {
            "series": series_name(backend, item.accuracy),
            "backend": backend,
            "accuracy": item.accuracy,
            "num_tokens": item.num_tokens,
            "candidate": item.candidate.key,
            "samples": summary.samples,
            "rank_us": summary.estimate_us,
            "median_us": summary.median_us,
            "q25_us": summary.low_us,
            "q75_us": summary.high_us,
        }
        key = (backend, item.accuracy, item.num_tokens)
        if key not in best or row["rank_us"] < best[key]["rank_us"]:
            best[key] = row
    rows = [best[key] for key in sorted(best)]
    return pd.DataFrame(rows, columns=list(LATENCY_COLUMNS))


def winner_data(decisions: Iterable[Decision]) -> pd.DataFrame:
    """One row for each token bucket; ``high`` is missing for the open last one."""
    rows = [
        {
            "low": item.bucket.low,
            "high": item.bucket.high,
            "measured": item.bucket.measured,
            "series": series_name(item.winner.backend, item.accuracy),
            "candidate": item.winner.key,
            "winner_us": item.winner_us,
            "margin": item.margin,
            "settled": settled_text(item),
        }
        for item in sorted(decisions, key=lambda d: d.bucket.low)
    ]
    return pd.DataFrame(rows, columns=list(WINNER_COLUMNS)).astype({"high": "Int64"})


def roofline_data(
    problem: Problem,
    token_counts: Iterable[int],
    ceilings: Ceilings,
    hits: Hits | None = None,
) -> pd.DataFrame:
    """The bound at each token count; ``hits`` gives the experts really hit, else the expected.

    Columns: :data:`ROOFLINE_COLUMNS`; see :mod:`autosel.roofline` for the model.
    """
    points = []
    for num_tokens in sorted(set(token_counts)):
        experts_hit, slots = hits(num_tokens) if hits else (None, None)
        points.append(roofline(problem, num_tokens, ceilings, experts_hit=experts_hit, slots=slots))
    rows = [{name: getattr(point, name) for name in ROOFLINE_COLUMNS} for point in points]
    return pd.DataFrame(rows, columns=list(ROOFLINE_COLUMNS))


def plot_latency(
    latency: pd.DataFrame,
    winners: pd.DataFrame,
    bound: pd.DataFrame | None = None,
    caption: Caption | None = None,
    size: tuple[float, float] = (9.0, 5.6),
) -> Figure:
    """Latency against tokens, both logarithmic, one line a backend; below it, who wins where.

    A line goes through the figure that decisions compare (the median on accelerators, a low
    quantile on CPUs), its bars span that and the middle half of the samples, a dash is the median.
    ``bound`` is :func:`roofline_data`'s table or None. ``size`` is in inches.
    """
    if latency.empty:
        raise AutoselError(
            field_error("plot", "correct timed candidates", "none", "at least one to draw")
        )
    names = [*latency["series"], *winners["series"]]
    style = styles(names)
    with drawing():
        frame = new_frame(size, caption or Caption("Latency of one MoE layer"))
        top, strip, legend = _axes(frame, {*names, CHOSEN, BOUND})
        _draw_lines(top, latency, style)
        if bound is not None and not bound.empty:
            _draw_bound(top, bound)
        _draw_winning_points(top, latency, winners)
        _scale_axes(top, strip, latency)
        _draw_strip(strip, winners, style)
        entries = dict(zip(*reversed(top.get_legend_handles_labels()), strict=True))
        extra = [name for name in (CHOSEN, BOUND) if name in entries]
        order = [*(name for name in entries if name not in extra), *extra]
        legend([entries[name] for name in order], order)
    return frame.figure


def _axes(frame: Frame, entries: set[str]) -> tuple[Axes, Axes, Callable[..., Any]]:
    """The main axes, the strip below it, and a function that places the legend.

    The legend stands at the right of a wide figure and above the axes of a narrow one.
    """
    width, height = frame.figure.get_size_inches()
    beside = frame.inches[0] >= 7
    entry = 0.62 + 0.07 * max(map(len, entries))  # line sample and name, in inches
    columns = 1 if beside else max(1, int(frame.inches[0] // entry))
    rows = 0 if beside else -(-len(entries) // columns)
    left, bottom = frame.left + 0.72 / width, frame.bottom + 0.42 / height
    right = frame.right - (entry / width if beside else 0.05 / width)
    ceiling = frame.top - (rows * 0.185 + 0.08 * bool(rows)) / height
    strip_top = bottom + 0.42 / height
    strip = frame.figure.add_axes((left, bottom, right - left, 0.42 / height))
    floor = strip_top + 0.1 / height
    top = frame.figure.add_axes((left, floor, right - left, ceiling - floor), sharex=strip)

    def legend(handles: Any, labels: Any) -> None:
        where = (
            {"loc": "upper left", "bbox_to_anchor": (right, ceiling)}
            if beside
            else {"loc": "upper left", "bbox_to_anchor": (frame.left, frame.top)}
        )
        frame.figure.legend(
            handles, labels, ncols=columns, borderaxespad=0, borderpad=0.1, handlelength=3,
            labelspacing=0.35, columnspacing=1.0, **where,
        )  # fmt: skip

    return top, strip, legend


def _draw_lines(axes: Axes, latency: pd.DataFrame, style: dict[str, Style]) -> None:
    # Slowest first, so that the legend reads like the right end of the plot.
    last = latency.sort_values("num_tokens").groupby("series")["rank_us"].last()
    for name in last.sort_values(ascending=False).index:
        rows = latency[latency["series"] == name].sort_values("num_tokens")
        look = style[name]
        rank = rows["rank_us"].to_numpy()
        spread = np.array([rank - rows["q25_us"], rows["q75_us"] - rank]).clip(min=0)
        axes.errorbar(
            rows["num_tokens"], rank, yerr=spread, label=name,
            color=look.colour, marker=look.marker, linestyle=look.line,
            markersize=5, linewidth=1.5, elinewidth=1.0, capsize=2.5, zorder=3,
        )  # fmt: skip
        axes.plot(
            rows["num_tokens"], rows["median_us"], linestyle="none", marker="_", markersize=9,
            color=look.colour, zorder=3,
        )  # fmt: skip


def _draw_bound(axes: Axes, bound: pd.DataFrame) -> None:
    axes.plot(
        bound["num_tokens"], bound["time_us"], color="black", linewidth=3, alpha=0.3,
        label=BOUND, zorder=2,
    )  # fmt: skip


def _draw_winning_points(axes: Axes, latency: pd.DataFrame, winners: pd.DataFrame) -> None:
    """A ring around the chosen backend's point in each bucket."""
    chosen = winners.merge(
        latency, how="inner", left_on=["series", "measured"], right_on=["series", "num_tokens"]
    )
    axes.plot(
        chosen["measured"], chosen["rank_us"], linestyle="none", marker="o", markersize=12,
        markerfacecolor="none", markeredgecolor="black", markeredgewidth=1.1,
        label=CHOSEN, zorder=4, clip_on=False,
    )  # fmt: skip


def _draw_strip(axes: Axes, winners: pd.DataFrame, style: dict[str, Style]) -> None:
    """A cell for each bucket: the winner's colour and marker, its name once, and by how much."""
    left, right = axes.get_xlim()
    inches = _width_inches(axes)
    axes.set_ylim(0, 1)
    axes.set_yticks([0.25, 0.73], ["ahead by", "chosen"], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    runs: list[list[Any]] = []  # [series, start, end]
    rows: Any = winners.to_dict("records")
    for row in rows:
        start = max(row["low"], left)
        end = min(right, right if pd.isna(row["high"]) else row["high"] + 1)
        if end <= start:
            continue
        look = style[row["series"]]
        axes.axvspan(start, end, facecolor=look.colour, alpha=0.2, edgecolor="none")
        axes.axvline(start, color="white", linewidth=1.2)
        text = "" if pd.isna(row["margin"]) else f"{row['margin']:.0%}"
        if row["settled"] != "yes":
            text = "tie" if row["settled"] == "no: tie" else f"{text}?"
        if inches * np.log(end / start) / np.log(right / left) > 0.27:
            axes.text((start * end) ** 0.5, 0.25, text, ha="center", va="center", fontsize=6.5)
        if not runs or runs[-1][0] != row["series"]:
            runs.append([row["series"], start, end])
        runs[-1][2] = end
    for name, start, end in runs:
        axes.axvline(start, color="black", linewidth=0.8)
        look = style[name]
        room = inches * np.log(end / start) / np.log(right / left)
        shown = name if room > 0.2 + 0.062 * len(name) else ""
        middle = (start * end) ** 0.5
        shift = (right / left) ** (0.031 * len(shown) / inches) if shown else 1.0
        axes.plot([middle / shift], [0.73], marker=look.marker, color=look.colour, markersize=5)
        axes.text(
            middle / shift * (right / left) ** (0.09 / inches), 0.72, shown,
            ha="left", va="center", fontsize=7.5,
        )  # fmt: skip


def _scale_axes(top: Axes, strip: Axes, latency: pd.DataFrame) -> None:
    counts = sorted(set(map(int, latency["num_tokens"])))
    top.set_xscale("log")
    top.set_yscale("log")
    strip.set_xlim(0.75 * counts[0], 1.35 * counts[-1])
    top.tick_params(axis="x", which="both", labelbottom=False, length=0)
    inches = _width_inches(strip)
    strip.set_xticks(counts, _labels_that_fit(counts, inches), fontsize=8)
    strip.set_xticks([], minor=True)
    strip.set_xlabel("Tokens in the call (log)", labelpad=2)
    _time_axis(top)


def _width_inches(axes: Axes) -> float:
    figure: Any = axes.figure
    return float(axes.get_position().width * figure.get_size_inches()[0])


def _labels_that_fit(counts: list[int], inches: float) -> list[str]:
    """Tick labels, empty where one would run into the label before it."""
    scale = inches / np.log(1.35 * counts[-1] / (0.75 * counts[0]))
    labels, edge = [], -np.inf
    for count in counts:
        at, half = scale * np.log(count), 0.035 * len(str(count)) + 0.03
        fits = at - half > edge
        labels.append(str(count) if fits else "")
        edge = at + half if fits else edge
    return labels


def _time_axis(axes: Axes) -> None:
    """Ticks such as ``200 µs`` and ``1 ms``, at 1 or at 1, 2 and 5 of each decade."""
    low, high = axes.get_ylim()
    steps = (1,) if high / low > 300 else (1, 2, 5)
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    ticks = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(ticks, [_time_label(tick) for tick in ticks], fontsize=8)
    axes.set_yticks([], minor=True)
    axes.set_ylim(low, high)
    axes.set_ylabel("Time of one call (log)")


def _time_label(microseconds: float) -> str:
    for factor, unit in ((1e6, "s"), (1e3, "ms"), (1.0, "µs")):
        if microseconds >= factor:
            return f"{microseconds / factor:g} {unit}"
    return f"{microseconds * 1e3:g} ns"
