"""PyTorch's packed int4 matmul for CPUs, one expert after the other."""

from __future__ import annotations

from typing import ClassVar

import torch

from autosel.backends._per_expert import run_per_expert
from autosel.core import Device, Params, Problem, Routing, Support
from autosel.dtypes import torch_dtype
from autosel.interfaces import Backend, Layout, PackedExperts, Requirements, Space
from autosel.layouts import _gemms as gemms
from autosel.layouts.aten_int4 import GROUP_SIZES, OUTPUTS_MULTIPLE, AtenInt4


class TorchInt4(Backend):
    """``aten::_weight_int4pack_mm_for_cpu``. Tunable: the dtype it computes in."""

    name: ClassVar[str] = "torch_int4"
    summary: ClassVar[str] = "PyTorch's packed int4 CPU matmul for each expert"

    def available(self, device: Device) -> Support:
        needs = Requirements()
        needs.one_of("device", device.kind, ("cpu",))
        present = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
        needs.need(present, "aten::_weight_int4pack_mm_for_cpu", "missing", "torch 2.6 or newer")
        return needs.support

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
        return AtenInt4(str(params.get("compute_dtype", _dtypes(problem)[0])))

    def space(self, problem: Problem, num_tokens: int, device: Device) -> Space:
        dtypes = _dtypes(problem)
        return Space({"compute_dtype": dtypes[0]}, {"compute_dtype": dtypes})

    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        problem, tensors = packed.problem, packed.tensors
        dtype = torch_dtype(str(params.get("compute_dtype", _dtypes(problem)[0])))
        groups = {
            name: gemms.group_inputs(scheme, shape[2])
            for name, scheme, shape in gemms.schemes(problem)
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

        return run_per_expert(
            packed,
            x,
            routing,
            out,
            dtype,
            lambda expert, rows: linear("w13", expert, rows),
            lambda expert, rows: linear("w2", expert, rows),
        )


def _dtypes(problem: Problem) -> tuple[str, ...]:
    """Compute dtypes, the act dtype first."""
    return tuple(dict.fromkeys((problem.act_dtype, "float32")))
