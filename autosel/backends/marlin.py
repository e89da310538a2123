"""Marlin through vLLM's fused-MoE operator ``moe_wna16_marlin_gemm``.

The operator comes with the package ``vllm``, or from a library named by the environment variable
``AUTOSEL_VLLM_MOE_LIB`` (:mod:`autosel.backends._vllm_ops`). Numerics: float32 accumulation and
split-K reduction in float32; weights are rounded to the activations' type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from autosel.align import Aligned
from autosel.backends import _rules, _vllm_ops
from autosel.backends._steps import activate_into, buffers, reduce_into, slot_rows
from autosel.backends._vllm_align import align
from autosel.core import Device, Params, Problem, QuantScheme, Reason, Routing, Support
from autosel.interfaces import Layout, PackedExperts, Requirements, Space
from autosel.layouts.marlin import GROUP_SIZES, padded_intermediate
from autosel.layouts.marlin import Marlin as MarlinLayout

BLOCK_SIZES = (8, 16, 32, 48, 64)
#: Tiles (inputs x outputs) the operator has kernels for, by block size up to 16 and above.
TILES = {
    "small": ((128, 128), (64, 128), (128, 64)),
    "large": ((64, 256), (64, 128), (128, 64)),
}
AUTO = "auto"


def scalar_type_id(num_bits: int, bias: int) -> int:
    """vLLM's 64-bit id of an unsigned integer type whose stored codes carry ``bias``.

    Mantissa bits from bit 8, bias from bit 17, and the not-a-number mode (1, the default) from
    bit 50, as ``vllm/scalar_type.py`` packs them.
    """
    return (1 << 50) | (bias << 17) | (num_bits << 8)


def type_id(scheme: QuantScheme) -> int:
    return scalar_type_id(scheme.num_bits, scheme.implicit_zero if scheme.symmetric else 0)


class Workspaces:
    """Lock counters: int32 zeros, one buffer for each device and stream.

    The kernels leave them zeroed, unless a launch fails half-way; two streams must not share one.
    A buffer for a stream that is first met inside a graph capture must not come from the graph's
    own memory, so one is kept ready from the calls before it (and the capture holds no memset).
    """

    def __init__(self, per_multiprocessor: int) -> None:
        self.per_multiprocessor = per_multiprocessor
        self._buffers: dict[tuple[torch.device, int], torch.Tensor] = {}
        self._spares: dict[torch.device, torch.Tensor] = {}

    def get(self, device: torch.device) -> torch.Tensor:
        key = device, _stream(device)
        capturing = _capturing(device)
        if key not in self._buffers:
            # A spare was zeroed on another stream; entering a capture waits for that stream, an
            # ordinary call does not.
            buffer = self._spares.pop(device, None) if capturing else None
            if buffer is None:
                buffer = self._new(device)
                if capturing:
                    return buffer  # no call came before: good for this capture only
            self._buffers[key] = buffer
        if not capturing and device not in self._spares:
            self._spares[device] = self._new(device)
        return self._buffers[key]

    def renew(self, device: torch.device) -> None:
        """Forget the buffer of this device and stream: a failed launch may have left it dirty."""
        self._buffers.pop((device, _stream(device)), None)

    def _new(self, device: torch.device) -> torch.Tensor:
        count = 1
        if device.type == "cuda":
            count = torch.cuda.get_device_properties(device).multi_processor_count
        return torch.zeros(count * self.per_multiprocessor, dtype=torch.int32, device=device)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


WORKSPACES = Workspaces(per_multiprocessor=4)
Inputs = tuple[torch.Tensor, torch.Tensor | None]


def default_block_size(problem: Problem, num_tokens: int) -> int:
    """The smallest block that is less than 90 % full on average, as vLLM chooses it."""
    local, whole = problem.num_local_experts, problem.num_experts
    tokens = -(-num_tokens * local // whole)
    for block in BLOCK_SIZES:
        if tokens * problem.top_k / local / block < 0.9:
            return block
    return BLOCK_SIZES[-1]


def tile_constraint(params: Params, problem: Problem) -> Reason | None:
    """Why the two tiles don't fit the block size or the shapes."""
    small = int(str(params["moe_block_size"])) <= 16
    legal = TILES["small" if small else "large"]
    inner = padded_intermediate(problem)
    for name, outputs, inputs in (
        ("tile13", problem.num_shards * inner, problem.hidden_size),
        ("tile2", problem.hidden_size, inner),
    ):
        if params[name] == AUTO:
            continue
        thread_k, thread_n = _tile(params[name])
        where = f"{name} with moe_block_size {params['moe_block_size']}"
        if (thread_k, thread_n) not in legal:
            return Reason(where, str(params[name]), ", ".join(f"{k}x{n}" for k, n in legal))
        if inputs % thread_k or outputs % thread_n:
            return Reason(name, str(params[name]), f"divisors of {inputs} x {outputs}")
    return None


