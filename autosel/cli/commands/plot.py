"""``autosel plot``."""

from __future__ import annotations

from pathlib import Path

import click

from autosel.cli.group import Command
from autosel.cli.options import (
    LayerOptions,
    cache_option,
    db_option,
    device_option,
    layer_options,
    routing_option,
    target_argument,
)
from autosel.cli.report import Report, note


@click.command(cls=Command)
@target_argument
@click.option(
    "-o", "--output", required=True, type=click.Path(dir_okay=False),
    help="File to write: .png or .svg.",
)  # fmt: skip
@click.option(
    "--size", type=(click.FloatRange(3, 40), click.FloatRange(2.5, 40)), default=(9.0, 5.6),
    metavar="W H", show_default=True, help="Width and height in inches.",
)  # fmt: skip
@layer_options
@routing_option
@device_option
@cache_option
@db_option
def command(
    target: str,
    output: str,
    size: tuple[float, float],
    layer_options: LayerOptions,
    routing: str,
    device: str | None,
    cache: str,
    db: str | None,
) -> Report:
    """Draw latency against tokens for each backend, from the database; needs no display.

    A checkpoint with several kinds of layers needs --layer, since a figure shows one.
    """
    from autosel import figures
    from autosel.cli.database import reading
    from autosel.cli.target import check_routing, resolve
    from autosel.device import detect
    from autosel.plot_style import check_path, save

    path = check_path(output)
    found = resolve(target, layer_options)
    check_routing(routing, found)
    layer = found.layers[0]
    if len(found.layers) > 1:
        others = ", ".join(other.label for other in found.layers[1:])
        note(f"drawn is {layer.label}; its other layers differ (--layer picks one): {others}")
    name = Path(found.name).resolve().name if found.kind == "checkpoint" else found.name
    title = f"{name}, {layer.label}" if found.kind == "checkpoint" else name
    with reading(db) as store:
        figure = figures.latency(
            store, layer.problem, detect(device),
            routing=routing, title=title, timing={"cache": cache}, size=size,
        )  # fmt: skip
    save(figure, path)
    return Report(
        {"file": str(path), "layer": layer.label, "problem": layer.problem.to_dict()},
        [f"wrote {path}"],
    )
