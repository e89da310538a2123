"""``autosel db info``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from autosel.cli.group import Command
from autosel.cli.options import db_option
from autosel.cli.report import Report, Table


@click.command(cls=Command)
@db_option
def command(db: str | None) -> Report:
    """Show the database's place, schema, size, rows, devices and sweeps.

    Also what else decisions are looked up in: packs, the site's database, what ships with autosel.
    """
    from autosel.cli.database import reading
    from autosel.cli.text import bytes_text
    from autosel.store_tables import VIEWS, summary

    with reading(db) as store:
        data = summary(store)
        layers = _layers(store.path)
    facts = [
        ("path", data["path"] or "in memory"),
        ("kind", data["kind"]),
        ("file system", data["file_system"] or "-"),
        ("schema", data["schema"]),
        ("size", bytes_text(data["size_bytes"])),
        ("sweeps", f"{data['sweeps']['finished']} finished, "
                   f"{data['sweeps']['unfinished']} interrupted or running"),
    ]  # fmt: skip
    devices = [
        (d["name"] or "(no name)", d["kind"], d["measurements"], d["newest"] or "-")
        for d in data["devices"]
    ]
    parts = [
        Table(("", ""), facts),
        Table(("table", ">rows"), list(data["rows"].items())),
        Table(("device", "kind", ">measurements", "newest"), devices) if devices else "no device",
        Table(("view", "a row is"), [(name, VIEWS[name]) for name in data["views"]]),
        Table(("read in this order", "there", "path"), layers),
    ]
    data["layers"] = [
        {"layer": name, "present": there == "yes", "path": place} for name, there, place in layers
    ]
    return Report(data, parts)


def _layers(path: Path | None) -> list[tuple[str, str, str]]:
    """What decisions are looked up in, the first that knows the answer counting."""
    from autosel.packs import places

    site = places.site_database()
    found = [("user database", path is not None, str(path or "in memory"))]
    found += [("installed pack", True, str(pack)) for pack in places.installed(path)]
    found += [("site database", os.path.isfile(site), str(site))]
    found += [("installed pack", True, str(pack)) for pack in places.installed(site)]
    found += [("pack beside the model", False, "autosel-pack.json in the model's folder")]
    found += [("built in", True, str(pack)) for pack in places.built_in()]
    return [(name, "yes" if there else "no", path) for name, there, path in found]
