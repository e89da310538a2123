"""Standard streams that may be full, closed or without a reader."""

from __future__ import annotations

import os
from typing import Any


def to_null(stream: Any) -> None:
    """Send a stream's further output, and what it still holds, to the null device.

    It has nowhere else to go, and Python would complain about it at exit.
    """
    try:
        number = stream.fileno()
    except (OSError, ValueError, AttributeError):  # no stream of the process, as in a test
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)


class Lenient:
    """Standard error: what cannot be written there is dropped, since results matter more.

    Stands for the stream with everybody who writes to it: our notes, the live display of a sweep,
    warnings and libraries.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError:
            to_null(self._stream)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            to_null(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
