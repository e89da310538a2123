"""Backends whose kernels come from an optional Python package: found, imported, explained."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from autosel.errors import UnsupportedError, field_error
from autosel.interfaces import Requirements


def member(where: str, module: str, name: str, required: str) -> Any:
    """``module.name``. Raises UnsupportedError, in one line, when it cannot be had."""
    try:
        loaded = importlib.import_module(module)
    except Exception as error:  # packages import device bindings, which fail in many ways
        detail = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnsupportedError(field_error(where, "import", detail, "no error")) from error
    if not hasattr(loaded, name):
        raise UnsupportedError(field_error(where, name, "missing", required))
    return getattr(loaded, name)


def require(
    needs: Requirements,
    distribution: str,
    module: str,
    install: str,
    load: Callable[[], object] | None = None,
) -> None:
    """The package is there and, where ``load`` is given, what is used of it can be imported.

    It is looked for by its module: an extracted copy on the path has no distribution, and builds
    for other devices come as distributions of other names.
    """
    what = f"package {distribution}"
    there = importlib.util.find_spec(module) is not None
    needs.need(there, what, "not installed", install)
    if there and load is not None:
        try:
            load()
        except UnsupportedError as error:
            needs.need(False, what, str(error), "a working import")


def require_triton(needs: Requirements) -> None:
    require(needs, "triton", "triton", "pip install triton")
