"""Who is chosen where, for many layers, and at how many tokens the choice changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import pandas as pd

from autosel.core import Decision
from autosel.evidence import Evidence
from autosel.plot_style import Caption, Style, drawing, styles
from autosel.plots._common import (
    WIDE,
    Kind,
    Options,
    caption,
    figure_words,
    height_inches,
    need,
    routings,
    series_name,
    shortened,
    text_inches,
    token_axis,
    width_inches,
)
from autosel.plots._room import label_room, placed, row_room
from autosel.plots.latency import latency_data
from autosel.words import is_settled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CROSSOVER_COLUMNS = (
    "layer", "series", "low", "high", "first", "last", "counts", "settled", "crossing",
)  # fmt: skip

NOTHING = "nothing usable"
#: Inches of a row; two lines of text need the upper, one the lower.
TWO_LINES, ONE_LINE = 0.42, 0.26
#: Least inches of a row; its words just do not touch those of the next.
BAND = 0.12


def crossover_data(found: Sequence[Evidence]) -> pd.DataFrame:
    """One row for each run of neighbouring token counts with the same chosen backend.

    low, high    tokens the run is chosen for; ``high`` is missing for the open last one
    first, last  measured token counts at its ends; ``counts`` are all of them
    settled      whether for every one of its decisions no other backend is tied or too noisy
    crossing     tokens at which it overtakes the run before, by straight lines on log-log axes
                 between the measured counts; missing for the first run, and where the two times
                 do not cross between them (a tie that the canonical order decided)

    Columns: :data:`CROSSOVER_COLUMNS`.
    """
    rows = [row for one in found for row in _runs(one)]
    return pd.DataFrame(rows, columns=list(CROSSOVER_COLUMNS)).astype({"high": "Int64"})


def _runs(one: Evidence) -> list[dict[str, Any]]:
    times = latency_data(one.measurements).set_index(["series", "num_tokens"])["rank_us"]
    known: dict[Any, float] = {key: float(us) for key, us in times.items()}
    runs: list[dict[str, Any]] = []
    for outcome in one.outcomes:
        name, settled = NOTHING, True
        if isinstance(outcome, Decision):
            name = series_name(outcome.winner.backend, outcome.accuracy)
            settled = is_settled(outcome)
        bucket = outcome.bucket
        if runs and runs[-1]["series"] == name:
            runs[-1] |= {"high": bucket.high, "last": bucket.measured}
            runs[-1]["counts"] = (*runs[-1]["counts"], bucket.measured)
            runs[-1]["settled"] = runs[-1]["settled"] and settled
            continue
        crossing = None
        if runs:
            before = runs[-1]
            crossing = crossing_tokens(
                known, str(before["series"]), name, int(before["last"]), bucket.measured
            )
        runs.append(
            {
                "layer": one.label, "series": name, "low": bucket.low, "high": bucket.high,
                "first": bucket.measured, "last": bucket.measured,
                "counts": (bucket.measured,), "settled": settled, "crossing": crossing,
            }
        )  # fmt: skip
    return runs


def crossing_tokens(
    times: dict[Any, float], before: str, after: str, left: int, right: int
) -> float | None:
    """Tokens in ``[left, right]`` at which ``after`` becomes faster than ``before``.

    ``times`` maps (series, tokens) to microseconds. None where a time is missing or the straight
    lines through them on log-log axes do not cross.
    """
    keys = [(name, count) for name in (before, after) for count in (left, right)]
    if not all(key in times for key in keys):
        return None
    b0, b1, a0, a1 = (math.log(times[key]) for key in keys)
    gap_left, gap_right = a0 - b0, a1 - b1
    if not gap_left >= 0 > gap_right:
        return None
    share = gap_left / (gap_left - gap_right)
    return math.exp(math.log(left) + share * (math.log(right) - math.log(left)))


def plot_crossover(
    table: pd.DataFrame, words: Caption | None = None, size: tuple[float, float] = WIDE
) -> Figure:
    """A band a layer, cut where the choice changes; colour, hatch and name tell the backends apart.

    ``table`` is :func:`crossover_data`'s; ``size`` in inches.
    """
    need(table, "decisions")
    layers = list(dict.fromkeys(table["layer"]))
    style = styles(table["series"])
    counts = sorted({count for run in table["counts"] for count in run})
    with drawing():
        words = words or Caption("What is chosen where")
        frame, place = placed(
            size, words, lambda frame: (label_room(frame, layers, 8, 0.3), 0.42, 0.05, 0.0),
            row_room(len(layers), row=BAND), 0.62 * len(layers) + 0.42,
        )  # fmt: skip
        names = label_room(frame, layers, 8, 0.3)
        axes = frame.figure.add_axes(place)
        token_axis(axes, counts)
        axes.set_ylim(len(layers) - 0.5, -0.5)
        axes.grid(visible=False)
        axes.tick_params(axis="y", length=0)
        axes.set_yticks(
            range(len(layers)), [shortened(name, names - 0.1, 8) for name in layers], fontsize=8
        )
        told: Any = table.to_dict("records")
        for row, after in zip_longest(told, told[1:]):
            end = _start(after) if after and after["layer"] == row["layer"] else math.inf
            y = layers.index(row["layer"])
            _draw_run(axes, row, end, y, len(layers), style[row["series"]])
    return frame.figure


def _start(row: Any) -> float:
    """Where a run begins: at its crossing if that is known, else at its bucket's border."""
    return float(row["low"] if pd.isna(row["crossing"]) else row["crossing"])


