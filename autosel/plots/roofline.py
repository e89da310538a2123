"""Share of the roofline that each backend reaches, against tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from autosel.evidence import Evidence
from autosel.plot_style import Caption, drawing, styles
from autosel.plots._common import (
    WIDE,
    Kind,
    Options,
    caption,
    figure_words,
    name_y,
    need,
    three_digits,
    token_axis,
)
from autosel.plots._room import placed_with_legend
from autosel.plots.latency import latency_data
from autosel.words import problem_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOFLINE_SHARE_COLUMNS = (
    "series", "num_tokens", "candidate", "rank_us", "bound_us", "bound", "share",
)  # fmt: skip


def roofline_share_data(one: Evidence) -> pd.DataFrame:
    """``share = bound_us / rank_us`` of each backend's fastest correct candidate by token count.

    ``bound`` says what limits there: ``memory`` or ``compute`` (:mod:`autosel.roofline`). Empty
    where no sweep measured the device's ceilings. Columns: :data:`ROOFLINE_SHARE_COLUMNS`.
    """
    rows: list[dict[str, Any]] = []
    told: Any = latency_data(one.measurements).to_dict("records")
    for row in told:
        point = one.bound(int(row["num_tokens"]))
        if point is not None:
            share = {"bound_us": point.time_us, "bound": point.bound}
            rows.append({**row, **share, "share": point.time_us / row["rank_us"]})
    return pd.DataFrame(rows, columns=list(ROOFLINE_SHARE_COLUMNS))


def plot_roofline_share(
    table: pd.DataFrame, words: Caption | None = None, size: tuple[float, float] = WIDE
) -> Figure:
    """A line a backend, 0 to 100 % and beyond; below the axis, what bounds at each token count.

    ``table`` is :func:`roofline_share_data`'s; ``size`` in inches.
    """
    need(table, "correct timed candidates with a roofline", "a sweep, which measures ceilings")
    style = styles(table["series"])
    counts = sorted(set(map(int, table["num_tokens"])))
    with drawing():
        words = words or Caption("Share of the roofline")
        figure, place, legend = placed_with_legend(size, words, set(style))
        axes = figure.add_axes(place)
        last = table.sort_values("num_tokens").groupby("series")["share"].last()
        for name in last.sort_values(ascending=False).index:
            rows = table[table["series"] == name].sort_values("num_tokens")
            look = style[name]
            axes.plot(
                rows["num_tokens"], 100 * rows["share"], label=name, color=look.colour,
                marker=look.marker, linestyle=look.line, markersize=5, linewidth=1.5, zorder=3,
            )  # fmt: skip
        axes.axhline(100, color="black", linewidth=1.0, zorder=2)
        top = max(108.0, 106 * float(table["share"].max()))
        axes.set_ylim(0, top)
        name_y(axes, "Share of the roofline (%)", "Share (%)")
        token_axis(axes, counts)
        bounds = table.drop_duplicates("num_tokens").set_index("num_tokens")["bound"]
        compute = [count for count in counts if bounds[count] == "compute"]
        if compute:
            left, right = axes.get_xlim()
            below = [count for count in counts if count < compute[0]]
            edge = (below[-1] * compute[0]) ** 0.5 if below else left
            axes.axvspan(edge, right, facecolor="#000000", alpha=0.06, zorder=0)
        legend(*axes.get_legend_handles_labels())
    return figure


def _table(found: Sequence[Evidence], options: Options) -> pd.DataFrame:
    return pd.concat([roofline_share_data(one) for one in found[:1]])


def _figure(found: Sequence[Evidence], options: Options) -> Figure:
    one = found[0]
    table = _table(found, options)
    need(table, "correct timed candidates with a roofline", "a sweep, which measures ceilings")
    footer = [
        f"Share: least time by the roofline over the {figure_words(one)}. "
        "Shaded: multiplications bound there, bytes elsewhere."
    ]
    if one.ceilings is not None:
        footer.append(
            "Ceilings, as torch reads and multiplies here: "
            f"{three_digits(one.ceilings.read_gbps)} GB/s, "
            f"{three_digits(one.ceilings.matmul_tflops)} TFLOP/s; a kernel may multiply better "
            "than torch."
        )
    words = caption(
        found[:1], options, f"{one.label}: share of the roofline",
        f"{problem_text(one.problem)}; {one.routing} routing", footer,
    )  # fmt: skip
    return plot_roofline_share(table, words, options.size)


def _describe(table: pd.DataFrame) -> str:
    best = table.loc[table.groupby("num_tokens")["share"].idxmax()]
    told: Any = best.to_dict("records")
    parts = [f"{r['num_tokens']}: {r['series']} {r['share']:.0%} ({r['bound']})" for r in told]
    return f"Share of the roofline against tokens. Highest by tokens: {'; '.join(parts)}."


KIND = Kind("share of the roofline that each backend reaches", _table, _figure, _describe)
