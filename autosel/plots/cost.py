"""Where the tuning's time went: packing, first calls, timing and the rest, by backend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import pandas as pd

from autosel.core import Measurement
from autosel.evidence import Evidence
from autosel.plot_style import Caption, drawing
from autosel.plots._common import (
    WIDE,
    Kind,
    Options,
    caption,
    name_x,
    need,
    text_inches,
    width_inches,
)
from autosel.plots._room import NARROW, placed_with_legend, row_room
from autosel.store import Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COST_COLUMNS = ("backend", "step", "seconds", "candidates")

#: Steps in the order they happen, with colour and hatch.
STEPS = {
    "pack": ("#E69F00", ""),
    "first call": ("#56B4E9", "///"),
    "verify": ("#CC79A7", "..."),
    "timing": ("#0072B2", ""),
    "rest": ("#BBBBBB", "xx"),
}
REST = "(not one backend's)"


def cost_data(found: Sequence[Evidence]) -> pd.DataFrame:
    """Seconds by backend and step; ``candidates`` is how many measurements took part.

    ``pack`` counts each packed copy once, however many candidates read it. ``first call`` includes
    compilation. ``timing`` is wall time, flushes and warm-up included. ``verify`` is there where
    it was recorded. ``rest`` (backend :data:`REST`) is what the sweeps' own clock has beyond that:
    reading weights, reference results, the search of settings, and verification where it was not
    recorded. Columns: :data:`COST_COLUMNS`.
    """
    spent: dict[tuple[str, str], float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    packed: set[tuple[object, ...]] = set()
    for one in found:
        for m in one.measurements:
            backend = m.candidate.backend
            for step, seconds in _steps(m, packed):
                spent[backend, step] += seconds
            counts[backend] += m.status != "unsupported"
    sweeps = {(one.device, sweep.id): sweep for one in found for sweep in one.sweeps}
    whole = sum(map(_seconds, sweeps.values()))
    rest = whole - sum(spent.values())
    rows = [
        {"backend": backend, "step": step, "seconds": seconds, "candidates": counts[backend]}
        for (backend, step), seconds in spent.items()
        if seconds > 0
    ]
    if whole and rest > 0 and rows:
        rows.append({"backend": REST, "step": "rest", "seconds": rest, "candidates": 0})
    return pd.DataFrame(rows, columns=list(COST_COLUMNS))


def _steps(m: Measurement, packed: set[tuple[object, ...]]) -> Iterable[tuple[str, float]]:
    copy = (m.problem, m.device, m.candidate.layout, m.pack_ms)
    if m.pack_ms is not None and copy not in packed:
        packed.add(copy)
        yield "pack", m.pack_ms / 1e3
    if m.first_call_ms is not None:
        yield "first call", m.first_call_ms / 1e3
    if m.verify_ms is not None:
        yield "verify", m.verify_ms / 1e3
    wall_s = dict(m.timing).get("wall_s")
    if isinstance(wall_s, int | float) and not isinstance(wall_s, bool):
        yield "timing", wall_s


def _seconds(sweep: Sweep) -> float:
    if sweep.finished is None:
        return 0.0
    return (
        datetime.fromisoformat(sweep.finished) - datetime.fromisoformat(sweep.started)
    ).total_seconds()


def plot_cost(
    table: pd.DataFrame, words: Caption | None = None, size: tuple[float, float] = WIDE
) -> Figure:
    """A bar a backend, stacked by step, the longest first. ``table`` is :func:`cost_data`'s."""
    need(table, "steps whose time was recorded")
    wide = table.pivot_table(index="backend", columns="step", values="seconds", aggfunc="sum")
    wide = wide.reindex(columns=[step for step in STEPS if step in wide.columns]).fillna(0.0)
    totals = wide.sum(axis=1).sort_values(ascending=False)
    wide = wide.loc[totals.index]
    with drawing():
        words = words or Caption("Where the tuning's time went")
        # Rows of the legend: two at most where it stands above the axes.
        figure, place, legend = placed_with_legend(
            size, words, set(wide.columns),
            left=max(text_inches(str(n), 8) for n in wide.index) + 0.1,
            least=row_room(len(wide)), most=0.36 * len(wide) + 0.52 + 0.5 * (size[0] < NARROW),
        )  # fmt: skip
        axes = figure.add_axes(place)
        left = pd.Series(0.0, index=wide.index)
        for step in wide.columns:
            colour, hatch = STEPS[str(step)]
            axes.barh(
                range(len(wide)), wide[step], left=left, height=0.7, color=colour, hatch=hatch,
                edgecolor="white", linewidth=0.6, label=str(step), zorder=2,
            )  # fmt: skip
            left = left + wide[step]
        for y, total in enumerate(totals):
            axes.annotate(
                _seconds_text(float(total)), (float(total), y), (4, 0),
                textcoords="offset points", va="center", fontsize=7.5,
            )  # fmt: skip
        axes.set_ylim(len(wide) - 0.5, -0.5)
        past = _past_the_bars(totals, size[0] > NARROW, width_inches(axes))
        axes.set_xlim(0, past * float(totals.max()))
        axes.set_yticks(range(len(wide)), list(map(str, wide.index)), fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=8)
        axes.grid(visible=False, axis="y")
        name_x(axes, "Wall time of the sweep (s)", "Time (s)")
        legend(*axes.get_legend_handles_labels())
    return figure


def _past_the_bars(totals: pd.Series, wide: bool, inches: float) -> float:
    """How far the axis goes on, over the longest bar, so that each bar's number has room."""
    largest = float(totals.max())
    past = 1.12 if wide else 1.25
    for total in map(float, totals):
        room = text_inches(_seconds_text(total), 7.5) + 0.12
        past = max(past, total / largest / max(1 - room / inches, 0.2))
    return past


def _seconds_text(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:.0f} s"
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1e3 * seconds:.2g} ms"


def _table(found: Sequence[Evidence], options: Options) -> pd.DataFrame:
    return cost_data(found)


def _figure(found: Sequence[Evidence], options: Options) -> Figure:
    table = _table(found, options)
    need(table, "steps whose time was recorded")
    total = float(table["seconds"].sum())
    layers = len(found)
    footer = [
        "First call: compilation included. Timing: flushes and warm-up included. Rest: reading "
        "weights, reference results, search, and verification where it was not recorded apart."
    ]
    words = caption(
        found, options, "Where the tuning's time went",
        f"{layers} layer{'' if layers == 1 else 's'}, {_seconds_text(total)} in all", footer,
    )  # fmt: skip
    return plot_cost(table, words, options.size)


def _describe(table: pd.DataFrame) -> str:
    by_step = table.groupby("step")["seconds"].sum().sort_values(ascending=False)
    parts = [f"{step} {_seconds_text(float(seconds))}" for step, seconds in by_step.items()]
    return f"Where the tuning's time went, by step: {', '.join(parts)}."


KIND = Kind(
    "where the sweeps' time went: pack, first call, verify, timing",
    _table,
    _figure,
    _describe,
    several=True,
)
