"""Finds, loads and calls vLLM's GPU operators without importing vLLM.

They are looked for in this order: operators already registered in this process; the library that
the environment variable ``AUTOSEL_VLLM_MOE_LIB`` names (several may be given, separated by the
path separator), for libraries extracted from a wheel of another torch version, which the stable
ABI allows; the library inside the installed ``vllm`` package.

Releases differ in their arguments, so calls are made from the operator's schema: see :func:`call`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import torch

from autosel.errors import UnsupportedError, field_error
from autosel.interfaces import Backend, Requirements

DISTRIBUTIONS = ("vllm",)
LIBRARY_VARIABLE = "AUTOSEL_VLLM_MOE_LIB"
#: Where wheels keep the operators of a namespace, newest first.
_FILES = {
    "_moe_C": ("vllm/_moe_C_stable_libtorch.abi3.so", "vllm/_moe_C.abi3.so"),
    "_rocm_C": ("vllm/_rocm_C.abi3.so",),
}
_lock = threading.Lock()
_errors: dict[str, str] = {}
_tried: set[tuple[str, Path]] = set()
_missing: set[tuple[str, str, str | None]] = set()


def find(namespace: str, name: str) -> Any | None:
    """``torch.ops.<namespace>.<name>``'s default overload, loading its library at first use.

    None when there is none; :func:`why_missing` then says why. Cheap after the first call.
    """
    if not _registered(namespace, name):
        key = (namespace, name, os.environ.get(LIBRARY_VARIABLE))
        if key in _missing:
            return None
        with _lock:
            for path in _libraries(namespace) if not _taken(namespace) else ():
                if _load(namespace, path) and _registered(namespace, name):
                    break
            else:
                if not _registered(namespace, name):
                    _missing.add(key)
                    return None
    return getattr(getattr(torch.ops, namespace), name).default


class VllmOperator(Backend):
    """A backend on vLLM's compiled operators."""

    distributions: ClassVar[tuple[str, ...]] = DISTRIBUTIONS

    def unpackaged(self) -> Mapping[str, str]:
        """A hash of the libraries that the variable names, for the vllm that is not installed."""
        facts = tuple(
            (str(p), s.st_mtime_ns, s.st_size) for p in _named() if p.is_file() and (s := p.stat())
        )
        return {DISTRIBUTIONS[0]: _hash(facts)} if facts else {}


@functools.lru_cache(maxsize=4)
def _hash(facts: tuple[tuple[str, int, int], ...]) -> str:
    """One hash of some files; ``facts``: path, time of change and size of each."""
    state = hashlib.sha256()
    for path, _, size in facts:
        state.update(f"{size}\n".encode())
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                state.update(block)
    return "sha256:" + state.hexdigest()[:20]


def why_missing(namespace: str, name: str) -> str:
    """What was found instead of an operator, for the reason shown to the user."""
    if namespace in _errors:
        return _errors[namespace]
    if _taken(namespace):
        return f"another library in namespace {namespace}, without {name}"
    if not _libraries(namespace):
        return "package vllm not installed"
    return "a library without it"


def require(needs: Requirements, namespace: str, name: str, *, load: bool) -> bool:
    """Record a reason unless the operator can be had here.

    ``load`` is False where the library could not run anyway (another kind of device): then only
    its presence is checked.
    """
    if load:
        there = find(namespace, name) is not None
    else:
        there = _registered(namespace, name) or bool(_libraries(namespace))
    if there:
        return True
    wanted = "package vllm"
    if namespace in _FILES:
        file = Path(_FILES[namespace][0]).name
        wanted = f"pip install vllm, or {LIBRARY_VARIABLE}=PATH/{file}"
    return needs.need(False, f"operator {namespace}::{name}", why_missing(namespace, name), wanted)


def operator(namespace: str, name: str) -> Any:
    """As :func:`find`; raises UnsupportedError when there is none."""
    op = find(namespace, name)
    if op is None:
        raise UnsupportedError(
            field_error(
                f"operator {namespace}::{name}", "value", why_missing(namespace, name), "registered"
            )
        )
    return op


@functools.lru_cache(maxsize=64)
def arguments(op: Any) -> tuple[str, ...]:
    """Argument names of an operator, normalised (``b_zeros_or_none`` is ``b_zeros``)."""
    return tuple(_normal(argument.name) for argument in op._schema.arguments)


def call(op: Any, values: Mapping[str, object]) -> Any:
    """Call an operator by its schema with ``values``, keyed by normalised argument names.

    Raises UnsupportedError, before anything is launched, for an argument that is not known here
    and has no default, and for a value that matters (not None, not False) without a place.
    """
    schema = op._schema.arguments
    names = arguments(op)
    unknown = [
        argument.name
        for argument, name in zip(schema, names, strict=True)
        if name not in values and not argument.has_default_value()
    ]
    dropped = [
        name for name, value in values.items() if name not in names and not _is_default(name, value)
    ]
    if unknown or dropped:
        raise UnsupportedError(
            field_error(
                f"operator {op._schema.name}",
                "arguments",
                f"{', '.join(unknown) or 'none'} unknown, {', '.join(dropped) or 'none'} missing",
                "a schema this version of autosel knows",
            )
        )
    defaults = (argument.default_value for argument in schema)
    given = (values.get(name, default) for name, default in zip(names, defaults, strict=True))
    return op(*given)


#: Values that say the same as an operator without the argument does.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "is_k_full": (True,),
    "thread_k": (-1,),
    "thread_n": (-1,),
    "blocks_per_sm": (-1,),
    "use_fp32_reduce": (True,),
}
_ALIASES = {
    "b_type_id": "b_q_type_id",
    "is_full_k": "is_k_full",
    "maybe_expert_map": "expert_map",
}


def _is_default(name: str, value: object) -> bool:
    if value is None or value is False:
        return True
    return any(value is neutral or value == neutral for neutral in _NEUTRAL.get(name, ()))


def _normal(name: str) -> str:
    name = name.removesuffix("_or_none")
    return _ALIASES.get(name, name)


def _registered(namespace: str, name: str) -> bool:
    return hasattr(getattr(torch.ops, namespace), name)


def _taken(namespace: str) -> bool:
    """A second library in one namespace ends the process from C++, so it is never tried."""
    prefix = f"{namespace}::"
    return any(op.startswith(prefix) for op in torch._C._dispatch_get_all_op_names())


def _named() -> list[Path]:
    return [Path(p) for p in os.environ.get(LIBRARY_VARIABLE, "").split(os.pathsep) if p]


def _libraries(namespace: str) -> list[Path]:
    if named := _named():
        return named  # whatever they are called: extracted libraries are often renamed
    for distribution in DISTRIBUTIONS:
        try:
            found = metadata.distribution(distribution)
        except metadata.PackageNotFoundError:
            continue
        paths = [Path(str(found.locate_file(file))) for file in _FILES.get(namespace, ())]
        return [path for path in paths if path.is_file()]
    return []


def _load(namespace: str, path: Path) -> bool:
    if (namespace, path) in _tried:
        return False
    _tried.add((namespace, path))
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError) as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        _errors[namespace] = f"{path}: {detail}"
        return False
    return True
