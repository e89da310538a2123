"""Dequantised weights through torch's own matmuls: every format, every device, always there."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn import functional

from autosel.activations import activate
from autosel.backends._per_expert import compute_dtypes, run_per_expert
from autosel.core import Device, Params, Problem, Reason, Routing, Support
from autosel.dtypes import torch_dtype
from autosel.interfaces import Backend, Layout, PackedExperts, Requirements, Space
from autosel.layouts.dense import Dense

#: What oneDNN's weight reordering needs in torch, by weight dtype: any one of the sets.
_ONEDNN_FLAGS: dict[str, tuple[frozenset[str], ...]] = {
    "bfloat16": (
        frozenset({"avx512bw", "avx512vl", "avx512dq"}),
        frozenset({"avx_ne_convert"}),
    ),
    "float16": (frozenset({"avx512_fp16"}), frozenset({"avx_ne_convert"})),
    "float32": (frozenset({"avx2"}),),
}


class Emulation(Backend):
    """The last resort. Tunable: the weights' dtype and how the matmuls are made.

    ``linear``   one ``torch.nn.functional.linear`` an expert
    ``onednn``   the same on the CPU, weights reordered once for oneDNN
    ``grouped``  torch's grouped GEMM, on CUDA in bfloat16; no host synchronisation
    """

    name: ClassVar[str] = "emulation"
    summary: ClassVar[str] = "dequantised weights, torch's own matmul for each expert"

    def available(self, device: Device) -> Support:
        needs = Requirements()
        needs.one_of("device", device.kind, ("cpu", "cuda", "rocm", "xpu"))
        return needs.support

    def supports(self, problem: Problem, device: Device) -> Support:
        return self.available(device)

    def layout(self, problem: Problem, params: Params) -> Layout:
        return Dense(
            dtype=str(params.get("weight_dtype", problem.act_dtype)),
            onednn=params.get("matmul") == "onednn",
        )

    def space(self, problem: Problem, num_tokens: int, device: Device) -> Space:
        dtypes = compute_dtypes(problem)
        grouped = _has_grouped(problem, device)
        kinds = {"cpu": ("linear", "onednn")}.get(device.kind, ("grouped", "linear"))

        def constraint(params: Params) -> Reason | None:
            needs = Requirements()
            dtype = str(params["weight_dtype"])
            if params["matmul"] == "onednn":
                has = any(flags <= set(device.flags) for flags in _ONEDNN_FLAGS[dtype])
                wanted = " or ".join("+".join(sorted(flags)) for flags in _ONEDNN_FLAGS[dtype])
                needs.need(has, f"instruction sets for {dtype} in oneDNN's order", "none", wanted)
            elif params["matmul"] == "grouped":
                needs.one_of("weight dtype of the grouped GEMM", dtype, ("bfloat16",))
                needs.need(bool(grouped), "grouped GEMM", str(grouped), "supported")
            reasons = needs.support.reasons
            return reasons[0] if reasons else None

        bfloat16 = problem.act_dtype == "bfloat16"
        default = kinds[0] if device.kind == "cpu" or (grouped and bfloat16) else "linear"
        return Space(
            default={"weight_dtype": problem.act_dtype, "matmul": default},
            choices={"weight_dtype": dtypes, "matmul": kinds},
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
        dtype = torch_dtype(str(params.get("weight_dtype", packed.problem.act_dtype)))
        if params.get("matmul") == "grouped":
            return _run_grouped(packed, x, routing, out, dtype)
        tensors = packed.tensors
        if params.get("matmul") == "onednn":

            def reordered(name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
                weight = tensors[f"{name}.{expert}"]
                product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                    rows, weight, None, "none", [], ""
                )
                return product

            linear = reordered
        else:

            def plain(name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
                return functional.linear(rows, tensors[name][expert])

            linear = plain
        return run_per_expert(packed, x, routing, out, dtype, linear)


def _has_grouped(problem: Problem, device: Device) -> Support:
    """torch's grouped GEMM: rows must start on 16 bytes, which is 8 values of bfloat16."""
    needs = Requirements()
    needs.one_of("device", device.kind, ("cuda",))
    needs.need(hasattr(torch, "_grouped_mm"), "torch._grouped_mm", "missing", "torch 2.9 or newer")
    needs.need(
        device.capability is not None and device.capability >= (8, 0),
        "compute capability",
        device.capability,
        "(8, 0) or newer",
    )
    needs.multiple("hidden_size", problem.hidden_size, 8)
    needs.multiple("intermediate_size", problem.intermediate_size, 8)
    return needs.support


def _run_grouped(
    packed: PackedExperts,
    x: torch.Tensor,
    routing: Routing,
    out: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """All experts in two grouped GEMMs; everything stays on the device, so it can be captured."""
    problem, tensors = packed.problem, packed.tensors
    num_experts, top_k = problem.num_local_experts, problem.top_k
    ids = routing.topk_ids.flatten().long()  # [M * top_k]
    keys = torch.where(ids < 0, num_experts, ids)  # slots served elsewhere go last
    keys, order = torch.sort(keys, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, keys, torch.ones_like(keys))
    ends = counts[:num_experts].cumsum(0).to(torch.int32)  # [E]
    weights = routing.topk_weights.flatten()[order].unsqueeze(1)  # [M * top_k, 1]
    served = (keys < num_experts).unsqueeze(1)
    expert = keys.clamp(max=num_experts - 1)

    def gemm(name: str, rows: torch.Tensor) -> torch.Tensor:
        product = torch._grouped_mm(rows, tensors[name].transpose(1, 2), offs=ends).float()
        bias = tensors.get(f"{name}_bias")
        return product if bias is None else product + bias[expert]

    rows = x[order // top_k]  # [M * top_k, H]
    if problem.router_weight_on_input:
        rows = rows.float() * weights
    h = gemm("w13", rows.to(dtype))  # [M * top_k, s*I]
    y = gemm("w2", activate(h, problem.activation).to(dtype))  # [M * top_k, H]
    if not problem.router_weight_on_input:
        y = y * weights
    # Rows past the last end were never written, and NaN times 0 is NaN: they are replaced.
    y = torch.where(served, y, 0.0)
    slots = torch.empty_like(y)
    slots[order] = y
    return out.copy_(slots.view(x.shape[0], top_k, -1).sum(1))
