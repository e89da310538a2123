"""autosel: pick the fastest correct way to run a quantised mixture-of-experts layer here.

The functions named in ``__all__`` are those of :mod:`autosel.api`; they are imported when they are
first used, so that ``import autosel`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autosel.api import explain, open_checkpoint, plot, source, sweep

__version__ = "0.1.0"

__all__ = ["__version__", "explain", "open_checkpoint", "plot", "source", "sweep"]


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module 'autosel' has no attribute {name!r}")
    from autosel import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
