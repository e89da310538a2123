"""Exceptions of third parties, and what they say about a candidate."""

from __future__ import annotations

import errno

import pytest
import torch

from autosel.errors import UnsupportedError
from autosel.failures import (
    CandidateError,
    failed,
    is_machine_fault,
    is_out_of_memory,
    is_poison,
    one_line,
    tamed,
)


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError


class NotTextError(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]


class Base(BaseException):
    pass


@pytest.mark.parametrize(
    "error",
    [ValueError("plain"), MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), OSError(2)],
)
def test_what_is_harmless_stays_as_it_is(error: Exception) -> None:
    assert tamed(error) is error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Base("why"), "Base: why"),
        (SystemExit(0), "SystemExit: 0"),
        (GeneratorExit(), "GeneratorExit: no message"),
        (UnprintableError(), "UnprintableError: its message cannot be printed"),
        (NotTextError(), "NotTextError: its message cannot be printed"),
        (RuntimeError("y" * 10_000_000), "RuntimeError: yyy"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_becomes_words(error: BaseException, words: str) -> None:
    found = tamed(error)
    assert isinstance(found, CandidateError)
    status, reason = failed(found, "x run")
    assert status == "failed"
    assert reason.startswith(f"x run: {words}")
    assert len(reason) < 450


def test_an_interrupt_is_the_users_unless_there_is_no_user() -> None:
    error = KeyboardInterrupt()
    assert tamed(error) is error
    assert isinstance(tamed(error, interruptible=False), CandidateError)


def test_memory_stays_memory_whatever_its_message() -> None:
    assert is_out_of_memory(tamed(torch.OutOfMemoryError("z" * 1_000_000)))
    assert is_out_of_memory(RuntimeError("HIP out of memory. Tried"))
    assert is_out_of_memory(RuntimeError("std::bad_alloc"))
    assert not is_out_of_memory(ValueError("out of memory"))
    assert failed(MemoryError(), "x")[0] == "oom"


def test_unsupported_is_no_failure() -> None:
    assert failed(UnsupportedError("bits: found 3"), "x") == ("unsupported", "bits: found 3")


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: misaligned address",
        "CUDA error: unspecified launch failure",
        "CUDA error: device-side assert triggered",
        "Triton Error [CUDA]: an illegal instruction was encountered",
        "HIP error: hipErrorIllegalAddress",
        "CUDA error: the launch timed out and was terminated",
    ],
)
def test_a_poisoned_context_is_recognised(text: str) -> None:
    assert is_poison(text)
    assert not is_machine_fault(text)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory",
        "CUDA error: invalid configuration argument",
        "out of resource: shared memory, Required: 147456, Hardware limit: 101376",
        "no kernel image is available for execution on the device",
    ],
)
def test_other_device_errors_poison_nothing(text: str) -> None:
    assert not is_poison(text)
    assert not is_machine_fault(text)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EROFS, "Read-only file system"),
        RuntimeError("CUDA error: no CUDA-capable device is detected"),
        RuntimeError("Found no NVIDIA driver on your system"),
        RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("CUDA driver version is insufficient for CUDA runtime version"),
    ],
    ids=str,
)
def test_a_fault_of_the_machine_is_nobodys(error: Exception) -> None:
    assert is_machine_fault(error)


def test_one_line_of_anything() -> None:
    assert one_line(ValueError("a\nb\n\nlong explanation")) == "a b"
    assert one_line("  \n ") == "no message"
    assert len(one_line("w " * 10_000)) == 400
