"""Reads JSON from strangers: one file, of bounded size, without anything that readers disagree on.

Refused: NaN and infinity, a key that stands twice in an object, bytes that are no UTF-8, numbers
of thousands of digits, and nesting that Python's parser cannot follow. Types, ranges (``1e999`` is
read as infinity), lengths and characters are checked by whoever knows the fields
(:mod:`autosel.packs.fields`).
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from autosel.errors import PackError, field_error

#: Larger files are refused before a byte is parsed. Sixty layers of one shape with raw samples
#: of 14 token counts and 60 candidates take about 1 MB.
MAX_BYTES = 32 << 20
#: More objects and lists than this are refused as well: 32 MiB of ``[],`` would take 1 GB as Python
#: objects, while a pack of 1 MB has some 5,000.
MAX_CONTAINERS = 500_000

#: First bytes of what people may hand over instead, with its name.
_OTHERS = (
    (b"PK\x03\x04", "a zip archive"),
    (b"\x1f\x8b", "a gzip file"),
    (b"BZh", "a bzip2 file"),
    (b"\xfd7zXZ", "an xz file"),
    (b"\x28\xb5\x2f\xfd", "a zstd file"),
    (b"SQLite format 3", "an SQLite database"),
    (b"\x80\x02", "a pickle"),
    (b"\x80\x03", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"\x80\x05", "a pickle"),
    (b"\xef\xbb\xbf", "a byte-order mark"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)


class _RefusedError(Exception):
    """What a hook of the parser found and what it expected."""


def read_bytes(path: Path) -> bytes:
    """The whole of a regular file of at most :data:`MAX_BYTES`; PackError in one line otherwise.

    Links are followed (model caches are made of them) as far as a regular file.
    """
    try:
        # Not blocking: opening a named pipe would wait for ever for its writer.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _BINARY)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise PackError(f"{path}: cannot be read: {reason}") from None
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        os.close(handle)
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a device or pipe"
        raise PackError(field_error(str(path), "pack", kind, "a file"))
    with os.fdopen(handle, "rb") as file:
        # One byte more tells a file that grew meanwhile; a huge one is not read at all.
        data = file.read(MAX_BYTES + 1) if found.st_size <= MAX_BYTES else b""
    size = max(found.st_size, len(data))
    if size > MAX_BYTES:
        raise PackError(field_error(str(path), "bytes", size, f"at most {MAX_BYTES}"))
    return data


_BINARY = getattr(os, "O_BINARY", 0)


def parse(data: bytes, where: str) -> Any:
    """The value in ``data``; PackError, in one line that starts with ``where``, for the rest."""
    for start, name in _OTHERS:
        if data.startswith(start):
            raise PackError(field_error(where, "content", name, "JSON text in UTF-8"))
    if data[257:262] == b"ustar":
        raise PackError(field_error(where, "content", "a tar archive", "JSON text in UTF-8"))
    containers = data.count(b"[") + data.count(b"{")
    if containers > MAX_CONTAINERS:
        raise PackError(
            field_error(where, "objects and lists", containers, f"at most {MAX_CONTAINERS}")
        )
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_constant,
        )
    except _RefusedError as error:
        raise PackError(f"{where}: {error}") from None
    except json.JSONDecodeError as error:
        raise PackError(f"{where}: line {error.lineno}: not valid JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise PackError(f"{where}: byte {error.start}: not valid UTF-8") from None
    except ValueError:  # Python's own limit of digits
        raise PackError(f"{where}: a number of thousands of digits") from None
    except RecursionError:
        raise PackError(f"{where}: nested too deeply") from None
    except MemoryError:
        raise PackError(f"{where}: does not fit in memory") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _RefusedError(field_error(shown(name), "key", "twice", "once in an object"))
            seen.add(name)
    return made


def _constant(word: str) -> float:
    raise _RefusedError(field_error("number", "value", word, "a finite number"))


def shown(value: object) -> str:
    """A short ASCII rendering: nothing of a stranger's reaches a terminal as it is."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
