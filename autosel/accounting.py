"""Accounts for every tensor in and around the experts: used, or not used and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autosel.moe_layer import LayerPlan
from autosel.tensor_index import TensorIndex


@dataclass(frozen=True, slots=True)
class TensorUse:
    """One tensor of an MoE block. ``layer`` is the layer's index, None where it has none."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    layer: int | None
    used: bool
    why: str


def account(plans: Iterable[LayerPlan], index: TensorIndex) -> Iterator[TensorUse]:
    """Every expert, router and shared-expert tensor, and any other that has expert in its name."""
    seen: set[str] = set()
    for plan in plans:
        for name, used, why in _layer_rows(plan):
            seen.add(name)
            info = index.tensors[name]
            yield TensorUse(name, info.file, info.dtype, info.shape, plan.layer.index, used, why)
    for name, info in index.tensors.items():
        if "expert" in name and name not in seen:
            yield TensorUse(
                name, info.file, info.dtype, info.shape, None, False, "unknown: no known layer"
            )
    for info in index.unnamed:
        if "expert" in info.name:
            why = "not named in the index: not read"
            yield TensorUse(info.name, info.file, info.dtype, info.shape, None, False, why)


def _layer_rows(plan: LayerPlan) -> Iterator[tuple[str, bool, str]]:
    layer, names = plan.layer, plan.names
    known = plan.format.suffixes if plan.format else ()
    for linear in names.linears.values():
        who = "all experts" if linear.expert is None else f"expert {linear.expert}"
        for suffix, name in linear.names.items():
            if layer.status == "unquantized":
                yield name, False, f"unquantised: {layer.reason}"
            elif layer.status == "refused":
                yield name, False, f"layer refused: {layer.reason}"
            elif suffix not in known:
                yield name, False, f"unknown: no tensor of {layer.format}"
            else:
                yield name, True, f"{who}, {linear.projection}"
    quantised = any("the router is quantised" in note for note in layer.notes)
    for name in names.router.values():
        yield name, False, "router, quantised" if quantised else "router"
    for name in names.shared:
        yield name, False, "shared expert"
    for name in names.unknown:
        yield name, False, "unknown: no known name"
