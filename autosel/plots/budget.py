"""Bytes of resident copies against expected time: the plans for growing budgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from autosel.errors import NothingUsableError
from autosel.evidence import Evidence
from autosel.plans import plan as make_plan
from autosel.plot_style import Caption, drawing
from autosel.plots._common import (
    WIDE,
    Kind,
    Options,
    caption,
    figure_words,
    name_x,
    need,
    short_time,
    time_axis,
)
from autosel.plots._room import placed_with_legend
from autosel.safe_text import printable
from autosel.weight_budget import WeightBudget
from autosel.words import problem_text
from autosel.workload import load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BUDGET_COLUMNS = (
    "copies", "resident_bytes", "time_us", "best_us", "layouts", "backends", "worth",
)  # fmt: skip

MIB = 1 << 20
PLAN, BEST = "plan", "every winner resident"
#: More copies than this were never worth it; it ends the search in any case.
MOST = 6


def budget_data(one: Evidence, workload: str = "mixed") -> pd.DataFrame:
    """One row for each number of resident copies, from one on until no further copy helps.

    ``time_us`` is the plan's expected time a call under ``workload`` (a preset's name or a file,
    :mod:`autosel.workload`), ``best_us`` that with every layout resident; ``worth`` whether the
    last copy's gain clears the noise. Columns: :data:`BUDGET_COLUMNS`.
    """
    traffic = load(workload)
    rows: list[dict[str, Any]] = []
    budget, worth = WeightBudget(), True
    measurements = [] if one.figures else list(one.measurements)
    for _ in range(MOST if any(m.status == "ok" for m in measurements) else 0):
        try:
            plan = make_plan(measurements, workload=traffic, budget=budget)
        except NothingUsableError:
            break
        if rows and plan.resident_bytes <= rows[-1]["resident_bytes"]:
            # A copy whose gain the noise hides is not planned for; its price is all there is.
            break
        rows.append(
            {
                "copies": len(plan.resident),
                "resident_bytes": plan.resident_bytes,
                "time_us": plan.time_us,
                "best_us": plan.best_us,
                "layouts": ", ".join(item.layout for item in plan.resident),
                "backends": ", ".join(dict.fromkeys(b.candidate.backend for b in plan.buckets)),
                "worth": worth,
            }
        )
        after = plan.next_copy
        if after is None or after.gain_us <= 0:
            break
        worth = after.worth
        budget = WeightBudget(None, plan.resident_bytes + after.extra_bytes)
    return pd.DataFrame(rows, columns=list(BUDGET_COLUMNS))


def plot_budget(
    table: pd.DataFrame, words: Caption | None = None, size: tuple[float, float] = WIDE
) -> Figure:
    """A staircase of expected time over bytes, each step with its number of copies.

    ``table`` is :func:`budget_data`'s; ``size`` in inches.
    """
    need(table, "candidates that a plan can be made of")
    with drawing():
        words = words or Caption("Bytes against expected time")
        figure, place, legend = placed_with_legend(size, words, (PLAN, BEST))
        axes = figure.add_axes(place)
        axes.set_yscale("log")
        most = float(table["resident_bytes"].max()) / MIB
        least = float(table["best_us"].min())
        x = [*(table["resident_bytes"] / MIB), 1.25 * most]
        y = [*table["time_us"], float(table["time_us"].iloc[-1])]
        axes.step(x, y, where="post", color="#0072B2", linewidth=1.5, marker="o", markersize=6,
                  markevery=list(range(len(table))), label=PLAN, zorder=3)  # fmt: skip
        axes.axhline(least, color="black", linewidth=1.0, linestyle=(0, (5, 1.5)), label=BEST)
        axes.set_xlim(0, 1.25 * most)
        axes.set_ylim(least / 1.3, float(table["time_us"].max()) * 1.45)
        told: Any = table.to_dict("records")
        for row in told:
            axes.annotate(
                f"{row['copies']}{'' if row['worth'] else '?'}",
                (row["resident_bytes"] / MIB, row["time_us"]), (0, 7), ha="center", va="bottom",
                textcoords="offset points", fontsize=8,
            )  # fmt: skip
        name_x(axes, "Packed weights resident for one layer (MiB)", "Weights (MiB)")
        axes.tick_params(axis="x", labelsize=8)
        time_axis(axes, "Expected time of one call (log)")
        legend(*axes.get_legend_handles_labels())
    return figure


def _table(found: Sequence[Evidence], options: Options) -> pd.DataFrame:
    return pd.concat([budget_data(one, options.workload) for one in found[:1]]) if found else (
        pd.DataFrame([], columns=list(BUDGET_COLUMNS))
    )  # fmt: skip


def _figure(found: Sequence[Evidence], options: Options) -> Figure:
    table = _table(found, options)
    need(table, "candidates that a plan can be made of")
    one = found[0]
    told: Any = table.to_dict("records")
    copies = "; ".join(f"{row['copies']}: {row['layouts']}" for row in told)
    footer = [
        f"Copies resident: {printable(copies)}. A number with ?: its gain is within the noise.",
        f"Planned from the {figure_words(one)} at the measured token counts; traffic: "
        f"{printable(load(options.workload).name)}.",
    ]
    words = caption(
        found[:1], options, f"{one.label}: bytes against expected time",
        f"{problem_text(one.problem)}; {one.routing} routing", footer,
    )  # fmt: skip
    return plot_budget(table, words, options.size)


def _describe(table: pd.DataFrame) -> str:
    told: Any = table.to_dict("records")
    parts = [
        f"{row['resident_bytes'] / MIB:.3g} MiB ({row['layouts']}) {short_time(row['time_us'])}"
        for row in told
    ]
    return f"Expected time of one call by bytes of resident copies: {'; '.join(parts)}."


KIND = Kind("bytes of resident copies against expected time, by plan", _table, _figure, _describe)