def _draw_run(axes: Axes, row: Any, end: float, y: int, rows: int, look: Style) -> None:
    from matplotlib.patches import Rectangle

    left, right = axes.get_xlim()
    start, end = max(left, _start(row)), min(right, end)
    nothing = row["series"] == NOTHING
    axes.add_patch(
        Rectangle(
            (start, y - 0.4), end - start, 0.8, facecolor="white" if nothing else look.pale,
            edgecolor=look.colour, hatch="" if nothing else look.hatch, linewidth=0.0, zorder=2,
        )
    )  # fmt: skip
    axes.plot([start, start], [y - 0.4, y + 0.4], color="black", linewidth=1.2, zorder=3)
    room = width_inches(axes) * math.log(end / start) / math.log(right / left) - 0.1
    text = row["series"] + ("" if row["settled"] else " ?")
    lines = [shortened(text, room, 8)] if room > 0.45 else []
    if not pd.isna(row["crossing"]) and room > 0.5:
        tokens = row["crossing"]
        crossing = f"from {tokens:.0f}" if tokens >= 10 else f"from {tokens:.2g}"
        both = f"{text} {crossing}"
        if height_inches(axes) / rows > TWO_LINES:
            lines.append(crossing)
        elif text_inches(both, 8) < room:
            lines = [both]
    middle = math.sqrt(start * end)
    if lines:
        axes.text(
            middle, y, "\n".join(lines), ha="center", va="center", fontsize=8, zorder=4,
            linespacing=1.2, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )  # fmt: skip
    else:
        points = 5 if room > 0.12 else 3
        axes.plot([middle], [y], marker=look.marker, color="black", markersize=points, zorder=4)


def _table(found: Sequence[Evidence], options: Options) -> pd.DataFrame:
    return crossover_data(found)


def _figure(found: Sequence[Evidence], options: Options) -> Figure:
    table = _table(found, options)
    need(table, "decisions")
    notes = [
        f"Chosen by the {figure_words(found[0])}. A border with a number is where the two lines "
        "cross between measured token counts; others lie halfway. "
        + ("" if found[0].figures else "?: tied with another backend or too noisy somewhere.")
    ]
    words = caption(found, options, "What is chosen where", routings(found), notes, _marks(table))
    size = options.size
    if size == WIDE:  # nobody asked for a size: as tall as its rows need
        size = (size[0], max(size[1], 1.6 + ONE_LINE * table["layer"].nunique()))
    return plot_crossover(table, words, size)


def _marks(table: pd.DataFrame) -> list[str]:
    """What stands for whom where a band has no room for a name."""
    told = [f"{look.symbol} {name}" for name, look in styles(table["series"]).items()]
    return [f"In narrow bands: {', '.join(told)}."] if len(told) > 1 else []


def _describe(table: pd.DataFrame) -> str:
    parts = []
    for layer, runs in table.groupby("layer", sort=False):
        told: Any = runs.to_dict("records")
        spans = [
            f"{r['series']} from {r['low']}" + ("" if pd.isna(r["high"]) else f" to {r['high']}")
            for r in told
        ]
        parts.append(f"{layer}: {', '.join(spans)} tokens")
    return "What is chosen by tokens. " + "; ".join(parts) + "."


KIND = Kind(
    "layers by tokens: what is chosen where, and where the choice changes",
    _table,
    _figure,
    _describe,
    several=True,
)
