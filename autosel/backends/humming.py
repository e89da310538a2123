"""Humming through the package ``humming-kernels``: GEMMs generated and compiled on first use.

Two kinds of kernel read the same weights: ``indexed`` gathers rows by expert through sorted slots,
``grouped_contiguous`` wants rows already permuted by expert. Each uses the package's own heuristic
configuration for a number of routed rows: ``rows`` says which, by default those of the call; the
one made for more or fewer is often faster. A candidate names its rows, so that the kernel that was
verified and timed is the one that runs for every token count of a bucket. Compiling takes seconds
for each new kernel and is cached on disk by the package. Numerics: float32 accumulation, weights
dequantised to 16 bit.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from autosel import triton_offline
from autosel.align import expert_ranks
from autosel.backends import _humming_choices, _humming_offline, _package, _rules
from autosel.backends._batches import fill
from autosel.backends._humming_choices import DISTRIBUTION, Asked
from autosel.backends._steps import activate_into, buffers, reduce_into, slot_rows
from autosel.backends._vllm_align import align
from autosel.backends.marlin import Workspaces
from autosel.core import Device, Params, Problem, QuantScheme, Routing, Support
from autosel.dtypes import torch_dtype
from autosel.errors import UnsupportedError, field_error
from autosel.interfaces import Backend, Layout, PackedExperts, Requirements, Space
from autosel.layouts.humming import PAD_K, PAD_N, gemms, same_as_marlin
from autosel.layouts.humming import Humming as HummingLayout
from autosel.layouts.marlin import Marlin as MarlinLayout

KINDS = ("indexed", "grouped_contiguous")
MASKED = "grouped_masked"
GROUP_SIZES = (16, 32, 64, 128)
#: Configurations tried beside the one for the rows of the call: those for this many times as many.
ROWS_FACTORS = (1.0, 0.25, 0.5, 2.0, 4.0)
GEMMS = ("w13", "w2")
#: What is used of the package, by module.
_USED = {
    "humming.forward": ("humming_forward",),
    "humming.schema": ("HummingInputSchema", "HummingWeightSchema"),
    "humming.transform": ("prepare_layer_config",),
    "humming.tune": ("get_heuristics_config",),
}
LOCKS = Workspaces(per_multiprocessor=8)


@functools.cache
def package() -> dict[str, Any]:
    """The functions used of the package, by name. Raises UnsupportedError, in one line."""
    return {
        name: _package.member(f"package {DISTRIBUTION}, {module}", module, name, "a function")
        for module, names in _USED.items()
        for name in names
    }


class Humming(Backend):
    """``humming.forward.humming_forward`` for both GEMMs."""

    name: ClassVar[str] = "humming"
    summary: ClassVar[str] = "just-in-time compiled kernels of humming-kernels"
    distributions: ClassVar[tuple[str, ...]] = (DISTRIBUTION,)
    kinds: ClassVar[tuple[str, ...]] = KINDS

    def unpackaged(self) -> Mapping[str, str]:
        return _humming_choices.unpackaged()

    def available(self, device: Device) -> Support:
        needs = Requirements()
        cuda = needs.one_of("device", device.kind, ("cuda",))
        if cuda:
            cuda = _rules.capability_at_least(needs, device, (7, 5))
        install = f"pip install '{DISTRIBUTION}[cu13]' (or [cu12])"
        _package.require(needs, DISTRIBUTION, "humming", install, package if cuda else None)
        return needs.support

    def supports(self, problem: Problem, device: Device) -> Support:
        needs = Requirements()
        needs.one_of("activations' dtype", problem.act_dtype, ("bfloat16", "float16"))
        if device.capability is not None and device.capability < (8, 0):
            where = "activations' dtype below compute capability 8.0"
            needs.need(problem.act_dtype != "bfloat16", where, "bfloat16", "float16")
        for name, scheme, _, _ in _rules.gemms(problem):
            needs.one_of(f"{name} group_size", scheme.group_size, (-1, *GROUP_SIZES))
        # rows are loaded 16 bytes at a time
        needs.multiple("hidden_size", problem.hidden_size, 8)
        needs.multiple("intermediate_size", problem.intermediate_size, 8)
        needs.need(not problem.router_weight_on_input, "router weight", "on input", "on output")
        _rules.activation(needs, problem)
        return Support(self.available(device).reasons + needs.support.reasons)

    def layout(self, problem: Problem, params: Params) -> Layout:
        """Marlin's where that is the same, so that one packed copy serves both backends."""
        if same_as_marlin(problem, problem.act_dtype):
            return MarlinLayout(problem.act_dtype)
        return HummingLayout(problem.act_dtype)

    def space(self, problem: Problem, num_tokens: int, device: Device) -> Space:
        share = routed_rows(problem, num_tokens)
        rows = tuple(dict.fromkeys(max(1, round(share * factor)) for factor in ROWS_FACTORS))
        # Each kind's own setting is tried: on Mixtral, where the grouped one is better from a few
        # dozen tokens on, short searches that began with the indexed one never came to it.
        first, *others = (
            Space({"kind": kind, "rows": share}, {"rows": rows}, relative=("rows",))
            for kind in self.kinds
        )
        return replace(first, rivals=tuple(others))

    def compile_ahead(
        self, problem: Problem, params: Params, num_tokens: int, device: Device
    ) -> None:
        _humming_offline.pretend(device)
        triton_offline.launches_compile(device)
        x, routing, out = triton_offline.meta_call(problem, num_tokens)
        packed = _humming_offline.meta_packed(self.layout(problem, params).key, problem)
        kind = self._kind(params)
        # Helpers start with the same kind all at once: who finds both its lists taken computes
        # those of the next kind instead of waiting.
        kinds = (kind, *(other for other in self.kinds if other != kind))
        asked = [
            Asked(layer_config(problem, name, str(x.device)), one)
            for one in kinds
            for name in GEMMS
        ]
        _humming_choices.choices(package()["get_heuristics_config"], asked[0], asked[1:])
        self.run(packed, x, routing, params, out)

    def compiled_counts(
        self, problem: Problem, params: Params, token_counts: Sequence[int], device: Device
    ) -> Sequence[int]:
        """One where the settings say for how many rows; else all, since those of the call choose
        the configuration. What two share is built once, under the package's own lock."""
        return token_counts[:1] if "rows" in params else token_counts

    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        kind, problem = self._kind(params), packed.problem
        share = routed_rows(problem, x.shape[0])
        rows = int(str(params.get("rows", share)))
        plans = tuple(gemm_plan(problem, name, kind, rows, str(x.device)) for name in GEMMS)
        try:
            return _RUN[kind](packed, x, routing, plans, share, out)
        except Exception:
            LOCKS.renew(x.device)
            raise

    def _kind(self, params: Params) -> str:
        kind = str(params.get("kind", self.kinds[0]))
        if kind not in self.kinds:
            raise UnsupportedError(field_error(self.name, "kind", kind, " or ".join(self.kinds)))
        return kind


