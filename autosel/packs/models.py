"""What a pack says about a model: its name, settings and layers, from its folder or a preset."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from autosel.checkpoint import Checkpoint
from autosel.core import Problem
from autosel.errors import CheckpointError, field_error
from autosel.packs.build import folder_name, model
from autosel.packs.model import Model
from autosel.rank_problem import rank_problem

Layers = Iterable[tuple[Problem, Sequence[int]]]


def of_checkpoint(
    path: str | Path,
    layers: Layers | None = None,
    *,
    tp_size: int = 1,
    act_dtype: str | None = None,
) -> Model:
    """A checkpoint folder; ``layers`` (problem and numbers) are its quantised ones if left out.

    tp_size, act_dtype  of the layers when these are left out: rank 0's share, and the type of the
                        activations in place of the model's
    Raises CheckpointError when there is no quantised layer.
    """
    opened = Checkpoint.open(path)
    if layers is None:
        groups: dict[Problem, list[int]] = {}
        for layer in opened.layers:
            if layer.status == "quantized":
                exact = opened.exact_problem(layer.index)
                whole = replace(exact, act_dtype=act_dtype or exact.act_dtype)
                groups.setdefault(rank_problem(whole, tp_size=tp_size), []).append(layer.index)
        layers = list(groups.items())
        if not groups:
            raise CheckpointError(
                field_error(str(path), "quantised MoE layers", "none", "at least one")
            )
    return model(
        folder_name(path),
        "checkpoint",
        layers,
        model_type=opened.model_type,
        quantization=opened.quantization,
    )


def of_preset(name: str, problem: Problem) -> Model:
    """A published shape; it has no layer numbers and no settings of a checkpoint."""
    return model(name, "preset", [(problem, ())])
