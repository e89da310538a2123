"""A transformers model whose routed experts autosel runs.

Nothing of transformers is imported: its blocks are known by the names of their classes, which are
those of version 4.57; the experts' modules of version 5 are called in one common way.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from autosel.checkpoint import Checkpoint
from autosel.errors import AutoselError, CheckpointError, UnsupportedError, field_error
from autosel.layer import FusedMoE
from autosel.layer_loading import load_moe_layers
from autosel.layer_surroundings import for_building
from autosel.routing_spec import RouterSpec
from autosel.store import Database

__all__ = ["replace_experts"]

_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def replace_experts(
    model: nn.Module,
    checkpoint_path: str | Path,
    *,
    device: str | torch.device | None = None,
    act_dtype: str | None = None,
    db: Database = None,
    **options: Any,
) -> dict[int, FusedMoE]:
    """Let autosel run the routed experts of ``model``; returns the new layers by their number.

    model            a transformers model of the checkpoint, in eval mode. Its routers, shared
                     experts and everything else stay; its own experts are dropped and may have
                     been anything, also on the meta device.
    checkpoint_path  the quantised checkpoint the experts are read from
    device           where the experts run; for each layer its router's device when left out
    act_dtype        the dtype of the model when left out
    options          of :meth:`autosel.FusedMoE.from_checkpoint`

    Layers that the checkpoint does not quantise are left alone. Raises UnsupportedError for a
    model without a block that is known, and CheckpointError when checkpoint and model are not the
    same model (another number of layers, other sizes, another router or routing rule). Then
    nothing is replaced.
    """
    blocks = _blocks(model)
    with for_building():
        wanted = _wanted(Checkpoint.open(checkpoint_path), blocks)
    places: dict[str | torch.device, list[int]] = {}
    for index, block in wanted.items():
        where = device if device is not None else _device(_router_weight(block))
        places.setdefault(where, []).append(index)
    first = _router_weight(next(iter(wanted.values())))
    layers: dict[int, FusedMoE] = {}
    for where, indices in places.items():
        layers |= load_moe_layers(
            checkpoint_path,
            layers=indices,
            device=where,
            act_dtype=act_dtype or _dtype(model, first),
            db=db,
            **options,
        )
    for index, block in wanted.items():
        join = _join(block)
        assert join is not None, "only known blocks are wanted"
        join(block, layers[index])
    return {index: layers[index] for index in wanted}


def _wanted(opened: Checkpoint, blocks: dict[int, Any]) -> dict[int, Any]:
    """Those of the model's blocks that the checkpoint quantises; refuses another model's."""
    known = {layer.index: layer for layer in opened.layers}
    wanted = {}
    for index, block in blocks.items():
        if index not in known:
            raise CheckpointError(
                field_error(str(opened.path), f"MoE layer {index}", "none", "one as in the model")
            )
        if known[index].status == "unquantized":
            continue
        _check_router(opened, index, block)
        _check_rule(f"{opened.path}: layer {index}", known[index].router, block)
        wanted[index] = block
    if not wanted:
        raise CheckpointError(
            field_error(str(opened.path), "quantised MoE layers", "none", "at least one")
        )
    return wanted


Join = Callable[[Any, FusedMoE], None]


def _as_experts(block: Any, layer: FusedMoE) -> None:
    """The block calls ``experts(hidden_states, top_k_index, top_k_weights)``."""
    block.experts = layer


def _as_moe(block: Any, layer: FusedMoE) -> None:
    """The block calls ``self.moe(hidden_states, ids, weights)`` and adds its shared experts."""

    def moe(
        self: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out: torch.Tensor = self.experts(hidden, ids, weights)
        return out

    block.experts = layer
    block.moe = MethodType(moe, block)


def _as_forward(block: Any, layer: FusedMoE) -> None:
    """The block loops over its experts: its forward is replaced, router and result are kept."""

    def forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.gate(hidden_states.reshape(-1, hidden_states.shape[-1]))
        return self.experts.apply_monolithic(hidden_states, logits), logits

    block.experts = layer
    block.forward = MethodType(forward, block)


def _as_forward_with_shared(block: Any, layer: FusedMoE) -> None:
    """The same with one shared expert behind a sigmoid of its own."""

    def forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.gate(hidden_states.reshape(-1, hidden_states.shape[-1]))
        out = self.experts.apply_monolithic(hidden_states, logits)
        share = self.shared_expert_gate(hidden_states).sigmoid()
        return out + share * self.shared_expert(hidden_states), logits

    block.experts = layer
    block.forward = MethodType(forward, block)


def _as_llama4(block: Any, layer: FusedMoE) -> None:
    """The router gives scores of every expert beside its logits; the shared expert has no gate."""

    def forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, logits = self.router(rows)
        return self.shared_expert(rows) + self.experts.apply_monolithic(rows, logits), logits

    block.experts = layer
    block.forward = MethodType(forward, block)


#: How each block of transformers 4.57 takes its new experts. One line adds a model.
_JOINS: dict[str, Join] = {
    "MixtralSparseMoeBlock": _as_forward,
    "MiniMaxSparseMoeBlock": _as_forward,
    "OlmoeSparseMoeBlock": _as_forward,
    "FlexOlmoSparseMoeBlock": _as_forward,
    "Qwen3MoeSparseMoeBlock": _as_forward,
    "Qwen2MoeSparseMoeBlock": _as_forward_with_shared,
    "Qwen3NextSparseMoeBlock": _as_forward_with_shared,
    "DeepseekV2MoE": _as_moe,
    "DeepseekV3MoE": _as_moe,
    "Dots1MoE": _as_moe,
    "Glm4MoeMoE": _as_moe,
    "Glm4vMoeTextMoE": _as_moe,
    "Llama4TextMoe": _as_llama4,
}


#: These route by the checkpoint's rule, the others take what the model's own router says.
_ROUTE_HERE = (_as_forward, _as_forward_with_shared, _as_llama4)


def _join(block: nn.Module) -> Join | None:
    """How this module takes new experts; None where it has none, or is not known."""
    experts = getattr(block, "experts", None)
    if not isinstance(experts, nn.Module):
        return None
    parameters = list(inspect.signature(experts.forward).parameters)
    if parameters[:3] == ["hidden_states", "top_k_index", "top_k_weights"]:
        return _as_experts  # transformers 5, whatever the model
    return _JOINS.get(type(block).__name__)


def _blocks(model: nn.Module) -> dict[int, Any]:
    """The model's MoE blocks by the number of their layer."""
    found: dict[int, Any] = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, "experts", None), FusedMoE):
            raise AutoselError(
                field_error(name, "experts", "replaced already", "the model's own experts")
            )
        if _join(module) is None:
            continue
        number = _NUMBER.search(f"{name}.")
        index = int(number[1]) if number else len(found)
        if index in found:
            raise UnsupportedError(
                field_error(name, f"MoE blocks of layer {index}", "two", "one stack of layers")
            )
        found[index] = module
    if not found:
        raise UnsupportedError(
            field_error(type(model).__name__, "MoE blocks", "none known", ", ".join(_JOINS))
        )
    return found


