"""The layer in float32, expert by expert, from canonical weights."""

from __future__ import annotations

import torch

from autosel.canonical import dequantize_expert
from autosel.core import Activation, CanonicalExperts


def activate(name: Activation, h: torch.Tensor) -> torch.Tensor:
    f = torch.nn.functional
    if not name.gated:
        if name.name == "relu2_no_mul":
            return f.relu(h).square()
        if name.name == "silu_no_mul":
            return f.silu(h)
        return f.gelu(h, approximate="tanh" if "tanh" in name.name else "none")
    g, u = h.chunk(2, -1)
    if name.name == "silu":
        if name.limit:
            g, u = g.clamp(max=name.limit), u.clamp(-name.limit, name.limit)
        return f.silu(g) * u
    if name.name in ("gelu", "gelu_tanh"):
        return f.gelu(g, approximate="tanh" if "tanh" in name.name else "none") * u
    if name.name.startswith("swigluoai"):
        plain = name.name == "swigluoai"
        limit = 7.0 if plain else name.limit
        alpha = 1.702 if plain else (name.alpha if name.alpha is not None else 1.0)
        beta = 1.0 if plain else (name.beta if name.beta is not None else 0.0)
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        return g * torch.sigmoid(alpha * g) * (u + beta)
    if name.name == "swiglustep":
        return f.silu(g).clamp(max=7.0) * u.clamp(-7.0, 7.0)
    if name.linear_beta:
        u = name.linear_beta * torch.tanh(u / name.linear_beta)
    return name.beta * torch.tanh(g / name.beta) * torch.sigmoid(g) * u


def layer_reference(
    experts: CanonicalExperts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float32)
    for e in range(experts.problem.num_local_experts):
        token, choice = torch.where(ids == e)
        if not len(token):
            continue
        h = x[token].float() @ dequantize_expert(experts.w13, e).T
        if experts.w13.bias is not None:
            h = h + experts.w13.bias[e].float()
        y = activate(experts.problem.activation, h) @ dequantize_expert(experts.w2, e).T
        if experts.w2.bias is not None:
            y = y + experts.w2.bias[e].float()
        out.index_add_(0, token, y * weights[token, choice][:, None])
    return out


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    return float((out.float() - ref).norm() / ref.norm())
