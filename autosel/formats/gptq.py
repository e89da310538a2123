"""GPTQ, both conventions of zero points: ``checkpoint_format`` ``gptq`` (v1) and ``gptq_v2``.

Bits as written by AutoGPTQ and GPTQModel (https://github.com/ModelCloud/GPTQModel):

    qweight  int32 [K/pf, N]   packed along K, first code in the low bits
    qzeros   int32 [G, N/pf]   packed along N; v1 holds the true zero points less one
    scales   float [G, N]
    g_idx    int32 [K]         group of each input

v1 is made from v2 by subtracting 0x11111111 (4 bits) or 0x01010101 (8 bits) from whole words, so a
true zero of 0 borrows from the next field; adding the same constant modulo 2**32 is the inverse.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from autosel.core import QuantWeight
from autosel.errors import CheckpointError, ConfigError, field_error
from autosel.formats.base import (
    FLOATS,
    Format,
    LinearQuant,
    Origin,
    Rules,
    Stored,
    Verdict,
    pack_zeros,
    plain_zeros,
    stored_bias,
    stored_g_idx,
    stored_zeros,
    written_bias,
    written_g_idx,
    written_zeros,
)
from autosel.json_file import Section
from autosel.module_rules import Pattern
from autosel.packing import as_int32, unpack_last

#: One in every field of a word.
ONES = {4: 0x11111111, 8: 0x01010101}
_CONVENTIONS = {"gptq": True, "gptq_v2": False}


class GPTQRules(Rules):
    """``bits``, ``group_size``, ``sym``, ``desc_act``, overridden by the first ``dynamic`` rule.

    A rule matches from the start of the full module name (``re.match``), as in GPTQModel. The list
    ``modules_in_block_to_quantize`` is not needed: which tensors are packed tells the same.
    """

    def __init__(self, config: Section) -> None:
        self._config = config
        name = config.first("checkpoint_format", "format")
        convention = "gptq" if name is None else str(config.string(name)).lower()
        if convention not in _CONVENTIONS:
            raise ConfigError(
                field_error(
                    config.where(name or "checkpoint_format"),
                    "checkpoint format",
                    repr(convention),
                    "'gptq' or 'gptq_v2'",
                )
            )
        self._minus_one = _CONVENTIONS[convention]
        if config.boolean("is_marlin_format"):
            raise ConfigError(field_error(config.where("is_marlin_format"), "value", True, False))
        pack_dtype = str(config.string("pack_dtype") or "int32").removeprefix("torch.")
        if pack_dtype != "int32":
            raise ConfigError(
                field_error(config.where("pack_dtype"), "value", repr(pack_dtype), "'int32'")
            )
        self._rules: list[tuple[str, Any, Section | None]] = []
        dynamic = config.section("dynamic")
        for pattern in dynamic.data if dynamic else ():
            assert dynamic is not None
            negative = pattern.startswith("-:")
            compiled = Pattern(
                pattern.removeprefix("-:").removeprefix("+:"), dynamic.where(pattern)
            )
            override = None if negative else dynamic.section(pattern)
            self._rules.append((pattern, compiled, override))
        self._verdict(None)  # so that a bad base value stops the reading at once

    def verdict(self, module: str, *, exclusions: bool = True) -> Verdict:
        for pattern, compiled, override in self._rules:
            if compiled.match(module):
                if pattern.startswith("-:"):
                    if not exclusions:
                        continue
                    return Verdict("excluded", reason=f"excluded by the dynamic rule {pattern!r}")
                return self._verdict(override)
        return self._verdict(None)

    def _verdict(self, override: Section | None) -> Verdict:
        sections = [s for s in (override, self._config) if s is not None]

        def pick(*names: str) -> tuple[Section, str | None]:
            for section in sections:
                name = section.first(*names)
                if name is not None:
                    return section, name
            return self._config, None

        section, name = pick("bits", "w_bit")
        if name is None:
            raise ConfigError(field_error(section.where("bits"), "value", "nothing", "4 or 8"))
        bits = section.integer(name)
        if bits not in ONES:
            return Verdict(
                "refused", reason=field_error(section.where(name), "value", bits, "4 or 8")
            )
        section, name = pick("group_size", "q_group_size")
        if name is None:
            raise ConfigError(
                field_error(section.where("group_size"), "value", "nothing", "-1 or at least 1")
            )
        group_size = checked_group_size(section, name)
        section, name = pick("sym")
        symmetric = True if name is None else bool(section.boolean(name))
        section, name = pick("desc_act")
        act_order = False if name is None else bool(section.boolean(name))
        # With static groups the columns are only processed in another order; the groups stay
        # where they are, and what g_idx says, if anything, is read all the same.
        section, name = pick("static_groups")
        static = name is not None and section.data[name] is True
        quant = LinearQuant(
            int(bits), group_size, symmetric, act_order and not static, self._minus_one
        )
        return Verdict("quantized", quant)


def checked_group_size(section: Section, name: str) -> int:
    """A group size of -1 or at least 1, in the spelling ``name``."""
    size = section.integer(name)
    if size is None or (size != -1 and size < 1):
        raise ConfigError(field_error(section.where(name), "value", size, "-1 or at least 1"))
    return size


class GPTQ(Format):
    name = "gptq"
    weight = "qweight"
    scales = "scales"
    zeros = "qzeros"
    g_idx = "g_idx"

    def matches(self, config: Section) -> bool:
        method = config.data.get("quant_method") or config.data.get("method")
        if method is None:  # AutoGPTQ's own quantize_config.json does not name the method
            return "bits" in config and "group_size" in config and "zero_point" not in config
        return str(method).lower() == "gptq"

    def rules(self, config: Section) -> Rules:
        return GPTQRules(config)

    def num_outputs(self, quant: LinearQuant, shape: tuple[int, ...]) -> int:
        return shape[1]

    def stored(self, quant: LinearQuant, num_outputs: int, num_inputs: int) -> dict[str, Stored]:
        factor = quant.pack_factor
        groups = quant.num_groups(num_inputs)
        words = -(-num_outputs // factor)
        return {
            "qweight": Stored(((("I32",), (-(-num_inputs // factor), num_outputs)),)),
            "scales": Stored(((FLOATS, (groups, num_outputs)),)),
            "qzeros": stored_zeros(quant, (groups, words), (groups, num_outputs)),
            "g_idx": stored_g_idx(quant, num_inputs),
            "bias": stored_bias(num_outputs),
        }

    def codes_of(self, tensor: torch.Tensor, quant: LinearQuant) -> torch.Tensor:
        return tensor.t().contiguous()

    def scales_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.t()

    def zeros_of(
        self, tensor: torch.Tensor, quant: LinearQuant, num_outputs: int, origin: Origin
    ) -> torch.Tensor:
        label = origin.label("qzeros")
        packed = tensor.dtype == torch.int32 and tensor.shape[1] == -(
            -num_outputs // quant.pack_factor
        )
        if not packed:
            return plain_zeros(tensor, quant, 0, label).t().contiguous()
        words = tensor.long() & 0xFFFFFFFF  # [G, N/pf]
        if quant.zeros_minus_one:
            if not quant.symmetric and looks_overwritten(words, quant.num_bits):
                origin.notes.append(
                    f"{label}: words end in runs of all ones; an old AutoGPTQ overwrites the rest "
                    "of a word when a zero point is 0, and such zero points are lost"
                )
            words = (words + ONES[quant.num_bits]) & 0xFFFFFFFF
        return unpack_last(words, quant.num_bits, num_outputs).t().contiguous()

    def write(self, weight: QuantWeight, quant: LinearQuant) -> dict[str, torch.Tensor]:
        """The four tensors; zero points in the convention of ``quant.zeros_minus_one``."""
        for size, what in ((weight.num_inputs, "inputs"), (weight.num_outputs, "outputs")):
            if size % quant.pack_factor:
                raise CheckpointError(
                    field_error("GPTQ.write", what, size, f"a multiple of {quant.pack_factor}")
                )
        words = pack_zeros(written_zeros(weight), quant.num_bits).long() & 0xFFFFFFFF
        if quant.zeros_minus_one:
            words = (words - ONES[quant.num_bits]) & 0xFFFFFFFF
        return {
            "qweight": weight.codes[0].t().contiguous(),
            "qzeros": as_int32(words),
            "scales": weight.scales[0].t().contiguous(),
            "g_idx": written_g_idx(weight).contiguous(),
            **written_bias(weight),
        }


def looks_overwritten(words: torch.Tensor, num_bits: int) -> bool:
    """Whether v1 zero words look like AutoGPTQ's: a zero point of 0, stored as -1, fills the rest.

    GPTQModel's borrow gives all ones in the middle of a word too, which AutoGPTQ's fault cannot;
    one such field clears the whole tensor.
    """
    top = (1 << num_bits) - 1
    fields = [((words >> shift) & top) == top for shift in range(0, 32, num_bits)]
    borrow = torch.zeros((), dtype=torch.bool)
    for low, high in pairwise(fields):
        borrow = borrow | (low & ~high).any()
    return not bool(borrow) and bool((fields[-1] & fields[-2]).any())


FORMAT = GPTQ()
