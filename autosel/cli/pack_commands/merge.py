"""``autosel pack merge``."""

from __future__ import annotations

import click

from autosel.cli.group import Command
from autosel.cli.report import Report


@click.command(cls=Command)
@click.argument(
    "packs", type=click.Path(dir_okay=False), metavar="PACK...", nargs=-1, required=True
)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), default="autosel-pack.json",
    show_default=True, help="File to write.",
)  # fmt: skip
@click.option(
    "--prefer", type=click.Choice(["newest", "first", "last"]),
    help="Which counts where packs say different things of one layer on one machine.",
)  # fmt: skip
@click.option(
    "--sign", type=click.Path(exists=True, dir_okay=False), metavar="KEY.pem",
    help="Sign with this Ed25519 private key; signatures of the parts do not carry over.",
)  # fmt: skip
def command(packs: tuple[str, ...], output: str, prefer: str | None, sign: str | None) -> Report:
    """Make one pack of several: of other devices, shapes or models.

    Conflicts are named, and refused unless --prefer says what counts.
    """
    from autosel.packs import signing
    from autosel.packs.content import read, write
    from autosel.packs.merge import merge

    merged = merge([(name, read(name)) for name in packs], prefer)  # type: ignore[arg-type]
    pack = signing.sign(merged.pack, sign) if sign else merged.pack
    write(pack, output)
    lines = [str(conflict) for conflict in merged.conflicts]
    data = {
        "file": output,
        "sha256": pack.sha256,
        "entries": len(pack.entries),
        "conflicts": lines,
    }
    text = f"wrote {len(pack.entries)} entries of {len(packs)} packs to {output}"
    return Report(data, [text, *(f"settled ({prefer}): {line}" for line in lines)])