def _router_weight(block: Any) -> torch.Tensor:
    router = block.gate if hasattr(block, "gate") else block.router
    weight: torch.Tensor = router.weight
    return weight


def _check_router(opened: Checkpoint, index: int, block: Any) -> None:
    """The model's router must be the checkpoint's, up to rounding to the model's dtype."""
    ours = _router_weight(block)
    stored = opened.router(index).get("weight")
    if stored is None:  # a quantised router is not read
        return
    where = f"{opened.path}: layer {index}: router"
    if stored.shape != ours.shape:
        raise CheckpointError(
            field_error(where, "shape", list(stored.shape), f"{list(ours.shape)} as in the model")
        )
    if ours.is_meta:
        return
    same = torch.allclose(
        stored.float(), ours.detach().cpu().float(), rtol=1e-2, atol=1e-6, equal_nan=False
    )
    if not same:
        raise CheckpointError(
            field_error(where, "weights", "others than the model's", "the checkpoint of this model")
        )


def _check_rule(where: str, rule: RouterSpec | None, block: Any) -> None:
    """A model may have been loaded with another rule than the checkpoint's config states."""
    if rule is None or _join(block) not in _ROUTE_HERE:
        return
    for name, stated in (("top_k", rule.top_k), ("norm_topk_prob", rule.renormalize)):
        own = getattr(block, name, stated)
        if own != stated:
            raise CheckpointError(
                field_error(f"{where}: router", name, stated, f"{own} as in the model")
            )


def _device(weight: torch.Tensor) -> torch.device:
    if weight.is_meta:
        raise AutoselError(
            field_error("replace_experts", "device", "a model on meta", "device= to be given")
        )
    return weight.device


def _dtype(model: nn.Module, router: torch.Tensor) -> str:
    """The dtype of the activations: the model's own word, else its router's."""
    dtype = getattr(model, "dtype", None) or router.dtype
    return str(dtype).removeprefix("torch.")
