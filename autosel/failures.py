"""What an exception means for a candidate: a status and one line that says which step failed.

A candidate's code may raise anything: exceptions that cannot be printed, messages of megabytes,
things that are no :class:`Exception` at all. :func:`tamed` turns all of it into an exception that
the rest of the program can handle, at the one place where such code is called.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from autosel.core import Status
from autosel.errors import AutoselError, UnsupportedError
from autosel.handlers import let_through

T = TypeVar("T")

#: What a candidate may raise without ending the sweep. A library that gives up calls ``exit``.
#: In a process that serves a model an exit is the program's: there Exception alone is caught.
#: What a signal handler raised goes on to the caller everywhere (:mod:`autosel.handlers`).
CAUGHT = (Exception, SystemExit)

#: Characters of a message that are looked at: some libraries put a whole program into one.
LONGEST = 20_000

#: Characters of a reason.
LINE = 400

#: Not every library raises an out-of-memory error of its own type.
_NO_MEMORY = re.compile(
    r"out of memory|can.?t allocate memory|cannot allocate memory|not enough memory|"
    r"std::bad_alloc|alloc(ation)? failed|failed to allocate|OUT_OF_(HOST_|DEVICE_)?MEMORY",
    re.IGNORECASE,
)

#: Device errors after which every later call of the process fails as well (CUDA Runtime API,
#: "Error handling": the process must be ended and started again), and HIP's words for them.
_POISON = re.compile(
    r"illegal memory access|illegal address|misaligned address|illegal instruction|"
    r"invalid program counter|invalid address space|hardware stack error|device-side assert|"
    r"unspecified launch failure|launch timed out|tensor memory alignment|"
    r"cluster target block not present|hipErrorIllegalAddress|hipErrorLaunchFailure|"
    r"memory access fault by GPU|UR_RESULT_ERROR_DEVICE_LOST",
    re.IGNORECASE,
)

#: Faults of the machine, which say nothing about the candidate that met them first.
_MACHINE_ERRNO = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.EIO}
)
_MACHINE = re.compile(
    r"no space left on device|disk quota exceeded|read-only file system|too many open files|"
    r"no CUDA-capable device|no HIP GPUs|found no nvidia driver|driver/library version mismatch|"
    r"cuda driver version is insufficient|device\S* .{0,40}unavailable|"
    r"device not ready|uncorrectable (ECC|NVLink) error|fallen off the bus|gpu is lost|"
    r"cudaErrorInitializationError|initialization error|system not yet initialized",
    re.IGNORECASE,
)


class CandidateError(Exception):
    """What a candidate raised, in words, where the exception itself would do harm."""


@contextmanager
def ignored() -> Iterator[None]:
    """What a candidate raises inside counts for nothing; a signal handler's goes through."""
    try:
        yield
    except CAUGHT as error:
        let_through(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that something did not fit in memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError | OSError | CandidateError):
        return False
    return bool(_NO_MEMORY.search(message(error)))


def is_poison(text: str) -> bool:
    """Whether a message tells of a device context that no later call can use."""
    return bool(_POISON.search(text))


def is_machine_fault(error: BaseException | str) -> bool:
    """Whether the machine is at fault (a full disk, a lost driver) and not who met it first."""
    if isinstance(error, OSError) and error.errno in _MACHINE_ERRNO:
        return True
    return bool(_MACHINE.search(error if isinstance(error, str) else message(error)))


def is_passing(error: BaseException) -> bool:
    """Whether the reason may be gone the next time: memory that was short, a fault of the machine.

    Nothing about the candidate may be stored for it.
    """
    return is_out_of_memory(error) or is_machine_fault(error)


def tamed(error: BaseException, *, interruptible: bool = True) -> BaseException:
    """``error`` itself where it is harmless, else one that says the same.

    Harmless is an Exception with a message of moderate length. A KeyboardInterrupt is the user's
    where the process is ``interruptible``; in a worker nobody else raises one. Raises what a signal
    handler raised.
    """
    let_through(error)
    if interruptible and isinstance(error, KeyboardInterrupt):
        return error
    text = message(error)
    # The way to a readable message may be the fault: __str__ that raises, or returns megabytes.
    if isinstance(error, Exception) and _readable(error):
        return error
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return MemoryError(text)
    return CandidateError(f"{type(error).__name__}: {text or 'no message'}")


def call_tamed(code: Callable[[], T], *, interruptible: bool = True) -> T:
    """``code()``, a candidate's; what it raises is :func:`tamed`."""
    try:
        return code()
    except BaseException as error:
        raise tamed(error, interruptible=interruptible) from None


def failed(error: BaseException, step: str) -> tuple[Status, str]:
    """Status and reason of a candidate whose ``step`` raised ``error``.

    Raises what a signal handler raised: that is about no candidate.
    """
    let_through(error)
    if isinstance(error, UnsupportedError):
        return "unsupported", one_line(error)
    status: Status = "oom" if is_out_of_memory(error) else "failed"
    known = isinstance(error, AutoselError | CandidateError)
    what = one_line(error) if known else f"{type(error).__name__}: {one_line(error)}"
    return status, f"{step}: {what}"


def message(error: BaseException) -> str:
    """The error's message as far as it is of use; never raises."""
    try:
        text = str(error)
        return text if len(text) <= LONGEST else text[:LONGEST] + "..."
    except BaseException as fault:  # a __str__ of a third party's
        let_through(fault)
        return "its message cannot be printed"


def one_line(error: BaseException | str) -> str:
    """The first paragraph of a message as one line of moderate length."""
    text = error[:LONGEST] if isinstance(error, str) else message(error)
    line = " ".join(text.strip().split("\n\n")[0].split()) or "no message"
    return line if len(line) <= LINE else line[: LINE - 3] + "..."


def _readable(error: BaseException) -> bool:
    try:
        return len(str(error)) <= LONGEST
    except BaseException as fault:
        let_through(fault)
        return False
