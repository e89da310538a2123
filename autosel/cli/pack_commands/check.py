"""``autosel pack check``."""

from __future__ import annotations

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
from autosel.cli.report import Report, Table, note


@click.command(cls=Command)
@target_argument
@layer_options
@routing_option
@cache_option
@device_option
@db_option
@click.option("--again", is_flag=True, help="Also check what was checked here before.")
def command(
    target: str,
    layer_options: LayerOptions,
    routing: str,
    cache: str,
    device: str | None,
    db: str | None,
    again: bool,
) -> Report:
    """Check compatible packs about a model on this machine, once, so that they may be used.

    Runs every winner against the emulation and times it against its runner-up at three token
    counts, in at most 10 seconds a layer. The layer does this by itself when it is loaded, except
    with several ranks, which must not time for themselves. Exit status 1 when a check fails.
    """
    from autosel.cli.target import resolve
    from autosel.device import detect
    from autosel.packs import canary, canary_results
    from autosel.store import Store
    from autosel.tiers import open_tiers

    found = resolve(target, layer_options)
    here = detect(device)
    model = found.name if found.kind == "checkpoint" else None
    rows, checks, failures = [], [], 0
    with Store.open(db) as store, open_tiers(store, model) as tiers:
        for layer in found.layers:
            answers = tiers.answers(
                layer.problem, here, routing=routing, timing=(("cache", cache),)
            )
            pending = [
                answer
                for answer in (*answers.unproven, *answers.usable)
                if answer.entry is not None and answer.origin.graded.grade == "compatible"
            ]
            experts = None
            for answer in pending:
                entry, origin = answer.entry, answer.origin
                assert entry is not None
                known = canary_results.find(store.path, origin.sha256, entry, here)
                if known is None or again:
                    experts = experts or layer.source.load(here.torch_device)
                    known = canary.run(entry, experts, here)
                    canary_results.keep(store.path, origin.sha256, entry, here, known)
                failures += not known.passed
                verdict = "passed" if known.passed else "failed"
                rows.append(
                    (layer.label, origin.place, verdict, f"{known.seconds:.1f} s", known.why)
                )
                checks.append(
                    {
                        "layer": layer.label,
                        "place": origin.place,
                        "sha256": origin.sha256,
                        "passed": known.passed,
                        "why": known.why,
                        "seconds": known.seconds,
                        "figures": known.figures,
                    }
                )
    columns = ("layer", "pack", "check", ">took", "what was found")
    parts = [Table(columns, rows)] if rows else ["no compatible pack about these layers"]
    if failures:
        note(f"{failures} of {len(rows)} checks failed: those packs are not used here")
    return Report({"target": found.name, "checks": checks}, parts, 1 if failures else 0)
