"""vLLM's CUDA operator ``moe_wna16_gemm`` on N-first bytes: no tensor cores, for few tokens.

One thread computes one output of up to 64 rows, so it wins, if anywhere, where each expert gets a
few tokens; vLLM itself takes it up to 6 on average. Numerics: products of four inputs are added in
the activations' type, the rest in float32; blocks of inputs are added to the output with 16-bit
atomics in arbitrary order, so two runs may differ in the last bits.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from autosel.align import Aligned
from autosel.backends import _rules, _vllm_ops
from autosel.backends._steps import activate_into, buffers, reduce_into
from autosel.backends._vllm_align import align
from autosel.core import Device, Params, Problem, Reason, Routing, Support
from autosel.errors import UnsupportedError, field_error
from autosel.interfaces import Layout, PackedExperts, Requirements, Space
from autosel.layouts.nfirst_bytes import NFirstBytes

GROUP_SIZES = (32, 64, 128)
BLOCK_M = (1, 2, 4, 8, 16, 32, 64)
BLOCK_N = (64, 128, 256, 512, 1024)  # threads of a block
#: Groups of inputs in one block: the operator has a kernel for each.
GROUPS = (1, 2, 4, 8)
#: Shared memory of a block, which the operator does not ask more of than every device has.
_SHARED_MEMORY = 48 << 10


class MoeWna16(_vllm_ops.VllmOperator):
    """``_moe_C::moe_wna16_gemm`` for both GEMMs."""

    name: ClassVar[str] = "moe_wna16"
    summary: ClassVar[str] = "vLLM's CUDA kernel without tensor cores, for few tokens"

    def available(self, device: Device) -> Support:
        needs = Requirements()
        cuda = needs.one_of("device", device.kind, ("cuda",))
        if cuda:
            cuda = _rules.capability_at_least(needs, device, (7, 5))
        _vllm_ops.require(needs, "_moe_C", "moe_wna16_gemm", load=cuda)
        return needs.support

    def supports(self, problem: Problem, device: Device) -> Support:
        needs = Requirements()
        needs.one_of("activations' dtype", problem.act_dtype, ("bfloat16", "float16"))
        if device.capability is not None and device.capability < (8, 0):
            where = "activations' dtype below compute capability 8.0"
            needs.need(problem.act_dtype != "bfloat16", where, "bfloat16", "float16")
        for name, scheme, outputs, inputs in _rules.gemms(problem):
            size = scheme.group_size
            if needs.one_of(f"{name} group_size", size, GROUP_SIZES):
                needs.need(inputs % size == 0, f"{name} inputs", inputs, f"whole groups of {size}")
            if not scheme.symmetric and scheme.num_bits == 4:
                needs.multiple(f"{name} outputs", outputs, 2)
        needs.need(not problem.has_bias, "expert bias", "present", "none")
        _rules.no_act_order(needs, problem)
        _rules.activation(needs, problem)
        return Support(self.available(device).reasons + needs.support.reasons)

    def layout(self, problem: Problem, params: Params) -> Layout:
        return NFirstBytes(scale_dtype=problem.act_dtype)

    def space(self, problem: Problem, num_tokens: int, device: Device) -> Space:
        def constraint(params: Params) -> Reason | None:
            block_m = int(str(params["BLOCK_SIZE_M"]))
            for name, _, _, _ in _rules.gemms(problem):
                needed = 2 * block_m * block_k(problem, name, int(str(params["groups"])))
                if needed > _SHARED_MEMORY:
                    where = f"shared memory of one block of {name}"
                    return Reason(where, f"{needed} bytes", f"at most {_SHARED_MEMORY} bytes")
            return None

        return Space(
            default=default_params(problem, num_tokens),
            choices={"BLOCK_SIZE_M": BLOCK_M, "BLOCK_SIZE_N": BLOCK_N, "groups": GROUPS},
            constraint=constraint,
        )

    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        problem, num_tokens = packed.problem, x.shape[0]
        settings = {**default_params(problem, num_tokens), **params}
        top_k, slots = problem.top_k, num_tokens * problem.top_k
        _check_size(slots, max(problem.num_shards * problem.intermediate_size, x.shape[1]))
        blocks = align(
            routing.topk_ids, problem.num_local_experts, int(str(settings["BLOCK_SIZE_M"]))
        )
        h, a, y = buffers(problem, x, slots)
        on_input, weights = problem.router_weight_on_input, routing.topk_weights
        _gemm(packed, "w13", x, h, blocks, weights if on_input else None, settings, top_k)
        activate_into(a, h, problem.activation)
        _gemm(packed, "w2", a, y, blocks, None if on_input else weights, settings, 1)
        return reduce_into(out, y, routing.topk_ids, problem.num_local_experts)


def block_k(problem: Problem, name: str, groups: int) -> int:
    """Inputs of one block: at most ``groups`` whole groups, a divisor of all inputs."""
    _, scheme, _, inputs = next(gemm for gemm in _rules.gemms(problem) if gemm[0] == name)
    size = scheme.group_size
    return size * max(g for g in GROUPS if g <= groups and (inputs % (size * g) == 0 or g == 1))


def default_params(problem: Problem, num_tokens: int) -> dict[str, Any]:
    """As vLLM begins: blocks of up to 16 rows, 128 outputs, and 128 inputs or one group."""
    size = min(scheme.group_size for _, scheme, _, _ in _rules.gemms(problem))
    return {
        "BLOCK_SIZE_M": min(16, 1 << (max(1, num_tokens) - 1).bit_length()),
        "BLOCK_SIZE_N": 128,
        "groups": max(1, min(8, 128 // max(1, size))),
    }


def _check_size(slots: int, width: int) -> None:
    """The kernel counts elements of rows in 32 bits."""
    if slots * width >= 1 << 31:
        raise UnsupportedError(
            field_error("moe_wna16", "slots x width", f"{slots} x {width}", "below 2**31")
        )


def _gemm(
    packed: PackedExperts,
    name: str,
    rows: torch.Tensor,
    out: torch.Tensor,
    blocks: Aligned,
    weights: torch.Tensor | None,
    settings: Params,
    top_k: int,
) -> None:
    """``out[slot]`` is written for every slot: 0 where no block names it."""
    problem, tensors = packed.problem, packed.tensors
    scheme = problem.w13 if name == "w13" else problem.w2
    _vllm_ops.call(
        _vllm_ops.operator("_moe_C", "moe_wna16_gemm"),
        {
            "input": rows,
            "output": out,
            "b_qweight": tensors[name],
            "b_scales": tensors[f"{name}_scales"],
            "b_qzeros": tensors.get(f"{name}_zeros"),
            "topk_weights": weights,
            "sorted_token_ids": blocks.sorted_ids,
            "expert_ids": blocks.expert_ids,
            "num_tokens_post_pad": blocks.num_padded,
            "top_k": top_k,
            "BLOCK_SIZE_M": blocks.block,
            "BLOCK_SIZE_N": int(str(settings["BLOCK_SIZE_N"])),
            "BLOCK_SIZE_K": block_k(problem, name, int(str(settings["groups"]))),
            "bit": scheme.num_bits,
        },
    )
