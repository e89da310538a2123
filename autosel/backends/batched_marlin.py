"""Marlin on batched activations ``[E, T, H]``, as all-to-all dispatch of expert parallelism gives.

With DeepEP's low-latency mode (or NIXL) every expert's tokens arrive in a buffer of its own and
the router weights are applied after the way back. Here the buffer is filled from ordinary
activations first, so that the path can be verified and timed on one device; that costs a copy
which a real dispatch has already paid for.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from autosel.align import align_batched, expert_ranks
from autosel.backends import _vllm_ops, marlin
from autosel.backends._steps import reduce_into, slot_rows
from autosel.core import Device, Params, Problem, Routing, Support
from autosel.interfaces import Backend, Layout, PackedExperts, Requirements, Space
from autosel.layouts.marlin import Marlin as MarlinLayout


class BatchedMarlin(Backend):
    """The operator and the layout of :mod:`autosel.backends.marlin`, one row a slot."""

    name: ClassVar[str] = "batched_marlin"
    summary: ClassVar[str] = "Marlin on per-expert batches, for all-to-all dispatch"
    distributions: ClassVar[tuple[str, ...]] = _vllm_ops.DISTRIBUTIONS

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
        experts, num_tokens = problem.num_local_experts, x.shape[0]
        ranks, counts = expert_ranks(ids, experts)  # [M, top_k], [E]
        length = _buffer_length(counts, ids.numel())
        rows = torch.where(ranks >= 0, ids * length + ranks, -1)  # [M, top_k]
        # One place past the end takes the slots that no expert here serves.
        places = torch.where(rows >= 0, rows, experts * length).flatten()
        batched = torch.empty((experts * length + 1, x.shape[1]), dtype=x.dtype, device=x.device)
        batched[places] = slot_rows(x, ids, packed.tensors.get("w13_order"))
        block = int(str(params.get("moe_block_size") or default_block_size(problem, num_tokens)))
        blocks = align_batched(counts, length, block)
        ones = torch.ones((experts * length, 1), dtype=torch.float32, device=x.device)
        y = marlin.gemms(packed, batched[:-1], blocks, ones, params, 1, False, False)
        rows = rows.to(torch.int32)
        return reduce_into(out, y, ids, experts, routing.topk_weights, rows)


def default_block_size(problem: Problem, num_tokens: int) -> int:
    """As vLLM chooses it, from the mean number of tokens of an expert."""
    mean = num_tokens * problem.top_k / problem.num_experts
    return next((b for b in marlin.BLOCK_SIZES if mean / b < 0.9), marlin.BLOCK_SIZES[-1])


def _buffer_length(counts: torch.Tensor, num_slots: int) -> int:
    """Rows of each expert's buffer: the busiest expert's, or the bound where a read would break a
    graph capture.
    """
    if counts.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return num_slots
    return max(1, int(counts.max()))
