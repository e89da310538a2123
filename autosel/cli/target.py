"""What the user names: a checkpoint folder or a preset, and which of its layers are meant."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import click

from autosel import presets, sources
from autosel.checkpoint import Checkpoint, MoELayer
from autosel.cli.options import LayerOptions
from autosel.cli.report import warn
from autosel.core import Problem
from autosel.errors import AutoselError, CheckpointError, ConfigError, field_error
from autosel.rank_problem import rank_problem
from autosel.routing_synthetic import make_routing
from autosel.sources import CheckpointSource, RandomSource, WeightSource


@dataclass(frozen=True)
class Layer:
    """One layer to tune, standing for all layers of the same problem."""

    label: str
    problem: Problem
    source: WeightSource
    indices: tuple[int, ...] = ()

    def stand_ins(self) -> Iterator[tuple[str, WeightSource]]:
        """Each alike layer by name, the one that is to be tuned first."""
        if isinstance(self.source, CheckpointSource):
            for index in self.indices:
                yield f"layer {index}", replace(self.source, layer=index)
        else:
            yield self.label, self.source


@dataclass(frozen=True)
class Target:
    """A checkpoint or preset with the layers that were asked for; ``name`` is what to retype."""

    name: str
    kind: str
    layers: tuple[Layer, ...]
    skipped: tuple[MoELayer, ...] = field(default_factory=tuple)


def resolve(text: str, options: LayerOptions, *, every: bool = False) -> Target:
    """The checkpoint folder at ``text``, else the preset called ``text``.

    ``every``: of a checkpoint, tell layers apart by the small tensors of all their experts, for
    commands that read the weights all the same; else by those of expert 0.
    Raises AutoselError when it is neither, saying which presets come close, and
    click.UsageError for an option that does not go with what it is.
    """
    if is_folder(text):
        return _checkpoint(text, options, every)
    try:
        preset = presets.find(text)
    except ConfigError:
        raise AutoselError(_neither(text)) from None
    return _preset(preset.name, options)


def open_checkpoint(text: str) -> Checkpoint:
    """The checkpoint at ``text``; a preset's name is refused, since it has no files."""
    if not is_folder(text):
        raise AutoselError(_no_folder(text))
    return Checkpoint.open(text)


def is_folder(text: str) -> bool:
    """Whether ``text`` leads to a folder; a folder wins over a preset of the same name."""
    return bool(text) and Path(text).is_dir()


def _checkpoint(text: str, options: LayerOptions, every: bool) -> Target:
    given = [
        flag for name, flag in options.PRESET_ONLY if getattr(options, name) not in (None, False)
    ]
    if given:
        raise click.UsageError(
            f"{', '.join(given)}: only for presets; {text} is a checkpoint, which says it itself"
        )
    checkpoint = sources.open_checkpoint(text)
    groups: dict[Problem, list[MoELayer]] = {}
    seen: dict[Problem | None, Problem] = {}
    for layer in _chosen(text, checkpoint.layers, options.layer):
        # All experts' small tensors of a large model are gigabytes: a command that only looks
        # things up takes one of alike layers for all.
        exact = seen.get(layer.problem) if not every else None
        if exact is None:
            exact = seen[layer.problem] = checkpoint.exact_problem(layer.index)
        whole = replace(exact, act_dtype=options.act_dtype or exact.act_dtype)
        groups.setdefault(rank_problem(whole, tp_size=options.tp), []).append(layer)
    layers = tuple(
        Layer(
            _label(alike),
            problem,
            CheckpointSource(text, alike[0].index, tp_size=options.tp, act_dtype=options.act_dtype),
            tuple(layer.index for layer in alike),
        )
        for problem, alike in groups.items()
    )
    skipped = tuple(layer for layer in checkpoint.layers if layer.status != "quantized")
    if options.layer is None:
        _warn_of(skipped)
    return Target(text, "checkpoint", layers, skipped)


