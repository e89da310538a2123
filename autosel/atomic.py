"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from autosel.errors import AutoselError, field_error


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary file beside ``path`` that replaces it when the block ends well.

    When the block raises, the temporary file is removed and whatever was at ``path`` stays. Raises
    AutoselError, before the block runs, when the folder is missing or cannot be written, or when
    ``path`` is something else than a file (a device must not be replaced).
    """
    target = Path(path)
    if os.path.exists(target) and not target.is_file():
        kind = "a folder" if target.is_dir() else "a device or pipe"
        raise AutoselError(field_error(str(target), "output", kind, "a file name"))
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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
