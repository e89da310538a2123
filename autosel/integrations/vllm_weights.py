"""A vLLM layer's loaded parameters as autosel's weights, proven against the checkpoint.

vLLM's parameters are what it cut and stacked while loading. Autosel reads a few of the same
experts from the files with a reader of its own and compares bit by bit, so that gate and up in
another order, another order of nibbles, another rank's part or another layer is noticed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autosel.core import CanonicalExperts, Problem, QuantWeight
from autosel.errors import AutoselError, CheckpointError, UnsupportedError, field_error
from autosel.integrations.vllm_reasons import differences
from autosel.layer_place import held_experts
from autosel.layer_stacked import stacked_experts
from autosel.sources import CheckpointSource

_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class KnownMethod:
    """One of vLLM's WNA16 MoE methods: its parameters' format and how it reads the weights."""

    format: str
    scales: str
    symmetric: Callable[[Any], bool]
    zeros_minus_one: Callable[[Any], bool] = lambda method: False


def _gptq_v1(method: Any) -> bool:
    return bool(method.quant_config.full_config.get("checkpoint_format") != "gptq_v2")


#: By class name, since vLLM's own loader goes by it too.
METHODS = {
    "AutoGPTQMoEMethod": KnownMethod(
        "gptq", "scales", lambda method: bool(method.quant_config.is_sym), _gptq_v1
    ),
    "AutoAWQMoEMethod": KnownMethod(
        "awq", "scales", lambda method: not method.quant_config.zero_point
    ),
    "CompressedTensorsWNA16MoEMethod": KnownMethod(
        "compressed-tensors", "weight_scale", lambda method: bool(method.symmetric)
    ),
}


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The part of a checkpoint's layer that a vLLM layer holds.

    source      reads the same part from the files
    problem     ``source.problem``, the key of decisions
    expert_map  int ``[num_experts]``, local id or -1; None where every expert is here
    scales      dtype in which vLLM holds scales, into which it rounded them
    """

    source: CheckpointSource
    problem: Problem
    expert_map: torch.Tensor | None
    scales: torch.dtype

    def read(self, where: torch.device) -> CanonicalExperts:
        """From the files, with scales rounded as vLLM's are."""
        return self._rounded(self.source.load(where))

    def _rounded(self, experts: CanonicalExperts) -> CanonicalExperts:
        def rounded(weight: QuantWeight) -> QuantWeight:
            return replace(weight, scales=weight.scales.to(self.scales).to(weight.scales.dtype))

        return replace(experts, w13=rounded(experts.w13), w2=rounded(experts.w2))

    def require_same(self, loaded: CanonicalExperts) -> None:
        """CheckpointError where ``loaded`` has other bits than the files: first, middle and last
        expert are read."""
        count = self.problem.num_local_experts
        slots = sorted({0, count // 2, count - 1})
        held = self.source.held or tuple(range(self.problem.num_experts))
        source = replace(self.source, held=tuple(held[slot] for slot in slots))
        stored = self._rounded(source.load())
        for name in ("w13", "w2"):
            ours, theirs = getattr(loaded, name), getattr(stored, name)
            for at, slot in enumerate(slots):
                what = _unlike(ours, slot, theirs, at)
                if what:
                    where = f"{self.source.label}: {name} of expert {held[slot]}"
                    raise CheckpointError(
                        field_error(where, what, "others in vLLM's parameters", "the checkpoint's")
                    )


def find_part(layer: Any, method: Any, folder: str | Path) -> Part:
    """Which part of the checkpoint in ``folder`` this ``RoutedExperts`` holds.

    Raises AutoselError for a layer that cannot be found there, or that is another one.
    """
    number = _NUMBER.search(f"{layer.layer_name}.")
    if number is None:
        raise UnsupportedError(
            field_error(layer.layer_name, "name", "no layer's number", "layers.NUMBER")
        )
    moe = layer.moe_config
    parallel = moe.moe_parallel_config
    source = CheckpointSource(
        str(folder),
        int(number[1]),
        int(parallel.tp_rank),
        int(parallel.tp_size),
        act_dtype=str(moe.in_dtype).removeprefix("torch."),
    )
    placed = layer.expert_map_manager.expert_map
    if placed is not None:
        placed = placed.cpu()
        source = replace(source, held=held_experts(placed, source.problem))
    known = METHODS[type(method).__name__]
    problem = source.problem
    differs = differences(layer, known.symmetric(method), problem)
    if differs:
        raise UnsupportedError(differs)
    scales = getattr(layer, f"w13_{known.scales}").dtype
    return Part(source, problem, placed, scales)


def loaded_experts(layer: Any, method: Any, problem: Problem) -> CanonicalExperts:
    """What vLLM loaded, in canonical form and in new memory on the parameters' device.

    Raises UnsupportedError and CheckpointError for what does not fit ``problem``.
    """
    known = METHODS[type(method).__name__]
    tensors = {name: tensor.data for name, tensor in layer.named_parameters(recurse=False)}
    for name in ("w13_bias", "w2_bias"):
        if name in tensors and not problem.has_bias and bool((tensors[name] != 0).any()):
            raise UnsupportedError(
                field_error(name, "values", "biases in vLLM", "none as in the checkpoint")
            )
    return stacked_experts(
        known.format, tensors, problem, zeros_minus_one=known.zeros_minus_one(method)
    )


def drop_parameters(layer: Any) -> None:
    """Let vLLM's copy of the expert weights go."""
    for name, _ in list(layer.named_parameters(recurse=False)):
        if name.startswith(("w13_", "w2_")):
            delattr(layer, name)


def model_folder(named: str, revision: str | None, download_dir: str | None) -> Path:
    """The checkpoint's folder of what vLLM calls the model; AutoselError where it is not on disk.

    Nothing is downloaded: vLLM has just loaded it.
    """
    if Path(named).is_dir():
        return Path(named)
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                named, revision=revision, cache_dir=download_dir, local_files_only=True
            )
        )
    except Exception:
        raise AutoselError(
            field_error("model", "folder", repr(named), "a folder, or a model in the hub's cache")
        ) from None


def _unlike(ours: QuantWeight, slot: int, theirs: QuantWeight, at: int) -> str:
    """What of one expert differs, "" where nothing does."""
    pairs = {
        "codes": (ours.codes[slot], theirs.codes[at]),
        "scales": (ours.scales[slot].to(theirs.scales.dtype), theirs.scales[at]),
        "zero points": (_zeros(ours, slot), _zeros(theirs, at)),
        "biases": (_bias(ours, slot), _bias(theirs, at)),
    }
    return next((what for what, (a, b) in pairs.items() if not torch.equal(a.cpu(), b.cpu())), "")


def _zeros(weight: QuantWeight, expert: int) -> torch.Tensor:
    if weight.zero_points is not None:
        return weight.zero_points[expert]
    implicit = weight.scheme.implicit_zero
    return torch.full(weight.scales.shape[1:], implicit, dtype=torch.uint8)


def _bias(weight: QuantWeight, expert: int) -> torch.Tensor:
    if weight.bias is not None:
        return weight.bias[expert].float()
    return torch.zeros(weight.num_outputs)
