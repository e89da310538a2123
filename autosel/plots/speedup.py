"""Speed-up over a named baseline: layers by token counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from autosel import samples
from autosel.core import Decision, Measurement
from autosel.errors import AutoselError, field_error
from autosel.evidence import Evidence
from autosel.evidence import ratio as compared
from autosel.plot_style import Caption, drawing
from autosel.plots._common import (
    WIDE,
    Kind,
    Options,
    caption,
    figure_words,
    need,
    routings,
    series_name,
    shortened,
    text_inches,
    width_inches,
)
from autosel.plots._room import label_room, placed, row_room
from autosel.vllm_names import priority

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPEEDUP_COLUMNS = (
    "layer", "num_tokens", "chosen", "chosen_us", "baseline", "baseline_us",
    "speedup", "low", "high", "settled", "why",
)  # fmt: skip

CONFIDENCE = 0.95
#: Least inches of a column; its number is of 4 points then.
CELL = 0.17


def speedup_data(found: Sequence[Evidence], baseline: str | None = None) -> pd.DataFrame:
    """One row for each layer and measured token count; columns: :data:`SPEEDUP_COLUMNS`.

    ``speedup`` is the baseline's time over the chosen candidate's, ``low`` to ``high`` its 95 %
    interval (missing with too few samples) and ``settled`` whether that excludes 1 (missing for a
    table without samples). The baseline is
    ``baseline``'s fastest correct setting, or with None that of the backend which vLLM's fixed
    order takes (:func:`vllm_choice`). Where there is no ratio, ``why`` says so.

    Raises AutoselError when a named baseline was measured nowhere.
    """
    rows: list[dict[str, Any]] = []
    for one in found:
        for count in one.token_counts:
            rows.append({"layer": one.label, "num_tokens": count, **_cell(one, count, baseline)})
    table = pd.DataFrame(rows, columns=list(SPEEDUP_COLUMNS))
    if baseline is not None and len(table) and table["baseline"].isna().all():
        known = sorted({m.candidate.backend for one in found for m in one.correct})
        raise AutoselError(
            field_error("plot", "baseline", repr(baseline), "one of " + ", ".join(known))
        )
    return table


def vllm_choice(one: Evidence, num_tokens: int) -> str | None:
    """The backend that vLLM's fixed order takes: the first that was found to support the layer.

    What was not measured there is passed over; None where no backend of the order was measured.
    """
    tried: dict[str, bool] = {}
    for m in one.at(num_tokens):
        backend = m.candidate.backend
        tried[backend] = tried.get(backend, False) or m.status != "unsupported"
    return next((name for name in priority(one.device) if tried.get(name)), None)


def _cell(one: Evidence, num_tokens: int, baseline: str | None) -> dict[str, Any]:
    name = baseline or vllm_choice(one, num_tokens)
    base = fastest(one.at(num_tokens), name) if name else None
    cell: dict[str, Any] = dict.fromkeys(SPEEDUP_COLUMNS[2:])
    cell["settled"] = False
    if base is not None:
        cell["baseline"] = series_name(base.candidate.backend, base.accuracy)
        cell["baseline_us"] = samples.estimate(base).us
    decision = one.outcome(num_tokens)
    winner = None
    if isinstance(decision, Decision):
        winner = next((m for m in one.at(num_tokens) if m.candidate == decision.winner), None)
        cell["chosen"] = series_name(decision.winner.backend, decision.accuracy)
        cell["chosen_us"] = decision.winner_us
    if base is None:
        cell["why"] = f"{name} has no correct time here" if name else "no backend of vLLM's order"
    elif winner is None or winner.status != "ok":
        cell["why"] = "nothing is chosen here"
    else:
        ratio = compared(base, winner)
        interval = None if one.figures else ratio.interval(CONFIDENCE)
        cell["speedup"] = 1 + ratio.margin
        if one.figures:
            cell["settled"] = None
        elif winner.candidate == base.candidate:
            cell |= {"low": 1.0, "high": 1.0, "settled": True}  # the same samples
        elif interval is not None:
            low, high = interval
            # Which of one backend's settings is faster is no doubt about the choice.
            sure = low > 0 or high < 0 or cell["baseline"] == cell["chosen"]
            cell |= {"low": 1 + low, "high": 1 + high, "settled": sure}
    return cell


def fastest(measurements: Sequence[Measurement], backend: str) -> Measurement | None:
    """The correct measurement of ``backend`` with the least time; None when there is none."""
    right = [
        m for m in measurements
        if m.candidate.backend == backend and m.status == "ok" and m.times_us
    ]  # fmt: skip
    return min(right, key=lambda m: samples.estimate(m).us, default=None)


def plot_speedup(
    table: pd.DataFrame, words: Caption | None = None, size: tuple[float, float] = WIDE
) -> Figure:
    """A heat map: green-blue where the chosen one is faster than the baseline, orange where slower.

    Each cell says its number, so nothing depends on colour; ``?`` marks an interval that includes
    1, hatching a cell without a ratio. ``table`` is :func:`speedup_data`'s; ``size`` in inches.
    """
    need(table.dropna(subset=["speedup"]), "layers with a baseline")
    layers = list(dict.fromkeys(table["layer"]))
    counts = sorted(set(map(int, table["num_tokens"])))
    cells: Any = table.set_index(["layer", "num_tokens"]).to_dict("index")
    largest = max(1.25, float(np.nanmax(np.abs(np.log2(table["speedup"].astype(float))))))
    with drawing():
        words = words or Caption("Speed-up over the baseline")
        frame, place = placed(
            size, words, lambda frame: (label_room(frame, layers, 8, 0.3), 0.42, 0.95, 0.0),
            row_room(len(layers), max(1.2, CELL * len(counts))), 0.5 * len(layers) + 0.42,
        )  # fmt: skip
        names = label_room(frame, layers, 8, 0.3)
        axes = frame.figure.add_axes(place)
        column = width_inches(axes) / len(counts)
        points = min(8.0, 8.0 * 0.92 * column / text_inches("1.00?", 8))
        every = 1 if text_inches(str(counts[-1]), 7) < 0.95 * column else 2
        cmap = _colours()
        x_of = {count: i for i, count in enumerate(counts)}
        for y, layer in enumerate(layers):
            for count, x in x_of.items():
                _draw_cell(axes, x, y, cells.get((layer, count)), cmap, largest, points)
        axes.set_xlim(-0.5, len(counts) - 0.5)
        axes.set_ylim(len(layers) - 0.5, -0.5)
        labels = [str(count) if i % every == 0 else "" for i, count in enumerate(counts)]
        axes.set_xticks(range(len(counts)), labels, fontsize=7)
        axes.set_yticks(
            range(len(layers)), [shortened(name, names - 0.1, 8) for name in layers], fontsize=8
        )
        axes.set_xlabel("Tokens in the call", labelpad=2)
        axes.tick_params(length=0)
        axes.grid(visible=False)
        _colour_bar(frame.figure, axes, cmap, largest)
    return frame.figure


def _draw_cell(
    axes: Axes, x: int, y: int, cell: Any, cmap: Any, largest: float, points: float
) -> None:
    from matplotlib.patches import Rectangle

    none = cell is None or cell["speedup"] is None or np.isnan(cell["speedup"])
    share = 0.5 if none else 0.5 + np.log2(cell["speedup"]) / (2 * largest)
    axes.add_patch(
        Rectangle(
            (x - 0.5, y - 0.5), 1, 1, linewidth=1.5, edgecolor="white",
            facecolor="white" if none else cmap(share), hatch="////" if none else None,
        )
    )  # fmt: skip
    if none:
        axes.add_patch(
            Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, fill=False, hatch="////", linewidth=0,
                      edgecolor="#bbbbbb")
        )  # fmt: skip
        return
    text = f"{cell['speedup']:.2f}" + ("?" if cell["settled"] is False else "")
    dark = abs(share - 0.5) > 0.33
    axes.text(
        x, y, text, ha="center", va="center", fontsize=points, color="white" if dark else "black"
    )


def _colours() -> Any:
    """Orange to white to blue: told apart with every kind of colour vision."""
    from matplotlib.colors import LinearSegmentedColormap

    steps = ["#A04000", "#F0B070", "#FFFFFF", "#80B8DC", "#00507D"]
    return LinearSegmentedColormap.from_list("slower-faster", steps)


def _colour_bar(figure: Figure, axes: Axes, cmap: Any, largest: float) -> None:
    box = axes.get_position()
    width, height = map(float, figure.get_size_inches())
    bar = figure.add_axes((box.x1 + 0.12 / width, box.y0, 0.14 / width, box.height))
    steps = np.linspace(-largest, largest, 49)  # bars, since a picture could not be searched
    bar.barh(
        steps, 1, height=1.1 * (steps[1] - steps[0]),
        color=[cmap(0.5 + step / (2 * largest)) for step in steps],
    )  # fmt: skip
    bar.set_xlim(0, 1)
    bar.set_ylim(-largest, largest)
    ends = [-largest, -largest / 2, 0.0, largest / 2, largest]
    shown = ends if box.height * height > 0.9 else [ends[0], 0.0, ends[-1]]
    bar.set_yticks(shown, [f"{2**end:.2g}x" for end in shown], fontsize=7.5)
    bar.yaxis.tick_right()
    bar.set_xticks([])
    bar.grid(visible=False)
    bar.tick_params(length=0)


def _table(found: Sequence[Evidence], options: Options) -> pd.DataFrame:
    return speedup_data(found, options.baseline)


def _figure(found: Sequence[Evidence], options: Options) -> Figure:
    table = _table(found, options)
    known = ", ".join(sorted({m.candidate.backend for one in found for m in one.correct}))
    why = "; ".join(sorted(set(table["why"].dropna())))
    having = table.dropna(subset=["speedup"])
    need(having, f"layers with a baseline ({why})", f"--baseline of {known}")
    used = " or ".join(sorted(set(table["baseline"].dropna())))
    name = options.baseline or f"vLLM's priority choice ({used})"
    unsure = "" if found[0].figures else " ?: the 95% interval includes 1, of two backends."
    footer = [
        "Number: time of the baseline's fastest setting over the chosen candidate's "
        f"({figure_words(found[0])}); above 1 the chosen one is faster.{unsure} "
        "Hatched: no correct time of the baseline."
    ]
    words = caption(found, options, f"Speed-up over {name}", routings(found), footer)
    return plot_speedup(table, words, options.size)


def _describe(table: pd.DataFrame) -> str:
    """Range of the ratios and where the baseline wins."""
    known = table.dropna(subset=["speedup"])
    below = known[known["speedup"] < 1]
    same = below["baseline"] == below["chosen"]
    slower = below[~same & (below["settled"] != False)]  # noqa: E712 - None is not
    best: Any = known.sort_values("speedup").to_dict("records")[-1]
    return (
        f"Speed-up over {', '.join(sorted(set(known['baseline'])))} in {len(known)} cells: "
        f"{known['speedup'].min():.2f} to {known['speedup'].max():.2f}, most at "
        f"{best['num_tokens']} tokens of {best['layer']}; "
        f"{len(slower)} cells where the chosen one is clearly slower"
        + (f", {same.sum()} where another setting of the same backend is." if same.any() else ".")
    )


KIND = Kind(
    "layers by token counts: how much faster than a baseline what is chosen is",
    _table,
    _figure,
    _describe,
    several=True,
)
