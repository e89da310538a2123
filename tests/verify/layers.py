"""Random layers, and a correct backend that the tests plant faults into."""

from __future__ import annotations

from dataclasses import replace

import torch

from autosel.core import CanonicalExperts, Problem, QuantScheme, QuantWeight, Routing, Support
from autosel.interfaces import Backend, Layout, PackedExperts
from autosel.packing import pack_last
from autosel.reference import moe

S32 = QuantScheme(4, 32, True)


def problem(experts=8, top_k=2, hidden=128, inter=64, w13=S32, w2=None, local=None, **more):
    return Problem(experts, local or experts, top_k, hidden, inter, w13, w2 or w13, **more)


def weight(scheme: QuantScheme, shape, seed: int, bias: bool = False) -> QuantWeight:
    """Codes about normal around the middle; a GEMM with unit inputs gives outputs near 1."""
    generator = torch.Generator().manual_seed(seed)
    experts, outputs, inputs = shape
    groups, top = scheme.num_groups(inputs), 1 << scheme.num_bits
    codes = torch.randn(shape, generator=generator) * top / 6 + top / 2
    spread = 0.5 + torch.rand(experts, outputs, groups, generator=generator)
    scales = spread * 6 / top / inputs**0.5
    zeros = g_idx = None
    if not scheme.symmetric:
        zeros = torch.randint(top // 4, 3 * top // 4 + 1, scales.shape, generator=generator)
        zeros = zeros.to(torch.uint8)
    if scheme.has_g_idx:
        order = torch.arange(inputs) // scheme.group_size
        shuffled = [order[torch.randperm(inputs, generator=generator)] for _ in range(experts)]
        g_idx = torch.stack(shuffled).to(torch.int32)
    return QuantWeight(
        scheme,
        inputs,
        pack_last(codes.round().clamp(0, top - 1).to(torch.uint8), scheme.num_bits),
        scales.to(getattr(torch, scheme.scale_dtype)),
        zeros,
        g_idx,
        torch.randn(experts, outputs, generator=generator) / 4 if bias else None,
    )


def layer(of: Problem, seed: int = 0) -> CanonicalExperts:
    return CanonicalExperts(
        of,
        weight(of.w13, of.w13_shape, seed, of.has_bias),
        weight(of.w2, of.w2_shape, seed + 1, of.has_bias),
    )


def tokens(count: int, of: Problem, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, of.hidden_size, generator=generator)
    return x.to(getattr(torch, of.act_dtype))


def pack(experts: CanonicalExperts) -> PackedExperts:
    """The canonical tensors themselves, cloned, under flat names."""
    tensors = {
        f"{name}.{part}": tensor.clone()
        for name, source in (("w13", experts.w13), ("w2", experts.w2))
        for part, tensor in source.tensors.items()
    }
    return PackedExperts("canonical", experts.problem, tensors)


def unpack(packed: PackedExperts) -> CanonicalExperts:
    def of(name: str, scheme: QuantScheme, inputs: int) -> QuantWeight:
        parts = {
            key.partition(".")[2]: tensor
            for key, tensor in packed.tensors.items()
            if key.startswith(name)
        }
        return QuantWeight(scheme, inputs, **parts)

    p = packed.problem
    return CanonicalExperts(p, of("w13", p.w13, p.hidden_size), of("w2", p.w2, p.intermediate_size))


class Truthful(Backend):
    """Correct in 16 bits: the emulation with every rounding that a kernel may do.

    It reads the packed tensors, so a fault planted in them shows as a wrong kernel would.
    """

    name = "truthful"
    summary = "A correct fake."

    def supports(self, problem, device):
        return Support.yes()

    def layout(self, problem, params) -> Layout:
        raise NotImplementedError

    def output(self, packed: PackedExperts, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        p = packed.problem
        held = torch.arange(p.num_experts, dtype=torch.int32, device=x.device)
        held[p.num_local_experts :] = -1
        return moe(x, unpack(packed), routing, expert_map=held, rounded=True).to(x.dtype)

    def run(self, packed, x, routing, params, out):
        return out.copy_(self.output(packed, x, routing))


def dense_moe(x, experts: CanonicalExperts, routing: Routing, act, expert_map=None):
    """Another emulation, token by token in float64, that shares no code with the first.

    It reads codes out of the words bit by bit; ``act`` is a function of (gate, up) or of h.
    """
    p = experts.problem

    def dequantise(w: QuantWeight, e: int):
        bits, factor = w.scheme.num_bits, 32 // w.scheme.num_bits
        value = torch.zeros(w.num_outputs, w.num_inputs, dtype=torch.float64)
        for k in range(w.num_inputs):
            word = w.codes[e, :, k // factor].to(torch.int64) & 0xFFFFFFFF
            code = (word >> (bits * (k % factor))) & ((1 << bits) - 1)
            size = w.scheme.group_size
            group = int(w.g_idx[e, k]) if w.g_idx is not None else 0 if size == -1 else k // size
            zero = 1 << (bits - 1) if w.zero_points is None else w.zero_points[e, :, group].double()
            value[:, k] = (code.double() - zero) * w.scales[e, :, group].double()
        return value

    matrices = [
        (dequantise(experts.w13, e), dequantise(experts.w2, e)) for e in range(p.num_local_experts)
    ]
    out = torch.zeros(len(x), p.hidden_size, dtype=torch.float64)
    for t in range(len(x)):
        for j in range(p.top_k):
            e = int(routing.topk_ids[t, j])
            if expert_map is not None and 0 <= e < p.num_experts:
                e = int(expert_map[e])
            if not 0 <= e < p.num_local_experts:
                continue
            w = float(routing.topk_weights[t, j])
            row = x[t].double() * (w if p.router_weight_on_input else 1.0)
            h = matrices[e][0] @ row
            if experts.w13.bias is not None:
                h = h + experts.w13.bias[e].double()
            a = act(*h.split(p.intermediate_size)) if p.num_shards == 2 else act(h)
            y = matrices[e][1] @ a
            if experts.w2.bias is not None:
                y = y + experts.w2.bias[e].double()
            out[t] += y * (1.0 if p.router_weight_on_input else w)
    return out


def with_tensors(packed: PackedExperts, **changed: torch.Tensor) -> PackedExperts:
    """A copy with some tensors replaced; ``w13_codes=...`` stands for ``w13.codes``."""
    renamed = {name.replace("_", ".", 1): tensor for name, tensor in changed.items()}
    assert renamed.keys() <= packed.tensors.keys()
    return replace(packed, tensors={**packed.tensors, **renamed})
