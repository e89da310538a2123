"""A correct 16-bit kernel in plain torch, every step of which can be replaced by a faulty one.

It rounds wherever a 16-bit kernel may (weights, first GEMM's output, activation, second GEMM's
output, sum) and accumulates in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from autosel.activations import activate
from autosel.canonical import expert_zeros, group_index
from autosel.core import (
    AccuracyClass,
    Activation,
    CanonicalExperts,
    Device,
    Params,
    Problem,
    QuantWeight,
    Routing,
    Support,
)
from autosel.dtypes import torch_dtype
from autosel.interfaces import Backend, Layout, PackedExperts
from autosel.packing import unpack_last


@dataclass(frozen=True)
class Canonical(Layout):
    """The canonical tensors themselves, cloned."""

    name: ClassVar[str] = "canonical"

    def pack(self, experts: CanonicalExperts) -> PackedExperts:
        tensors = {
            f"{name}.{part}": tensor.clone()
            for name, source in (("w13", experts.w13), ("w2", experts.w2))
            for part, tensor in source.tensors.items()
        }
        return PackedExperts(self.key, experts.problem, tensors)

    def unpack(self, packed: PackedExperts) -> CanonicalExperts:
        problem = packed.problem

        def weight(name: str, inputs: int) -> QuantWeight:
            parts = {
                key.partition(".")[2]: tensor
                for key, tensor in packed.tensors.items()
                if key.startswith(f"{name}.")
            }
            return QuantWeight(getattr(problem, name), inputs, **parts)

        return CanonicalExperts(
            problem,
            weight("w13", problem.hidden_size),
            weight("w2", problem.intermediate_size),
        )

    def nbytes(self, problem: Problem) -> int:
        return 1


class Kernel(Backend):
    """Correct as it is. Subclasses replace one step."""

    name: ClassVar[str] = "kernel"
    summary: ClassVar[str] = "a correct 16-bit kernel in plain torch"

    def supports(self, problem: Problem, device: Device) -> Support:
        return Support.yes()

    def layout(self, problem: Problem, params: Params) -> Layout:
        return Canonical()

    # steps ---------------------------------------------------------------------------------------

    def zeros(self, weight: QuantWeight, expert: int) -> torch.Tensor:
        """Zero points ``[N, G]``."""
        if weight.zero_points is None:
            return torch.full_like(weight.scales[expert].float(), weight.scheme.implicit_zero)
        return expert_zeros(weight, expert).float()

    def groups(self, weight: QuantWeight, expert: int) -> torch.Tensor:
        """Group of each input, int64 ``[K]``."""
        return group_index(weight, expert)

    def round_weights(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return values.to(dtype).float()

    def dense(self, weight: QuantWeight, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """Weights ``[N, K]`` as multiplied, float32."""
        codes = unpack_last(weight.codes[expert], weight.scheme.num_bits, weight.num_inputs).float()
        groups = self.groups(weight, expert)
        zeros, scales = self.zeros(weight, expert), weight.scales[expert].float()
        return self.round_weights((codes - zeros[:, groups]) * scales[:, groups], dtype)

    def product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rows @ weight.T

    def quantised(self, rows: torch.Tensor) -> torch.Tensor:
        """The input of a GEMM as it is multiplied."""
        return rows

    def bias(self, weight: QuantWeight, expert: int) -> torch.Tensor | float:
        return 0.0 if weight.bias is None else weight.bias[expert].float()

    def round_h(self, h: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return h.to(dtype).float()

    def activation(self, h: torch.Tensor, of: Activation) -> torch.Tensor:
        return activate(h, of)

    def round_out(self, total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return total.to(dtype)

    # ---------------------------------------------------------------------------------------------

    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        problem, dtype = packed.problem, torch_dtype(packed.problem.act_dtype)
        experts = Canonical().unpack(packed)
        total = torch.zeros(x.shape, dtype=torch.float32)
        for expert in sorted(set(routing.topk_ids.flatten().tolist()) - {-1}):
            tokens, slots = (routing.topk_ids == expert).nonzero(as_tuple=True)
            weight = routing.topk_weights[tokens, slots].unsqueeze(1)
            rows = x[tokens].float()
            if problem.router_weight_on_input:
                rows = (rows * weight).to(dtype).float()
            w13, w2 = self.dense(experts.w13, expert, dtype), self.dense(experts.w2, expert, dtype)
            h = self.product(self.quantised(rows), w13) + self.bias(experts.w13, expert)
            a = self.activation(self.round_h(h, dtype), problem.activation).to(dtype).float()
            y = self.product(self.quantised(a), w2) + self.bias(experts.w2, expert)
            if not problem.router_weight_on_input:
                y = y * weight
            total.index_add_(0, tokens, y.to(dtype).float())
        return out.copy_(self.round_out(total, dtype))


class Int8Kernel(Kernel):
    """The same with both GEMMs' inputs in symmetric 8 bits, one scale a row: class a8."""

    name: ClassVar[str] = "int8_kernel"

    def accuracy(self, params: Params) -> AccuracyClass:
        return "a8"

    def quantised(self, rows: torch.Tensor) -> torch.Tensor:
        step = rows.abs().amax(dim=1, keepdim=True) / 127
        return torch.where(step > 0, (rows / step).round() * step, rows)
