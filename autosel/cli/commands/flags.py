"""``autosel flags``."""

from __future__ import annotations

import click

from autosel.cli.group import Command
from autosel.cli.options import (
    LayerOptions,
    db_option,
    device_option,
    layer_options,
    routing_option,
    stored_device_option,
    target_argument,
)
from autosel.cli.report import Report, Table


@click.command(cls=Command)
@target_argument
@stored_device_option
@click.option("--allow-a8", is_flag=True, help="Count winners that quantise activations to 8 bits.")
@routing_option
@layer_options
@device_option
@db_option
def command(
    target: str,
    stored_device: str | None,
    allow_a8: bool,
    routing: str,
    layer_options: LayerOptions,
    device: str | None,
    db: str | None,
) -> Report:
    """Print the option with which vLLM and SGLang run what was decided for a model.

    An engine takes one backend for all layers and token counts: the one that wins most token ranges
    is named, and how many it wins.
    """
    from autosel.cli.database import reading
    from autosel.cli.target import resolve
    from autosel.core import Decision
    from autosel.device import detect
    from autosel.engine_decisions import engine_flags
    from autosel.errors import StoreError, field_error
    from autosel.evidence import devices_named, gather
    from autosel.explanation import COLD

    timing = tuple(COLD.items())
    decisions: list[Decision] = []
    with reading(db) as store:
        here = devices_named(store, stored_device)[-1] if stored_device else detect(device)
        for layer in resolve(target, layer_options).layers:
            key = (layer.problem, here)
            found = store.decisions(*key, routing, timing=timing, allow_a8=allow_a8)
            if not found:  # a sweep that was stopped before it decided has measured all the same
                one = gather(store, *key, routing=routing, timing=COLD)
                made = [each for each in one.outcomes if isinstance(each, Decision)]
                found = [each for each in made if allow_a8 or each.accuracy == "exact"]
            decisions += found
    if not decisions:
        expected = "a decision; autosel sweep makes them, autosel explain says what is near"
        raise StoreError(field_error(target, f"decisions on {here.name}", "none", expected))
    flags = engine_flags(decisions)
    rows = [(f.engine, f.flag or "-", f.backend, f.why) for f in flags]
    data = {"target": target, "device": here.to_dict(), "engines": flags}
    return Report(data, [Table(("engine", "option", "backend", "why"), rows)])
