"""``autosel inspect``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from autosel.cli.group import Command
from autosel.cli.report import Report, Table
from autosel.core import Problem

if TYPE_CHECKING:
    from autosel.checkpoint import Checkpoint, MoELayer, TensorUse

#: Unknown tensors named in the text; all of them are in the JSON and in ``--tensors``.
_NAMED = 10


@click.command(cls=Command)
@click.argument("checkpoint")
@click.option("--tensors", is_flag=True, help="List every tensor, not only how many.")
def command(checkpoint: str, tensors: bool) -> Report:
    """List a checkpoint's MoE layers and account for every expert tensor; reads no weights."""
    from autosel.cli.target import open_checkpoint

    opened = open_checkpoint(checkpoint)
    uses = opened.accounting()
    parts: list[str | Table] = [
        f"{checkpoint}: {opened.model_type or 'no model type'}, {_plural(opened.layers)}",
        _layers(opened.layers),
        _summary(uses),
    ]
    if tensors:
        parts.append(_every(uses))
    parts += [f"note: {line}" for line in _notes(opened, uses, named=not tensors)]
    return Report(_data(checkpoint, opened, uses), parts)


def _plural(layers: Sequence[object]) -> str:
    return f"{len(layers)} MoE layer{'' if len(layers) == 1 else 's'}"


def _layers(layers: Iterable[MoELayer]) -> Table:
    """One row for each run of layers that are alike."""
    from autosel.cli.target import number_ranges
    from autosel.words import quant_text

    groups: dict[tuple[object, ...], list[MoELayer]] = {}
    for layer in layers:
        alike = (layer.status, layer.format, layer.problem, layer.reason, layer.num_experts,
                 layer.num_shared_experts)  # fmt: skip
        groups.setdefault(alike, []).append(layer)
    rows = []
    for members in groups.values():
        first = members[0]
        scheme = quant_text(first.problem) if first.problem else first.reason
        experts = str(first.num_experts)
        if first.num_shared_experts:
            experts += f" + {first.num_shared_experts} shared"
        rows.append(
            (
                number_ranges([layer.index for layer in members]),
                first.status,
                first.format or "-",
                experts,
                _sizes(first.problem),
                scheme,
            )
        )
    columns = (
        "layers",
        "status",
        "format",
        "experts",
        "top-k, hidden, intermediate",
        "scheme, or why not",
    )
    return Table(columns, rows)


def _sizes(problem: Problem | None) -> str:
    if problem is None:
        return "-"
    return f"{problem.top_k}, {problem.hidden_size}, {problem.intermediate_size}"


def _kind(use: TensorUse) -> str:
    """What the tensors of one row of the summary have in common."""
    return "packed weights of routed experts" if use.used else use.why.partition(":")[0]


def _summary(uses: Iterable[TensorUse]) -> Table:
    counts = Counter((use.used, _kind(use)) for use in uses)
    rows = [
        ("used" if used else "not used", kind, count)
        for (used, kind), count in sorted(counts.items(), key=lambda item: (not item[0][0], item))
    ]
    return Table(("tensors in and around the experts", "what they are", ">count"), rows)


def _every(uses: Iterable[TensorUse]) -> Table:
    rows = [
        (
            use.name,
            use.file,
            use.dtype,
            list(use.shape),
            "used" if use.used else "not used",
            use.why,
        )
        for use in uses
    ]
    return Table(("tensor", "file", "type", "shape", "use", "why"), rows)


def _notes(opened: Checkpoint, uses: Iterable[TensorUse], *, named: bool) -> list[str]:
    notes = list(dict.fromkeys([*opened.notes, *_layer_notes(opened.layers)]))
    if named:
        unknown = [use.name for use in uses if not use.used and _kind(use) == "unknown"]
        if unknown:
            more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
            notes.append(f"not known and not used: {', '.join(unknown[:_NAMED])}{more}")
    return notes


def _layer_notes(layers: Iterable[MoELayer]) -> list[str]:
    """Notes of layers; those that differ only in numbers are shown once and counted."""
    from autosel.cli.target import number_ranges

    found: dict[str, list[tuple[int, str]]] = {}
    for layer in layers:
        for text in layer.notes:
            alike = re.sub(r"gate|up|down|\d+", "#", text)
            found.setdefault(alike, []).append((layer.index, text))
    lines = []
    for members in found.values():
        numbers = number_ranges([index for index, _ in members])
        more = f" (and {len(members) - 1} more like it)" if len(members) > 1 else ""
        plural = "s" if "-" in numbers or "," in numbers else ""
        lines.append(f"layer{plural} {numbers}: {members[0][1]}{more}")
    return lines


def _data(checkpoint: str, opened: Checkpoint, uses: Iterable[TensorUse]) -> dict[str, Any]:
    return {
        "checkpoint": checkpoint,
        "model_type": opened.model_type,
        "notes": opened.notes,
        "layers": [
            {**asdict(layer), "problem_key": layer.problem.key if layer.problem else None}
            for layer in opened.layers
        ],
        "tensors": uses,
    }
