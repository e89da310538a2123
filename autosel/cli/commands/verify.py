"""``autosel verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from autosel.cli.group import Command
from autosel.cli.options import (
    LayerOptions,
    db_option,
    device_option,
    layer_options,
    names,
    require_option,
    target_argument,
)
from autosel.cli.report import Report, Table, note

if TYPE_CHECKING:
    from autosel.core import Certificate, Measurement
    from autosel.sources import WeightSource


@click.command(cls=Command)
@target_argument
@layer_options
@click.option(
    "--backends", type=names, metavar="NAME,NAME,...", default=(), show_default="all",
    help="Backends to judge.",
)  # fmt: skip
@require_option
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), metavar="N", default=0, show_default=True,
    help="Seed of activations and routing.",
)  # fmt: skip
@device_option
@db_option
def command(
    target: str,
    layer_options: LayerOptions,
    backends: tuple[str, ...],
    require: tuple[str, ...],
    seed: int,
    device: str | None,
    db: str | None,
) -> Report:
    """Judge every backend that can run the layer on the full set of cases; time nothing.

    Each backend's default here, and the stored winners. Shows what is proven of each and keeps the
    certificates. Status 1 when a candidate is wrong, a layer cannot be read, or, with --require,
    when none has what is required.
    """
    from autosel.cli.progress import SweepProgress
    from autosel.cli.stand_ins import Failures
    from autosel.cli.target import resolve
    from autosel.device import detect
    from autosel.store import Store
    from autosel.verify_layer import verify_layer

    found = resolve(target, layer_options, every=True)
    here = detect(device)
    answers = []
    parts: list[str | Table] = []
    failed, fit = 0, True
    failures = Failures(found)
    with Store.open(db) as store, SweepProgress() as progress:

        def judged(source: WeightSource) -> list[Measurement]:
            rows = verify_layer(
                source, here, backends=backends, store=store, seed=seed, observer=progress
            )
            return list(rows)

        for layer in found.layers:
            progress.label = layer.label
            rows = failures.work(layer, judged)
            if rows is None:
                continue
            ran = [row for row in rows if row.status != "unsupported"]
            failed += sum(row.status != "ok" for row in ran)
            fit = fit and any(not lacking(row, require) for row in ran)
            parts += [_table(ran, layer.label, require), *_left_out(rows), ""]
            answers.append(
                {
                    "layer": layer.label,
                    "problem_key": layer.problem.key,
                    "candidates": [_dict(row, require) for row in rows],
                }
            )
        place = str(store.path) if store.path else None
    data = {
        "target": found.name,
        "device": here.to_dict(),
        "database": place,
        "required": list(require),
        "failed": failures.to_list(),
        "answers": answers,
    }
    if require and not fit:
        note(f"error: no candidate is certified for {', '.join(require)}")
    unread = failures.say("judged")
    return Report(data, parts[:-1], 1 if failed or unread or (require and not fit) else 0)


def lacking(row: Measurement, require: tuple[str, ...]) -> str:
    """Why a candidate may not be chosen under ``require``; "" when it may."""
    if row.status != "ok" or row.certificate is None:
        return row.reason or "not certified"
    return row.certificate.missing(require)


def _table(rows: list[Measurement], title: str, require: tuple[str, ...]) -> Table:
    columns = ("candidate", "accuracy", "verdict", ">score", ">bias", ">calls", "not proven")
    return Table(columns, [_row(row, require) for row in rows], title)


def _row(row: Measurement, require: tuple[str, ...]) -> tuple[str, ...]:
    found = row.certificate
    verdict = row.status if row.status == "ok" else f"{row.status}: {row.reason}"
    if found is None:
        return (row.candidate.key, row.accuracy, verdict, "-", "-", "-", "")
    return (
        row.candidate.key,
        row.accuracy,
        verdict,
        _number(found.score),
        _number(found.bias),
        str(found.runs),
        _open(found) if row.status == "ok" else "",
    )


def _open(certificate: Certificate) -> str:
    """Properties that do not hold, then those that were not checked."""
    no = [name for name, value in certificate.properties if value is False]
    unknown = [name for name, value in certificate.properties if value is None]
    words = [f"not {name}" for name in no]
    return "; ".join([*words, *(f"{name} not checked" for name in unknown)])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _left_out(rows: list[Measurement]) -> list[Table]:
    left = [(r.candidate.backend, r.reason) for r in rows if r.status == "unsupported"]
    return [Table(("left out", "reason"), left)] if left else []


def _dict(row: Measurement, require: tuple[str, ...]) -> dict[str, object]:
    return {
        "candidate": row.candidate.key,
        "status": row.status,
        "reason": row.reason,
        "lacks": lacking(row, require),
        "certificate": row.certificate.to_dict() if row.certificate else None,
    }
