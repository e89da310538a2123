"""PyTorch's packed int8 matmul for CPUs, one expert after the other."""

from __future__ import annotations

from typing import ClassVar

import torch

from autosel.backends._aten import AtenMatmul, compute_dtype
from autosel.backends._per_expert import Linear
from autosel.core import Device, Params, Problem, Support
from autosel.interfaces import Layout, PackedExperts, Requirements
from autosel.layouts import _gemms as gemms
from autosel.layouts.aten_int8 import AtenInt8

#: The operator's bfloat16 path reads 16 inputs at a time and takes the process down otherwise.
INPUTS_MULTIPLE = 16


class TorchInt8(AtenMatmul):
    """``aten::_weight_int8pack_mm``. Tunable: the dtype it computes in."""

    name: ClassVar[str] = "torch_int8"
    summary: ClassVar[str] = "PyTorch's packed int8 CPU matmul for each expert, one scale a row"
    operator: ClassVar[str] = "_weight_int8pack_mm"
    since: ClassVar[str] = "torch 2.3 or newer"

    def supports(self, problem: Problem, device: Device) -> Support:
        needs = Requirements()
        for name, scheme, (_, _, inputs) in gemms.schemes(problem):
            needs.one_of(f"{name} bits", scheme.num_bits, (8,))
            needs.need(scheme.symmetric, f"{name} zero points", "present", "symmetric weights")
            needs.need(not scheme.has_g_idx, f"{name} act-order", "g_idx", "contiguous groups")
            needs.one_of(f"{name} scale groups", scheme.num_groups(inputs), (1,))
            needs.multiple(f"{name} inputs", inputs, INPUTS_MULTIPLE)
        return Support(self.available(device).reasons + needs.support.reasons)

    def layout(self, problem: Problem, params: Params) -> Layout:
        return AtenInt8(compute_dtype(problem, params))

    def linear(self, packed: PackedExperts) -> Linear:
        tensors = packed.tensors

        def linear(name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
            product: torch.Tensor = torch.ops.aten._weight_int8pack_mm(
                rows, tensors[name][expert], tensors[f"{name}_scales"][expert]
            )
            return product

        return linear