def _tile(value: object) -> tuple[int, int]:
    if value == AUTO:
        return -1, -1
    thread_k, _, thread_n = str(value).partition("x")
    return int(thread_k), int(thread_n)


def shape_rules(needs: Requirements, problem: Problem, device: Device) -> None:
    """What both Marlin backends ask of a layer."""
    needs.one_of("activations' dtype", problem.act_dtype, ("bfloat16", "float16"))
    if device.capability is not None and device.capability < (8, 0):
        where = "activations' dtype below compute capability 8.0"
        needs.need(problem.act_dtype != "bfloat16", where, "bfloat16", "float16")
    _rules.activation(needs, problem)
    for name, scheme, _, inputs in _rules.gemms(problem):
        needs.need(
            scheme.symmetric or scheme.num_bits == 4,
            f"{name} zero points",
            f"asymmetric {scheme.num_bits} bit",
            "symmetric, or 4 bit",
        )
        if scheme.num_groups(inputs) > 1:
            needs.one_of(f"{name} group_size", scheme.group_size, GROUP_SIZES)
    needs.multiple("hidden_size", problem.hidden_size, 128)


def require_operator(needs: Requirements, device: Device) -> None:
    cuda = needs.one_of("device", device.kind, ("cuda",))
    if cuda:
        cuda = _rules.capability_at_least(needs, device, (7, 5))
    _vllm_ops.require(needs, "_moe_C", "moe_wna16_marlin_gemm", load=cuda)


class Marlin(_vllm_ops.VllmOperator):
    """vLLM's ``_moe_C::moe_wna16_marlin_gemm`` for both GEMMs."""

    name: ClassVar[str] = "marlin"
    summary: ClassVar[str] = "Marlin's tensor-core kernels, from vLLM"
    block_sizes: ClassVar[tuple[int, ...]] = BLOCK_SIZES

    def block_size(self, problem: Problem, num_tokens: int) -> int:
        return max(self.block_sizes[0], default_block_size(problem, num_tokens))

    def available(self, device: Device) -> Support:
        needs = Requirements()
        require_operator(needs, device)
        return needs.support

    def supports(self, problem: Problem, device: Device) -> Support:
        needs = Requirements()
        shape_rules(needs, problem, device)
        # The operator multiplies the finished row, bias included; on the input it must not be.
        needs.need(
            not (problem.router_weight_on_input and problem.has_bias),
            "router weight on input",
            "with expert bias",
            "without",
        )
        return Support(self.available(device).reasons + needs.support.reasons)

    def layout(self, problem: Problem, params: Params) -> Layout:
        return MarlinLayout(problem.act_dtype)

    def inputs(self, packed: PackedExperts, name: str, rows: torch.Tensor) -> Inputs:
        """Rows of one GEMM as the operator gets them, with a scale for each where they have one."""
        return rows, None

    def space(self, problem: Problem, num_tokens: int, device: Device) -> Space:
        tiles = (AUTO, *dict.fromkeys(f"{k}x{n}" for group in TILES.values() for k, n in group))
        return Space(
            default={
                "moe_block_size": self.block_size(problem, num_tokens),
                "tile13": AUTO,
                "tile2": AUTO,
            },
            choices={"moe_block_size": self.block_sizes, "tile13": tiles, "tile2": tiles},
            constraint=lambda params: tile_constraint(params, problem),
        )

    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        problem = packed.problem
        block = int(str(params.get("moe_block_size") or self.block_size(problem, x.shape[0])))
        blocks = align(routing.topk_ids, problem.num_local_experts, block)
        top_k, on_input = problem.top_k, problem.router_weight_on_input
        rows, order = x, packed.tensors.get("w13_order")
        if order is not None:  # every slot wants the inputs in its own expert's order
            rows, top_k = slot_rows(x, routing.topk_ids, order), 1
        weights = routing.topk_weights.view(-1, top_k)
        y = gemms(packed, rows, blocks, weights, params, top_k, on_input, not on_input, self.inputs)
        return reduce_into(out, y, routing.topk_ids, problem.num_local_experts)


