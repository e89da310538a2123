"""PyTorch's packed int8 matmul for CPUs, one expert after the other."""

from __future__ import annotations

from typing import ClassVar

import torch

from autosel.backends._per_expert import run_per_expert
from autosel.core import Device, Params, Problem, Routing, Support
from autosel.dtypes import torch_dtype
from autosel.interfaces import Backend, Layout, PackedExperts, Requirements, Space
from autosel.layouts import _gemms as gemms
from autosel.layouts.aten_int8 import AtenInt8

#: The operator's bfloat16 path reads 16 inputs at a time and takes the process down otherwise.
INPUTS_MULTIPLE = 16


class TorchInt8(Backend):
    """``aten::_weight_int8pack_mm``. Tunable: the dtype it computes in."""

    name: ClassVar[str] = "torch_int8"
    summary: ClassVar[str] = "PyTorch's packed int8 CPU matmul for each expert, one scale a row"

    def available(self, device: Device) -> Support:
        needs = Requirements()
        needs.one_of("device", device.kind, ("cpu",))
        present = hasattr(torch.ops.aten, "_weight_int8pack_mm")
        needs.need(present, "aten::_weight_int8pack_mm", "missing", "torch 2.3 or newer")
        return needs.support

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
        return AtenInt8(str(params.get("compute_dtype", problem.act_dtype)))

    def space(self, problem: Problem, num_tokens: int, device: Device) -> Space:
        dtypes = tuple(dict.fromkeys((problem.act_dtype, "float32")))
        return Space({"compute_dtype": dtypes[0]}, {"compute_dtype": dtypes})

    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        tensors = packed.tensors
        dtype = torch_dtype(str(params.get("compute_dtype", packed.problem.act_dtype)))

        def linear(name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
            product: torch.Tensor = torch.ops.aten._weight_int8pack_mm(
                rows, tensors[name][expert], tensors[f"{name}_scales"][expert]
            )
            return product

        return run_per_expert(
            packed,
            x,
            routing,
            out,
            dtype,
            lambda expert, rows: linear("w13", expert, rows),
            lambda expert, rows: linear("w2", expert, rows),
        )
