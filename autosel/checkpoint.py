"""Opens a checkpoint folder, lists its MoE layers and reads one layer's experts at a time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autosel.accounting import TensorUse, account
from autosel.canonical import check_experts, dequantize_expert
from autosel.core import CanonicalExperts, Problem, QuantWeight
from autosel.errors import CheckpointError, field_error
from autosel.expert_names import (
    CORRECTION_BIASES,
    ROUTER_BIASES,
    ROUTER_WEIGHTS,
    STANDARD,
    ExpertNames,
    group_names,
)
from autosel.formats import find_format
from autosel.layer_planner import LayerPlanner
from autosel.layer_scheme import exact_problem
from autosel.model_config import ModelConfig
from autosel.moe_layer import LayerPlan, MoELayer, origin_of, read_tensor
from autosel.rank_problem import expert_range, named_experts, tp_share
from autosel.sharding import (
    slice_outputs,
    spell_out_order,
    tp_inputs,
    tp_outputs,
)
from autosel.stacking import Stack
from autosel.tensor_index import TensorIndex, TensorReader

__all__ = ["Checkpoint", "CheckpointWarning", "MoELayer", "TensorUse"]


class CheckpointWarning(UserWarning):
    """Something in a checkpoint is odd but can be read; the message names the tensor."""


class Checkpoint:
    """One model folder: ``config.json`` and safetensors files. Build it with :meth:`open`."""

    def __init__(self, config: ModelConfig, index: TensorIndex, plans: list[LayerPlan]) -> None:
        self.path = index.folder
        self.notes = index.notes
        self._config = config
        self._index = index
        self._plans = {plan.layer.index: plan for plan in plans}
        self._exact: dict[int, Problem] = {}

    @staticmethod
    def open(path: str | Path) -> Checkpoint:
        """Read configs and tensor headers; no weights.

        Raises ConfigError for a config that is missing, unreadable, contradicting or of a kind
        that is not read, and CheckpointError for files that are missing, unsafe or damaged.
        A fault of one layer alone is told by that layer's status instead.
        """
        folder = Path(path)
        index = TensorIndex.open(folder)
        config = ModelConfig.read(folder)
        fmt = None if config.quant is None else find_format(config.quant)
        rules = None if fmt is None or config.quant is None else fmt.rules(config.quant)
        names = group_names(index.tensors)
        if names:
            # What every layer needs is asked once, so that a bad value stops here, by its line.
            _ = (config.num_experts, config.top_k, config.hidden_size, config.act_dtype("bfloat16"))
        with index.reader() as reader:
            plans = [
                LayerPlanner(config.of(found.module, found.layer), index, fmt, rules).plan(
                    found, position, reader
                )
                for position, found in _numbered(names, config.num_layers)
            ]
        return Checkpoint(config, index, plans)

    @property
    def model_type(self) -> str | None:
        return self._config.model_type

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """The quantisation settings as the folder's config files have them, or None."""
        return None if self._config.quant is None else self._config.quant.data

    @property
    def layers(self) -> tuple[MoELayer, ...]:
        """The MoE layers in order, those that are not quantised or refused included."""
        return tuple(plan.layer for plan in self._plans.values())

    def layer(self, index: int) -> MoELayer:
        """The MoE layer with that number; raises CheckpointError, naming the numbers there are."""
        return self._plan(index).layer

    def exact_problem(self, layer: int) -> Problem:
        """The layer as its weights have it, by which it is tuned and looked up.

        ``MoELayer.problem`` knows the small tensors of expert 0 alone; here those of all experts
        are read, once: zero points, group indexes and biases. Raises CheckpointError for a layer
        without a problem, saying why it has none.
        """
        plan = self._plan(layer)
        problem = plan.layer.problem
        if problem is None:
            raise CheckpointError(f"layer {layer}: {plan.layer.status}: {plan.layer.reason}")
        if layer not in self._exact:
            with self._index.reader() as reader:
                self._exact[layer] = exact_problem(plan, problem, self._index, reader)
        return self._exact[layer]

    def accounting(self) -> tuple[TensorUse, ...]:
        """Every tensor in and around the experts as used or not used, and why."""
        return tuple(account(self._plans.values(), self._index))

    def read_experts(
        self,
        layer: int,
        *,
        act_dtype: str | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        ep_rank: int = 0,
        ep_size: int = 1,
        held: Sequence[int] | None = None,
    ) -> CanonicalExperts:
        """One layer's experts on the CPU, or a rank's part of them.

        ``held`` names the experts to read, in the order in which they are to lie, in place of the
        equal run that ``ep_rank`` of ``ep_size`` has; each at most once.
        Reads one expert at a time into memory that is allocated once: at the peak less than three
        times the layer's packed bytes. ``act_dtype`` replaces the model's. Raises CheckpointError
        naming file, tensor and expert; nothing is guessed or left uninitialised. Findings that
        do not stop the reading are given as one CheckpointWarning.
        """
        plan = self._plan(layer)
        problem = self.exact_problem(layer)
        local: Sequence[int] = expert_range(problem.num_experts, ep_rank, ep_size)
        if held is not None:
            local = named_experts(problem.num_experts, held)
        rows = tp_share(problem.intermediate_size, tp_rank, tp_size)
        w13 = Stack(len(local), problem.num_shards * rows)
        w2 = Stack(len(local), problem.hidden_size)
        notes: list[str] = []
        with self._index.reader() as reader:
            for slot, expert in enumerate(local):
                parts = self._expert(plan, reader, expert, notes)
                where = f"{plan.layer.name}.{expert}"
                down = parts.pop("down")
                if problem.w2.has_g_idx:
                    down = spell_out_order(down)
                _require_one_order(parts, where)
                for number, part in enumerate(parts.values()):  # gate, up
                    w13.put(slot, number * rows, tp_outputs(part, tp_rank, tp_size), where)
                w2.put(slot, 0, tp_inputs(down, tp_rank, tp_size), where)
        if notes:
            more = f" (and {len(notes) - 1} more like it)" if len(notes) > 1 else ""
            warnings.warn(notes[0] + more, CheckpointWarning, stacklevel=2)
        has_bias = problem.has_bias or w13.has("bias") or w2.has("bias")
        first, second = (
            stack.finish(symmetric=scheme.symmetric, has_g_idx=scheme.has_g_idx, has_bias=has_bias)
            for stack, scheme in ((w13, problem.w13), (w2, problem.w2))
        )
        experts = CanonicalExperts(
            replace(
                problem,
                num_local_experts=len(local),
                intermediate_size=rows,
                w13=first.scheme,
                w2=second.scheme,
                has_bias=has_bias,
                act_dtype=act_dtype or problem.act_dtype,
            ),
            first,
            second,
        )
        check_experts(experts)
        return experts

    def dequantize(self, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and ``[out, in]`` weights of one layer, an expert projection at a time.

        The name is the checkpoint's own module name plus ``.weight`` (where experts are stacked,
        ``<experts>.<number>.gate_proj.weight`` and so on), the dtype that of the scales: the
        product is formed in float32 and rounded once. Layers that cannot be stacked, because gate
        and up differ, are given too; raises CheckpointError for those that cannot be read.
        """
        plan = self._plan(layer)
        if not plan.sources:
            raise CheckpointError(f"layer {layer}: {plan.layer.status}: {plan.layer.reason}")
        return self._dequantized(plan)

    def router(self, layer: int) -> dict[str, torch.Tensor]:
        """The router's tensors as stored: ``weight`` ``[num_experts, hidden_size]``, and, where
        the model has them, ``bias`` and ``e_score_correction_bias`` ``[num_experts]``.

        A quantised router's weight is not read and not there. The rule is ``MoELayer.router``.
        """
        plan = self._plan(layer)
        names = plan.names.router
        count = plan.layer.num_experts
        found: dict[str, torch.Tensor] = {}
        with self._index.reader() as reader:
            for key, spellings in (
                ("weight", ROUTER_WEIGHTS),
                ("bias", ROUTER_BIASES),
                ("e_score_correction_bias", CORRECTION_BIASES),
            ):
                name = next((names[s] for s in spellings if s in names), None)
                if name is None:
                    continue
                tensor = reader.get(name).clone()
                tensor = tensor if key == "weight" else tensor.flatten()
                if tensor.ndim != (2 if key == "weight" else 1) or len(tensor) != count:
                    raise CheckpointError(
                        field_error(name, "shape", list(tensor.shape), f"{count} experts first")
                    )
                found[key] = tensor
        return found

    def _plan(self, index: int) -> LayerPlan:
        if index not in self._plans:
            known = ", ".join(map(str, self._plans)) or "none"
            raise CheckpointError(
                field_error(str(self.path), "MoE layer", index, f"one of {known}")
            )
        return self._plans[index]

    def _dequantized(self, plan: LayerPlan) -> Iterator[tuple[str, torch.Tensor]]:
        with self._index.reader() as reader:
            for expert in range(plan.layer.num_experts):
                for projection, weight in self._expert(plan, reader, expert, []).items():
                    source = plan.source(expert, projection).tensors
                    own = source.expert is not None and source.projection == projection
                    module = (
                        source.module
                        if own
                        else f"{plan.layer.name}.{expert}.{STANDARD[projection]}"
                    )
                    values = dequantize_expert(weight, 0, weight.scales.dtype)
                    _require_finite(values, f"{module}.weight")
                    yield f"{module}.weight", values

    def _expert(
        self, plan: LayerPlan, reader: TensorReader, expert: int, notes: list[str]
    ) -> dict[str, QuantWeight]:
        """One expert's gate, up and down; a stored gate_up is read once and cut in halves."""
        assert plan.format is not None
        parts: dict[str, QuantWeight] = {}
        for projection in plan.projections:
            source = plan.source(expert, projection)
            stored = source.tensors.projection
            if stored not in parts:
                origin = origin_of(self._index, source.tensors, expert)
                tensors = {
                    suffix: read_tensor(reader, source.tensors, suffix, expert)
                    for suffix in source.tensors.names
                    if suffix in plan.format.suffixes
                }
                parts[stored] = plan.format.read(
                    tensors, source.quant, source.num_outputs, source.num_inputs, origin
                )
                notes += origin.notes
            if stored == "gate_up":
                half = source.num_outputs // 2
                first = 0 if projection == "gate" else half
                parts[projection] = slice_outputs(parts[stored], first, half)
        return {projection: parts[projection] for projection in plan.projections}


