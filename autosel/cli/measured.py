"""What is stored about the layers that the user names, for commands that show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autosel import figures
from autosel.cli.database import reading
from autosel.cli.options import LayerOptions, refuse_options_without_a_name
from autosel.cli.target import check_routing, resolve, retype
from autosel.core import Device
from autosel.device import detect
from autosel.evidence import Evidence, devices_named, gather, gather_all, nothing_on
from autosel.store import Store


def gather_named(
    targets: tuple[str, ...],
    layer_options: LayerOptions,
    *,
    db: str | None,
    device: str | None,
    stored_device: str | None,
    routing: str,
    timing: Mapping[str, Any],
) -> list[Evidence]:
    """The layers of ``targets`` that were measured, or all that were; at least one was right.

    ``stored_device`` is part of the name of a device in the database, instead of the one here.
    Raises AutoselError in one line, with the nearest entry there is, where nothing is stored.
    """
    if not targets:
        refuse_options_without_a_name(layer_options)
    with reading(db) as store:
        devices = devices_named(store, stored_device) if stored_device else [detect(device)]
        if not targets:
            found = gather_all(store, devices, routing=routing, timing=timing)
            if not found:
                raise nothing_on(store, devices)
        else:
            found = _named(store, targets, layer_options, devices, routing, timing)
        if not any(one.correct for one in found):
            raise figures.nothing_here(store, found[0])
    return found


def _named(
    store: Store,
    targets: tuple[str, ...],
    layer_options: LayerOptions,
    devices: list[Device],
    routing: str,
    timing: Mapping[str, Any],
) -> list[Evidence]:
    asked = []
    for text in targets:
        target = resolve(text, layer_options)
        check_routing(routing, target)
        name = Path(target.name).resolve().name if target.kind == "checkpoint" else ""
        words = retype(target, layer_options)
        for layer in target.layers:
            label = f"{name}, {layer.label}" if name else layer.label
            number = f" --layer {layer.indices[0]}" if len(target.layers) > 1 else ""
            asked.append((label, words + number, layer.problem))
    every = [
        replace(
            gather(store, problem, device, routing=routing, timing=timing, label=label),
            target=words,
        )
        for label, words, problem in asked
        for device in devices
    ]
    # Layers that were not measured say nothing; when none was, the first tells why.
    return [one for one in every if one.measurements] or every[:1]
