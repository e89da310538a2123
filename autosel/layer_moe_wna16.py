"""Parameters in vLLM's MoeWNA16 layout, filled from GPTQ or AWQ tensors one at a time.

Each tensor is cut for the rank and converted as it arrives, so nothing is held twice
(vLLM, ``model_executor/layers/quantization/moe_wna16.py``, ``MoeWNA16Method``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autosel.core import CanonicalExperts, Problem, QuantScheme
from autosel.errors import AutoselError, field_error
from autosel.formats import moe_wna16
from autosel.formats.base import LinearQuant, Origin, require_finite
from autosel.layer_axes import Cut
from autosel.layer_params import ExpertParameters, Shard
from autosel.rank_problem import rank_problem

_SOURCES = ("gptq", "awq")


class MoeWna16Parameters(ExpertParameters):
    """A rank's stacked parameters in the layout of :mod:`autosel.formats.moe_wna16`.

    ``w13_qweight`` uint8 ``[E, s*I, H/v]``, ``w2_qweight`` uint8 ``[E, H, I/v]`` with ``v`` values
    a byte; ``w13_scales`` ``[E, s*I, H/g]``, ``w2_scales`` ``[E, H, I/g]``; where the layer is
    asymmetric ``w13_qzeros`` uint8 ``[E, s*I/v, H/g]`` and ``w2_qzeros`` ``[E, H/v, I/g]``. The
    group size ``g`` is halved until it divides both sizes of the rank, scales repeat accordingly.
    """

    def __init__(self, format_name: str, problem: Problem, **options: Any) -> None:
        """``options`` of :class:`~autosel.layer_params.ExpertParameters` without ``transposed``.

        format_name  ``gptq`` or ``awq``: what :meth:`load_weight` is handed

        Raises AutoselError for another format, CheckpointError for a layer that the layout cannot
        hold (act-order, bias, one scale a channel, no common group size).
        """
        if format_name not in _SOURCES:
            raise AutoselError(
                field_error(
                    "MoeWna16Parameters", "format", repr(format_name), " or ".join(_SOURCES)
                )
            )
        split = {name: options[name] for name in ("tp_rank", "tp_size") if name in options}
        # As the layout's own rule has it: from the whole layer's group size and the rank's sizes.
        local = replace(rank_problem(problem, **split), w13=problem.w13, w2=problem.w2)
        moe_wna16.require(local)
        self.group_size = moe_wna16.common_group_size(local)
        super().__init__(format_name, problem, **options)
        self._local_problem = replace(local, num_local_experts=len(self._local))

    def experts(self) -> CanonicalExperts:
        """The filled parameters as canonical weights, in groups of :attr:`group_size`."""
        for slot in range(len(self._local)):
            for shard_id, cut in self._cuts.items():
                self._require_loaded(slot, shard_id, cut)
        tensors = {name: parameter.data.cpu() for name, parameter in self.named_parameters()}
        for name in ("w13_scales", "w2_scales"):
            require_finite(tensors[name], ("expert", "output", "group"), name)
        return moe_wna16.read(tensors, self._local_problem)

    # inside ----------------------------------------------------------------------------------

    def _dtype(self, suffix: str, scheme: QuantScheme) -> torch.dtype:
        return super()._dtype(suffix, scheme) if suffix == self._format.scales else torch.uint8

    def _shape(self, name: str, suffix: str, cut: Cut) -> tuple[int, ...]:
        per_byte = 8 // cut.scheme.num_bits
        rows = cut.outputs * (self.problem.num_shards if name == "w13" else 1)
        if suffix == self._format.weight:
            return rows, cut.inputs // per_byte
        rows = rows // per_byte if suffix == self._format.zeros else rows
        return rows, cut.inputs // self.group_size

    def _place(self, suffix: str, slot: int, shard_id: Shard) -> torch.Tensor:
        name, cut = "w2" if shard_id == "w2" else "w13", self._cuts[shard_id]
        stacked: torch.Tensor = getattr(self, f"{name}_{suffix}").data[slot]
        packed = suffix == self._format.zeros
        rows = cut.outputs // (8 // cut.scheme.num_bits) if packed else cut.outputs
        first = rows if shard_id == "w3" and "w1" in self._cuts else 0
        return stacked.narrow(0, first, rows)

    def _convert(self, suffix: str, part: torch.Tensor, cut: Cut, where: str) -> torch.Tensor:
        fmt, scheme = self._format, cut.scheme
        quant = LinearQuant(
            scheme.num_bits, cut.group_size, scheme.symmetric, False, self._minus_one
        )
        part = part.cpu().contiguous()
        if suffix == fmt.weight:
            codes = fmt.codes_of(part, quant)  # int32 [N, words], inputs in order: so are the bytes
            return codes.view(torch.uint8)[:, : cut.inputs * scheme.num_bits // 8]
        if suffix == fmt.scales:
            found = fmt.scales_of(part)
        else:
            probe = fmt.probe({suffix: part}, quant, cut.outputs, cut.inputs, Origin(where))
            zeros = probe.zero_points
            shape = (cut.outputs, quant.num_groups(cut.inputs))
            found = torch.full(shape, scheme.implicit_zero, dtype=torch.uint8)
            found = found if zeros is None else zeros
        found = found.repeat_interleave(cut.group_size // self.group_size, -1)  # [N, G']
        return (
            moe_wna16.pack_outputs(found[None], scheme.num_bits)[0]
            if suffix == fmt.zeros
            else found
        )
