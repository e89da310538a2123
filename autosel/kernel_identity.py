"""Says which versions of our own kernels are here, by the content of their sources.

A distribution's version does not change when somebody edits a kernel in a checkout; a decision
measured with the old code must still not be used for the new one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import subprocess
from pathlib import Path

from autosel import native

#: Names under which these stand among a device's versions.
KERNELS, COMPILER = "autosel-kernels", "c++"

_PACKAGE = Path(__file__).resolve().parent
#: Patterns below the package of what runs on a kind of device. ``native.py`` has the compiler
#: flags. A kernel that cannot run on a kind does not make its results stale.
_SOURCES = {"cpu": ("kernels/csrc/*", "native.py")}
_ACCELERATOR = ("kernels/*.py",)
#: Says which settings are tried and where a search starts. A candidate names all of its settings,
#: so that what was measured of it stays true when others are tried first.
_SPACES = "_space.py"


def versions(kind: str) -> dict[str, str]:
    """Content hash of the kernels for ``kind``, and on CPUs the compiler that builds them.

    Nothing that cannot be read has an entry, so that it never equals what was stored with one.
    """
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        found[KERNELS] = "sha256:" + sources_hash(_PACKAGE, _SOURCES.get(kind, _ACCELERATOR))
    if kind == "cpu":
        text = _compiler_version()
        if text:
            found[COMPILER] = text
    return found


def sources_hash(folder: Path, patterns: tuple[str, ...]) -> str:
    """20 hexadecimal digits of the files' names and content; raises OSError where there are none.

    Files are read again only when a name, size or time of change differs from the last call.
    """
    files = sorted(
        file
        for pattern in patterns
        for file in folder.glob(pattern)
        if file.is_file() and not file.name.endswith(_SPACES)
    )
    if not files:
        raise FileNotFoundError(f"{folder}: no sources")
    facts = tuple(
        (str(f), s.st_mtime_ns, s.st_ctime_ns, s.st_size) for f in files if (s := f.stat())
    )
    return _hash(str(folder), facts)


@functools.lru_cache(maxsize=8)
def _hash(folder: str, facts: tuple[tuple[str, int, int, int], ...]) -> str:
    state = hashlib.sha256()
    for name, *_ in facts:
        content = Path(name).read_bytes()
        # Names and lengths keep bytes from moving unseen between files.
        state.update(f"{Path(name).relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        state.update(content)
    return state.hexdigest()[:20]


def _compiler_version() -> str | None:
    path = native.compiler()
    if path is None:
        return None
    try:
        seen = Path(path).stat()
        return _first_line(path, seen.st_mtime_ns, seen.st_size)
    except (OSError, subprocess.SubprocessError):
        return None


@functools.lru_cache(maxsize=8)
def _first_line(path: str, mtime_ns: int, size: int) -> str | None:
    done = subprocess.run([path, "--version"], capture_output=True, check=False, timeout=60)
    lines = done.stdout.decode(errors="replace").splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None