def _require_finite(values: torch.Tensor, name: str) -> None:
    """A scale may take codes beyond what its own type holds."""
    bad = values.numel() - int(torch.isfinite(values).sum())
    if bad:
        dtype = str(values.dtype).removeprefix("torch.")
        raise CheckpointError(
            field_error(name, "dequantised values", f"{bad} beyond {dtype}", "finite ones")
        )


def _require_one_order(parts: dict[str, QuantWeight], where: str) -> None:
    """Gate and up share one stacked matrix, so they must share their group index."""
    indexes = [part.g_idx for part in parts.values()]
    if len(indexes) == 2:
        left, right = indexes
        same = torch.equal(left, right) if left is not None and right is not None else left is right
        if not same:
            raise CheckpointError(
                field_error(where, "group index of gate and up", "different", "equal")
            )


def _numbered(names: list[ExpertNames], num_layers: int) -> list[tuple[int, ExpertNames]]:
    """Each layer with its number: the decoder's own for the main stack, then counting on.

    The main stack is the prefix with most layers; draft heads and a talker have other prefixes.
    """
    counts: dict[str, int] = {}
    for found in names:
        counts[found.prefix] = counts.get(found.prefix, 0) + 1
    main = max(counts, key=lambda p: (counts[p], "mtp" not in p, -len(p)), default="")
    taken: dict[int, ExpertNames] = {}
    others: list[ExpertNames] = []
    for found in names:
        if found.prefix == main and found.layer not in taken:
            taken[found.layer] = found
        else:
            others.append(found)
    following = max([num_layers, *(n + 1 for n in taken)])
    return [*taken.items(), *((following + i, found) for i, found in enumerate(others))]