def gemms(
    packed: PackedExperts,
    x: torch.Tensor,
    blocks: Aligned,
    topk_weights: torch.Tensor,
    params: Params,
    top_k: int,
    weight_first: bool,
    weight_second: bool,
    inputs: Callable[[PackedExperts, str, torch.Tensor], Inputs] | None = None,
) -> torch.Tensor:
    """Both GEMMs and the activation: rows ``[R, H]`` of x to ``[R * top_k, H]``.

    ``inputs`` turns the rows of a GEMM into what the operator takes. Rows that no block names hold
    old memory in the result.
    """
    problem = packed.problem
    h, a, y = buffers(problem, x, x.shape[0] * top_k, padded_intermediate(problem))
    try:
        first = inputs(packed, "w13", x) if inputs else (x, None)
        _gemm(packed, "w13", first, h, blocks, topk_weights, params, top_k, weight_first)
        activate_into(a, h, problem.activation)
        second = inputs(packed, "w2", a) if inputs else (a, None)
        _gemm(packed, "w2", second, y, blocks, topk_weights, params, 1, weight_second)
    except Exception:
        WORKSPACES.renew(x.device)
        raise
    return y


def _gemm(
    packed: PackedExperts,
    name: str,
    inputs: Inputs,
    out: torch.Tensor,
    blocks: Aligned,
    topk_weights: torch.Tensor,
    params: Params,
    top_k: int,
    weighted: bool,
) -> None:
    tensors, (rows, row_scales) = packed.tensors, inputs
    scheme = packed.problem.w13 if name == "w13" else packed.problem.w2
    thread_k, thread_n = _tile(params.get("tile13" if name == "w13" else "tile2", AUTO))
    values: dict[str, Any] = {
        "a": rows,
        "c": out,
        "b_q_weight": tensors[name],
        "b_bias": tensors.get(f"{name}_bias"),
        "b_scales": tensors[f"{name}_scales"],
        "a_scales": row_scales,
        "global_scale": None,
        "b_zeros": tensors.get(f"{name}_zeros"),
        "g_idx": None,
        "perm": None,
        "workspace": WORKSPACES.get(rows.device),
        "sorted_token_ids": blocks.sorted_ids,
        "expert_ids": blocks.expert_ids,
        "num_tokens_past_padded": blocks.num_padded,
        "topk_weights": topk_weights,
        "moe_block_size": blocks.block,
        "top_k": top_k,
        "mul_topk_weights": weighted,
        "is_ep": False,
        "b_q_type_id": type_id(scheme),
        "size_m": rows.shape[0],
        "size_n": out.shape[1],
        "size_k": rows.shape[1],
        "is_k_full": True,
        "use_atomic_add": False,
        "use_fp32_reduce": True,
        "is_zp_float": False,
        "thread_k": thread_k,
        "thread_n": thread_n,
        "blocks_per_sm": -1,
    }
    result = _vllm_ops.call(_vllm_ops.operator("_moe_C", "moe_wna16_marlin_gemm"), values)
    if result.data_ptr() != out.data_ptr():
        out.copy_(result)  # an operator without a place for c allocates its own
