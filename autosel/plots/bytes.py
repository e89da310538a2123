"""Bytes of packed weights against time at one token count, with the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from autosel import samples
from autosel.core import Decision
from autosel.evidence import Evidence
from autosel.plot_style import Caption, drawing, styles
from autosel.plots._common import (
    WIDE,
    Kind,
    Options,
    caption,
    figure_words,
    name_x,
    need,
    series_name,
    short_time,
    time_axis,
    tokens_or_default,
)
from autosel.plots._room import placed_with_legend
from autosel.words import problem_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BYTES_COLUMNS = (
    "num_tokens", "series", "candidate", "layout", "accuracy", "weight_bytes", "time_us",
    "front", "chosen",
)  # fmt: skip

CHOSEN, FRONT = "chosen", "fastest for its bytes"
MIB = 1 << 20


def bytes_data(one: Evidence, num_tokens: int) -> pd.DataFrame:
    """One row for each backend and layout: its fastest correct candidate at ``num_tokens``.

    ``weight_bytes`` are the packed weights of one layer, ``time_us`` the figure that decisions
    compare. ``front``: nothing of the same accuracy class or better takes no more bytes and less
    time. Candidates whose bytes are not known are left out. Columns: :data:`BYTES_COLUMNS`.
    """
    outcome = one.outcome(num_tokens)
    winner = outcome.winner if isinstance(outcome, Decision) else None
    best: dict[tuple[str, str, str], dict[str, Any]] = {}
    for m in one.at(num_tokens):
        if m.status != "ok" or not m.times_us or m.weight_bytes is None:
            continue
        row: dict[str, Any] = {
            "num_tokens": num_tokens,
            "series": series_name(m.candidate.backend, m.accuracy),
            "candidate": m.candidate.key,
            "layout": m.candidate.layout,
            "accuracy": m.accuracy,
            "weight_bytes": m.weight_bytes,
            "time_us": samples.estimate(m).us,
            "chosen": m.candidate == winner,
        }
        key = (m.candidate.backend, m.accuracy, m.candidate.layout)
        known = best.get(key)
        if known is None or (row["chosen"], -row["time_us"]) > (known["chosen"], -known["time_us"]):
            best[key] = row
    rows = [best[key] for key in sorted(best)]
    for row in rows:
        row["front"] = not any(_better(other, row) for other in rows)
    return pd.DataFrame(rows, columns=list(BYTES_COLUMNS))


def _better(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether ``one`` makes ``other`` pointless: at least as exact and small, and faster."""
    if one["accuracy"] != "exact" and other["accuracy"] == "exact":
        return False
    less = one["weight_bytes"] < other["weight_bytes"] or one["time_us"] < other["time_us"]
    return bool(
        less and one["weight_bytes"] <= other["weight_bytes"] and one["time_us"] <= other["time_us"]
    )


def plot_bytes(
    table: pd.DataFrame, words: Caption | None = None, size: tuple[float, float] = WIDE
) -> Figure:
    """Points by bytes (MiB) and time; a staircase joins those that are the fastest for their bytes.

    ``table`` is :func:`bytes_data`'s; ``size`` in inches.
    """
    need(table, "correct candidates whose bytes are known")
    style = styles(table["series"])
    with drawing():
        words = words or Caption("Bytes against time")
        figure, place, legend = placed_with_legend(size, words, {*style, CHOSEN, FRONT})
        axes = figure.add_axes(place)
        axes.set_yscale("log")
        front = table[table["front"]].sort_values("weight_bytes")
        axes.step(
            front["weight_bytes"] / MIB, front["time_us"], where="post", color="black",
            linewidth=1.0, alpha=0.5, zorder=2, label=FRONT,
        )  # fmt: skip
        for name, rows in table.groupby("series"):
            look = style[str(name)]
            axes.plot(
                rows["weight_bytes"] / MIB, rows["time_us"], linestyle="none", label=str(name),
                marker=look.marker, color=look.colour, markersize=7, zorder=3,
            )  # fmt: skip
        chosen = table[table["chosen"]]
        if len(chosen):
            axes.plot(
                chosen["weight_bytes"] / MIB, chosen["time_us"], linestyle="none", marker="o",
                markersize=14, markerfacecolor="none", markeredgecolor="black",
                markeredgewidth=1.1, label=CHOSEN, zorder=4,
            )  # fmt: skip
        most = float(table["weight_bytes"].max()) / MIB
        axes.set_xlim(0, 1.08 * most)
        low, high = float(table["time_us"].min()), float(table["time_us"].max())
        axes.set_ylim(low / 1.35, high * 1.35)
        name_x(axes, "Packed weights of one layer (MiB)", "Weights (MiB)")
        axes.tick_params(axis="x", labelsize=8)
        time_axis(axes)
        legend(*axes.get_legend_handles_labels())
    return figure


def _table(found: Sequence[Evidence], options: Options) -> pd.DataFrame:
    one = found[0]
    return bytes_data(one, tokens_or_default(one, options.num_tokens))


def _figure(found: Sequence[Evidence], options: Options) -> Figure:
    one = found[0]
    table = _table(found, options)
    need(table, "correct candidates whose bytes are known")
    count = int(table["num_tokens"].iloc[0])
    plural = "" if count == 1 else "s"
    words = caption(
        found[:1], options, f"{one.label}: bytes against time at {count} token{plural}",
        f"{problem_text(one.problem)}; {one.routing} routing",
        [f"Time: {figure_words(one)}, each backend's fastest setting for its weight layout."],
    )  # fmt: skip
    return plot_bytes(table, words, options.size)


def _describe(table: pd.DataFrame) -> str:
    front: Any = table[table["front"]].sort_values("weight_bytes").to_dict("records")
    parts = [
        f"{r['series']} {r['weight_bytes'] / MIB:.3g} MiB {short_time(r['time_us'])}" for r in front
    ]
    return f"Bytes against time. Fastest for their bytes: {'; '.join(parts)}."


KIND = Kind("packed bytes against time at one token count", _table, _figure, _describe)
