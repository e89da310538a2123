"""What the launching code passes around: a layer as the kernels see it, and a launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Params = Mapping[str, Any]


@dataclass(frozen=True)
class TiledLayer:
    """Packed weights of one layer and the facts the kernels are compiled for."""

    tensors: Mapping[str, torch.Tensor]
    experts: int
    top_k: int
    hidden: int  # padded
    intermediate: int  # padded
    group13: int
    group2: int
    bits13: int = 4
    bits2: int = 4
    symmetric13: bool = True
    symmetric2: bool = True
    activation: str = "silu"
    limit: float = 0.0
    alpha: float = 1.0
    beta: float = 0.0
    linear_beta: float = 0.0
    gated: bool = True
    fp16: bool = False
    asm: bool = True  # inline PTX; without it the kernels are plain Triton
    pdl: bool = True  # programmatic dependent launch (sm_90 and later)
    gluon: bool = True  # the device is sm_90, which moe_prefill is written for
    weight_on_input: bool = False  # router weights scale x, and no output (top_k is 1)

    @property
    def rows13(self) -> int:
        return self.intermediate * (2 if self.gated else 1)

    def gemm(self, up: bool) -> dict[str, Any]:
        """Arguments that describe one GEMM's weights."""
        if up:
            return {
                "K": self.hidden,
                "NR": self.rows13,
                "GROUP": self.group13,
                "BITS": self.bits13,
                "SYM": self.symmetric13,
                "BIAS": "b13" in self.tensors,
                "E": self.experts,
            }
        return {
            "K": self.intermediate,
            "NR": self.hidden,
            "GROUP": self.group2,
            "BITS": self.bits2,
            "SYM": self.symmetric2,
            "BIAS": "b2" in self.tensors,
            "E": self.experts,
        }

    def act(self) -> dict[str, Any]:
        return {
            "GATED": self.gated,
            "ACT": self.activation,
            "LIMIT": self.limit,
            "ALPHA": self.alpha,
            "BETA": self.beta,
            "LINEAR_BETA": self.linear_beta,
        }

    def weights(self, up: bool) -> tuple[torch.Tensor, ...]:
        """Words, scales, zero points, bias; absent ones are stood in for by the scales."""
        n, t = ("13" if up else "2"), self.tensors
        return t[f"w{n}"], t[f"s{n}"], t.get(f"z{n}", t[f"s{n}"]), t.get(f"b{n}", t[f"s{n}"])


@dataclass(frozen=True)
class Launch:
    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        self.kernel[self.grid](*self.args, **self.options)

    def signature(self) -> tuple[Any, ...]:
        """Types instead of tensors: what ``kernel.warmup`` needs, and a key for the compilation."""
        return tuple(a.dtype if isinstance(a, torch.Tensor) else a for a in self.args)


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def padded(experts: int) -> int:
    return max(16, next_power_of_two(experts))


def pdl_option(layer: TiledLayer) -> dict[str, Any]:
    return {"launch_pdl": True} if layer.pdl else {}


def register_option(layer: TiledLayer, p: Params, pre: str) -> dict[str, Any]:
    """A cap on registers a thread, where the parameters ask for one (NVIDIA only)."""
    cap = p.get(f"{pre}_regs", 0)
    return {"maxnreg": cap} if cap and layer.asm else {}


def widest(classes: str) -> int:
    """The longest of the widths ("32,32+16,64") that a block may take."""
    return max(sum(map(int, width.split("+"))) for width in classes.split(","))


def block_of(p: Params) -> int:
    """Slots of a block of an expert, at most."""
    return widest(p["classes"]) if "classes" in p else int(p["tok"])
