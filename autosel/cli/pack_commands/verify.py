"""``autosel pack verify``."""

from __future__ import annotations

import click

from autosel.cli.group import Command
from autosel.cli.options import LayerOptions, device_option, layer_options
from autosel.cli.report import Report


@click.command(cls=Command)
@click.argument("pack", type=click.Path(dir_okay=False), metavar="PACK")
@click.option(
    "--key", type=click.Path(exists=True, dir_okay=False), metavar="PUB.pem",
    envvar="AUTOSEL_PACK_KEY", show_envvar=True,
    help="Ed25519 public key that the pack must be signed with.",
)  # fmt: skip
@click.option(
    "--model", metavar="CHECKPOINT|PRESET",
    help="Also refuse a pack that is not about this model's layers and quantisation.",
)  # fmt: skip
@click.option(
    "--grade", type=click.Choice(["exact", "compatible"]),
    help="Also refuse a pack without an entry of at least this grade on this machine.",
)  # fmt: skip
@layer_options
@device_option
def command(
    pack: str,
    key: str | None,
    model: str | None,
    grade: str | None,
    layer_options: LayerOptions,
    device: str | None,
) -> Report:
    """Check a pack: its form, its content hash and, with a key, its signature."""
    from autosel.cli.packs import difference_lines, grades, model_of
    from autosel.cli.target import resolve
    from autosel.device import detect
    from autosel.errors import PackError, field_error
    from autosel.packs import signing
    from autosel.packs.content import read
    from autosel.packs.grade import GRADES
    from autosel.packs.install import check_about
    from autosel.packs.library import check_known

    found = read(pack)
    check_known(found, pack)
    if key:
        signing.verify(found, key, pack)
    if model:
        about = model_of(resolve(model, layer_options))
        check_about(found, pack, about)
    graded = grades(found, detect(device))
    best = min((result.grade for _, result in graded), key=GRADES.index, default="foreign")
    if grade and GRADES.index(best) > GRADES.index(grade):
        reasons = "; ".join(difference_lines(graded)) or "no entry"
        raise PackError(field_error(pack, "grade", f"{best} ({reasons})", f"at least {grade}"))
    signed = "not signed"
    if found.signature:
        signed = f"signed with the key {found.signature.key_id[:16]}"
        signed += "" if key else ", which was not checked (--key checks it)"
    data = {
        "file": pack,
        "sha256": found.sha256,
        "key_id": found.signature.key_id if found.signature else None,
        "signature_checked": bool(key),
        "grade": best,
        "differences": difference_lines(graded),
    }
    parts = [f"{pack}: sound, sha256 {found.sha256}", signed, f"grade here: {best}"]
    return Report(data, [*parts, *difference_lines(graded)])
