"""What the checks of compatible packs found on this machine, kept so that each runs once.

One small file a check, beside the user's database: nothing to lock, and right on any file system.
A result holds for one pack, one of its entries and one machine with its software and kernels.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import autosel
from autosel import records
from autosel.atomic import atomic_file
from autosel.core import Device
from autosel.errors import AutoselError, PackError
from autosel.packs import fields as f
from autosel.packs.library import PackWarning
from autosel.packs.model import Entry
from autosel.packs.places import FOLDER
from autosel.packs.strict_json import parse, read_bytes

_CHECKS = "checks"
_memory: dict[str, CanaryResult] = {}


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """``passed``, in words ``why``, and how long it took; ``figures`` for people and programs.

    ``passing``: the next start may find more memory, or the machine well again.
    """

    passed: bool
    why: str
    seconds: float
    created: str
    figures: Mapping[str, Any]
    passing: bool = False


def find(database: Path | None, sha256: str, entry: Entry, device: Device) -> CanaryResult | None:
    """The stored result, or None when the check has not run here."""
    key = _key(sha256, entry, device)
    if database is None:
        return _memory.get(key)
    path = _path(database, key)
    if not os.path.isfile(path):  # also where nobody lets us look
        return _memory.get(key)
    try:
        return _parsed(parse(read_bytes(path), str(path)), key, str(path))
    except PackError as error:
        warnings.warn(f"result of a check not used: {error}", PackWarning, stacklevel=2)
        return None


def keep(
    database: Path | None, sha256: str, entry: Entry, device: Device, result: CanaryResult
) -> None:
    """Store a result; where that is impossible it is kept for this process, with one warning.

    One that may be another the next time is kept for this process alone.
    """
    key = _key(sha256, entry, device)
    _memory[key] = result
    if database is None or result.passing:
        return
    path = _path(database, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as partial:
            stored = {k: v for k, v in asdict(result).items() if k != "passing"}
            text = records.to_json({**stored, "key": key})
            partial.write_text(text + "\n", encoding="utf-8")
    except (OSError, AutoselError) as error:
        warnings.warn(
            f"the result of a check is kept in memory only: {error}", PackWarning, stacklevel=2
        )


def _key(sha256: str, entry: Entry, device: Device) -> str:
    """Tells apart packs, their entries and machines; the device holds versions and kernels."""
    parts = (
        sha256,
        records.problem_text(entry.problem),
        entry.routing,
        records.to_json(dict(entry.timing)),
        records.to_json(entry.device.to_dict()),
        records.to_json(device.to_dict()),
        autosel.__version__,
    )
    return hashlib.sha256("\0".join(parts).encode("utf-8", "backslashreplace")).hexdigest()


def _path(database: Path, key: str) -> Path:
    return database.parent / FOLDER / _CHECKS / f"{key}.json"


def _parsed(data: Any, key: str, where: str) -> CanaryResult:
    f.object_of(data, where, ("passed", "why", "seconds", "created", "figures", "key"))
    if data["key"] != key:
        f.refuse(f"{where}: key", "value", ascii(data["key"])[:40], key)
    return CanaryResult(
        f.boolean(data["passed"], f"{where}: passed"),
        f.text(data["why"], f"{where}: why"),
        f.number(data["seconds"], f"{where}: seconds", 0, 1e9),
        f.text(data["created"], f"{where}: created", most=40),
        f.sane(data["figures"], f"{where}: figures"),
    )