def routed_rows(problem: Problem, num_tokens: int) -> int:
    """Rows that the experts of this rank get from ``num_tokens`` tokens on average."""
    slots = num_tokens * problem.top_k * problem.num_local_experts
    return max(1, -(-slots // problem.num_experts))


@dataclass(frozen=True)
class GemmPlan:
    """One GEMM: the package's layer description and the configuration chosen for it."""

    name: str
    layer: Any
    compute: str
    tuning: str
    block: int


@functools.lru_cache(maxsize=4096)
def gemm_plan(problem: Problem, name: str, kind: str, rows: int, device: str) -> GemmPlan:
    """Configuration for about ``rows`` routed rows. The package keeps lists of ``[low, high,
    configuration]`` with ``low < rows <= high``; the last is open.
    """
    layer = layer_config(problem, name, device)
    choices = _choices(problem, name, kind, device)
    chosen = next((entry[2] for entry in choices if entry[0] < rows <= entry[1]), choices[-1][2])
    compute = {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": kind}
    # The launcher also looks its kernel up for one row, so the one interval starts at 0.
    tuning = json.dumps([[0, 1 << 30, chosen]])
    return GemmPlan(name, layer, json.dumps(compute), tuning, int(chosen["block_shape"][0]))


@functools.lru_cache(maxsize=256)
def _choices(problem: Problem, name: str, kind: str, device: str) -> list[Any]:
    names = (name, *(other for other in GEMMS if other != name))
    asked = [Asked(layer_config(problem, one, device), kind) for one in names]
    return _humming_choices.choices(package()["get_heuristics_config"], asked[0], asked[1:])


@functools.lru_cache(maxsize=256)
def layer_config(problem: Problem, name: str, device: str) -> Any:
    """The package's description of one GEMM; the layout packs for exactly this.

    The scheme is given as it is: the package's own converter would re-encode weights in which the
    lowest code never occurs, and so time another kernel for them.
    """
    used = package()
    gemm = gemms(problem)[0 if name == "w13" else 1]
    scheme: QuantScheme = gemm.scheme
    weights = used["HummingWeightSchema"](
        b_dtype=f"uint{scheme.num_bits}",
        weight_scale_group_size=0 if scheme.group_size == -1 else scheme.group_size,
        has_zero_point=not scheme.symmetric,
    )
    return used["prepare_layer_config"](
        shape_n=gemm.outputs,
        shape_k=gemm.inputs,
        weight_schema=weights,
        input_schema=used["HummingInputSchema"](),
        num_experts=problem.num_local_experts,
        pad_n_to_multiple=PAD_N,
        pad_k_to_multiple=PAD_K,
        has_bias=problem.has_bias,
        torch_dtype=torch_dtype(problem.act_dtype),
        device=torch.device(device),
    )


def _forward(
    packed: PackedExperts, plan: GemmPlan, rows: torch.Tensor, out: torch.Tensor, **kwargs: Any
) -> None:
    tensors, name = packed.tensors, plan.name
    package()["humming_forward"](
        plan.layer,
        inputs=rows,
        weight=tensors[name],
        weight_scale=tensors[f"{name}_scales"],
        zero_point=tensors.get(f"{name}_zeros"),
        bias=tensors.get(f"{name}_bias"),
        outputs=out,
        locks=LOCKS.get(rows.device),
        compute_config=plan.compute,
        tuning_config=plan.tuning,
        **kwargs,
    )


def _indexed(
    packed: PackedExperts,
    x: torch.Tensor,
    routing: Routing,
    plans: tuple[GemmPlan, ...],
    share: int,
    out: torch.Tensor,
) -> torch.Tensor:
    problem, ids = packed.problem, routing.topk_ids
    h, a, y = buffers(packed.problem, x, ids.numel())
    first, second = plans
    blocks = align(ids, problem.num_local_experts, first.block)
    inputs, per_row, order = x, problem.top_k, packed.tensors.get("w13_order")
    if order is not None:  # every slot wants the inputs in its own expert's order
        inputs, per_row = slot_rows(x, ids, order), 1
    for plan, rows, result, top_k in ((first, inputs, h, per_row), (second, a, y, 1)):
        if plan.block != blocks.block:
            blocks = align(ids, problem.num_local_experts, plan.block)
        _forward(
            packed,
            plan,
            rows,
            result,
            sorted_ids=blocks.sorted_ids,
            expert_ids=blocks.expert_ids,
            num_tokens_padded=blocks.num_padded,
            top_k=top_k,
            valid_shape_m=share,
        )
        if plan is first:
            activate_into(a, h, problem.activation)
    return reduce_into(out, y, ids, problem.num_local_experts, routing.topk_weights)


def _grouped(
    packed: PackedExperts,
    x: torch.Tensor,
    routing: Routing,
    plans: tuple[GemmPlan, ...],
    share: int,
    out: torch.Tensor,
) -> torch.Tensor:
    problem, ids = packed.problem, routing.topk_ids
    experts, (num_tokens, top_k) = problem.num_local_experts, ids.shape
    ranks, counts = expert_ranks(ids, experts)
    ends = counts.long().cumsum(0)
    offsets = torch.nn.functional.pad(ends, (1, 0))  # [E + 1] first row of each expert
    place = torch.where(ranks >= 0, offsets[ids.clamp(min=0).long()] + ranks, -1)  # [M, top_k]
    # Slots served elsewhere get the rows behind the last expert, which no kernel reads.
    slots = num_tokens * top_k
    target = torch.where(place >= 0, place, slots).flatten()
    permuted = torch.empty((slots + 1, x.shape[1]), dtype=x.dtype, device=x.device)
    permuted[target] = slot_rows(x, ids, packed.tensors.get("w13_order"))
    h, a, y = buffers(packed.problem, x, slots)
    first, second = plans
    _forward(packed, first, permuted[:-1], h, expert_layout=offsets, valid_shape_m=share)
    activate_into(a, h, problem.activation)
    _forward(packed, second, a, y, expert_layout=offsets, valid_shape_m=share)
    return reduce_into(out, y, ids, experts, routing.topk_weights, place.to(torch.int32))


def _masked(
    packed: PackedExperts,
    x: torch.Tensor,
    routing: Routing,
    plans: tuple[GemmPlan, ...],
    share: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """Rows past an expert's count are neither read by the GEMMs nor by the sum."""
    problem, ids = packed.problem, routing.topk_ids
    experts = problem.num_local_experts
    batch = fill(x, ids, experts, packed.tensors.get("w13_order"))
    h, a, y = buffers(packed.problem, x, experts * batch.length)
    first, second = plans
    _forward(packed, first, batch.inputs, h, expert_layout=batch.counts, valid_shape_m=share)
    activate_into(a, h, problem.activation)
    _forward(packed, second, a, y, expert_layout=batch.counts, valid_shape_m=share)
    return reduce_into(out, y, ids, experts, routing.topk_weights, batch.rows)


_RUN = {"indexed": _indexed, "grouped_contiguous": _grouped, MASKED: _masked}
