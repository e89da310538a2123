"""``autosel report``."""

from __future__ import annotations

import click

from autosel.cli.group import Command
from autosel.cli.options import (
    TOKENS,
    LayerOptions,
    cache_option,
    db_option,
    device_option,
    layer_options,
    refuse_given,
    refuse_options_without_a_name,
    routing_option,
    stored_device_option,
)
from autosel.cli.report import Report


@click.command(cls=Command)
@click.argument("targets", metavar="[CHECKPOINT|PRESET]...", nargs=-1)
@click.option(
    "-o", "--output", required=True, type=click.Path(dir_okay=False), help="File to write: .html."
)
@click.option(
    "--tokens", type=TOKENS, metavar="M", default=16, show_default=True,
    help="Tokens in a call that the summary speaks of.",
)  # fmt: skip
@click.option(
    "--baseline", metavar="BACKEND",
    help="Backend that speed-ups are over (default: the one vLLM's fixed order takes).",
)  # fmt: skip
@click.option("--title", default="", help="Title of the report.")
@click.option(
    "--from", "source", type=click.Path(dir_okay=False), metavar="FILE",
    help="A pack, a database or an export to report on, instead of the user's database.",
)  # fmt: skip
@click.option("--no-figures", is_flag=True, help="Tables and words alone: smaller and faster.")
@stored_device_option
@layer_options
@routing_option
@device_option
@cache_option
@db_option
def command(
    targets: tuple[str, ...],
    output: str,
    tokens: int,
    baseline: str | None,
    title: str,
    source: str | None,
    no_figures: bool,
    stored_device: str | None,
    layer_options: LayerOptions,
    routing: str,
    device: str | None,
    cache: str,
    db: str | None,
) -> Report:
    """Write one HTML file about what was measured; needs no device, no display and no network.

    It says in words which backend to use and why, and has the tables, the figures, the rejected
    candidates with their reasons, certificates, the environment and the commands that make it all
    again. Without a name it covers every layer measured on the device.
    """
    from autosel.cli.measured import gather_named
    from autosel.report_page import write_report

    timing = {"cache": cache}
    if source is not None:
        from autosel.evidence_files import read

        if targets or stored_device:
            raise click.UsageError(
                "--from: a file is reported on whole; leave out names and --stored-device"
            )
        refuse_options_without_a_name(layer_options)
        refuse_given("--from reports on the whole of a file", "routing", "device", "db")
        found, place = read(source, timing=timing), source
    else:
        found, place = gather_named(
            targets, layer_options, db=db, device=device, stored_device=stored_device,
            routing=routing, timing=timing,
        ), db or ""  # fmt: skip
    named = {"title": title} if title else {}
    path = write_report(
        found, output, batch=tokens, baseline=baseline, place=place, figures=not no_figures, **named
    )
    layers = [{"layer": one.label, "problem": one.problem.to_dict()} for one in found]
    plural = "" if len(found) == 1 else "s"
    return Report(
        {"file": str(path), "layers": layers}, [f"wrote {path} about {len(found)} layer{plural}"]
    )
