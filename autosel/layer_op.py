"""The layer as one torch operator, so that torch.compile keeps it in the graph as it is.

``autosel::fused_moe(x, topk_ids, topk_weights, layer)``: ``layer`` is the name of a live
:class:`autosel.layer.FusedMoE`. Its packed weights are no arguments: they never change.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any, NoReturn

import torch

from autosel.errors import AutoselError, field_error
from autosel.layer_runtime import LayerRuntime

_layers: weakref.WeakValueDictionary[str, LayerRuntime] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def enroll(runtime: LayerRuntime) -> str:
    """Make ``runtime`` known to the operator; returns the name to pass. Registers it when first
    needed, so that importing does nothing."""
    _register()
    name = f"layer_{next(_numbers)}"
    _layers[name] = runtime
    return name


@functools.cache
def _register() -> Any:
    library: Any = torch.library.Library("autosel", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("fused_moe(Tensor x, Tensor topk_ids, Tensor topk_weights, str layer) -> Tensor")
    library.impl("fused_moe", _run, "CompositeExplicitAutograd")
    torch.library.register_fake("autosel::fused_moe", _fake, lib=library)
    torch.library.register_autograd("autosel::fused_moe", _backward, lib=library)
    return library


def _run(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, layer: str
) -> torch.Tensor:
    runtime = _layers.get(layer)
    if runtime is None:
        raise AutoselError(
            field_error("autosel::fused_moe", "layer", layer, "a FusedMoE that still exists")
        )
    return runtime.run(x, topk_ids, topk_weights, compiled=True)


def _fake(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, layer: str
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _backward(ctx: Any, grad: torch.Tensor) -> NoReturn:
    raise AutoselError(
        field_error("FusedMoE", "gradient", "a backward pass", "inference: weights are packed")
    )
