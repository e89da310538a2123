"""``autosel dequantize``."""

from __future__ import annotations

from pathlib import Path

import click

from autosel.cli.group import Command
from autosel.cli.report import Report, note
from autosel.cli.text import bytes_text
from autosel.errors import AutoselError, CheckpointError, field_error


@click.command(cls=Command)
@click.argument("checkpoint")
@click.option("--layer", type=click.IntRange(0), metavar="N", required=True, help="Layer number.")
@click.option(
    "-o", "--output", required=True, type=click.Path(dir_okay=False),
    help="Safetensors file to write.",
)  # fmt: skip
def command(checkpoint: str, layer: int, output: str) -> Report:
    """Write one layer's expert weights dequantised, to compare with other tools.

    Each expert projection becomes one [outputs, inputs] tensor in the type of its scales, under the
    checkpoint's own module name plus ".weight". The file appears whole or not at all.
    """
    from autosel.cli.target import find_layer, open_checkpoint
    from autosel.tensor_writer import write_tensors

    opened = open_checkpoint(checkpoint)
    found = find_layer(checkpoint, opened.layers, layer)
    if found.status == "unquantized":
        raise CheckpointError(
            field_error(checkpoint, f"layer {layer}", "unquantized weights", "quantised ones")
        )
    path = Path(output)
    if path.exists() and path.resolve().parent == Path(checkpoint).resolve():
        raise AutoselError(
            field_error(output, "output", "a file of the checkpoint itself", "another place")
        )
    written = write_tensors(path, opened.dequantize(layer), {"format": "pt"})
    size = path.stat().st_size
    note(f"dequantised {found.name} ({found.format})")
    data = {
        "file": str(path),
        "bytes": size,
        "layer": layer,
        "tensors": [
            {"name": name, "shape": shape, "dtype": dtype}
            for name, (shape, dtype) in written.items()
        ],
    }
    return Report(data, [f"wrote {len(written)} tensors, {bytes_text(size)}, to {path}"])
