"""AWQ in GEMM packing, 4 bits, as written by AutoAWQ and GPTQModel.

    qweight  int32 [K, N/8]   packed along N, interleaved
    qzeros   int32 [G, N/8]   packed like the weight; true zero points
    scales   float [G, N]

Nibble ``i`` of word ``c`` belongs to output ``8 * c + ORDER[i]``
(https://github.com/casper-hansen/AutoAWQ, ``awq/utils/packing_utils.py``).
"""

from __future__ import annotations

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
    stored_bias,
    written_bias,
    written_zeros,
)
from autosel.formats.gptq import checked_group_size
from autosel.json_file import Section
from autosel.packing import pack_last, unpack_last

#: Output, within its eight, of each nibble from the low end.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
#: Nibble that holds each output: the inverse of ORDER.
NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)


class AWQRules(Rules):
    """One scheme for every module; an entry of ``modules_to_not_convert`` is part of a name."""

    def __init__(self, config: Section) -> None:
        for name in ("version", "checkpoint_format", "format"):
            version = config.string(name)
            if version is not None and version.lower() != "gemm":
                raise ConfigError(field_error(config.where(name), "value", repr(version), "'gemm'"))
        backend = config.string("backend")
        if backend is not None and backend.lower() == "llm-awq":
            raise ConfigError(
                field_error(config.where("backend"), "packing", repr(backend), "'autoawq'")
            )
        pack_dtype = str(config.string("pack_dtype") or "int32").removeprefix("torch.")
        if pack_dtype != "int32":
            raise ConfigError(
                field_error(config.where("pack_dtype"), "value", repr(pack_dtype), "'int32'")
            )
        bits_name = config.first("bits", "w_bit")
        size_name = config.first("group_size", "q_group_size")
        if bits_name is None or size_name is None:
            absent = "bits" if bits_name is None else "group_size"
            raise ConfigError(field_error(config.where(absent), "value", "nothing", "a number"))
        bits = config.integer(bits_name)
        zero_point = config.boolean("zero_point")
        if bits == 4:
            quant = LinearQuant(4, checked_group_size(config, size_name), zero_point is False)
            self._default = Verdict("quantized", quant)
        else:
            reason = field_error(config.where(bits_name), "value", bits, "4 (all AWQ packs)")
            self._default = Verdict("refused", reason=reason)
        self._skip = config.strings("modules_to_not_convert")

    def verdict(self, module: str, *, exclusions: bool = True) -> Verdict:
        for part in self._skip if exclusions else ():
            if part in module:
                return Verdict("excluded", reason=f"excluded by modules_to_not_convert {part!r}")
        return self._default


class AWQ(Format):
    name = "awq"
    weight = "qweight"
    scales = "scales"
    zeros = "qzeros"
    g_idx = "g_idx"

    def matches(self, config: Section) -> bool:
        method = config.data.get("quant_method") or config.data.get("method")
        if method is None:  # AutoAWQ's own quant_config.json does not name the method
            return "zero_point" in config and ("w_bit" in config or "bits" in config)
        return str(method).lower() == "awq"

    def rules(self, config: Section) -> Rules:
        return AWQRules(config)

    def num_outputs(self, quant: LinearQuant, shape: tuple[int, ...]) -> int:
        return shape[1] * 8

    def stored(self, quant: LinearQuant, num_outputs: int, num_inputs: int) -> dict[str, Stored]:
        groups = quant.num_groups(num_inputs)
        words = -(-num_outputs // 8)
        return {
            "qweight": Stored(((("I32",), (num_inputs, words)),)),
            "scales": Stored(((FLOATS, (groups, num_outputs)),)),
            "qzeros": Stored(((("I32",), (groups, words)),), required=not quant.symmetric),
            # Groups are contiguous; what another order would mean here, nobody has defined.
            "g_idx": Stored((), required=False),
            "bias": stored_bias(num_outputs),
        }

    def codes_of(self, tensor: torch.Tensor, quant: LinearQuant) -> torch.Tensor:
        return pack_last(_unpack(tensor).t(), 4)

    def scales_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.t()

    def zeros_of(
        self, tensor: torch.Tensor, quant: LinearQuant, num_outputs: int, origin: Origin
    ) -> torch.Tensor:
        return _unpack(tensor).t().contiguous()

    def write(self, weight: QuantWeight, quant: LinearQuant) -> dict[str, torch.Tensor]:
        """The three tensors, ``qzeros`` also where all zero points are 8."""
        if weight.num_outputs % 8 or weight.scheme.num_bits != 4 or weight.g_idx is not None:
            found = (
                f"{weight.num_outputs} outputs, {weight.scheme.num_bits} bits, "
                f"{'a' if weight.g_idx is not None else 'no'} group index"
            )
            raise CheckpointError(
                field_error("AWQ.write", "weight", found, "a multiple of 8, 4 bits, none")
            )
        codes = unpack_last(weight.codes[0], 4, weight.num_inputs)  # [N, K]
        return {
            "qweight": _pack(codes.t()),
            "qzeros": _pack(written_zeros(weight).t()),
            "scales": weight.scales[0].t().contiguous(),
            **written_bias(weight),
        }


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """int32 ``[R, N/8]`` to uint8 ``[R, N]`` in the natural order of outputs."""
    codes = torch.empty(*words.shape, 8, dtype=torch.uint8, device=words.device)
    for output, nibble in enumerate(NIBBLE):
        codes[..., output] = ((words >> (4 * nibble)) & 15).to(torch.uint8)
    return codes.reshape(words.shape[0], words.shape[1] * 8)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`_unpack`."""
    blocks = codes.reshape(codes.shape[0], -1, 8)[..., list(ORDER)]
    return pack_last(blocks.reshape(codes.shape[0], -1), 4)


FORMAT = AWQ()
