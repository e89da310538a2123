"""``autosel pack install``."""

from __future__ import annotations

import click

from autosel.cli.group import Command
from autosel.cli.options import LayerOptions, db_option
from autosel.cli.report import Report


@click.command(cls=Command)
@click.argument("pack", type=click.Path(dir_okay=False), metavar="PACK")
@click.argument("model", type=click.Path(), metavar="[MODEL]", required=False)
@click.option(
    "--site", is_flag=True,
    help="For everybody here: beside $AUTOSEL_SITE_DB (default /etc/autosel/autosel.db).",
)  # fmt: skip
@click.option(
    "--key", type=click.Path(exists=True, dir_okay=False), metavar="PUB.pem",
    envvar="AUTOSEL_PACK_KEY", show_envvar=True,
    help="Ed25519 public key that the pack must be signed with.",
)  # fmt: skip
@click.option(
    "--force", is_flag=True,
    help="Replace what is there, and take a pack that is not about this model.",
)  # fmt: skip
@db_option
def command(
    pack: str, model: str | None, site: bool, key: str | None, force: bool, db: str | None
) -> Report:
    """Put a pack where it is looked up: into a model's folder, or among the user's or site's packs.

    With MODEL it becomes MODEL/autosel-pack.json; without, it goes beside the user's database.
    """
    from autosel.cli.packs import model_of
    from autosel.cli.target import open_checkpoint, resolve
    from autosel.errors import StoreError
    from autosel.packs import places, signing
    from autosel.packs.content import read
    from autosel.packs.install import among_installed, beside_model
    from autosel.store import Store

    if model and site:
        raise click.UsageError("MODEL and --site: found both, expected one")
    found = read(pack)
    if key:
        signing.verify(found, key, pack)
    if model:
        open_checkpoint(model)
        about = model_of(resolve(model, LayerOptions()))
        place = beside_model(found, model, about, force=force)
    elif site:
        place = among_installed(found, places.site_database(), force=force)
    else:
        with Store.open(db, strict=True) as store:
            if store.path is None:
                raise StoreError("a database in memory has no place for packs")
            place = among_installed(found, store.path, force=force)
    data = {"file": str(place), "sha256": found.sha256}
    return Report(data, [f"installed {found.sha256[:12]} as {place}"])
