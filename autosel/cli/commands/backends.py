"""``autosel backends``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from autosel.cli.group import Command
from autosel.cli.options import LayerOptions, db_option, device_option, layer_options
from autosel.cli.report import Report, Table
from autosel.core import Device, Problem, Reason, Support

if TYPE_CHECKING:
    from autosel.interfaces import Backend
    from autosel.quarantine import Held


@click.command(cls=Command)
@click.argument("target", metavar="[CHECKPOINT|PRESET]", required=False)
@layer_options
@device_option
@db_option
def command(
    target: str | None, layer_options: LayerOptions, device: str | None, db: str | None
) -> Report:
    """List every backend: supported here, or every reason why not.

    With a checkpoint or preset the question is whether the backend can run that layer here. What
    failed here before and is not tried again (quarantine) is listed below, with how often and why.
    """
    from autosel.device import detect
    from autosel.registry import all_backends
    from autosel.words import problem_text

    here = detect(device)
    asked: list[tuple[str, Problem | None]] = []
    if target:
        from autosel.cli.target import resolve

        found = resolve(target, layer_options)
        asked = [(layer.label, layer.problem) for layer in found.layers]
    parts: list[str | Table] = []
    answers: list[dict[str, Any]] = []
    for label, problem in asked or [("", None)]:
        rows = [(backend, _ask(backend, problem, here)) for backend in all_backends()]
        # What can run comes first.
        rows.sort(key=lambda row: not row[1])
        title = f"{label}: {problem_text(problem)}" if problem else f"on {here.kind}: {here.name}"
        parts.append(_table(rows, title))
        answers.append(_data(label, problem, rows))
    held = _quarantine(db, here, [problem for _, problem in asked if problem])
    if held:
        parts.append(_quarantine_table(held))
    data = {
        "device": here.to_dict(),
        "answers": answers,
        "quarantine": [_held_data(item) for item in held],
    }
    return Report(data, parts)


def _quarantine(db: str | None, device: Device, problems: list[Problem]) -> list[Held]:
    """What is held back on this device, of these layers or of all; no database, nothing held."""
    from autosel.cli.database import place_of
    from autosel.errors import StoreError
    from autosel.quarantine import held_back, is_current
    from autosel.store import Store

    try:
        place_of(db)
    except StoreError:
        return []
    with Store.open(db) as store:
        held = held_back(store.incidents(None, device))
    wanted = [item for item in held if not problems or item.incident.problem in problems]
    return [item for item in wanted if is_current(item.incident)]


def _quarantine_table(held: list[Held]) -> Table:
    rows = [
        (
            item.incident.candidate.key,
            item.incident.problem.key,
            item.incident.status,
            item.incident.tokens_text,
            item.count,
            item.incident.created[:10],
            item.incident.reason,
        )
        for item in held
    ]
    columns = ("candidate", "layer", "what", "tokens", ">times", "last", "why")
    return Table(columns, rows, "in quarantine here; autosel sweep --retry-failed tries them again")


def _held_data(held: Held) -> dict[str, Any]:
    from autosel.records import candidate_dict

    incident = held.incident
    return {
        "candidate": {**candidate_dict(incident.candidate), "key": incident.candidate.key},
        "problem_key": incident.problem.key,
        "status": incident.status,
        "step": incident.step,
        "num_tokens": incident.num_tokens,
        "tokens": incident.tokens_text,
        "times": held.count,
        "first": held.since,
        "last": incident.created,
        "reason": incident.reason,
    }


def _ask(backend: Backend, problem: Problem | None, device: Device) -> Support:
    try:
        return backend.supports(problem, device) if problem else backend.available(device)
    except Exception as error:  # a broken plug-in is a row, not the end of the list
        found = f"{type(error).__name__}: {error}"
        return Support.no(Reason("asking the backend", found, "an answer"))


def _table(rows: list[tuple[Backend, Support]], title: str) -> Table:
    shown: list[tuple[str, str, str]] = []
    for backend, support in rows:
        lines = [str(reason) for reason in support.reasons] or [backend.summary]
        shown += [
            (backend.name, "yes" if support else "no", line) if number == 0 else ("", "", line)
            for number, line in enumerate(lines)
        ]
    return Table(("backend", "runs", "what it is, or every reason why not"), shown, title)


def _data(
    label: str, problem: Problem | None, rows: list[tuple[Backend, Support]]
) -> dict[str, Any]:
    return {
        "layer": label or None,
        "problem": problem.to_dict() if problem else None,
        "backends": [
            {
                "name": backend.name,
                "summary": backend.summary,
                "supported": bool(support),
                "reasons": support.reasons,
            }
            for backend, support in rows
        ],
    }
