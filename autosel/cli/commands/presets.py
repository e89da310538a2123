"""``autosel presets``."""

from __future__ import annotations

from dataclasses import asdict

import click

from autosel.cli.group import Command
from autosel.cli.report import Report, Table


@click.command(cls=Command)
def command() -> Report:
    """List the published models whose layer shapes can be swept without a checkpoint."""
    from autosel import presets

    found = presets.presets()
    rows = [
        (
            preset.name,
            preset.num_experts,
            preset.top_k,
            preset.hidden_size,
            preset.intermediate_size,
            preset.num_moe_layers,
            preset.activation.key + (", bias" if preset.has_bias else ""),
            preset.hf_id,
        )
        for preset in found
    ]
    columns = (
        "preset", ">experts", ">top-k", ">hidden", ">intermediate", ">MoE layers", "activation",
        "model",
    )  # fmt: skip
    data = [{**asdict(preset), "unconfirmed": preset.unconfirmed} for preset in found]
    return Report({"presets": data}, [Table(columns, rows)])
