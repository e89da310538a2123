"""Intel's MoE kernel for Xe2 and later GPUs, through the package ``vllm-xpu-kernels``.

The package's object converts the weights it is given in place (every byte ``^ 0x88``) unless they
carry its mark, and takes int4 weights by their dtype, uint8. Here the weights are packed in the
converted form and handed over with the mark, so nothing is converted and packed weights stay as
they are.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, ClassVar

import torch

from autosel.activations import constants
from autosel.backends import _package, _rules, _signature
from autosel.core import Device, Params, Problem, Routing, Support
from autosel.interfaces import Backend, Layout, PackedExperts, Requirements
from autosel.layouts.nfirst_bytes import NFirstBytes

GROUP_SIZES = (32, 64, 128, 256)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2_no_mul")
_DISTRIBUTION = "vllm-xpu-kernels"
_MARK = "xpu_fused_moe"


@functools.cache
def factory() -> Any:
    """The package's class. Raises UnsupportedError, in one line, when it cannot be had."""
    where, module = f"package {_DISTRIBUTION}", "vllm_xpu_kernels.fused_moe_interface"
    return _package.member(where, module, "XpuFusedMoe", "release 0.1.9 on")


class Xpu(Backend):
    """``vllm_xpu_kernels.fused_moe_interface.XpuFusedMoe``."""

    name: ClassVar[str] = "xpu"
    summary: ClassVar[str] = "Intel's int4 grouped GEMM for Xe2 GPUs"
    distributions: ClassVar[tuple[str, ...]] = (_DISTRIBUTION,)

    def available(self, device: Device) -> Support:
        needs = Requirements()
        fits = needs.one_of("device", device.kind, ("xpu",))
        install, load = f"pip install {_DISTRIBUTION}", factory if fits else None
        _package.require(needs, _DISTRIBUTION, "vllm_xpu_kernels", install, load)
        return needs.support

    def supports(self, problem: Problem, device: Device) -> Support:
        needs = Requirements()
        needs.one_of("activations' dtype", problem.act_dtype, ("bfloat16", "float16"))
        _rules.symmetric_int4(needs, problem)
        for name, scheme, _, inputs in _rules.gemms(problem):
            needs.need(not scheme.has_g_idx, f"{name} act-order", "g_idx", "contiguous groups")
            if needs.one_of(f"{name} group_size", scheme.group_size, GROUP_SIZES):
                needs.multiple(f"{name} inputs", inputs, scheme.group_size)
        # swigluoai is left out: the kernel reads gate and up as alternating rows.
        if needs.one_of("activation", problem.activation.name, ACTIVATIONS):
            _rules.activation(needs, problem)
        needs.need(not problem.router_weight_on_input, "router weight", "on input", "on output")
        return Support(self.available(device).reasons + needs.support.reasons)

    def layout(self, problem: Problem, params: Params) -> Layout:
        return NFirstBytes(signed=True, scale_dtype=problem.act_dtype)

    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        experts = packed.problem.num_local_experts
        # Ids of -1 would be read as expert 0: they become an expert that the map says is elsewhere.
        ids = routing.topk_ids.remainder(experts + 1)
        moe = _object(packed)
        moe.apply(
            output=out,
            hidden_states=x,
            topk_weights=routing.topk_weights,
            topk_ids=ids,
            expert_map=moe.expert_map,
        )
        return out


_objects: dict[int, Any] = {}


def _object(packed: PackedExperts) -> Any:
    """One object of the package for each packed layer, made at its first call."""
    key = id(packed.tensors["w13"])
    if key not in _objects:
        _objects[key] = _make(packed)
        weakref.finalize(packed.tensors["w13"], _objects.pop, key, None)
    return _objects[key]


def _make(packed: PackedExperts) -> Any:
    problem, tensors = packed.problem, packed.tensors
    experts = problem.num_local_experts
    weights = {}
    for name in ("w13", "w2"):
        view = tensors[name].view(torch.uint8)
        setattr(view, _MARK, True)
        weights[name] = view
    expert_map = torch.arange(experts + 1, dtype=torch.int32, device=tensors["w13"].device)
    expert_map[experts] = -1
    values = {
        "w13": weights["w13"],
        "w13_scales": tensors["w13_scales"],
        "w13_bias": tensors.get("w13_bias"),
        "w2": weights["w2"],
        "w2_scales": tensors["w2_scales"],
        "w2_bias": tensors.get("w2_bias"),
        "n_experts_per_token": problem.top_k,
        "activation": problem.activation.name,
        "num_experts": experts,
        "ep_rank": 0,
        "ep_size": 1,
        "expert_map": expert_map,
        "gemm1_clamp_limit": constants(problem.activation).get("limit"),
    }
    moe = _signature.call("XpuFusedMoe", factory(), values)
    # It was told uint8 to recognise int4; its kernel reads the signed bytes.
    moe.w13, moe.w2 = tensors["w13"], tensors["w2"]
    return moe
