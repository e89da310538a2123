"""Mutations of correct backends, each a mistake that real kernels and packers have made.

A fault of the **weights** is planted before packing, into any backend: what is packed is what a
wrong packer would have packed. A fault of the **call** wraps any backend's ``run``. A fault of the
**kernel** replaces one step of :class:`bench.fault_kernel.Kernel`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from autosel.core import (
    Activation,
    CanonicalExperts,
    Device,
    Params,
    Problem,
    QuantScheme,
    Routing,
    Support,
)
from autosel.interfaces import Backend, Layout, PackedExperts
from bench import fault_calls as c
from bench import fault_kernels as k
from bench import fault_weights as w
from bench.fault_calls import Run
from bench.fault_kernel import Kernel

SYM, ASYM = QuantScheme(4, 32, True), QuantScheme(4, 32, False)
BASE = Problem(8, 8, 2, 128, 64, SYM, SYM)
WITH_ZEROS = replace(BASE, w13=ASYM, w2=ASYM)
WITH_BIAS = replace(BASE, has_bias=True)
ACT_ORDER = replace(BASE, w13=replace(SYM, has_g_idx=True), w2=replace(SYM, has_g_idx=True))
LONG = replace(BASE, num_experts=4, num_local_experts=4, hidden_size=1024)
GELU = replace(BASE, activation=Activation("gelu"))
CLAMPED = replace(BASE, activation=Activation("silu", limit=7.0))
HALF = BASE.with_act_dtype("float16")


@dataclass(frozen=True)
class Fault:
    """One mutation: exactly one of ``weights``, ``call`` and ``kernel`` says how it is planted."""

    name: str
    what: str
    problem: Problem = BASE
    weights: Callable[[CanonicalExperts], CanonicalExperts] | None = None
    call: Callable[[], Run] | None = None
    kernel: type[Kernel] | None = None

    @property
    def where(self) -> str:
        return "weights" if self.weights else "call" if self.call else "kernel"

    def plant(self, correct: Backend) -> Backend:
        """``correct`` with this fault; a fault of the kernel brings its own backend."""
        return self.kernel() if self.kernel else Faulty(correct, self)


@dataclass(frozen=True)
class FaultyLayout(Layout):
    """Packs other weights than it was given."""

    inner: Layout
    change: Callable[[CanonicalExperts], CanonicalExperts]

    @property
    def key(self) -> str:
        return self.inner.key

    @property
    def invertible(self) -> bool:  # type: ignore[override]
        return self.inner.invertible

    def pack(self, experts: CanonicalExperts) -> PackedExperts:
        return self.inner.pack(self.change(experts))

    def unpack(self, packed: PackedExperts) -> CanonicalExperts:
        return self.inner.unpack(packed)

    def nbytes(self, problem: Problem) -> int:
        return self.inner.nbytes(problem)


class Faulty(Backend):
    """A backend with a fault of its weights or of its call."""

    name = "faulty"
    summary = "a correct backend with a planted fault"

    def __init__(self, correct: Backend, fault: Fault) -> None:
        self.correct, self.fault = correct, fault
        self.call = fault.call() if fault.call else None

    def supports(self, problem: Problem, device: Device) -> Support:
        return self.correct.supports(problem, device)

    def layout(self, problem: Problem, params: Params) -> Layout:
        inner = self.correct.layout(problem, params)
        return FaultyLayout(inner, self.fault.weights) if self.fault.weights else inner

    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        if self.call is None:
            return self.correct.run(packed, x, routing, params, out)
        inner: Run = lambda x, routing, out: self.correct.run(packed, x, routing, params, out)  # noqa: E731
        self.call(inner, packed, x, routing, out)
        return out


FAULTS = (
    Fault("nibble swap", "two neighbouring codes exchanged", weights=w.in_w13(w.swap_nibbles)),
    Fault("one code", "a single code of the layer off by two", weights=w.in_w2(w.shift_code)),
    Fault("sign word", "signs of one packed word flipped", weights=w.in_w13(w.flip_signs)),
    Fault(
        "zero point", "off by one in a group of an expert", WITH_ZEROS, w.in_w13(w.zero_off_by_one)
    ),
    Fault("scale row", "scales of an expert shifted by a row", weights=w.in_w2(w.shift_scale_rows)),
    Fault("gate and up", "exchanged", weights=w.in_w13(w.exchange_halves)),
    Fault("neighbour's weights", "one expert has those of the next", weights=w.in_w13(w.neighbour)),
    Fault("scales of w13", "used for w2 of one expert", weights=w.w13_scales_in_w2),
    Fault("act-order index", "of another expert", ACT_ORDER, w.in_w13(w.wrong_order)),
    Fault("missing bias", "in one expert", WITH_BIAS, w.in_w2(w.no_bias)),
    Fault("id -1", "read as the last expert", call=c.routed(c.last_expert)),
    Fault("expert map", "wrapped at half of the experts", call=c.routed(c.wrapped)),
    Fault("duplicate ids", "counted once", call=c.routed(c.once)),
    Fault("slot order", "router weights of another slot",
          call=c.routed(lambda r, p: Routing(r.topk_ids, r.topk_weights.flip(1).contiguous()))),
    Fault("router weight", "applied twice",
          call=c.routed(lambda r, p: Routing(r.topk_ids, r.topk_weights * r.topk_weights))),
    Fault("doubled router weight", "times two",
          call=c.routed(lambda r, p: Routing(r.topk_ids, r.topk_weights * 2))),
    Fault("renormalised", "router weights made to sum to one", call=c.routed(c.renormalised)),
    Fault("last tile", "rows after the last whole tile not written", call=c.last_tile),
    Fault("stale workspace", "rows without an expert keep old values", call=c.stale_workspace),
    Fault("accumulated", "added to the output instead of written", call=c.accumulated),
    Fault("race", "a part of a row lost in 1 of 20 calls", call=c.race),
    Fault("dropped token", "one row is zero", call=c.after(c.drop_token)),
    Fault("odd token", "the last of an odd number skipped", call=c.after(c.odd_token)),
    Fault("neighbour row", "a hundredth of the row before leaks in", call=c.after(c.beside)),
    Fault("one NaN", "one element at 33 tokens only", call=c.after(c.one_nan)),
    Fault("input changed", "activations doubled in place", call=c.after(c.spoil_input)),
    Fault("past the end", "one element after the output written", call=c.after(c.beyond_the_end)),
    Fault("weights written", "a counter kept in the weights", call=c.shared_workspace_in_weights),
    Fault("bf16 accumulation", "partial sums in bfloat16", LONG, kernel=k.Bf16Accumulation),
    Fault("saturation", "activation clipped at 65504", kernel=k.Saturated),
    Fault("fp16 overflow", "activation kept in float16", kernel=k.HalfOverflow),
    Fault("clamp missing", "no limit on gate and up", CLAMPED, kernel=k.NoClamp),
    Fault("tanh gelu", "for gelu", GELU, kernel=k.TanhGelu),
    Fault("silu in bf16", "in a float16 layer", HALF, kernel=k.Bf16Silu),
    Fault("weight before activation", "router weight on the input", kernel=k.WeightBefore),
    Fault("biased rounding", "stochastic rounding that prefers up", kernel=k.BiasedStochastic),
    Fault("truncation", "first GEMM's output cut off, not rounded", kernel=k.Truncated),
    Fault("truncated weights", "cut off, not rounded", kernel=k.TruncatedWeights),
    Fault("group boundary", "off by one input in one expert", kernel=k.GroupBoundary),
    Fault("zero 7", "symmetric weights read with zero point 7", kernel=k.ZeroSeven),
    Fault("last input", "of each GEMM left out", kernel=k.NoTail),
    Fault("first group", "one scale for the whole row", kernel=k.FirstGroup),
)  # fmt: skip
