"""The plain Triton kernel on rows of packed bytes (:mod:`autosel.kernels.moe_wna16_plain`).

Takes every scheme, group size, act-order and bias that the canonical form has; sizes need not
fit tiles.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from autosel import triton_offline
from autosel.align import Aligned
from autosel.backends import _package, _rules
from autosel.backends._steps import activate_into, buffers, reduce_into
from autosel.backends._vllm_align import align
from autosel.core import Device, Params, Problem, Reason, Routing, Support
from autosel.dtypes import torch_dtype
from autosel.interfaces import Backend, Layout, PackedExperts, Requirements, Space
from autosel.layouts.nfirst_bytes import NFirstBytes

BLOCK_M = (16, 32, 64, 128)
BLOCK_N = (32, 64, 128, 256)
BLOCK_K = (32, 64, 128, 256)
#: Shared memory of one block on devices that do not report it: the least of any supported one.
_SHARED_MEMORY = 64 << 10


class Triton(Backend):
    """One Triton launch a GEMM; grouped, per-channel and act-order scales alike."""

    name: ClassVar[str] = "triton"
    summary: ClassVar[str] = "plain Triton kernel, every scheme, CUDA, ROCm and XPU"
    distributions: ClassVar[tuple[str, ...]] = (
        "triton",
        "pytorch-triton-rocm",
        "pytorch-triton-xpu",
    )

    def available(self, device: Device) -> Support:
        needs = Requirements()
        if needs.one_of("device", device.kind, ("cuda", "rocm", "xpu")) and device.kind == "cuda":
            _rules.capability_at_least(needs, device, (8, 0))
        _package.require_triton(needs)
        return needs.support

    def supports(self, problem: Problem, device: Device) -> Support:
        needs = Requirements()
        _rules.activation(needs, problem)
        return Support(self.available(device).reasons + needs.support.reasons)

    def layout(self, problem: Problem, params: Params) -> Layout:
        # Weights are multiplied in the activations' dtype: of the wider ones only float16 loses
        # range (1e-8 becomes 0, 70000 infinite).
        half = problem.act_dtype == "float16"
        wide = {problem.w13.scale_dtype, problem.w2.scale_dtype} != {"float16"}
        return NFirstBytes(fits="float16" if half and wide else "")

    def space(self, problem: Problem, num_tokens: int, device: Device) -> Space:
        def constraint(params: Params) -> Reason | None:
            for name, _, _, inputs in _rules.gemms(problem):
                reason = _divides(name, inputs, int(str(params["BLOCK_SIZE_K"])))
                if reason is not None:
                    return reason
            return _fits(params, problem, device)

        return Space(
            default=default_params(problem, num_tokens),
            choices={
                "BLOCK_SIZE_M": BLOCK_M,
                "BLOCK_SIZE_N": BLOCK_N,
                "BLOCK_SIZE_K": BLOCK_K,
                "GROUP_SIZE_M": (1, 8, 32),
                "num_warps": (4, 8),
                "num_stages": (2, 3, 4, 5),
            },
            constraint=constraint,
        )

    def compile_ahead(
        self, problem: Problem, params: Params, num_tokens: int, device: Device
    ) -> None:
        """One set of kernels serves every token count: blocks are fixed by ``params``."""
        triton_offline.launches_compile(device)
        x, routing, out = triton_offline.meta_call(problem, num_tokens)
        self.run(_meta_packed(self.layout(problem, params), problem), x, routing, params, out)

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
        experts, top_k = problem.num_local_experts, problem.top_k
        blocks = align(routing.topk_ids, experts, int(str(settings["BLOCK_SIZE_M"])))
        h, a, y = buffers(problem, x, num_tokens * top_k)
        on_input, weights = problem.router_weight_on_input, routing.topk_weights
        _gemm(packed, "w13", x, h, blocks, weights, settings, top_k, on_input, False)
        activate_into(a, h, problem.activation)
        _gemm(packed, "w2", a, y, blocks, weights, settings, 1, False, not on_input)
        return reduce_into(out, y, routing.topk_ids, experts)


def _meta_packed(layout: Layout, problem: Problem) -> PackedExperts:
    """The layer's packed weights without contents, as :mod:`autosel.layouts.nfirst_bytes` says."""
    tensors: dict[str, torch.Tensor] = {}
    for name, scheme, _, inputs in _rules.gemms(problem):
        groups = scheme.num_groups(inputs)
        made = {name: (torch.uint8, 1), f"{name}_scales": (torch_dtype(scheme.scale_dtype), groups)}
        if not scheme.symmetric:
            made[f"{name}_zeros"] = torch.uint8, 1
        if problem.has_bias:
            made[f"{name}_bias"] = torch.float32, 1
        if scheme.has_g_idx:
            made[f"{name}_g_idx"] = torch.int32, 1
        for key, (dtype, last) in made.items():
            tensors[key] = torch.empty((1, last), dtype=dtype, device="meta")
    return PackedExperts(layout.key, problem, tensors)


