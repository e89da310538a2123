"""Recognises expert tensors, routers and shared experts by their names in the checkpoint.

    <prefix>layers.<L>.<path>.experts.<e>.<proj>.<suffix>     one linear an expert
    <prefix>layers.<L>.<path>.experts.<proj>[._]<suffix>      all experts in one 3-D tensor

The prefix may be anything (``model.``, ``language_model.model.``, ``backbone.``) and the path is
the model's own (``mlp``, ``block_sparse_moe``, ``feed_forward``, ``mixer``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from autosel.module_rules import ancestors

#: Names of one expert's linears. Mixtral, MiniMax and Phi-MoE number theirs: w2 is the last.
PROJECTIONS = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
    "gate_up_proj": "gate_up",
    "w13": "gate_up",
    # Grok and Granite
    "linear": "gate",
    "linear_v": "up",
    "linear_1": "down",
    "input_linear": "gate_up",
    "output_linear": "down",
}
#: Names under which the canonical projections are written out.
STANDARD = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}

#: Modules beside the experts that decide the routing, with the name of their weight and bias.
ROUTER_WEIGHTS = (
    "gate.weight",
    "router.weight",
    "router.layer.weight",
    "gate.wg.weight",
    "router.gate.weight",
)
ROUTER_BIASES = ("gate.bias", "router.bias")
CORRECTION_BIASES = (
    "gate.e_score_correction_bias",
    "e_score_correction_bias",
    "router.e_score_correction_bias",
    "moe_statics.e_score_correction_bias",
    "gate.moe_statics.e_score_correction_bias",
    "gate.expert_bias",
    "expert_bias",
)
_ROUTER_PARTS = ("gate", "router", "moe_statics", "e_score_correction_bias", "expert_bias")

_LAYER = re.compile(r"^(?P<prefix>(?:.*?\.)?)(?:layers|blocks|h)\.(?P<layer>\d{1,9})\.")
_STACKED = re.compile(
    r"^(?P<proj>" + "|".join(sorted(PROJECTIONS, key=len, reverse=True)) + r")"
    r"(?:[._](?P<suffix>\w+))?$"
)
#: Stacked modules that stand beside the router instead of under a module named experts.
_BARE = re.compile(r"^(?P<parent>.*\.block_sparse_moe)\.(?P<rest>(?:input|output)_linear\.\w+)$")


@dataclass(frozen=True, slots=True)
class LinearTensors:
    """The tensors of one projection: suffix (``qweight``) to full name.

    ``expert`` is None where one tensor holds all experts. ``module`` is the full name without the
    suffix. A stacked tensor without any suffix is filed under ``weight``.
    """

    module: str
    projection: str
    expert: int | None
    names: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class ExpertNames:
    """All that the names say about one MoE layer.

    ``module`` is the experts' module, ``parent`` the block that also holds the router.
    """

    module: str
    parent: str
    prefix: str
    layer: int
    linears: dict[tuple[int | None, str], LinearTensors] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    repeated: list[tuple[str, str]] = field(default_factory=list)
    router: dict[str, str] = field(default_factory=dict)  # name below parent -> full name
    shared: list[str] = field(default_factory=list)


def group_names(names: Iterable[str]) -> list[ExpertNames]:
    """The MoE layers of a checkpoint, in order of prefix and number, and routers left alone.

    A router whose experts are nowhere gives a layer without linears, so that it is not overlooked.
    """
    layers: dict[str, ExpertNames] = {}
    rest: list[str] = []
    for name in names:
        split = _split(name)
        if split is None:
            rest.append(name)
            continue
        module, parent, tail = split
        layer = layers.get(module)
        if layer is None:
            found = _LAYER.match(name)
            if found is None:
                rest.append(name)
                continue
            layer = ExpertNames(module, parent, found["prefix"], int(found["layer"]))
            layers[module] = layer
        _add(layer, name, tail)
    parents = {layer.parent: layer for layer in layers.values()}
    tails = {parent.rsplit(".", 1)[-1] for parent in parents}
    for name in rest:
        owner = next((p for p in ancestors(name) if p in parents), None)
        if owner is None:
            owner = _lonely_router(name, tails)
            if owner is None:
                continue
            found = _LAYER.match(name)
            assert found is not None
            layer = ExpertNames(f"{owner}.experts", owner, found["prefix"], int(found["layer"]))
            layers[layer.module] = parents[owner] = layer
        below = name[len(owner) + 1 :]
        if below.split(".", 1)[0] in _ROUTER_PARTS:
            parents[owner].router[below] = name
        elif "shared" in below.split(".", 1)[0]:
            parents[owner].shared.append(name)
        else:
            parents[owner].unknown.append(name)
    return sorted(layers.values(), key=lambda layer: (layer.prefix, layer.layer, layer.module))


def _split(name: str) -> tuple[str, str, str] | None:
    """Experts' module, its parent and what follows; None for a name that is no expert's."""
    at = name.find(".experts.")
    if at >= 0:
        return name[: at + 8], name[:at], name[at + 9 :]
    bare = _BARE.match(name)
    return None if bare is None else (bare["parent"], bare["parent"], bare["rest"])


def _add(layer: ExpertNames, name: str, tail: str) -> None:
    # Nearly every tensor of a large checkpoint passes here, so the common form is split by hand.
    parts = tail.split(".")
    if len(parts) == 3 and parts[0].isdecimal() and len(parts[0]) < 10 and parts[1] in PROJECTIONS:
        expert: int | None = int(parts[0])
        proj, suffix = parts[1], parts[2]
    else:
        match = _STACKED.match(tail)
        if match is None:
            layer.unknown.append(name)
            return
        expert, proj, suffix = None, match["proj"], match["suffix"] or "weight"
    projection = PROJECTIONS[proj]
    linear = layer.linears.get((expert, projection))
    if linear is None:
        module = name if name.endswith(proj) else name[: -len(suffix) - 1]
        linear = LinearTensors(module, projection, expert)
        layer.linears[expert, projection] = linear
    if suffix in linear.names:
        layer.repeated.append((linear.names[suffix], name))  # one linear under two spellings
        layer.unknown.append(name)
    else:
        linear.names[suffix] = name


def _lonely_router(name: str, tails: set[str]) -> str | None:
    """The parent of a router weight in a block like those that hold experts elsewhere."""
    for ending in ROUTER_WEIGHTS:
        parent = name.removesuffix("." + ending)
        if parent != name and parent.rsplit(".", 1)[-1] in tails and _LAYER.match(name):
            return parent
    return None
