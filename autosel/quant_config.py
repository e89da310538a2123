"""Collects the quantisation settings of a folder: several files may hold them, in several places.

``config.json`` has a block at the top or inside its text part; GPTQ tools add
``quantize_config.json``, AWQ tools ``quant_config.json``. What one block leaves open another may
tell; where two contradict each other on something that decides the weights, none is believed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autosel.errors import ConfigError, field_error
from autosel.json_file import JsonFile, Section

BLOCK_NAMES = ("quantization_config", "compression_config")
EXTRA_FILES = ("quantize_config.json", "quant_config.json")

#: Settings that decide what the weights are, each with its spellings.
DECISIVE = (
    ("quant_method", "method"),
    ("bits", "w_bit"),
    ("group_size", "q_group_size"),
    ("sym",),
    ("desc_act",),
    ("static_groups",),
    ("zero_point",),
    ("checkpoint_format", "format"),
    ("pack_dtype",),
    ("dynamic",),
    ("modules_to_not_convert",),
    ("config_groups",),
    ("ignore",),
    ("transform_config",),
    ("sparsity_config",),
)


@dataclass(frozen=True)
class MergedSection(Section):
    """Several blocks as one; errors name the file and line of the block that holds the field."""

    origins: Mapping[str, Section] = field(default_factory=dict)

    def where(self, *more: str) -> str:
        if more and more[0] in self.origins:
            return self.origins[more[0]].where(*more)
        return super().where(*more)

    def section(self, name: str) -> Section | None:
        if name in self.origins:
            return self.origins[name].section(name)
        return super().section(name)


def find_quant_config(folder: Path, sections: list[Section]) -> Section | None:
    """The settings from ``sections`` (root of config.json and its text part) and extra files.

    None when there are none. Raises ConfigError where two blocks contradict each other, naming
    both places.
    """
    blocks: list[Section] = []
    for section in sections:
        for name in BLOCK_NAMES:
            block = section.section(name)
            if block is not None and block.data:
                blocks.append(block)
    for name in EXTRA_FILES:
        path = folder / name
        if path.exists():
            file = JsonFile.read(path)
            blocks.append(Section(file, (), file.data))
    return _merge(blocks) if blocks else None


def _merge(blocks: list[Section]) -> Section:
    first = blocks[0]
    for other in blocks[1:]:
        for names in DECISIVE:
            _require_agreement(first, other, names)
        _require_agreement(first, other, _version_names(first, other))
        merged: dict[str, Any] = dict(first.data)
        origins = dict(first.origins) if isinstance(first, MergedSection) else {}
        spelt = {name: names for names in DECISIVE for name in names}
        for name, value in other.data.items():
            known = any(alias in first for alias in spelt.get(name, (name,)))
            if value is not None and not known:
                merged[name] = value
                origins[name] = other
        first = MergedSection(first.file, first.keys, merged, origins)
    return first


def _version_names(first: Section, other: Section) -> tuple[str, ...]:
    """AWQ's ``version`` is its packing; compressed-tensors' is the number of a release."""
    both = ("config_groups" in first) or ("config_groups" in other)
    return () if both else ("version",)


def _require_agreement(first: Section, other: Section, names: tuple[str, ...]) -> None:
    here = next((name for name in names if name in first), None)
    there = next((name for name in names if name in other), None)
    if here is None or there is None:
        return
    left, right = _plain(first.data[here]), _plain(other.data[there])
    if left != right:
        raise ConfigError(
            field_error(
                other.where(there),
                "contradicting value",
                _short(right),
                f"{_short(left)} as in {first.where(here)}",
            )
        )


def _plain(value: Any) -> Any:
    """For comparison: case of text is free, and null settings are as good as absent ones.

    The order of ``dynamic`` rules counts, so objects keep theirs.
    """
    if isinstance(value, str):
        return value.lower()
    if isinstance(value, Mapping):
        return [(k, _plain(v)) for k, v in value.items() if v is not None]
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
