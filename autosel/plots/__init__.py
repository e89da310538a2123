"""Figures: each file is one kind, found by its name; nothing else lists them.

A kind has a ``*_data`` function that gives a table, a ``plot_*`` function that only draws it, and
a :class:`~autosel.plots._common.Kind` that joins both for :class:`~autosel.evidence.Evidence`.
Times are microseconds a call. Drawing needs matplotlib and never a display
(:mod:`autosel.plot_style`).
"""

from __future__ import annotations

import importlib
import pkgutil

from autosel.errors import AutoselError, field_error
from autosel.plots._common import Kind, Options

__all__ = ["Kind", "Options", "kind", "names"]


def names() -> list[str]:
    """Every kind of figure."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def kind(name: str) -> Kind:
    """The kind called ``name``; AutoselError, with the names there are, for another."""
    if name not in names():
        raise AutoselError(field_error("plot", "kind", repr(name), "one of " + ", ".join(names())))
    found: Kind = importlib.import_module(f"{__name__}.{name}").KIND
    return found
