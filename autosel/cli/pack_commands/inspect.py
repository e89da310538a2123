"""``autosel pack inspect``."""

from __future__ import annotations

from dataclasses import asdict

import click

from autosel.cli.group import Command
from autosel.cli.options import device_option
from autosel.cli.report import Report, Table


@click.command(cls=Command)
@click.argument("pack", type=click.Path(dir_okay=False), metavar="PACK")
@click.option("--decisions", is_flag=True, help="Also every decision.")
@click.option(
    "--content", type=click.Path(dir_okay=False), metavar="FILE",
    help="Write the canonical content to a file: what is hashed and signed.",
)  # fmt: skip
@device_option
def command(pack: str, decisions: bool, content: str | None, device: str | None) -> Report:
    """Show what a pack holds, where it comes from and what it is worth on this machine.

    Packs that may not be used here (of unknown backends, or unsigned) can be looked at as well.
    """
    from autosel.atomic import atomic_file
    from autosel.cli.packs import (
        decision_table,
        difference_lines,
        entry_table,
        graded_dict,
        grades,
    )
    from autosel.device import detect
    from autosel.packs.content import content as content_of
    from autosel.packs.content import read
    from autosel.packs.library import unknown_backends
    from autosel.words import device_text, versions_text

    found = read(pack)
    graded = grades(found, detect(device))
    unknown = unknown_backends(found)
    if content:
        with atomic_file(content) as partial:
            partial.write_bytes(content_of(found))
    parts: list[str | Table] = [
        f"content: sha256 {found.sha256}",
        f"signature: {found.signature.key_id[:16] if found.signature else 'none'}"
        + (" (not checked; autosel pack verify --key checks it)" if found.signature else ""),
    ]
    for model in found.models:
        numbers = sum(len(layer.indices) for layer in model.layers)
        settings = (model.quantization_sha256 or "none")[:16]
        parts.append(
            f"{model.kind} {model.name}: {_number(numbers or len(model.layers), 'layer')} of "
            f"{_number(len(model.layers), 'kind')}, quantisation settings {settings}"
        )
    for source in found.sources:
        parts += [
            f"made on {device_text(source.device)}; {versions_text(source.device)}",
            f"made by autosel {source.autosel_version} "
            f"(commit {(source.commit or 'unknown')[:12]}) at {source.created}: {source.command}",
        ]
    parts.append(entry_table(graded))
    if decisions:
        parts += [decision_table(entry) for entry, _ in graded]
    parts += difference_lines(graded)
    if unknown:
        parts.append(f"not for use here: unknown backends {', '.join(unknown)}")
    data = {
        "file": pack,
        "sha256": found.sha256,
        "key_id": found.signature.key_id if found.signature else None,
        "models": [
            {
                **{name: getattr(model, name) for name in ("name", "kind", "model_type")},
                "quantization_sha256": model.quantization_sha256,
                "shapes_sha256": model.shapes_sha256,
                "layers": [
                    {"problem_key": layer.problem.key, "indices": layer.indices}
                    for layer in model.layers
                ],
            }
            for model in found.models
        ],
        "sources": [
            {**asdict(source), "device": source.device.to_dict()} for source in found.sources
        ],
        "entries": [graded_dict(entry, result) for entry, result in graded],
        "unknown_backends": unknown,
    }
    return Report(data, parts)


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
