"""``autosel plot``."""

from __future__ import annotations

import pkgutil
from importlib.util import find_spec

import click

from autosel.cli.group import Command
from autosel.cli.options import (
    TOKENS,
    LayerOptions,
    Number,
    cache_option,
    db_option,
    device_option,
    layer_options,
    routing_option,
    stored_device_option,
)
from autosel.cli.report import Report, note


def _kinds() -> list[str]:
    """The files of :mod:`autosel.plots`, without importing it: pandas takes a second."""
    found = find_spec("autosel.plots")
    places = found.submodule_search_locations if found else None
    return sorted(m.name for m in pkgutil.iter_modules(places) if not m.name.startswith("_"))


@click.command(cls=Command)
@click.argument("targets", metavar="[CHECKPOINT|PRESET]...", nargs=-1)
@click.option(
    "-o", "--output", required=True, type=click.Path(dir_okay=False),
    help="File to write: .png, .svg, or .csv for the table that the figure draws.",
)  # fmt: skip
@click.option(
    "--kind", type=click.Choice(_kinds()), default="latency", show_default=True,
    help="latency: time against tokens. speedup: over a baseline, layers by tokens. roofline: "
    "share of it. crossover: what is chosen where. bytes: packed bytes against time. noise: "
    "samples and ties. cost: where the sweeps' time went. budget: resident copies against time.",
)  # fmt: skip
@click.option(
    "--baseline", metavar="BACKEND",
    help="For speedup: the backend to compare with (default: the one vLLM's fixed order takes).",
)  # fmt: skip
@click.option(
    "--tokens", type=TOKENS, metavar="M",
    help="For bytes and noise: a measured token count (default: the one nearest to 16).",
)  # fmt: skip
@click.option(
    "--histogram", metavar="FILE|PRESET", default="mixed", show_default=True,
    help="For budget: calls by tokens, as for `autosel plan`.",
)  # fmt: skip
@click.option(
    "--size", type=(Number(3, 40), Number(2.5, 40)), default=(9.0, 5.6),
    metavar="W H", show_default=True,
    help="Width and height in inches; a small figure leaves notes out.",
)  # fmt: skip
@stored_device_option
@layer_options
@routing_option
@device_option
@cache_option
@db_option
def command(
    targets: tuple[str, ...],
    output: str,
    kind: str,
    baseline: str | None,
    tokens: int | None,
    histogram: str,
    size: tuple[float, float],
    stored_device: str | None,
    layer_options: LayerOptions,
    routing: str,
    device: str | None,
    cache: str,
    db: str | None,
) -> Report:
    """Draw what the database holds; needs no device and no display.

    The kinds speedup, crossover and cost show every layer named, or without a name every layer that
    was measured on the device; the others show one layer, the only one or the first.
    """
    from autosel import figures, plots
    from autosel.cli.measured import gather_named
    from autosel.plot_style import check_path

    path = check_path(output)
    several = plots.kind(kind).several
    found = gather_named(
        targets, layer_options, db=db, device=device, stored_device=stored_device,
        routing=routing, timing={"cache": cache},
    )  # fmt: skip
    if not several and len(found) > 1:
        others = ", ".join(one.label for one in found[1:])
        note(f"drawn is {found[0].label}; others (--layer or a name picks one): {others}")
    shown = found if several else found[:1]
    options = plots.Options(baseline=baseline, num_tokens=tokens, workload=histogram, size=size)
    figures.write(kind, shown, path, options)
    data = {
        "file": str(path),
        "kind": kind,
        "layers": [{"layer": one.label, "problem": one.problem.to_dict()} for one in shown],
    }
    return Report(data, [f"wrote {path}"])
