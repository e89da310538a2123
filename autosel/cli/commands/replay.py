"""``autosel replay``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from autosel.cli.group import Command
from autosel.cli.options import db_option, names
from autosel.cli.report import Report, Table

if TYPE_CHECKING:
    from autosel.replay import Cell, Score


@click.command(cls=Command)
@click.argument("recording", required=False, type=click.Path(dir_okay=False), metavar="[CSV]")
@click.option(
    "--strategies", type=names, metavar="NAME,NAME,...", default=(), show_default="all",
    help="Strategies to rerun, such as racing or 'median of ten'.",
)  # fmt: skip
@click.option(
    "--priority", type=names, metavar="BACKEND,BACKEND,...", default=(), show_default="none",
    help="Also rerun a fixed list: the first of these backends that a cell has.",
)  # fmt: skip
@click.option(
    "--reruns", type=click.IntRange(2, 1000), default=10, show_default=True, metavar="N",
    help="Times that each strategy decides each cell anew.",
)  # fmt: skip
@click.option(
    "--by", type=names, metavar="COLUMN,COLUMN,...", default=(), show_default="one cell",
    help="CSV: columns that together name a cell (a layer and a token count, say).",
)  # fmt: skip
@click.option(
    "--candidate", default="candidate", show_default=True, metavar="COLUMN",
    help="CSV: the column that names the candidate.",
)  # fmt: skip
@click.option(
    "--time", "time_us", default="us", show_default=True, metavar="COLUMN",
    help="CSV: the column of microseconds, one sample a row.",
)  # fmt: skip
@click.option(
    "--kind", type=click.Choice(["cpu", "cuda", "rocm", "xpu"]), default="cuda", show_default=True,
    help="CSV: the kind of device, which says what quantile ranks.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), metavar="N", default=0, show_default=True,
    help="Seed of the reruns.",
)  # fmt: skip
@db_option
def command(
    recording: str | None,
    strategies: tuple[str, ...],
    priority: tuple[str, ...],
    reruns: int,
    by: tuple[str, ...],
    candidate: str,
    time_us: str,
    kind: str,
    seed: int,
    db: str | None,
) -> Report:
    """Rerun strategies of choosing on recorded samples: regret, samples, device time and flips.

    The samples are those of the database, or of a CSV with one row a sample. No device is used:
    every rerun draws whole rounds from the recording. Regret is how much longer the chosen
    candidate takes than the best one, by all recorded samples of both.
    """
    from autosel.errors import NothingUsableError, field_error
    from autosel.replay import STRATEGIES, fixed_list, replay
    from autosel.replay_tables import cells_from_csv, cells_from_measurements

    chosen = {name: STRATEGIES[_known(name, STRATEGIES)] for name in strategies or STRATEGIES}
    if priority:
        chosen["fixed list"] = fixed_list(priority)
    if recording is not None:
        cells = cells_from_csv(recording, by=by, candidate=candidate, time_us=time_us, kind=kind)
    else:
        from autosel.cli.database import reading

        with reading(db) as store:
            cells = cells_from_measurements(store.measurements())
    cells = [cell for cell in cells if len(cell.candidates) > 1]
    if not cells:
        where = recording or "database"
        raise NothingUsableError(
            field_error(where, "timed candidates of one cell", "at most 1", "2 or more")
        )
    return _report(cells, replay(cells, chosen, reruns, seed), list(chosen), reruns)


def _known(name: str, strategies: Any) -> str:
    if name not in strategies:
        raise click.BadParameter(
            f"found {name!r}, expected one of {', '.join(strategies)}", param_hint="--strategies"
        )
    return name


def _report(cells: list[Cell], scores: list[Score], chosen: list[str], reruns: int) -> Report:
    from autosel.replay import summary

    sums = {name: summary(scores, name) for name in chosen}
    rows = [
        (
            name,
            f"{s['within_1_percent']:.1%}",
            f"{s['regret_mean']:.2%}",
            f"{s['regret_max']:.1%}",
            f"{s['ties']:.0%}",
            f"{s['flips']:.1%}",
            f"{s['settled_flips']:.1%}",
            f"{s['samples']:,.0f}",
            f"{s['device_s']:.3g} s",
        )
        for name, s in sums.items()
    ]
    columns = (
        "strategy", ">regret at most 1 %", ">mean", ">worst", ">ties", ">reruns that differ",
        ">of those without a tie", ">samples", ">device time",
    )  # fmt: skip
    title = f"{len(cells)} cells, {reruns} reruns of each"
    data = {
        "cells": len(cells),
        "reruns": reruns,
        "strategies": sums,
        "scores": [
            {
                "cell": score.cell,
                "strategy": score.strategy,
                "regret_mean": sum(score.regrets) / len(score.regrets),
                "regret_max": max(score.regrets),
                "flips": score.flips,
                "settled_flips": score.settled_flips,
                "samples": score.samples,
                "device_us": score.us,
            }
            for score in scores
        ],
    }
    return Report(data, [Table(columns, rows, title)])
