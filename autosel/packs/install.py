"""Puts a pack where it is looked up: beside a model, or among the user's or the site's packs."""

from __future__ import annotations

import os
from pathlib import Path

from autosel.errors import PackError, field_error
from autosel.packs.build import plain_name
from autosel.packs.content import read, write
from autosel.packs.library import check_known
from autosel.packs.model import FILE_NAME, Model, Pack
from autosel.packs.places import FOLDER


def beside_model(pack: Pack, folder: str | Path, about: Model, *, force: bool = False) -> Path:
    """Write ``autosel-pack.json`` into a model's folder and return its path.

    about  the model there: a pack about other layers or another quantisation is refused
    force  takes it all the same, and replaces another pack that lies there
    """
    place = Path(folder) / FILE_NAME
    if not Path(folder).is_dir():
        raise PackError(field_error(str(folder), "model", "no folder", "a model's folder"))
    if not force:
        check_about(pack, "pack", about)
    return _put(pack, place, force=force)


def among_installed(pack: Pack, database: Path, *, force: bool = False) -> Path:
    """Write the pack into the folder of packs beside ``database`` and return its path.

    Its file is named by model and content, so that packs never replace each other.
    """
    folder = database.parent / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PackError(field_error(str(folder), "folder", error.strerror, "a folder")) from None
    about = plain_name(pack.models[0].name) if pack.models else "pack"
    return _put(pack, folder / f"{about[:80]}-{pack.sha256[:12]}.json", force=force)


def _put(pack: Pack, place: Path, *, force: bool) -> Path:
    if not force:
        check_known(pack, place.name)
    if os.path.lexists(place) and not force:
        there = "what is no pack"
        try:
            found = read(place)
            signed = pack.signature is None or found.signature == pack.signature
            if found.sha256 == pack.sha256 and signed and not place.is_symlink():
                return place
            there = f"the pack {found.sha256[:12]}"
        except PackError:
            pass
        raise PackError(field_error(str(place), "file", there, "nothing (--force replaces it)"))
    # A link in the place is replaced and not followed: nothing is written where it leads.
    write(pack, place)
    return place


def check_about(pack: Pack, where: str, about: Model) -> None:
    """PackError when nothing in ``pack`` is about this model's quantisation and layers."""
    hashes = {model.quantization_sha256 for model in pack.models} - {None}
    if hashes and about.quantization_sha256 and about.quantization_sha256 not in hashes:
        found = ", ".join(sorted(text[:12] for text in hashes if text))
        expected = f"{about.quantization_sha256[:12]}, that of {about.name}"
        raise PackError(field_error(where, "hash of the quantisation settings", found, expected))
    wanted = {layer.problem for layer in about.layers}
    if not wanted & set(pack.problems):
        keys = ", ".join(sorted(problem.key for problem in pack.problems)[:3])
        expected = "one of " + ", ".join(sorted(problem.key for problem in wanted)[:3])
        raise PackError(field_error(where, "layers", keys or "none", expected))
