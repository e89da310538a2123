"""Where packs and the site's database lie."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import platformdirs

from autosel.packs.model import FILE_NAME
from autosel.storefile import FILE_NAME as DATABASE

#: Names the site's database; its packs lie in the folder :data:`FOLDER` beside it.
SITE_ENVIRONMENT = "AUTOSEL_SITE_DB"
#: Folder of installed packs, beside the user's and beside the site's database.
FOLDER = "autosel-packs"


def site_database() -> Path:
    """``$AUTOSEL_SITE_DB``, else ``/etc/autosel/autosel.db`` (Windows, macOS: the site's data)."""
    given = os.environ.get(SITE_ENVIRONMENT)
    if given:
        return Path(given).expanduser().absolute()
    if sys.platform.startswith(("win", "darwin")):
        return Path(platformdirs.site_data_dir("autosel", appauthor=False)) / DATABASE
    return Path("/etc/autosel") / DATABASE


def installed(database: Path | None) -> tuple[Path, ...]:
    """The packs installed beside a database, the last written one first."""
    if database is None:
        return ()
    try:
        found = [
            (entry.stat().st_mtime_ns, entry.name)
            for entry in os.scandir(database.parent / FOLDER)
            if entry.name.endswith(".json") and not entry.name.startswith(".")
        ]
    except OSError:
        return ()
    return tuple(database.parent / FOLDER / name for _, name in sorted(found, reverse=True))


def beside(model: str | Path | None) -> tuple[Path, ...]:
    """The pack in a model's folder, if there is one."""
    if model is None:
        return ()
    path = Path(model) / FILE_NAME
    return (path,) if os.path.lexists(path) else ()


def built_in() -> tuple[Path, ...]:
    """The packs that ship with autosel, one folder a device."""
    # A link to results/ in a checkout, a folder in a wheel.
    return tuple(sorted((Path(__file__).parents[1] / "builtin").glob("*/packs/*.json")))
