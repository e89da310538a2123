"""Why a fused-MoE layer stays vLLM's own: what autosel's layer does not do, read off its config.

The names are those of vLLM 0.32 and 0.33 (``FusedMoEConfig``, ``FusedMoEParallelConfig``,
``RoutedExperts``). Nothing of vLLM is imported.
"""

from __future__ import annotations

from typing import Any

from autosel.core import Activation, Problem


def why_not(layer: Any, method: Any) -> str:
    """The first reason why autosel leaves this ``RoutedExperts`` alone; "" where there is none."""
    moe = layer.moe_config
    parallel = moe.moe_parallel_config
    reasons = {
        f"--moe-backend {moe.moe_backend} was asked for": moe.moe_backend != "auto",
        "LoRA adapters may be added to its experts": moe.is_lora_enabled,
        "experts are balanced over ranks while it runs (EPLB, redundant experts)": (
            parallel.enable_eplb or moe.num_experts != moe.num_logical_experts
        ),
        "tokens travel between data-parallel ranks": parallel.dp_size > 1,
        "prefill context parallelism": parallel.pcp_size > 1,
        "sequence parallelism": parallel.sp_size > 1,
        "shared experts are fused into the routed ones": (
            layer.expert_map_manager.num_fused_shared_experts > 0
        ),
        "its sizes are padded": _padded(moe),
        "8-bit activations were asked for (VLLM_MARLIN_INPUT_DTYPE)": _eight_bit(method),
        "its weights are offloaded to the host": any(
            getattr(tensor, "_vllm_is_uva_offloaded", False) for tensor in layer.parameters()
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def differences(layer: Any, symmetric: bool, problem: Problem) -> str:
    """Where vLLM's layer is another one than the checkpoint's; "" where they agree.

    ``symmetric`` is how vLLM reads the weights.
    """
    moe = layer.moe_config
    activation = _activation(layer)
    pairs = (
        ("experts", moe.num_experts, problem.num_experts),
        ("experts held here", layer.local_num_experts, problem.num_local_experts),
        ("top_k", layer.top_k, problem.top_k),
        ("hidden size", layer.hidden_size, problem.hidden_size),
        ("intermediate size", layer.intermediate_size_per_partition, problem.intermediate_size),
        ("dtype of activations", str(moe.in_dtype).removeprefix("torch."), problem.act_dtype),
        (
            "router weight on input",
            bool(layer.apply_router_weight_on_input),
            problem.router_weight_on_input,
        ),
        ("activation", activation, problem.activation),
        ("symmetric", symmetric, problem.w13.symmetric and problem.w2.symmetric),
    )
    for what, theirs, ours in pairs:
        if theirs != ours:
            return f"{what}: {theirs} in vLLM, {ours} in the checkpoint"
    return ""


def _activation(layer: Any) -> Activation | str:
    """vLLM's activation in autosel's words, or vLLM's where autosel has none."""
    moe, name = layer.moe_config, str(layer.activation.value)
    try:
        if name == "situ":
            beta, linear = moe.activation_situ_beta, moe.activation_situ_linear_beta
            return Activation(name, beta=beta, linear_beta=linear)
        return Activation(name, layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta)
    except Exception:
        return name


def _padded(moe: Any) -> bool:
    full = moe.intermediate_size_per_partition_unpadded
    return bool(
        moe.tp_shard_with_padding
        or moe.intermediate_pad
        or moe.hidden_dim_unpadded not in (None, moe.hidden_dim)
        or full not in (None, moe.intermediate_size_per_partition)
    )


def _eight_bit(method: Any) -> bool:
    dtype = getattr(method, "input_dtype", None)
    return dtype is not None and dtype.itemsize == 1
