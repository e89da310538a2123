"""What a wrong kernel computes: one step of a correct one replaced."""

from __future__ import annotations

import torch

from autosel.activations import activate
from autosel.core import Activation, Params, QuantWeight, Routing
from autosel.interfaces import PackedExperts
from bench.fault_kernel import Kernel


class Bf16Accumulation(Kernel):
    def product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(rows), len(weight), dtype=torch.bfloat16)
        for start in range(0, rows.shape[1], 16):  # a tile's depth at a time
            part = slice(start, start + 16)
            total = (total.float() + rows[:, part] @ weight[:, part].T).to(torch.bfloat16)
        return total.float()


class Saturated(Kernel):
    def activation(self, h: torch.Tensor, of: Activation) -> torch.Tensor:
        return activate(h, of).clamp(-65504, 65504)


class HalfOverflow(Kernel):
    def activation(self, h: torch.Tensor, of: Activation) -> torch.Tensor:
        return activate(h, of).to(torch.float16).float()


class NoClamp(Kernel):
    def activation(self, h: torch.Tensor, of: Activation) -> torch.Tensor:
        return activate(h, Activation(of.name))


class TanhGelu(Kernel):
    def activation(self, h: torch.Tensor, of: Activation) -> torch.Tensor:
        return activate(h, Activation("gelu_tanh"))


class Bf16Silu(Kernel):
    def activation(self, h: torch.Tensor, of: Activation) -> torch.Tensor:
        gate, up = h.chunk(2, dim=1)
        return torch.nn.functional.silu(gate.bfloat16()).float() * up


class WeightBefore(Kernel):
    """The router weight multiplies the input, where this model wants it on the output."""

    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32)
        for slot in range(routing.topk_ids.shape[1]):
            weight = routing.topk_weights[:, slot : slot + 1]
            alone = Routing(routing.topk_ids[:, slot : slot + 1], torch.ones_like(weight))
            part = torch.zeros_like(x)
            super().run(packed, (x.float() * weight).to(x.dtype), alone, params, part)
            total += part.float()
        return out.copy_(total)


def _bits_up(values: torch.Tensor, chance: float) -> torch.Tensor:
    """bfloat16, rounded away from zero with ``chance`` more than stochastic rounding should."""
    bits = values.float().contiguous().view(torch.int32)
    noise = torch.rand(bits.shape, generator=torch.Generator().manual_seed(len(values)))
    lift = ((noise + chance).clamp(max=1) * 0xFFFF).to(torch.int32)
    return ((bits + lift) & -0x10000).view(torch.float32).to(torch.bfloat16)


class BiasedStochastic(Kernel):
    def round_h(self, h: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return _bits_up(h, 0.5).float()


class Truncated(Kernel):
    def round_h(self, h: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (h.contiguous().view(torch.int32) & -0x10000).view(torch.float32)


class TruncatedWeights(Kernel):
    def round_weights(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (values.contiguous().view(torch.int32) & -0x10000).view(torch.float32)


class GroupBoundary(Kernel):
    def groups(self, weight: QuantWeight, expert: int) -> torch.Tensor:
        found = super().groups(weight, expert)
        return found.roll(-1) if expert == 3 else found


class ZeroSeven(Kernel):
    def zeros(self, weight: QuantWeight, expert: int) -> torch.Tensor:
        return super().zeros(weight, expert) - 1


class NoTail(Kernel):
    def product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rows[:, :-1] @ weight[:, :-1].T


class FirstGroup(Kernel):
    def groups(self, weight: QuantWeight, expert: int) -> torch.Tensor:
        return torch.zeros_like(super().groups(weight, expert))
