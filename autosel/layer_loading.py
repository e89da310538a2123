"""All MoE layers of a checkpoint, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from autosel.checkpoint import Checkpoint
from autosel.errors import CheckpointError, field_error
from autosel.layer import FusedMoE
from autosel.layer_build import making
from autosel.store import Database, Store, opened_database

#: Told how many layers are done, of how many.
Progress = Callable[[int, int], None]


def load_moe_layers(
    path: str | Path,
    *,
    layers: Iterable[int] | None = None,
    device: str | torch.device = "cpu",
    db: Database = None,
    progress: Progress | None = None,
    **options: Any,
) -> dict[int, FusedMoE]:
    """Every quantised MoE layer of a checkpoint folder by its number, ready to run.

    layers   numbers to load; left out, every quantised one (those kept in 16 bits, such as a
             draft head's, are left to the model)
    options  of :meth:`autosel.FusedMoE.from_checkpoint`, the same for every layer

    One layer's unpacked weights exist at a time: the peak is all packed layers and one source
    layer. Raises CheckpointError when there is none, and for a layer that cannot be read, by name.
    """
    with making(options):
        opened = Checkpoint.open(path)
        wanted = _wanted(opened) if layers is None else list(dict.fromkeys(layers))
        for index in wanted:
            layer = opened.layer(index)
            if layer.status != "quantized":
                found = f"{layer.status} ({layer.reason})"
                raise CheckpointError(
                    field_error(str(path), f"layer {index}", found, "a quantised layer")
                )
    loaded: dict[int, FusedMoE] = {}
    with opened_database(db) as store:
        # Opened once for all layers; a layer that has news later opens the file again.
        kept = db if isinstance(db, Store) or store.path is None else store.path
        for index in wanted:
            with making(options):
                rule = {
                    "router": opened.layer(index).router,
                    "correction_bias": opened.router(index).get("e_score_correction_bias"),
                }
            loaded[index] = FusedMoE.from_checkpoint(
                path, index, device=device, db=kept, **{**rule, **options}
            )
            if progress is not None:
                progress(len(loaded), len(wanted))
    return loaded


def _wanted(opened: Checkpoint) -> list[int]:
    """The quantised layers; one that should be, and cannot be read, stops everything."""
    for layer in opened.layers:
        if layer.status == "refused":
            raise CheckpointError(f"{opened.path}: layer {layer.index} refused: {layer.reason}")
    found = [layer.index for layer in opened.layers if layer.status == "quantized"]
    if not found:
        raise CheckpointError(
            field_error(str(opened.path), "quantised MoE layers", "none", "at least one")
        )
    return found
