"""What an exception means for a candidate: a status and one line that says which step failed."""

from __future__ import annotations

import re

import torch

from autosel.core import Status
from autosel.errors import AutoselError, UnsupportedError

#: What a candidate may raise without ending the sweep. A library that gives up calls ``exit``.
CAUGHT = (Exception, SystemExit)

#: Not every library raises an out-of-memory error of its own type.
_NO_MEMORY = re.compile(
    r"out of memory|can.?t allocate memory|cannot allocate memory|not enough memory|"
    r"std::bad_alloc|alloc(ation)? failed|failed to allocate|OUT_OF_(HOST_|DEVICE_)?MEMORY",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that something did not fit in memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_NO_MEMORY.search(str(error)))


def failed(error: BaseException, step: str) -> tuple[Status, str]:
    """Status and reason of a candidate whose ``step`` raised ``error``."""
    if isinstance(error, UnsupportedError):
        return "unsupported", one_line(error)
    status: Status = "oom" if is_out_of_memory(error) else "failed"
    known = isinstance(error, AutoselError)
    what = one_line(error) if known else f"{type(error).__name__}: {one_line(error)}"
    return status, f"{step}: {what}"


def one_line(error: BaseException) -> str:
    """The first paragraph of an error's message as one line of moderate length."""
    text = str(error).strip().split("\n\n")[0]
    line = " ".join(text.split()) or "no message"
    return line if len(line) <= 400 else line[:397] + "..."