def default_params(problem: Problem, num_tokens: int) -> dict[str, Any]:
    """vLLM's starting point for WNA16 without a tuned file, where its block divides the inputs."""
    block_m = 16 if num_tokens <= 20 else 32 if num_tokens <= 40 else 64
    block_n, wanted = (32, 64) if num_tokens == 1 else (64, 32)
    fits = [
        block
        for block in BLOCK_K
        if all(
            _divides(name, inputs, block) is None for name, _, _, inputs in _rules.gemms(problem)
        )
    ]
    return {
        "BLOCK_SIZE_M": block_m,
        "BLOCK_SIZE_N": block_n,
        "BLOCK_SIZE_K": max((block for block in fits if block <= wanted), default=BLOCK_K[0]),
        "GROUP_SIZE_M": 1,
        "num_warps": 4,
        "num_stages": 3,
    }


def _divides(name: str, inputs: int, block: int) -> Reason | None:
    """Blocks divide the inputs; where none can, the smallest one runs with its end masked."""
    smallest = BLOCK_K[0]
    if inputs % block == 0 or (block == smallest and inputs % smallest):
        return None
    return Reason(f"BLOCK_SIZE_K for {name}", str(block), f"a divisor of {inputs}")


def shared_memory(params: Params, problem: Problem) -> int:
    """Bytes of one block: the staged loads of both operands, and the dequantised one."""
    m, n, k = (int(str(params[f"BLOCK_SIZE_{axis}"])) for axis in "MNK")
    width = torch_dtype(problem.act_dtype).itemsize
    bits = max(problem.w13.num_bits, problem.w2.num_bits)
    stages = int(str(params["num_stages"]))
    return stages * (m * k * width + n * k * bits // 8) + n * k * width


def _fits(params: Params, problem: Problem, device: Device) -> Reason | None:
    needed, there = shared_memory(params, problem), device.shared_memory_bytes or _SHARED_MEMORY
    if needed <= there:
        return None
    return Reason("shared memory of one block", f"{needed} bytes", f"at most {there} bytes")


def _gemm(
    packed: PackedExperts,
    name: str,
    rows: torch.Tensor,
    out: torch.Tensor,
    blocks: Aligned,
    weights: torch.Tensor,
    params: Params,
    top_k: int,
    weight_input: bool,
    weight_output: bool,
) -> None:
    from autosel.kernels.moe_wna16_plain import moe_gemm_kernel

    tensors = packed.tensors
    scheme = packed.problem.w13 if name == "w13" else packed.problem.w2
    num_slots, outputs = out.shape
    inputs = rows.shape[1]
    settings = {key: int(str(value)) for key, value in params.items()}
    block_m, block_n = settings["BLOCK_SIZE_M"], settings["BLOCK_SIZE_N"]
    num_blocks = min(blocks.num_blocks, num_slots)
    moe_gemm_kernel[(num_blocks * -(-outputs // block_n),)](
        rows,
        tensors[name],
        out,
        tensors[f"{name}_scales"],
        tensors.get(f"{name}_zeros"),
        tensors.get(f"{name}_bias"),
        tensors.get(f"{name}_g_idx"),
        weights,
        blocks.sorted_ids,
        blocks.expert_ids,
        blocks.num_padded,
        num_slots,
        num_blocks,
        N=outputs,
        K=inputs,
        G=tensors[f"{name}_scales"].shape[-1],
        GROUP=inputs if scheme.group_size == -1 else scheme.group_size,
        TOP_K=top_k,
        BITS=scheme.num_bits,
        ZERO=scheme.implicit_zero,
        HAS_ZEROS=not scheme.symmetric,
        HAS_BIAS=packed.problem.has_bias,
        ACT_ORDER=scheme.has_g_idx,
        WEIGHT_INPUT=weight_input,
        WEIGHT_OUTPUT=weight_output,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=settings["BLOCK_SIZE_K"],
        GROUP_M=settings["GROUP_SIZE_M"],
        FP32_DOT=rows.device.type == "cpu" or rows.dtype == torch.float32,
        num_warps=settings["num_warps"],
        num_stages=settings["num_stages"],
    )
