"""Our own WNA16 kernels, Triton and Gluon, over the fragment-major tiled layout.

Numerics: weights are rounded once to the activations' type, products accumulate in float32, the
activations between the GEMMs and each expert's output in the activations' type; the weighted sum
over experts is float32 in a fixed order. No atomics anywhere: results repeat bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from autosel import triton_offline
from autosel.activations import constants
from autosel.backends import _package, _rules
from autosel.backends._steps import MAX_GRID_Y
from autosel.core import Device, Params, Problem, Reason, Routing, Support
from autosel.interfaces import Backend, Layout, PackedExperts, Requirements, Space
from autosel.layouts.wna16_tiled import Sizes, Wna16Tiled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autosel.kernels.wna16_layer import Launch, TiledLayer


def _layer(
    problem: Problem,
    tensors: Mapping[str, torch.Tensor],
    sizes: Sizes,
    capability: tuple[int, int],
    asm: bool,
) -> TiledLayer:
    from autosel.kernels.wna16_layer import TiledLayer

    values = constants(problem.activation)
    return TiledLayer(
        tensors,
        experts=problem.num_local_experts,
        top_k=problem.top_k,
        hidden=sizes.hidden,
        intermediate=sizes.intermediate,
        group13=sizes.group13,
        group2=sizes.group2,
        bits13=problem.w13.num_bits,
        bits2=problem.w2.num_bits,
        symmetric13=problem.w13.symmetric,
        symmetric2=problem.w2.symmetric,
        activation=problem.activation.name,
        limit=values.get("limit", 0.0),
        alpha=values.get("alpha", 1.0),
        beta=values.get("beta", 0.0),
        linear_beta=values.get("linear_beta", 0.0),
        gated=problem.activation.gated,
        fp16=problem.act_dtype == "float16",
        asm=asm,
        pdl=asm and capability >= (9, 0),
        gluon=asm and capability[0] == 9,
        weight_on_input=problem.router_weight_on_input,
    )


def tiled_layer(packed: PackedExperts) -> TiledLayer:
    """The kernels' view of a packed layer, for the device its tensors are on."""
    tensor = packed.tensors["w13"]
    asm = tensor.is_cuda and torch.version.hip is None
    capability = torch.cuda.get_device_capability(tensor.device) if asm else (0, 0)
    sizes = packed.meta["sizes"]
    return _layer(packed.problem, packed.tensors, sizes, capability, asm)


