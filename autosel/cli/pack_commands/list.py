"""``autosel pack list``."""

from __future__ import annotations

from pathlib import Path

import click

from autosel.cli.database import reading
from autosel.cli.group import Command
from autosel.cli.options import db_option, device_option
from autosel.cli.report import Report, Table


@click.command(cls=Command)
@click.argument("model", type=click.Path(file_okay=False), metavar="[MODEL]", required=False)
@device_option
@db_option
def command(model: str | None, device: str | None, db: str | None) -> Report:
    """List the packs that are looked at here, in order, and what each is worth on this machine.

    With MODEL, a folder, the pack beside it as well. One that is not used says why.
    """
    from autosel.cli.packs import difference_lines, grades
    from autosel.device import detect
    from autosel.errors import AutoselError
    from autosel.packs import library
    from autosel.packs.grade import GRADES
    from autosel.tiers import open_tiers

    here = detect(device)
    rows, found = [], []
    with reading(db) as store, open_tiers(store, model) as tiers:
        places = list(tiers.places)
    for tier, path in places:
        about, grade, why = "-", "-", ""
        try:
            pack = library.usable(path, signed=tier != "built-in")
            graded = grades(pack, here, shipped=tier == "built-in")
            about = ", ".join(item.name for item in pack.models) or "-"
            grade = min((g.grade for _, g in graded), key=GRADES.index, default="foreign")
            why = "; ".join(difference_lines(graded)) if grade != "exact" else ""
        except AutoselError as error:
            grade, why = "not used", str(error)
        rows.append((tier, str(path), about, grade, why))
        found.append(
            {"tier": tier, "file": Path(path), "models": about, "grade": grade, "why": why}
        )
    columns = ("tier", "file", "about", "grade here", "what differs")
    parts = [Table(columns, rows)] if rows else ["no packs"]
    return Report({"device": here.to_dict(), "packs": found}, parts)
