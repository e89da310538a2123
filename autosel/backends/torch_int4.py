"""PyTorch's packed int4 matmul for CPUs, one expert after the other."""

from __future__ import annotations

from typing import ClassVar

import torch

from autosel.backends._aten import AtenMatmul, compute_dtype
from autosel.backends._per_expert import Linear
from autosel.core import Device, Params, Problem, Support
from autosel.interfaces import Layout, PackedExperts, Requirements
from autosel.layouts import _gemms as gemms
from autosel.layouts.aten_int4 import GROUP_SIZES, OUTPUTS_MULTIPLE, AtenInt4


class TorchInt4(AtenMatmul):
    """``aten::_weight_int4pack_mm_for_cpu``. Tunable: the dtype it computes in."""

    name: ClassVar[str] = "torch_int4"
    summary: ClassVar[str] = "PyTorch's packed int4 CPU matmul for each expert"
    operator: ClassVar[str] = "_weight_int4pack_mm_for_cpu"
    since: ClassVar[str] = "torch 2.6 or newer"

    def supports(self, problem: Problem, device: Device) -> Support:
        needs = Requirements()
        for name, scheme, (_, outputs, inputs) in gemms.schemes(problem):
            group = gemms.group_inputs(scheme, inputs)
            needs.one_of(f"{name} bits", scheme.num_bits, (4,))
            needs.one_of(f"{name} inputs of a group", group, GROUP_SIZES)
            needs.multiple(f"{name} inputs", inputs, group)
            needs.multiple(f"{name} outputs", outputs, OUTPUTS_MULTIPLE)
        return Support(self.available(device).reasons + needs.support.reasons)

    def layout(self, problem: Problem, params: Params) -> Layout:
        return AtenInt4(compute_dtype(problem, params))

    def linear(self, packed: PackedExperts) -> Linear:
        tensors = packed.tensors
        groups = {
            name: gemms.group_inputs(scheme, shape[2])
            for name, scheme, shape in gemms.schemes(packed.problem)
        }

        def linear(name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
            gather = tensors.get(f"{name}_gather")
            if gather is not None:
                rows = rows.index_select(1, gather[expert])
            product: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
                rows,
                tensors[name][expert],
                groups[name],
                tensors[f"{name}_scales_and_zeros"][expert],
            )
            return product

        return linear