class Wna16TiledBackend(Backend):
    """Decode, narrow-block and prefill kernels that share one copy of the weights."""

    name: ClassVar[str] = "wna16_tiled"
    summary: ClassVar[str] = "our own kernels: decode, grouped and Hopper prefill on one layout"
    ours: ClassVar[bool] = True
    reads_any_ids: bool = True
    distributions: ClassVar[tuple[str, ...]] = ("triton", "pytorch-triton-rocm")

    def available(self, device: Device) -> Support:
        needs = Requirements()
        if needs.one_of("device", device.kind, ("cuda", "rocm")) and device.kind == "cuda":
            _rules.capability_at_least(needs, device, (8, 0))
        _package.require_triton(needs)
        return needs.support

    def supports(self, problem: Problem, device: Device) -> Support:
        needs = Requirements()
        _rules.activation(needs, problem)
        needs.one_of("activations' dtype", problem.act_dtype, ("bfloat16", "float16"))
        for name, scheme, _, _ in _rules.gemms(problem):
            size = scheme.group_size
            fits = size == -1 or (size >= 32 and size & (size - 1) == 0)
            needs.need(fits, f"{name} group size", size, "-1, or a power of two of at least 32")
        return Support(self.available(device).reasons + needs.support.reasons)

    def layout(self, problem: Problem, params: Params) -> Layout:
        return Wna16Tiled(problem.act_dtype)

    def space(self, problem: Problem, num_tokens: int, device: Device) -> Space:
        from autosel.kernels import wna16_space

        layer = _meta_layer(problem, device)
        starts = wna16_space.starting_points(layer, num_tokens, _share(problem))

        def constraint(params: Params) -> Reason | None:
            found = wna16_space.problem_with(layer, _completed(starts[0], params))
            return Reason(*found) if found else None

        def design(start: Params, rivals: tuple[Space, ...] = ()) -> Space:
            choices = wna16_space.choices(layer, start)
            return Space(start, choices, constraint, wna16_space.blocks(choices), rivals)

        first, *others = starts
        return design(first, tuple(design(other) for other in others))

    def compile_ahead(
        self, problem: Problem, params: Params, num_tokens: int, device: Device
    ) -> None:
        triton_offline.compile_for(device)
        for launch in _meta_launches(problem, params, num_tokens, device):
            launch.kernel.warmup(*launch.signature(), grid=(1,), **launch.options)

    def compiled_counts(
        self, problem: Problem, params: Params, token_counts: Sequence[int], device: Device
    ) -> Sequence[int]:
        """Columns that are found by scanning all slots have GEMMs for each power of two of them.

        The small kernels around the GEMMs have more variants still, but those of two counts whose
        GEMMs are the same are not worth having these compiled twice.
        """
        first: dict[tuple[str, ...], int] = {}
        for count in token_counts:
            launches = _meta_launches(problem, params, count, device)
            gemms = (launch for launch in launches if "NR" in launch.options)
            # Their whole numbers are not specialised on, so that the options tell them apart.
            key = tuple(f"{gemm.kernel.__name__} {gemm.options}" for gemm in gemms)
            first.setdefault(key, count)
        return tuple(first.values())

    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        from autosel.kernels.wna16_moe import moe_forward

        # A sum and weighted inputs have the tokens there, inputs in act-order the slots.
        most = MAX_GRID_Y // (packed.problem.top_k if "x_order" in packed.tensors else 1)
        if len(x) > most:
            step = -(-len(x) // -(-len(x) // most))  # equal parts
            for begin in range(0, len(x), step):
                part = slice(begin, begin + step)
                some = Routing(routing.topk_ids[part], routing.topk_weights[part])
                self.run(packed, x[part], some, params, out[part])
            return out
        problem, layer = packed.problem, tiled_layer(packed)
        weights = routing.topk_weights
        settings = _settings(problem, layer, len(x), params)
        if layer.hidden == problem.hidden_size:
            moe_forward(layer, x, routing.topk_ids, weights, out, settings)
            return out
        padding = layer.hidden - problem.hidden_size
        wide = torch.nn.functional.pad(x, (0, padding))
        y = torch.empty_like(wide)
        moe_forward(layer, wide, routing.topk_ids, weights, y, settings)
        return out.copy_(y[:, : problem.hidden_size])


def _share(problem: Problem) -> float:
    """Of the experts, how many are on this rank."""
    return problem.num_local_experts / problem.num_experts


def _settings(
    problem: Problem, layer: TiledLayer, num_tokens: int, params: Params
) -> dict[str, Any]:
    """``params`` with the kernels' own choice at this token count for what they leave out."""
    from autosel.kernels.wna16_space import is_complete, starting_params

    if is_complete(params):
        return dict(params)
    return _completed(starting_params(layer, num_tokens, _share(problem)), params)


def _completed(start: Params, params: Params) -> dict[str, Any]:
    """A block's length is said by ``tok`` or by ``classes``: the one given displaces the other's
    default. (With blocks of 128 from the default of 512 tokens, the scanning kernel that was chosen
    for 2 tokens of OLMoE kept Triton's compiler busy for more than six minutes.)
    """
    if "tok" in params and "classes" not in params:
        start = {name: value for name, value in start.items() if name != "classes"}
    return {**start, **params}


def _meta_launches(
    problem: Problem, params: Params, num_tokens: int, device: Device
) -> list[Launch]:
    """The launches of a call, on tensors without contents."""
    from autosel.kernels.wna16_moe import layer_launches

    layer = _meta_layer(problem, device)
    x, routing, _ = triton_offline.meta_call(problem, num_tokens)
    wide = torch.empty((num_tokens, layer.hidden), dtype=x.dtype, device="meta")
    settings = _settings(problem, layer, num_tokens, params)
    launches: list[Launch] = layer_launches(
        layer, wide, routing.topk_ids, routing.topk_weights, torch.empty_like(wide), settings
    )
    return launches


def _meta_layer(problem: Problem, device: Device) -> TiledLayer:
    """The layer without its weights: enough for spaces, constraints and compilation."""
    types = {"w13": torch.int32, "w2": torch.int32, "s13": torch.int32, "s2": torch.int32}
    for name, scheme in (("13", problem.w13), ("2", problem.w2)):
        if not scheme.symmetric:
            types[f"z{name}"] = torch.int32
        if problem.has_bias:
            types[f"b{name}"] = torch.float32
    tensors = {name: torch.empty(0, dtype=dtype, device="meta") for name, dtype in types.items()}
    if problem.w13.has_g_idx:
        order = (problem.num_local_experts, problem.hidden_size)
        tensors["x_order"] = torch.empty(order, dtype=torch.int32, device="meta")
    asm = device.kind == "cuda"
    return _layer(problem, tensors, Sizes.of(problem), device.capability or (0, 0), asm)
