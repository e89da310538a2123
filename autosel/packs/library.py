"""Reads packs for use, once each, and says why one is not used."""

from __future__ import annotations

import os
import warnings
from functools import lru_cache
from pathlib import Path

from autosel import records, registry
from autosel.core import Candidate, Device, Problem
from autosel.errors import AutoselError, PackError, UnsupportedError, field_error
from autosel.packs import signing
from autosel.packs.content import from_bytes
from autosel.packs.model import Pack
from autosel.packs.strict_json import read_bytes
from autosel.packs.writing import problem_data


class PackWarning(UserWarning):
    """A pack in a place that is looked up is not used; the message is one line that says why."""


def load(path: Path, *, signed: bool = True) -> Pack | None:
    """The pack for use, or None with one PackWarning when it must not be used at all.

    ``signed``: where ``$AUTOSEL_PACK_KEY`` names a key, only what is signed with it is used.
    """
    try:
        return usable(path, signed=signed)
    except AutoselError as error:
        warnings.warn(f"pack not used: {error}", PackWarning, stacklevel=3)
        return None


def usable(path: Path, *, signed: bool = True) -> Pack:
    """:func:`load`, raising AutoselError with the reason in one line."""
    pack = _read(*_state(path))
    check_known(pack, str(path))
    key = signing.required_key() if signed else None
    if key is not None:
        signing.verify(pack, key, str(path))
    return pack


def mentions(path: Path, problem: Problem) -> bool:
    """Whether a file can be about ``problem``; costs no parsing where it is in canonical form."""
    try:
        return _mentions(problem, *_state(path))
    except PackError:
        return True  # loading it says what is wrong


# A model's layers are alike and a search through a built-in pack takes 50 us.
@lru_cache(maxsize=4096)
def _mentions(problem: Problem, path: str, mtime_ns: int, size: int, inode: int) -> bool:
    raw = _bytes(path, mtime_ns, size, inode)
    if not raw.startswith(b'{"candidates":['):
        return True  # somebody reformatted it
    return records.to_json(problem_data(problem)).encode() in raw


def unknown_backends(pack: Pack) -> tuple[str, ...]:
    """Backends among the chosen and the next best that are not here."""
    found = {c.backend for entry in pack.entries for c in entry.candidates}
    return tuple(sorted(name for name in found if not _known(name)))


def _known(name: str) -> bool:
    # Not registry.names(): the first time that reads every installed package's entry points.
    try:
        return registry.get(name).name == name
    except AutoselError:
        return False


def check_known(pack: Pack, where: str) -> None:
    """PackError when a chosen candidate's backend does not exist here."""
    unknown = unknown_backends(pack)
    if unknown:
        expected = "backends of this autosel or its plugins"
        raise PackError(field_error(where, "backends", ", ".join(unknown), expected))


def why_illegal(candidate: Candidate, problem: Problem, device: Device, num_tokens: int) -> str:
    """Why a backend would never propose these parameters for this call itself; "" when it would.

    Parameters are numbers in a stranger's file: only points of the backend's own space are run.
    Whether the backend itself can run here is asked when it is to run.
    """
    try:
        backend = registry.get(candidate.backend)
        space = backend.space(problem, num_tokens, device)
        design = space.design_of(candidate.params_dict)
        unknown = design.unknown(candidate.params_dict)
        if unknown:
            return f"{candidate.backend} has no parameter {unknown[0]} here"
        illegal = design.constraint(candidate.params_dict)
        if illegal is not None:
            return f"{candidate.key}: {illegal}"
        layout = backend.layout(problem, candidate.params_dict).key
    except UnsupportedError:
        return ""  # what has no layout for this layer does not run either
    except Exception as error:  # a plugin's own rules may raise anything
        return f"{candidate.backend} refuses {candidate.key}: {' '.join(str(error).split())[:200]}"
    if layout != candidate.layout:
        return field_error(candidate.key, "layout", candidate.layout, layout)
    return ""


def _state(path: Path) -> tuple[str, int, int, int]:
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise PackError(f"{path}: cannot be read: {reason}") from None
    return (str(path), found.st_mtime_ns, found.st_size, found.st_ino)


@lru_cache(maxsize=64)
def _bytes(path: str, mtime_ns: int, size: int, inode: int) -> bytes:
    return read_bytes(Path(path))


@lru_cache(maxsize=64)
def _read(path: str, mtime_ns: int, size: int, inode: int) -> Pack:
    return from_bytes(_bytes(path, mtime_ns, size, inode), path)
