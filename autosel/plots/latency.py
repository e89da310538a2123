"""Latency against tokens, a line a backend, with the chosen ones in a strip below."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from autosel import samples
from autosel.core import Decision, Measurement, Problem
from autosel.evidence import Evidence, experts_hit
from autosel.plot_style import Caption, Style, drawing, styles
from autosel.plots._common import (
    WIDE,
    Kind,
    Options,
    caption,
    need,
    series_name,
    short_time,
    three_digits,
    time_axis,
    token_axis,
    width_inches,
)
from autosel.plots._room import Rect, placed_with_legend
from autosel.roofline import Ceilings, roofline
from autosel.routing_file import is_known
from autosel.stats import ranking_quantile
from autosel.words import problem_text, settled_text

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
#: Inches of the strip and the gap above it.
STRIP = 0.52

#: (local experts hit, slots served here) at a token count.
Hits = Callable[[int], tuple[float, float]]


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
    words: Caption | None = None,
    size: tuple[float, float] = WIDE,
) -> Figure:
    """Latency against tokens, both logarithmic, one line a backend; below it, who wins where.

    A line goes through the figure that decisions compare (the median on accelerators, a low
    quantile on CPUs), its bars span that and the middle half of the samples, a dash is the median.
    ``bound`` is :func:`roofline_data`'s table or None. ``size`` is in inches.
    """
    need(latency, "correct timed candidates")
    names = [*latency["series"], *winners["series"]]
    style = styles(names)
    with drawing():
        figure, place, legend = placed_with_legend(
            size, words or Caption("Latency of one MoE layer"), {*names, CHOSEN, BOUND},
            bottom=0.42 + STRIP,
        )  # fmt: skip
        top, strip = _axes(figure, place)
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
    return figure


def _axes(figure: Figure, place: Rect) -> tuple[Axes, Axes]:
    """The main axes at ``place`` and the strip below it."""
    left, floor, width, height = place
    inch = 1 / float(figure.get_size_inches()[1])
    strip = figure.add_axes((left, floor - STRIP * inch, width, (STRIP - 0.1) * inch))
    top = figure.add_axes((left, floor, width, height), sharex=strip)
    return top, strip


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
    inches = width_inches(axes)
    axes.set_ylim(0, 1)
    axes.set_yticks([0.25, 0.73], ["ahead by", "chosen"], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    runs: list[list[Any]] = []  # [series, start, end]
    rows: Any = winners.to_dict("records")
    for row in rows:
        start = max(row["low"] - 0.5, left)  # half way between whole numbers: ticks lie inside
        end = min(right, right if pd.isna(row["high"]) else row["high"] + 0.5)
        if end <= start:
            continue
        look = style[row["series"]]
        axes.axvspan(start, end, facecolor=look.colour, alpha=0.2, edgecolor="none")
        axes.axvline(start, color="white", linewidth=1.2)
        text = "" if pd.isna(row["margin"]) else f"{row['margin']:.0%}"
        if not row["settled"].startswith("yes"):
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
    top.set_yscale("log")
    top.tick_params(axis="x", which="both", labelbottom=False, length=0)
    token_axis(strip, counts)
    time_axis(top)


def _table(found: Sequence[Evidence], options: Options) -> pd.DataFrame:
    return latency_data(m for one in found[:1] for m in one.measurements)


def _figure(found: Sequence[Evidence], options: Options) -> Figure:
    one = found[0]
    latency = _table(found, options)
    need(latency, "correct timed candidates")
    bound = None
    if one.ceilings is not None and is_known(one.routing):
        counts = sorted({int(count) for count in latency["num_tokens"]})
        bound = roofline_data(
            one.problem, counts, one.ceilings,
            lambda tokens: experts_hit(one.problem, one.routing, tokens, one.seed),
        )  # fmt: skip
    words = caption(
        found[:1],
        options,
        one.label,
        f"{problem_text(one.problem)}; {one.routing} routing",
        _footer(one, latency),
    )
    return plot_latency(latency, winner_data(one.decisions), bound, words, options.size)


def _footer(one: Evidence, table: pd.DataFrame) -> list[str]:
    least, most = int(table["samples"].min()), int(table["samples"].max())
    count = f"{least}" if least == most else f"{least} to {most}"
    cache = dict(one.timing).get("cache", "cold")
    quantile = ranking_quantile(one.device.kind)
    if one.figures:
        shown = f"Lines: {one.figures}; bars: the table's other figures."
    elif quantile == 0.5:
        shown = f"Lines: median of {count} samples, {cache} caches; bars: the middle half of them."
    else:
        shown = (
            f"Lines: {quantile:.0%} quantile, which is what decisions compare here, of {count} "
            f"samples without preemption, {cache} caches; bars: to the 75% quantile; dash: median."
        )
    lines = [
        f"{shown} Ahead by: how much longer the fastest other backend takes; "
        "tie or ?: not settled by the samples."
    ]
    if any(m.accuracy == "a8" for m in one.correct):
        lines.append("a8: quantises activations to 8 bits inside; chosen only where allowed.")
    if one.ceilings is not None:
        lines.append(
            f"Roofline: bytes of the experts hit and of the activations at "
            f"{three_digits(one.ceilings.read_gbps)} GB/s, or multiplications at "
            f"{three_digits(one.ceilings.matmul_tflops)} TFLOP/s, as torch reads and "
            "multiplies here."
        )
    return lines


def _describe(table: pd.DataFrame) -> str:
    """The fastest backend and its time at each token count."""
    fastest = table.loc[table.groupby("num_tokens")["rank_us"].idxmin()]
    told: Any = fastest.to_dict("records")
    parts = [f"{row['num_tokens']}: {row['series']} {short_time(row['rank_us'])}" for row in told]
    series = ", ".join(sorted(set(table["series"])))
    return f"Time of one call against tokens for {series}. Fastest by tokens: {'; '.join(parts)}."


KIND = Kind("time of one call against tokens, and what is chosen where", _table, _figure, _describe)
