"""``autosel diff``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from autosel.cli.group import Command
from autosel.cli.options import Number, cache_option
from autosel.cli.report import Report, Table
from autosel.cli.text import percent_text, time_text

if TYPE_CHECKING:
    from autosel.diff_results import Cell, ResultDiff


@click.command(cls=Command)
@click.argument("first", metavar="FIRST")
@click.argument("second", metavar="SECOND")
@click.option(
    "--threshold", type=Number(0), default=5.0, show_default=True, metavar="PERCENT",
    help="Slow-down of what is chosen from which on a token count regresses.",
)  # fmt: skip
@click.option(
    "--strict", is_flag=True, help="What FIRST measured and SECOND did not counts as a regression."
)
@click.option(
    "--any-device", is_flag=True, help="Also compare layers measured on different devices."
)
@click.option("--all", "everything", is_flag=True, help="Show unchanged rows too.")
@cache_option
def command(
    first: str,
    second: str,
    threshold: float,
    strict: bool,
    any_device: bool,
    everything: bool,
    cache: str,
) -> Report:
    """Compare two results, the second with the first: what flips, what is slower, by how much.

    FIRST and SECOND are databases, packs or files of `autosel export`; they stay as they are.
    Exit status, for use as a gate: 0 nothing regressed; 1 something did; 2 an input cannot be read
    or the two have nothing in common. A token count regresses when what SECOND chooses takes longer
    than what FIRST chose by more than the threshold, and the 95 % interval of that ratio lies above
    1 (without samples: the ratio alone), or when SECOND has nothing to choose any more.
    """
    from autosel import evidence_files
    from autosel.diff_results import compare_results
    from autosel.errors import AutoselError

    try:
        found = compare_results(
            evidence_files.read(first, timing={"cache": cache}),
            evidence_files.read(second, timing={"cache": cache}),
            threshold=threshold / 100,
            any_device=any_device,
        )
    except (AutoselError, OSError) as error:
        # Status 2: a gate must tell "slower" from "not compared".
        raise click.UsageError(str(error)) from error
    failed = bool(found.regressions) or (strict and found.missing > 0)
    return Report(_data(found, failed), _parts(found, everything, failed), int(failed))


def _data(found: ResultDiff, failed: bool) -> dict[str, object]:
    return {
        "regressed": failed,
        "threshold": found.threshold,
        "mean_ratio": found.mean_ratio,
        "cells": [cell.to_dict() for cell in found.cells],
        "status_changes": found.statuses,
        "machines": [
            {"device": name, "differences": differences} for name, differences in found.machines
        ],
        "only_first": found.only_first,
        "only_second": found.only_second,
    }


def _parts(found: ResultDiff, everything: bool, failed: bool) -> list[str | Table]:
    parts: list[str | Table] = []
    for name, differences in found.machines:
        parts.append(
            Table(
                ("field", "first", "second"),
                [(d.field, _value(d.wanted), _value(d.stored)) for d in differences],
                f"{name}: the machines differ",
            )
        )
    # What is slower or faster but not clearly so stays out, like what is the same.
    shown = [
        cell for cell in found.cells
        if everything or cell.regression or cell.kind != "same" or _changed(cell, found.threshold)
    ]  # fmt: skip
    if shown:
        columns = ("layer", ">tokens", "change", "first", ">time", "second", ">time", ">ratio",
                   "95 % interval", "verdict")  # fmt: skip
        parts.append(Table(columns, [_row(cell, found.threshold) for cell in shown]))
    if found.statuses:
        parts.append(
            Table(
                ("layer", ">tokens", "candidate", "first", "second", "reason"),
                [
                    (s.layer, s.num_tokens, s.candidate.key, s.first, s.second, s.reason or "-")
                    for s in found.statuses
                ],
                "Candidates that end otherwise",
            )
        )
    parts += [f"only in the first: {name}" for name in found.only_first]
    parts += [f"only in the second: {name}" for name in found.only_second]
    compared = sum(cell.kind != "missing" for cell in found.cells)
    mean = f", {found.mean_ratio:.3f} times as long on average" if found.mean_ratio else ""
    parts.append(
        f"{compared} compared{mean}; {len(found.flips)} chosen otherwise, "
        f"{len(found.regressions)} slower by more than {percent_text(found.threshold)} or lost, "
        f"{found.missing} not measured again: {'REGRESSED' if failed else 'no regression'}"
    )
    return parts


def _changed(cell: Cell, threshold: float) -> bool:
    """Whether the time clearly changed by more than the threshold, either way."""
    return cell.settled is not False and _differs(cell, threshold)


def _differs(cell: Cell, threshold: float) -> bool:
    return cell.ratio is not None and max(cell.ratio, 1 / cell.ratio) > 1 + threshold


def _row(cell: Cell, threshold: float) -> tuple[str, ...]:
    span = "-"
    if cell.interval is not None:
        span = f"{cell.interval[0]:.3f} to {cell.interval[1]:.3f}"
    unsettled = cell.settled is False and _differs(cell, threshold)
    verdict = "regression" if cell.regression else "not settled" if unsettled else "-"
    if verdict == "-" and cell.ratio is not None and cell.ratio < 1 / (1 + threshold):
        verdict = "faster"
    return (
        cell.layer,
        str(cell.num_tokens),
        cell.kind,
        cell.first.key if cell.first else "-",
        time_text(cell.first_us),
        cell.second.key if cell.second else "-",
        time_text(cell.second_us),
        "-" if cell.ratio is None else f"{cell.ratio:.3f}",
        span,
        verdict,
    )


def _value(value: object) -> str:
    return "none" if value is None else str(value)
