"""Samples of the candidates at one token count beside the winner's: who is tied, who is slower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from autosel import samples
from autosel.core import Decision, Measurement
from autosel.decide import TIE_LIMIT
from autosel.decide_words import TIED, UNSETTLED
from autosel.evidence import Evidence
from autosel.evidence import ratio as compared
from autosel.plot_style import GREY, Caption, drawing
from autosel.plots._common import (
    WIDE,
    Kind,
    Options,
    caption,
    figure_words,
    height_inches,
    labels_that_fit,
    name_x,
    need,
    series_name,
    shortened,
    tokens_or_default,
)
from autosel.plots._room import label_room, placed, row_room
from autosel.words import problem_text, settled_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOISE_COLUMNS = (
    "candidate", "series", "verdict", "time_us", "ratio", "low", "high", "samples", "left_out",
    "sample_ratios",
)  # fmt: skip

#: More rows cannot be read in one figure.
SHOWN = 12
#: What a verdict looks like: colour and marker.
_LOOKS = {
    "chosen": ("#0072B2", "o"),
    "tied": ("#009E73", "s"),
    "not settled": ("#E69F00", "D"),
    "slower": ("#555555", "^"),
    "not allowed": ("#D55E00", "X"),
}


def noise_data(one: Evidence, num_tokens: int) -> pd.DataFrame:
    """One row for each correct candidate, the chosen one first, then by time.

    ``ratio`` is its time over the winner's with its 95 % interval ``low`` to ``high`` (missing with
    too few samples); ``verdict`` is the decision's: ``chosen``, ``tied``, ``not settled``,
    ``slower``, or ``not allowed`` (8-bit activations). ``sample_ratios`` are its undisturbed
    samples over the winner's figure, ``left_out`` how many were preempted. Empty where nothing was
    chosen. Columns: :data:`NOISE_COLUMNS`.
    """
    outcome = one.outcome(num_tokens)
    right = {m.candidate: m for m in one.at(num_tokens) if m.status == "ok" and m.times_us}
    if one.figures or not isinstance(outcome, Decision) or outcome.winner not in right:
        return pd.DataFrame([], columns=list(NOISE_COLUMNS))
    reasons = {item.candidate: item.reason for item in outcome.rejected}
    winner = samples.estimate(right[outcome.winner])
    rows = []
    for candidate, m in right.items():
        ratio = compared(m, right[outcome.winner])
        chosen = candidate == outcome.winner
        interval = None if chosen else ratio.interval(0.95)
        used = samples.ranking(m)
        rows.append(
            {
                "candidate": candidate.key,
                "series": series_name(candidate.backend, m.accuracy),
                "verdict": "chosen" if chosen else _verdict(m, reasons.get(candidate, "")),
                "time_us": samples.estimate(m).us,
                "ratio": 1 + ratio.margin,
                "low": None if interval is None else 1 + interval[0],
                "high": None if interval is None else 1 + interval[1],
                "samples": len(used.times_us),
                "left_out": used.left_out,
                "sample_ratios": tuple(time / winner.us for time in used.times_us),
            }
        )
    rows.sort(key=lambda row: (row["verdict"] != "chosen", row["time_us"]))
    return pd.DataFrame(rows, columns=list(NOISE_COLUMNS)).astype({"low": float, "high": float})


def _verdict(m: Measurement, reason: str) -> str:
    if reason.startswith(TIED):
        return "tied"
    if reason.startswith(UNSETTLED):
        return "not settled"
    return "not allowed" if reason.startswith("not allowed") and m.accuracy != "exact" else "slower"


def plot_noise(
    table: pd.DataFrame, words: Caption | None = None, size: tuple[float, float] = WIDE
) -> Figure:
    """A row a candidate: its samples as dots, its estimate as a marker with the 95 % interval.

    The shaded part is where a rival is close enough to be a tie. At most :data:`SHOWN` rows;
    ``table`` is :func:`noise_data`'s; ``size`` in inches.
    """
    need(table, "a decision with timed candidates")
    shown: Any = table.head(SHOWN).to_dict("records")
    with drawing():
        labels = [row["candidate"] for row in shown]
        frame, place = placed(
            size, words or Caption("Noise and ties"),
            lambda frame: (label_room(frame, labels, 7.5, 0.34), 0.42, 0.85, 0.0),
            row_room(len(shown)), 0.42 * len(shown) + 0.52,
        )  # fmt: skip
        names = label_room(frame, labels, 7.5, 0.34)
        axes = frame.figure.add_axes(place)
        axes.set_xscale("log")
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.axvspan(1, 1 + TIE_LIMIT, facecolor="#000000", alpha=0.07, zorder=0)
        axes.axvline(1, color="black", linewidth=0.9, zorder=1)
        spread = [value for row in shown for value in (*row["sample_ratios"], row["ratio"])]
        low, high = float(np.min(spread)), float(np.quantile(spread, 0.98))
        low, high = min(low, 0.95) / 1.02, max(high, 1.2) * 1.05
        dot = min(3.0, 14 * height_inches(axes) / len(shown) / 3)
        for y, row in enumerate(shown):
            colour, marker = _LOOKS[row["verdict"]]
            # A fixed spread: equal figures for equal data.
            shift = 0.24 * np.sin(np.arange(len(row["sample_ratios"])) * 2.399963)
            axes.plot(
                row["sample_ratios"], y + shift, linestyle="none", marker=".", markersize=dot,
                color=colour, alpha=0.55, zorder=2,
            )  # fmt: skip
            if not np.isnan(row["low"]):
                axes.plot([row["low"], row["high"]], [y, y], color="black", linewidth=1.6, zorder=3)
            axes.plot(
                [row["ratio"]], [y], marker=marker, color=colour, markersize=6.5,
                markeredgecolor="black", markeredgewidth=0.8, zorder=4,
            )  # fmt: skip
            axes.annotate(
                row["verdict"], (1, y), (5, 0), xycoords=("axes fraction", "data"),
                textcoords="offset points", va="center", fontsize=7.5, color=GREY,
            )  # fmt: skip
        axes.set_xlim(low, high)
        ticks = _ratio_ticks(low, high)
        told = labels_that_fit(axes, ticks, [f"{tick:g}x" for tick in ticks])
        axes.set_xticks(ticks, told, fontsize=8)
        axes.set_xticks([], minor=True)
        axes.set_yticks(
            range(len(shown)), [shortened(name, names - 0.1, 7.5) for name in labels], fontsize=7.5
        )
        axes.tick_params(axis="y", length=0)
        name_x(axes, "Time over the chosen candidate's (log)", "Ratio (log)")
    return frame.figure


def _ratio_ticks(low: float, high: float) -> list[float]:
    fine = (0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0)
    coarse = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0)
    middle = (0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0)
    steps = fine if high / low < 2.5 else middle if high / low < 8 else coarse
    return [step for step in steps if low <= step <= high]


def _table(found: Sequence[Evidence], options: Options) -> pd.DataFrame:
    one = found[0]
    return noise_data(one, tokens_or_default(one, options.num_tokens))


def _figure(found: Sequence[Evidence], options: Options) -> Figure:
    one = found[0]
    count = tokens_or_default(one, options.num_tokens)
    table = _table(found, options)
    need(table, "a decision with raw samples")
    plural = "" if count == 1 else "s"
    more = len(table) - SHOWN
    footer = [
        f"Markers: {figure_words(one)}, over the chosen one's; bars: 95% interval of that ratio; "
        f"dots: single samples. Shaded: within {TIE_LIMIT:.0%}, where a rival whose interval does "
        "not clear 1 is a tie and a fixed order decides."
    ]
    if more > 0:
        footer.append(f"{more} more candidate{'' if more == 1 else 's'} slower than these.")
    spoiled = int(table["left_out"].sum())
    if spoiled:
        footer.append(f"{spoiled} preempted samples are left out.")
    outcome = one.outcome(count)
    settled = settled_text(outcome) if isinstance(outcome, Decision) else ""
    words = caption(
        found[:1], options, f"{one.label}: noise at {count} token{plural} (settled: {settled})",
        f"{problem_text(one.problem)}; {one.routing} routing", footer,
    )  # fmt: skip
    return plot_noise(table, words, options.size)


def _describe(table: pd.DataFrame) -> str:
    told: Any = table.head(SHOWN).to_dict("records")
    parts = [f"{row['candidate']} {row['ratio']:.3g} times ({row['verdict']})" for row in told]
    return f"Time over the chosen candidate's, with samples: {'; '.join(parts)}."


KIND = Kind("samples at one token count: ties and noise", _table, _figure, _describe)
