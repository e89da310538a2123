"""What a worker said before it went: the end of its output, and where in the code it was."""

from __future__ import annotations

import os
import re
import select
import threading
from typing import IO

from autosel.failures import is_out_of_memory, one_line

#: Bytes of output that are kept; whatever came before them is read and dropped.
KEEP = 16 << 10

#: Characters of the last line that a reason quotes.
QUOTE = 200

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


class Tail:
    """Reads a worker's output for ever and keeps the end of it, however much comes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._fileno = os.dup(stream.fileno())
        stream.close()
        self._kept = bytearray()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._closed.is_set():
            if not select.select([self._fileno], [], [], 0.2)[0]:
                continue
            data = os.read(self._fileno, 1 << 16)
            if not data:
                break
            with self._lock:
                self._kept += data
                del self._kept[:-KEEP]
        os.close(self._fileno)

    def settle(self, seconds: float = 0.5) -> None:
        """Wait until everything that an ended process wrote has been read."""
        self._thread.join(timeout=seconds)

    def close(self) -> None:
        self._closed.set()

    @property
    def text(self) -> str:
        with self._lock:
            return bytes(self._kept).decode("utf-8", "replace")

    @property
    def last_line(self) -> str:
        """The last line with something in it, made short; "" where nothing was printed."""
        lines = [line.strip() for line in self.text[-4 * QUOTE :].splitlines() if line.strip()]
        if not lines:
            return ""
        line = "".join(c if c.isprintable() else "?" for c in lines[-1])
        return line if len(line) <= QUOTE else line[: QUOTE - 3] + "..."

    @property
    def out_of_memory(self) -> bool:
        """Whether the last words tell of memory, as those of ``std::bad_alloc`` do."""
        return is_out_of_memory(RuntimeError(self.text[-2000:]))


def death(found: str, faults: IO[bytes], tail: Tail) -> str:
    """One line: what was found, where the code was, and what it printed last."""
    where = _where(faults)
    said = tail.last_line
    return one_line(
        found + (f" in {where}" if where else "") + (f"; it last printed: {said}" if said else "")
    )


def _where(faults: IO[bytes]) -> str:
    """Where the last trace was, as ``function (file:line)``: the innermost frame of a candidate.

    Frames of Python's library and of this package (its backends excepted) are left out.
    """
    faults.seek(0)
    text = faults.read(1 << 16).decode("utf-8", "replace")
    frames = list(_FRAME.finditer(text))
    theirs = [found for found in frames if _is_candidates(found["file"])]
    for found in theirs or frames:
        return f"{found['function'].strip()} ({os.path.basename(found['file'])}:{found['line']})"
    return ""


def _is_candidates(file: str) -> bool:
    if file.startswith(_LIBRARY) and "site-packages" not in file:
        return False
    return not file.startswith(_PACKAGE) or f"{os.sep}backends{os.sep}" in file