def _warn_of(skipped: tuple[MoELayer, ...]) -> None:
    """Say which layers are left out, once for all whose reasons differ only in numbers."""
    groups: dict[tuple[str, str], list[MoELayer]] = {}
    for layer in skipped:
        groups.setdefault((layer.status, re.sub(r"\d+", "#", layer.reason)), []).append(layer)
    for alike in groups.values():
        first = alike[0]
        verb = "is" if len(alike) == 1 else "are"
        warn(f"{_label(alike)} {verb} left out: {first.status}: {first.reason}")


def _chosen(text: str, layers: tuple[MoELayer, ...], number: int | None) -> list[MoELayer]:
    """The quantised layers, or the one asked for; CheckpointError when there is none."""
    if number is not None:
        layer = find_layer(text, layers, number)
        if layer.status != "quantized":
            found = f"{layer.status} ({layer.reason})"
            raise CheckpointError(field_error(text, f"layer {number}", found, "a quantised layer"))
        return [layer]
    usable = [layer for layer in layers if layer.status == "quantized"]
    if not usable:
        reasons = "; ".join(f"layer {x.index} {x.status}: {x.reason}" for x in layers[:3])
        more = f"; and {len(layers) - 3} more" if len(layers) > 3 else ""
        found = f"none ({reasons}{more})" if layers else "no MoE layer at all"
        raise CheckpointError(field_error(text, "quantised MoE layers", found, "at least one"))
    return usable


def find_layer(text: str, layers: tuple[MoELayer, ...], number: int) -> MoELayer:
    """The MoE layer with this number; CheckpointError naming the numbers there are."""
    for layer in layers:
        if layer.index == number:
            return layer
    known = number_ranges([layer.index for layer in layers]) or "nothing: it has no MoE layer"
    raise CheckpointError(field_error(text, "MoE layer", number, f"one of {known}"))


def _preset(name: str, options: LayerOptions) -> Target:
    if options.layer is not None:
        raise click.UsageError(f"--layer: only for checkpoints; {name} is a preset of one layer")
    problem = presets.get(
        name,
        num_bits=options.bits or 4,
        group_size=options.group_size or 128,
        symmetric=not options.asym,
        has_g_idx=options.act_order,
        act_dtype=options.act_dtype or "bfloat16",
        tp=options.tp,
        experts=options.experts,
    )
    return Target(name, "preset", (Layer(name, problem, RandomSource(problem)),))


def retype(target: Target, options: LayerOptions) -> str:
    """The words that name the same layers on a command line again."""
    import shlex

    words = [target.name]
    for item in fields(options):
        value = getattr(options, item.name)
        if value in (None, False) or value == item.default:
            continue
        words.append(f"--{item.name.replace('_', '-')}")
        if value is not True:
            words.append("channel" if (item.name, value) == ("group_size", -1) else str(value))
    return shlex.join(words)


def check_routing(kind: str, target: Target) -> None:
    """Refuse a kind of routing that none of the layers can be given; it has no tokens yet."""
    for layer in target.layers:
        make_routing(kind, 0, layer.problem)


def number_ranges(numbers: list[int]) -> str:
    """``0-3, 5``: sorted numbers with runs joined."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _label(layers: list[MoELayer]) -> str:
    numbers = number_ranges([layer.index for layer in layers])
    return f"layer {numbers}" if len(layers) == 1 else f"layers {numbers}"


def _neither(text: str) -> str:
    if _looks_like_path(text):
        return _no_folder(text)
    known = presets.names()
    close = difflib.get_close_matches(text.lower(), known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else "autosel presets lists them"
    return f"{text!r} is neither a checkpoint folder nor a preset; {hint}"


def _looks_like_path(text: str) -> bool:
    return not text or text[0] in ".~" or os.path.isabs(text) or Path(text).exists()


def _no_folder(text: str) -> str:
    if text and Path(text).exists():
        return field_error(text, "checkpoint", "a file", f"its folder {Path(text).parent}")
    return field_error(text or "''", "checkpoint", "nothing", "a folder with config.json")
