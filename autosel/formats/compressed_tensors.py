"""compressed-tensors, ``format: pack-quantized``, as written by llmcompressor.

    weight_packed      int32 [N, ceil(K/pf)]   packed along K; holds q + 2**(bits-1)
    weight_scale       float [N, G]
    weight_zero_point  int32 [ceil(N/pf), G]   packed along N, the same offset; if asymmetric
    weight_shape       int64 [2]               (N, K), unpadded
    weight_g_idx       int32 [K]               only for ``actorder`` "group"

Targets and ignore lists match as in https://github.com/neuralmagic/compressed-tensors
(``utils/match.py``): exact names first, then patterns in alphabetical order, then class names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autosel.core import QuantWeight
from autosel.errors import CheckpointError, ConfigError, field_error
from autosel.formats.base import (
    FLOATS,
    Format,
    LinearQuant,
    Origin,
    Probe,
    Rules,
    Stored,
    Verdict,
    pack_zeros,
    plain_zeros,
    stored_bias,
    stored_g_idx,
    stored_zeros,
    written_bias,
    written_zeros,
)
from autosel.formats.gptq import checked_group_size
from autosel.json_file import Section
from autosel.module_rules import REGEX_PREFIX, NameList, Pattern
from autosel.packing import unpack_last

PACKED = "pack-quantized"
#: Columns were sorted for grouping, so every input needs its group's number.
_ORDERED = ("group", "dynamic", True)
#: Columns were only processed in another order; nothing to do when reading.
_UNORDERED = (None, "weight", "static", False)


@dataclass(frozen=True)
class _Target:
    """One target of a config group; ``rank`` sorts name, pattern, class."""

    rank: int
    text: str
    pattern: Pattern | None
    verdict: Verdict


class CompressedTensorsRules(Rules):
    """Which config group, if any, a module belongs to."""

    def __init__(self, config: Section) -> None:
        self._ignore = NameList(config.strings("ignore"), config.where("ignore"))
        transform = config.section("transform_config")
        if transform is not None and any(transform.data.values()):
            raise ConfigError(
                field_error(
                    config.where("transform_config"),
                    "value",
                    "transforms",
                    "none (weights alone do not define the layer)",
                )
            )
        sparsity = config.section("sparsity_config")
        kind = sparsity.string("format") if sparsity else None
        if kind not in (None, "dense"):
            assert sparsity is not None
            raise ConfigError(field_error(sparsity.where("format"), "value", repr(kind), "'dense'"))
        groups = config.section("config_groups")
        if groups is None or not groups.data:
            raise ConfigError(
                field_error(config.where("config_groups"), "value", "nothing", "at least one group")
            )
        by_text: dict[str, _Target] = {}
        for name in groups.data:
            group = groups.section(name)
            if group is None:
                continue
            verdict = _group_verdict(group, config)
            for text in group.strings("targets"):
                pattern = None
                if text.startswith(REGEX_PREFIX):
                    pattern = Pattern(text.removeprefix(REGEX_PREFIX), group.where("targets"))
                rank = 1 if pattern else 0 if "." in text else 2
                by_text[text] = _Target(rank, text, pattern, verdict)
        self._targets = sorted(by_text.values(), key=lambda t: (t.rank, t.text))

    def verdict(self, module: str, *, exclusions: bool = True) -> Verdict:
        entry = self._ignore.match(module) if exclusions else None
        if entry is not None:
            return Verdict("excluded", reason=f"excluded by ignore {entry!r}")
        # A target without a dot is a class name or the name of a top-level module. Which class a
        # module has is not in the files; a linear's experts are Linear, the one class in use.
        for target in self._targets:
            if target.pattern is not None:
                hit = target.pattern.match(module)
            else:
                hit = target.text == "Linear" or f"{module}.".startswith(f"{target.text}.")
            if hit:
                return target.verdict
        return Verdict("untargeted", reason="no config group targets it")


def _group_verdict(group: Section, config: Section) -> Verdict:
    """What one config group does to its modules; wrong types raise, other schemes are refused."""

    def refused(section: Section, name: str, found: object, expected: object) -> Verdict:
        return Verdict("refused", reason=field_error(section.where(name), "value", found, expected))

    weights = group.section("weights")
    if weights is None:
        return Verdict("untargeted", reason=f"{group.where('weights')}: no weights to quantise")
    packing = group.string("format") or config.string("format")
    if packing != PACKED:
        section = group if group.string("format") else config
        return refused(section, "format", repr(packing), repr(PACKED))
    for name in ("input_activations", "output_activations"):
        if group.section(name) is not None:
            return refused(group, name, "activation quantisation", "null (16-bit activations)")
    bits = weights.integer("num_bits")
    if bits not in (4, 8):
        return refused(weights, "num_bits", bits, "4 or 8")
    kind = weights.string("type")
    if kind not in (None, "int"):
        return refused(weights, "type", repr(kind), "'int'")
    if weights.boolean("dynamic"):
        return refused(weights, "dynamic", True, False)
    group_size = -1
    if "group_size" in weights:
        group_size = checked_group_size(weights, "group_size")
    strategy = weights.string("strategy")
    if strategy is None and "group_size" in weights:
        strategy = "channel" if group_size == -1 else "group"
    if strategy == "group" and group_size == -1 and "group_size" not in weights:
        raise ConfigError(
            field_error(weights.where("group_size"), "value", None, "a size for strategy 'group'")
        )
    if strategy == "channel" and group_size != -1:
        raise ConfigError(
            field_error(
                weights.where("group_size"), "value", group_size, "null for strategy 'channel'"
            )
        )
    if strategy not in ("group", "channel"):
        return refused(weights, "strategy", repr(strategy), "'group' or 'channel'")
    order = weights.data.get("actorder")
    order = order.lower() if isinstance(order, str) else order
    if order not in _ORDERED and order not in _UNORDERED:
        raise ConfigError(
            field_error(
                weights.where("actorder"),
                "value",
                repr(order),
                "null, 'group', 'dynamic', 'weight' or 'static'",
            )
        )
    symmetric = weights.boolean("symmetric")
    quant = LinearQuant(int(bits), group_size, symmetric is not False, order in _ORDERED)
    return Verdict("quantized", quant)


class CompressedTensors(Format):
    name = "compressed-tensors"
    weight = "weight_packed"
    scales = "weight_scale"
    zeros = "weight_zero_point"
    g_idx = "weight_g_idx"
    others = ("weight_shape",)

    def matches(self, config: Section) -> bool:
        method = config.data.get("quant_method")
        if method is None:
            return "config_groups" in config
        return str(method).lower() == "compressed-tensors"

    def rules(self, config: Section) -> Rules:
        return CompressedTensorsRules(config)

    def num_outputs(self, quant: LinearQuant, shape: tuple[int, ...]) -> int:
        return shape[0]

    def stored(self, quant: LinearQuant, num_outputs: int, num_inputs: int) -> dict[str, Stored]:
        groups = quant.num_groups(num_inputs)
        rows = -(-num_outputs // quant.pack_factor)
        return {
            "weight_packed": Stored(
                ((("I32",), (num_outputs, -(-num_inputs // quant.pack_factor))),)
            ),
            "weight_scale": Stored(((FLOATS, (num_outputs, groups)),)),
            # Older files keep them unpacked, signed.
            "weight_zero_point": stored_zeros(quant, (rows, groups), (num_outputs, groups)),
            "weight_shape": Stored(((("I64", "I32"), (2,)),), required=False),
            "weight_g_idx": stored_g_idx(quant, num_inputs),
            "bias": stored_bias(num_outputs),
        }

    def probe(
        self,
        tensors: Mapping[str, torch.Tensor],
        quant: LinearQuant,
        num_outputs: int,
        num_inputs: int,
        origin: Origin,
    ) -> Probe:
        shape = tensors.get("weight_shape")
        if shape is not None and shape.tolist() != [num_outputs, num_inputs]:
            raise CheckpointError(
                field_error(
                    origin.label("weight_shape"),
                    "value",
                    shape.tolist(),
                    [num_outputs, num_inputs],
                )
            )
        g_idx = tensors.get("weight_g_idx")
        if g_idx is not None and bool((g_idx == -1).any()):
            # The library's mark for "never set"; it then uses contiguous groups.
            tensors = {name: t for name, t in tensors.items() if name != "weight_g_idx"}
        return super().probe(tensors, quant, num_outputs, num_inputs, origin)

    def codes_of(self, tensor: torch.Tensor, quant: LinearQuant) -> torch.Tensor:
        return tensor.contiguous()

    def scales_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def zeros_of(
        self, tensor: torch.Tensor, quant: LinearQuant, num_outputs: int, origin: Origin
    ) -> torch.Tensor:
        rows = -(-num_outputs // quant.pack_factor)
        if tensor.dtype != torch.int32 or tensor.shape[0] != rows:
            label = origin.label("weight_zero_point")
            return plain_zeros(tensor, quant, quant.implicit_zero, label)
        return unpack_last(tensor.t(), quant.num_bits, num_outputs).t().contiguous()

    def write(self, weight: QuantWeight, quant: LinearQuant) -> dict[str, torch.Tensor]:
        """Zero points only where asymmetric, a group index only where there is an order."""
        out = {
            "weight_packed": weight.codes[0].contiguous(),
            "weight_scale": weight.scales[0].contiguous(),
            "weight_shape": torch.tensor([weight.num_outputs, weight.num_inputs]),
        }
        if weight.zero_points is not None:
            packed = pack_zeros(written_zeros(weight), quant.num_bits)
            out["weight_zero_point"] = packed.t().contiguous()
        if weight.g_idx is not None:
            out["weight_g_idx"] = weight.g_idx[0].contiguous()
        return out | written_bias(weight)


FORMAT = CompressedTensors()
