"""What a file from outside is before any of it is read: a regular file, and no stand-in of one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from autosel.errors import field_error

#: How a pointer begins that Git LFS puts where the file itself was not fetched.
_LFS = b"version https://git-lfs"


def not_regular(path: Path) -> str | None:
    """What is wrong with a path, links resolved, that is no regular file; None for one that is.

    A named pipe has no end and a device none that fits, so such a path may not even be opened.
    Raises OSError where nothing is there.
    """
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        return None
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
    kind = kinds.get(stat.S_IFMT(mode), "no regular file")
    return field_error(str(path), "kind", kind, "a regular file")


def read_whole(path: Path, limit: int) -> bytes:
    """At most ``limit`` bytes and one more, which tells that there are more.

    Opened without waiting: what was a file a moment ago may have become a pipe.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    with open(path, "rb", opener=opener) as file:
        return file.read(limit + 1) or b""


def lfs_pointer(path: Path, head: bytes, expected: str) -> str | None:
    """What is wrong with a file that begins as a Git LFS pointer does; None for any other."""
    if not head.startswith(_LFS):
        return None
    return field_error(str(path), "content", "a Git LFS pointer", f"{expected}; run git lfs pull")
