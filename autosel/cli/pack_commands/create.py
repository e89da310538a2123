"""``autosel pack create``."""

from __future__ import annotations

from pathlib import Path

import click

from autosel.cli.group import Command
from autosel.cli.options import (
    LayerOptions,
    db_option,
    device_option,
    layer_options,
    target_argument,
)
from autosel.cli.report import Report


@click.command(cls=Command)
@target_argument
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), default="autosel-pack.json",
    show_default=True, help="File to write.",
)  # fmt: skip
@click.option(
    "--samples", is_flag=True,
    help="Keep raw samples, so that readers can decide again; else their quantiles and number.",
)  # fmt: skip
@click.option(
    "--routing", metavar="KIND", show_default="all kinds",
    help="Only decisions for this kind of routing.",
)  # fmt: skip
@click.option("--allow-a8", is_flag=True, help="Also winners that quantise activations to 8 bits.")
@click.option(
    "--all-devices", is_flag=True,
    help="Everything stored about the layers, not only what this machine and software measured.",
)  # fmt: skip
@click.option(
    "--sign", type=click.Path(exists=True, dir_okay=False), metavar="KEY.pem",
    help="Sign with this Ed25519 private key.",
)  # fmt: skip
@layer_options
@device_option
@db_option
def command(
    target: str,
    output: str,
    samples: bool,
    routing: str | None,
    allow_a8: bool,
    all_devices: bool,
    sign: str | None,
    layer_options: LayerOptions,
    device: str | None,
    db: str | None,
) -> Report:
    """Write what is decided for a model's layers as a decision pack.

    Decisions, plans, certificates, the quantiles of what was measured, and where it all comes from.
    """
    import shlex

    from autosel.cli.database import reading
    from autosel.cli.packs import model_of
    from autosel.cli.target import resolve, retype
    from autosel.device import detect
    from autosel.packs import signing
    from autosel.packs.build import build
    from autosel.packs.content import write

    found = resolve(target, layer_options, every=True)
    about = model_of(found)
    here = None if all_devices else detect(device)
    words = shlex.split(retype(found, layer_options))[1:]
    flags = [
        *(["--routing", routing] if routing else []),
        *(["--allow-a8"] if allow_a8 else []),
        *(["--samples"] if samples else []),
    ]
    # The name and not the path: nobody needs to know where the model lay.
    again = shlex.join(["autosel", "pack", about.name, *words, *flags])
    with reading(db) as store:
        pack = build(
            store,
            about,
            device=here,
            routing=routing,
            allow_a8=allow_a8,
            with_samples=samples,
            command=again,
        )
    if sign:
        pack = signing.sign(pack, sign)
    write(pack, output)
    decisions = sum(len(entry.decisions) for entry in pack.entries)
    data = {
        "file": str(Path(output)),
        "sha256": pack.sha256,
        "key_id": pack.signature.key_id if pack.signature else None,
        "entries": len(pack.entries),
        "decisions": decisions,
    }
    text = f"wrote {decisions} decisions for {about.name} to {output}, sha256 {pack.sha256}"
    return Report(data, [text + (", signed" if pack.signature else "")])
