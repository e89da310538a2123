"""``autosel export``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from autosel.cli.group import Command
from autosel.cli.options import (
    LayerOptions,
    db_option,
    device_option,
    layer_options,
    refuse_given,
    refuse_options_without_a_name,
    routing_option,
)
from autosel.cli.report import Report, Table


@click.command(cls=Command)
@click.argument("target", metavar="[CHECKPOINT|PRESET]", required=False)
@click.option(
    "-o", "--output", type=click.Path(),
    help="File to write (default, and -: standard output); for vllm and sglang the folder.",
)  # fmt: skip
@click.option(
    "--format", "form", type=click.Choice(["json", "vllm", "sglang"]), default="json",
    show_default=True,
    help="json: measurements and decisions. vllm, sglang: the target's Triton settings as the "
         "tuned files that the engine reads.",
)  # fmt: skip
@click.option("--history", is_flag=True, help="Also what newer measurements have replaced.")
@click.option(
    "--stored-device", metavar="NAME",
    help="For vllm and sglang: a device of the database by part of its name, instead of this one.",
)  # fmt: skip
@routing_option
@layer_options
@device_option
@db_option
def command(
    target: str | None,
    output: str | None,
    form: str,
    history: bool,
    stored_device: str | None,
    routing: str,
    layer_options: LayerOptions,
    device: str | None,
    db: str | None,
) -> Report:
    """Write measurements and decisions as strict JSON: all of them, or those of one target.

    Candidates that failed are there with a status and a reason; their times are null. As vllm or
    sglang: one tuned file for each layer shape, and the variable that names its folder.
    """
    if form == "json":
        if target is None:
            refuse_options_without_a_name(layer_options)
        refuse_given("json takes in every routing and device", "routing", "device", "stored_device")
        output = None if output == "-" else output
        if output is not None and Path(output).is_dir():
            raise click.UsageError(f"-o: found the folder {output}, expected a file")
        return _json(target, output, history, layer_options, db)
    if target is None or output is None:
        raise click.UsageError(f"--format {form} needs a checkpoint or preset, and -o FOLDER")
    return _tuned(target, Path(output), form, stored_device, routing, layer_options, device, db)


def _json(
    target: str | None,
    output: str | None,
    history: bool,
    layer_options: LayerOptions,
    db: str | None,
) -> Report:
    from autosel.atomic import atomic_file
    from autosel.cli.database import reading_to_write
    from autosel.cli.text import to_json

    problems: list[Any] = [None]
    if target:
        from autosel.cli.target import resolve

        problems = [layer.problem for layer in resolve(target, layer_options).layers]
    with reading_to_write(db, output) as store:
        exports = [json.loads(store.export_json(p, history=history)) for p in problems]
    data = exports[0]
    for more in exports[1:]:
        data["measurements"] += more["measurements"]
        data["decisions"] += more["decisions"]
    if output is None:
        return Report(data, always_json=True)
    with atomic_file(output) as partial:
        partial.write_text(to_json(data) + "\n", encoding="utf-8")
    counts = {name: len(data[name]) for name in ("measurements", "decisions")}
    summary = " and ".join(f"{count} {name}" for name, count in counts.items())
    return Report({"file": str(Path(output)), **counts}, [f"wrote {summary} to {output}"])


def _tuned(
    target: str,
    folder: Path,
    engine: str,
    stored_device: str | None,
    routing: str,
    layer_options: LayerOptions,
    device: str | None,
    db: str | None,
) -> Report:
    from autosel.atomic import atomic_file
    from autosel.cli.database import reading
    from autosel.cli.target import resolve
    from autosel.device import detect
    from autosel.engine_decisions import triton_decisions
    from autosel.engine_export import tuned_file
    from autosel.errors import UnsupportedError, field_error
    from autosel.evidence import devices_named

    layers = resolve(target, layer_options).layers
    files: dict[str, Any] = {}
    with reading(db) as store:
        here = devices_named(store, stored_device)[-1] if stored_device else detect(device)
        for layer in layers:
            decisions = triton_decisions(store, layer.problem, here, routing)
            file = tuned_file(engine, layer.problem, here, decisions)
            if file.path in files and files[file.path].content != file.content:
                # The name has neither the group size nor anything else that could tell them apart.
                expected = "layers whose files differ in name (choose one with --layer)"
                raise UnsupportedError(field_error(target, file.path, "two layers", expected))
            files[file.path] = file
    for file in files.values():
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as partial:
            partial.write_text(file.text, encoding="utf-8")
    rows = [(file.path, len(file.content) - ("triton_version" in file.content))
            for file in files.values()]  # fmt: skip
    variable = f"{next(iter(files.values())).environment}={folder.absolute()}"
    data = {
        "engine": engine,
        "folder": str(folder),
        "environment": variable,
        "files": [{"path": path, "token_counts": count} for path, count in rows],
    }
    return Report(
        data, [Table(("file", ">token counts"), rows), f"the engine reads them with: {variable}"]
    )
