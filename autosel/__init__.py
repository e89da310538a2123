"""autosel: pick the fastest correct way to run a quantised mixture-of-experts layer here.

The names in ``__all__`` are imported when they are first used, so that ``import autosel`` costs
nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autosel.api import explain, open_checkpoint, pack, plan, plot, report, source, sweep
    from autosel.layer import FusedMoE
    from autosel.layer_loading import load_moe_layers

__version__ = "0.1.0"

#: Where a name comes from.
_MODULES = {
    "FusedMoE": "layer",
    "explain": "api",
    "load_moe_layers": "layer_loading",
    "open_checkpoint": "api",
    "pack": "api",
    "plan": "api",
    "plot": "api",
    "report": "api",
    "source": "api",
    "sweep": "api",
}

__all__ = [
    "FusedMoE",
    "__version__",
    "explain",
    "load_moe_layers",
    "open_checkpoint",
    "pack",
    "plan",
    "plot",
    "report",
    "source",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'autosel' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"autosel.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
