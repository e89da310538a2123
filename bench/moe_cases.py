"""The layers and token counts of the kernel benchmarks, and how a case's data is made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from autosel.kernels.wna16_layer import TiledLayer
from autosel.layouts.wna16_tiled import pack_codes, pack_pairs

COPY_BYTES_PER_US = 4.3e6  # H200: device-to-device copy, bytes read plus written
FLOPS_PER_US = 790e6  # H200: bf16 matrix product 8192^3


@dataclass(frozen=True)
class Shape:
    """One MoE layer on one rank: int4, symmetric, bf16."""

    name: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    group: int

    @property
    def expert_bytes(self) -> float:
        weights = 3 * self.hidden * self.inner
        return weights / 2 + weights / self.group * 2

    def roofline_us(self, tokens: int, distinct: float) -> float:
        """The larger of: touched weights, x and out at copy speed; operations at matmul speed."""
        bytes_ = distinct * self.expert_bytes + 4 * tokens * self.hidden
        flops = tokens * self.top_k * 6 * self.hidden * self.inner
        return max(bytes_ / COPY_BYTES_PER_US, flops / FLOPS_PER_US)


SHAPES = {
    s.name: s
    for s in (
        Shape("qwen3-30b-a3b", 128, 8, 2048, 768, 128),
        Shape("mixtral-8x7b", 8, 2, 4096, 14336, 128),
        Shape("deepseek-v3-tp8", 256, 8, 7168, 256, 128),
        Shape("kimi-k2-tp8", 384, 8, 7168, 256, 32),
        Shape("qwen3-235b-a22b", 128, 8, 4096, 1536, 128),
    )
}
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)


class Weights:
    """Canonical codes and scales of a shape, and our packed copies."""

    def __init__(self, shape: Shape, seed: int = 1234) -> None:
        self.shape = shape
        gen = torch.Generator(device="cuda").manual_seed(seed)
        e, k, n = shape.experts, shape.hidden, shape.inner
        self.codes, self.scales = {}, {}
        for name, rows, cols in (("13", 2 * n, k), ("2", k, n)):
            self.codes[name] = torch.randint(
                0, 16, (e, rows, cols), dtype=torch.uint8, device="cuda", generator=gen
            )
            scales = torch.rand((e, rows, cols // shape.group), device="cuda", generator=gen) + 0.5
            self.scales[name] = (scales / (4.6 * math.sqrt(cols))).to(torch.bfloat16)

    def dequantized(self, name: str, expert: int) -> torch.Tensor:
        scales = self.scales[name][expert].float().repeat_interleave(self.shape.group, 1)
        return (self.codes[name][expert].float() - 8.0) * scales

    def _interleaved(self, t: torch.Tensor) -> torch.Tensor:
        e, rows, cols = t.shape
        return t.reshape(e, 2, rows // 16, 8, cols).transpose(1, 2).reshape(e, rows, cols)

    def packed(self) -> dict[str, torch.Tensor]:
        out = {}
        e = self.shape.experts
        for name in ("13", "2"):
            codes, scales = self.codes[name], self.scales[name]
            if name == "13":
                codes, scales = self._interleaved(codes), self._interleaved(scales)
            rows, cols = codes.shape[1:]
            words = pack_codes(codes.reshape(e * rows, cols), 4)
            out[f"w{name}"] = words.reshape(e, rows // 16, cols // 64, 32, 4)
            pairs = pack_pairs(scales.reshape(e * rows, -1))
            out[f"s{name}"] = pairs.reshape(e, rows // 16, -1, 8)
        return out

    def packed_copies(self) -> list[Any]:
        """So many packed copies that calls in turn find none of the weights in the caches."""
        packed = self.packed()
        return copies_of(packed, 4 if sum(t.numel() * 4 for t in packed.values()) < 2e9 else 2)


def copies_of(tensors: Any, count: int) -> list[Any]:
    def clone() -> Any:
        if isinstance(tensors, dict):
            return {k: v.clone() for k, v in tensors.items()}
        return [v.clone() for v in tensors]

    return [tensors] + [clone() for _ in range(count - 1)]


def tiled(shape: Shape, tensors: dict[str, torch.Tensor]) -> TiledLayer:
    return TiledLayer(
        tensors, shape.experts, shape.top_k, shape.hidden, shape.inner, shape.group, shape.group
    )


def meta_layer(shape: Shape) -> TiledLayer:
    """The layer without memory: enough to compile its kernels."""
    word = torch.empty(1, dtype=torch.int32, device="meta")
    return tiled(shape, dict.fromkeys(("w13", "s13", "w2", "s2"), word))


class Inputs:
    """x and several uniform routings of a token count."""

    def __init__(self, shape: Shape, tokens: int, routings: int, seed: int = 0) -> None:
        gen = torch.Generator(device="cuda").manual_seed(seed * 1000003 + tokens)
        rand = lambda *size: torch.rand(size, device="cuda", generator=gen)  # noqa: E731
        self.x = torch.randn((tokens, shape.hidden), device="cuda", generator=gen).bfloat16()
        self.ids, self.weights = [], []
        for _ in range(routings):
            ids = rand(tokens, shape.experts).topk(shape.top_k, 1).indices
            weights = rand(tokens, shape.top_k) + 0.1
            self.ids.append(ids.to(torch.int32).contiguous())
            self.weights.append((weights / weights.sum(1, keepdim=True)).contiguous())
        self.distinct = sum(len(torch.unique(i)) for i in self.ids) / routings


def reference(weights: Weights, inputs: Inputs, routing: int = 0) -> torch.Tensor:
    """The whole layer in float32 with unrounded intermediates."""
    n, x = weights.shape.inner, inputs.x.float()
    ids, scale = inputs.ids[routing], inputs.weights[routing]
    out = torch.zeros_like(x)
    for e in torch.unique(ids).tolist():
        token, choice = torch.where(ids == e)
        h = x[token] @ weights.dequantized("13", e).T
        h = torch.nn.functional.silu(h[:, :n]) * h[:, n:]
        out.index_add_(0, token, h @ weights.dequantized("2", e).T * scale[token, choice][:, None])
    return out


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    return float((out.float() - ref).norm() / ref.norm())
