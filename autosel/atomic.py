"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from autosel.errors import AutoselError, field_error

#: The first bytes of every SQLite database (https://www.sqlite.org/fileformat.html, 1.3).
SQLITE_HEAD = b"SQLite format 3\x00"

_OF_A_CHECKPOINT = frozenset(
    {"config.json", "generation_config.json", "quantize_config.json", "quant_config.json"}
)


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary file beside ``path`` that replaces it when the block ends well.

    When the block raises, the temporary file is removed and whatever was at ``path`` stays. Raises
    AutoselError, before the block runs, when the folder is missing or cannot be written, or when
    something is at ``path`` that must not be replaced: a folder, a device, a database, a file that
    a checkpoint consists of.
    """
    target = Path(path)
    found = _irreplaceable(target)
    if found:
        raise AutoselError(field_error(str(target), "output", found, "another file name"))
    folder = target.absolute().parent
    try:
        descriptor, name = tempfile.mkstemp(
            dir=folder, prefix=f".{target.name}.", suffix=".partial"
        )
    except OSError as error:
        raise AutoselError(
            field_error(str(target), "folder", error.strerror, f"a folder {folder} to write in")
        ) from error
    os.close(descriptor)
    partial = Path(name)
    try:
        yield partial
        partial.chmod(0o666 & ~_umask())  # mkstemp makes it private
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _irreplaceable(target: Path) -> str | None:
    """What is at ``target`` if it would be lost, in words; a report can be written again."""
    if os.path.isdir(target):
        return "a folder"
    if not os.path.exists(target):
        return None
    # /dev/stdout is a link that leads to a file when output is redirected, and must stay a link.
    if not os.path.isfile(target) or _link(target).startswith("/proc/"):
        return "a device or pipe"
    if target.name in _OF_A_CHECKPOINT or target.name.endswith(".safetensors.index.json"):
        return "a part of a checkpoint"
    try:
        with target.open("rb") as file:
            return "a database" if file.read(len(SQLITE_HEAD)) == SQLITE_HEAD else None
    except OSError:  # not readable, and no reason to think that it is a database
        return None


def _link(path: Path) -> str:
    return os.readlink(path) if os.path.islink(path) else ""


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
