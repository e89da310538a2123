"""vLLM's GPTQ MoE kernel for AMD RDNA3 (gfx1100).

The kernel adds its partial sums into the output in 16 bit and in any order, so results change in
the last bits from run to run; both outputs must start from zero.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from autosel.align import align_block_size
from autosel.backends import _rules, _vllm_ops
from autosel.backends._steps import activate_into
from autosel.core import Device, Params, Problem, Routing, Support
from autosel.interfaces import Layout, PackedExperts, Requirements, Space
from autosel.layouts.exllama import Exllama

ARCHITECTURE = "gfx1100"
BLOCK_SIZES = (1, 2, 4, 8)
_OPERATOR = ("_rocm_C", "moe_gptq_gemm_rdna3")


class Rdna3(_vllm_ops.VllmOperator):
    """``_rocm_C::moe_gptq_gemm_rdna3`` for both GEMMs; the second one sums over slots."""

    name: ClassVar[str] = "rdna3"
    summary: ClassVar[str] = "vLLM's int4 kernel for AMD RDNA3"

    def available(self, device: Device) -> Support:
        needs = Requirements()
        fits = needs.one_of("device", device.kind, ("rocm",))
        if fits:
            there = ARCHITECTURE in device.flags
            found = ", ".join(device.flags) or "not reported"
            fits = needs.need(there, "architecture", found, ARCHITECTURE)
        _vllm_ops.require(needs, *_OPERATOR, load=fits)
        return needs.support

    def supports(self, problem: Problem, device: Device) -> Support:
        needs = Requirements()
        needs.one_of("activations' dtype", problem.act_dtype, ("float16", "bfloat16"))
        _rules.symmetric_int4(needs, problem)
        _rules.activation(needs, problem)
        needs.need(not problem.has_bias, "expert bias", "present", "none")
        for name, scheme, outputs, inputs in _rules.gemms(problem):
            if needs.need(scheme.group_size > 0, f"{name} scales", "per channel", "grouped"):
                needs.multiple(f"{name} group_size", scheme.group_size, 32)
                needs.multiple(f"{name} inputs", inputs, scheme.group_size)
            needs.need(not scheme.has_g_idx, f"{name} act-order", "g_idx", "contiguous groups")
            needs.multiple(f"{name} inputs", inputs, 32)
            needs.multiple(f"{name} outputs", outputs, 8)
        return Support(self.available(device).reasons + needs.support.reasons)

    def layout(self, problem: Problem, params: Params) -> Layout:
        return Exllama(problem.act_dtype)

    def space(self, problem: Problem, num_tokens: int, device: Device) -> Space:
        return Space(
            default={"block_size_m": default_block_size(num_tokens)},
            choices={"block_size_m": BLOCK_SIZES},
        )

    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        problem, tensors = packed.problem, packed.tensors
        num_tokens, top_k = routing.topk_ids.shape
        block = int(str(params.get("block_size_m") or default_block_size(num_tokens)))
        blocks = align_block_size(routing.topk_ids, problem.num_local_experts, block)
        op = _vllm_ops.operator(*_OPERATOR)
        slots, inner = num_tokens * top_k, problem.intermediate_size
        h = torch.zeros((slots, problem.num_shards * inner), dtype=x.dtype, device=x.device)
        a = torch.empty((slots, inner), dtype=x.dtype, device=x.device)
        weights = routing.topk_weights.flatten()
        none = weights[:0]
        on_input = problem.router_weight_on_input

        def gemm(
            name: str, rows: torch.Tensor, result: torch.Tensor, top_k: int, weighted: bool,
            output_topk: int,
        ) -> None:  # fmt: skip
            _vllm_ops.call(
                op,
                {
                    "a": rows,
                    "c": result,
                    "b_q_weight": tensors[name],
                    "b_scales": tensors[f"{name}_scales"],
                    "b_qzeros": tensors[f"{name}_zeros"],
                    "topk_weights": weights if weighted else none,
                    "sorted_token_ids": blocks.sorted_ids,
                    "expert_ids": blocks.expert_ids,
                    "num_tokens_post_padded": blocks.num_padded,
                    "top_k": top_k,
                    "block_size_m": block,
                    "mul_topk_weight": weighted,
                    "output_topk": output_topk,
                },
            )

        gemm("w13", x, h, top_k, on_input, 0)
        activate_into(a, h, problem.activation)
        gemm("w2", a, out.zero_(), 1, not on_input, top_k)
        return out


def default_block_size(num_tokens: int) -> int:
    """vLLM's choice: no padding for decode, blocks of 4 otherwise."""
    return 1 if num_tokens <= 4 else 4
