"""What the backends on one of PyTorch's packed CPU matmuls have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch

from autosel.backends._per_expert import Linear, compute_dtypes, run_per_expert
from autosel.core import Device, Params, Problem, Routing, Support
from autosel.dtypes import torch_dtype
from autosel.interfaces import Backend, PackedExperts, Requirements, Space


class AtenMatmul(Backend):
    """One call of ``aten::<operator>`` for each expert. Tunable: the dtype it computes in."""

    #: Name in ``torch.ops.aten``, and the torch that brought it, for the reason.
    operator: ClassVar[str]
    since: ClassVar[str]

    @abstractmethod
    def linear(self, packed: PackedExperts) -> Linear:
        """One GEMM of one expert, rows and result in the compute dtype."""

    def available(self, device: Device) -> Support:
        needs = Requirements()
        needs.one_of("device", device.kind, ("cpu",))
        present = hasattr(torch.ops.aten, self.operator)
        needs.need(present, f"aten::{self.operator}", "missing", self.since)
        return needs.support

    def space(self, problem: Problem, num_tokens: int, device: Device) -> Space:
        dtypes = compute_dtypes(problem)
        return Space({"compute_dtype": dtypes[0]}, {"compute_dtype": dtypes})

    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        dtype = torch_dtype(compute_dtype(packed.problem, params))
        return run_per_expert(packed, x, routing, out, dtype, self.linear(packed))


def compute_dtype(problem: Problem, params: Params) -> str:
    """The chosen dtype's name; that of the activations where none is chosen."""
    return str(params.get("compute_dtype", problem.act_dtype))
