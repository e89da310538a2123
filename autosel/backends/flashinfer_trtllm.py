"""FlashInfer's TensorRT-LLM MxInt4 kernel, through its entry that takes the routing as given.

The entry that routes by itself (from logits) is not used: what is chosen here runs with the
caller's routing. Router weights are rounded to bfloat16 inside. Without ``flashinfer.autotune()``
around the first calls the kernel runs with FlashInfer's default tactic.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch

from autosel.backends import _package, _rules, _signature
from autosel.core import Device, Params, Problem, Routing, Support
from autosel.interfaces import Backend, Layout, PackedExperts, Requirements
from autosel.layouts.flashinfer_mxint4 import GROUP_SIZE, MULTIPLE, FlashInferMxInt4

FUNCTION = "trtllm_mxint4_block_scale_routed_moe"
_RENORMALIZE = 1  # a routing method with no groups; the routing itself is given
_DISTRIBUTION = "flashinfer-python"
MAX_PACKED_EXPERTS = 1 << 15  # the expert's number shares a word with its 16-bit weight


@functools.cache
def function() -> Any:
    """The kernel's entry. Raises UnsupportedError, in one line, when it cannot be had."""
    where = f"package {_DISTRIBUTION}"
    return _package.member(where, "flashinfer.fused_moe", FUNCTION, "a newer release")


class FlashInferTrtllm(Backend):
    """``flashinfer.fused_moe.trtllm_mxint4_block_scale_routed_moe``."""

    name: ClassVar[str] = "flashinfer_trtllm"
    summary: ClassVar[str] = "FlashInfer's TensorRT-LLM int4 kernel, Blackwell data centre GPUs"
    distributions: ClassVar[tuple[str, ...]] = (_DISTRIBUTION, "flashinfer-cubin")

    def available(self, device: Device) -> Support:
        needs = Requirements()
        fits = needs.one_of("device", device.kind, ("cuda",))
        if fits:
            found = device.capability
            shown = "not reported" if found is None else f"{found[0]}.{found[1]}"
            family = found is not None and found[0] == 10
            fits = needs.need(family, "compute capability", shown, "10.x")
        install, load = f"pip install {_DISTRIBUTION}", function if fits else None
        _package.require(needs, _DISTRIBUTION, "flashinfer", install, load)
        return needs.support

    def supports(self, problem: Problem, device: Device) -> Support:
        needs = Requirements()
        needs.one_of("activations' dtype", problem.act_dtype, ("bfloat16",))
        _rules.symmetric_int4(needs, problem)
        for name, scheme, _, _ in _rules.gemms(problem):
            needs.one_of(f"{name} group_size", scheme.group_size, (GROUP_SIZE,))
        _rules.no_act_order(needs, problem)
        needs.multiple("hidden_size", problem.hidden_size, MULTIPLE)
        needs.multiple("intermediate_size", problem.intermediate_size, MULTIPLE)
        # The kernel computes plain SiLU times up, whatever it is asked for.
        needs.one_of("activation", problem.activation.key, ("silu",))
        needs.need(not problem.has_bias, "expert bias", "present", "none")
        needs.need(not problem.router_weight_on_input, "router weight", "on input", "on output")
        needs.multiple("num_experts", problem.num_experts, 4)
        needs.need(
            problem.num_experts <= MAX_PACKED_EXPERTS,
            "num_experts",
            problem.num_experts,
            f"at most {MAX_PACKED_EXPERTS}",
        )
        return Support(self.available(device).reasons + needs.support.reasons)

    def layout(self, problem: Problem, params: Params) -> Layout:
        return FlashInferMxInt4()

    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        problem, tensors = packed.problem, packed.tensors
        values: dict[str, object] = {
            "topk_ids": pack_routing(routing, problem),
            "hidden_states": x,
            "gemm1_weights": tensors["gemm1_weights"],
            "gemm1_weights_scale": tensors["gemm1_weights_scale"],
            "gemm1_alpha": None,
            "gemm1_beta": None,
            "gemm1_clamp_limit": None,
            "gemm2_weights": tensors["gemm2_weights"],
            "gemm2_weights_scale": tensors["gemm2_weights_scale"],
            "num_experts": problem.num_experts,
            "top_k": problem.top_k,
            "n_group": 0,
            "topk_group": 0,
            "intermediate_size": problem.intermediate_size,
            "local_expert_offset": 0,
            "local_num_experts": problem.num_local_experts,
            "routed_scaling_factor": None,
            "routing_method_type": _RENORMALIZE,
            "do_finalize": True,
            "output": out,
        }
        result = _signature.call(FUNCTION, function(), values)
        result = result[0] if isinstance(result, (list, tuple)) else result
        return out if result.data_ptr() == out.data_ptr() else out.copy_(result)


def pack_routing(routing: Routing, problem: Problem) -> torch.Tensor:
    """int32 ``[M, top_k]``: expert in the high half, bfloat16 bits of its weight in the low one.

    A slot served elsewhere becomes an expert behind the local ones, which the kernel leaves out;
    where all experts are local, it becomes expert 0 with weight 0.
    """
    ids, weights = routing.topk_ids, routing.topk_weights
    elsewhere = problem.num_local_experts % problem.num_experts
    served = ids >= 0
    bits = torch.where(served, weights, 0.0).to(torch.bfloat16).view(torch.int16)
    packed = (torch.where(served, ids, elsewhere) << 16) | (bits.to(torch.int32) & 0xFFFF)
    return packed.to(torch.int32)
