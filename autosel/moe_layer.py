"""One MoE layer as the files describe it, and the plan by which its weights are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from autosel.core import Problem
from autosel.errors import CheckpointError, field_error
from autosel.expert_names import ExpertNames, LinearTensors
from autosel.formats.base import Format, LinearQuant, Origin
from autosel.routing_spec import RouterSpec
from autosel.tensor_index import TensorIndex, TensorReader

LayerStatus = Literal["quantized", "unquantized", "refused"]


@dataclass(frozen=True, slots=True)
class MoELayer:
    """One MoE layer of a checkpoint.

    ``index`` is the number to ask for; it is the decoder layer's own number, except in a second
    stack of layers (a draft head, a talker), which counts on after the first. ``problem`` is the
    whole layer on one rank, as far as headers and expert 0 tell
    (:meth:`autosel.checkpoint.Checkpoint.exact_problem` looks at all experts), and None unless
    ``status`` is ``quantized``; ``reason`` says why then.
    """

    index: int
    name: str
    format: str
    status: LayerStatus
    reason: str = ""
    problem: Problem | None = None
    num_experts: int = 0
    num_shared_experts: int = 0
    router: RouterSpec | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LinearSource:
    """One stored projection with what is needed to read it. ``gate_up`` has both in one."""

    tensors: LinearTensors
    quant: LinearQuant
    num_outputs: int
    num_inputs: int


@dataclass(slots=True)
class LayerPlan:
    """How to read a layer: ``sources`` is filled when every projection can be dequantised."""

    layer: MoELayer
    names: ExpertNames
    format: Format | None
    sources: dict[tuple[int | None, str], LinearSource] = field(default_factory=dict)

    def source(self, expert: int, projection: str) -> LinearSource:
        """Where one expert's gate, up or down is stored."""
        for key in (
            (expert, projection),
            (None, projection),
            (expert, "gate_up"),
            (None, "gate_up"),
        ):
            if key in self.sources and (key[1] != "gate_up" or projection != "down"):
                return self.sources[key]
        raise CheckpointError(missing_projection(self.names, expert, projection))

    @property
    def projections(self) -> tuple[str, ...]:
        """``gate, up, down``, or ``up, down`` without gates."""
        has_gate = any(proj in ("gate", "gate_up") for _, proj in self.sources)
        return ("gate", "up", "down") if has_gate else ("up", "down")


def read_tensor(
    reader: TensorReader, linear: LinearTensors, suffix: str, expert: int
) -> torch.Tensor:
    """One expert's tensor, cut out of the stacked one where they are stacked."""
    name = linear.names[suffix]
    return reader.get(name) if linear.expert is not None else reader.get_at(name, expert)


def origin_of(index: TensorIndex, linear: LinearTensors, expert: int | None) -> Origin:
    """What error messages say about one expert's linear."""
    files = {suffix: index.tensors[name].file for suffix, name in linear.names.items()}
    return Origin(linear.module, expert, linear.names, files)


def missing_projection(names: ExpertNames, expert: int, projection: str) -> str:
    return field_error(
        f"{names.module}.{expert}", f"{projection} projection", "no tensor", "a packed weight"
    )


def who(names: ExpertNames, expert: int | None, projection: str) -> str:
    """A projection in words, for messages."""
    which = "all experts" if expert is None else f"expert {expert}"
    return f"layer {names.layer}, {which}, {projection}"
