"""Marlin on batched activations ``[E, T, H]``, as all-to-all dispatch of expert parallelism gives.

The buffer is filled from ordinary activations first, see :mod:`autosel.backends._batches`.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from autosel.align import align_batched
from autosel.backends import _vllm_ops, marlin
from autosel.backends._batches import fill
from autosel.backends._steps import reduce_into
from autosel.core import Device, Params, Problem, Routing, Support
from autosel.interfaces import Layout, PackedExperts, Requirements, Space
from autosel.layouts.marlin import Marlin as MarlinLayout


class BatchedMarlin(_vllm_ops.VllmOperator):
    """The operator and the layout of :mod:`autosel.backends.marlin`, one row a slot."""

    name: ClassVar[str] = "batched_marlin"
    summary: ClassVar[str] = "Marlin on per-expert batches, for all-to-all dispatch"

    def available(self, device: Device) -> Support:
        needs = Requirements()
        marlin.require_operator(needs, device)
        return needs.support

    def supports(self, problem: Problem, device: Device) -> Support:
        needs = Requirements()
        marlin.shape_rules(needs, problem, device)
        # The weights are known only after the way back.
        needs.need(not problem.router_weight_on_input, "router weight", "on input", "on output")
        return Support(self.available(device).reasons + needs.support.reasons)

    def layout(self, problem: Problem, params: Params) -> Layout:
        return MarlinLayout(problem.act_dtype)

    def space(self, problem: Problem, num_tokens: int, device: Device) -> Space:
        return Space(
            default={"moe_block_size": default_block_size(problem, num_tokens)},
            choices={"moe_block_size": marlin.BLOCK_SIZES},
        )

    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        problem, ids = packed.problem, routing.topk_ids
        experts = problem.num_local_experts
        batch = fill(x, ids, experts, packed.tensors.get("w13_order"))
        block = int(str(params.get("moe_block_size") or default_block_size(problem, x.shape[0])))
        blocks = align_batched(batch.counts, batch.length, block)
        ones = torch.ones((experts * batch.length, 1), dtype=torch.float32, device=x.device)
        y = marlin.gemms(packed, batch.inputs, blocks, ones, params, 1, False, False)
        return reduce_into(out, y, ids, experts, routing.topk_weights, batch.rows)


def default_block_size(problem: Problem, num_tokens: int) -> int:
    """As vLLM chooses it, from the mean number of tokens of an expert."""
    mean = num_tokens * problem.top_k / problem.num_experts
    return next((b for b in marlin.BLOCK_SIZES if mean / b < 0.9), marlin.BLOCK_SIZES[-1])
