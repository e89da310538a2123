"""``autosel backends``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from autosel.cli.group import Command
from autosel.cli.options import LayerOptions, device_option, layer_options
from autosel.cli.report import Report, Table
from autosel.core import Device, Problem, Reason, Support

if TYPE_CHECKING:
    from autosel.interfaces import Backend


@click.command(cls=Command)
@click.argument("target", metavar="[CHECKPOINT|PRESET]", required=False)
@layer_options
@device_option
def command(target: str | None, layer_options: LayerOptions, device: str | None) -> Report:
    """List every backend: supported here, or every reason why not.

    With a checkpoint or preset the question is whether the backend can run that layer here.
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
    data = {"device": here.to_dict(), "answers": answers}
    return Report(data, parts)


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
