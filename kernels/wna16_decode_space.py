"""Settings of the decode kernels (``moe_decode``): where to start, what to try, what is legal."""

from __future__ import annotations

from typing import Any

from autosel.kernels.wna16_layer import TiledLayer, next_power_of_two

Params = dict[str, Any]
HELD_WORDS = 160  # of the 255 registers a thread can have
#: Names that a call reads, besides its path.
NAMES = frozenset(
    f"{pre}_{name}" for pre in ("up", "down") for name in ("r", "ks", "kw", "sub", "stages")
) | {"down_warps"}


def decode_start(layer: TiledLayer, slots: float) -> Params:
    """From whole grids of settings (``bench.few_tokens``)."""
    k, inner = layer.hidden, layer.intermediate
    rounds = slots * layer.rows13 / 16 / (132 * 8)  # of the programs that run at once
    if layer.group13 < 128:
        ks, kw, stages = (4, 64, 0) if rounds <= 0.4 else (2, 512, 3)
    elif k <= 3072:  # short programs, all of their loads at once
        ks, kw, stages = 4 if k <= 2048 and rounds <= 1 else 2, 256, 0
    elif rounds <= 1 or inner <= 512 or (k > 4096 and rounds <= 2):
        ks, kw, stages = 4, 256, 0
    else:  # a program holds its place while it waits: long streams in a pipeline
        ks, kw, stages = (4, 512, 3) if rounds <= 3 else (2, 256, 3)
    up = _pieces("up", k, ks, kw, stages)
    # Choices and pieces of K are the batch: few choices need pieces, or else long steps.
    if inner <= 1024:
        ks, kw, stages = 1, 128 if inner > 512 else 64, 0
        if (layer.group2 < 128 and slots > 16) or (inner >= 512 and slots >= 64):
            kw, stages = 64, 3
    elif inner < 2048:
        ks, kw, stages = 2 if slots <= 16 else 1, 256 if inner % 256 == 0 else 64, 3
    elif inner < 4096:
        ks, kw, stages = 4, 64, 0
    else:
        ks, kw, stages = (2, 256, 3) if inner < 8192 else (4, 512, 3)
    down = _pieces("down", inner, ks, kw, stages) | {"down_warps": 4}
    if layer.bits13 == 8:  # twice the words
        up |= {"up_kw": min(up["up_kw"], 128 if k <= 3072 else 256), "up_stages": 3}
        up["up_sub"] = min(up["up_kw"], 128)
    if layer.bits2 == 8:
        kw = 256 if inner <= 1024 and inner % 256 == 0 else down["down_kw"]
        down |= {"down_kw": kw, "down_sub": 64, "down_stages": 3}
    params: Params = {"path": "decode"} | up | down
    for pre in ("up", "down"):
        if params[f"{pre}_stages"] == 0 and _held_words(layer, pre, params) > HELD_WORDS:
            params[f"{pre}_stages"] = 3
    return params


def _pieces(pre: str, k: int, ks: int, kw: int, stages: int) -> Params:
    """``ks`` warps' pieces of K in steps of at most ``kw``, as far as K can be divided so."""
    while k % (64 * ks):
        ks //= 2
    while (k // ks) % kw:
        kw //= 2
    values = {"r": 1, "ks": ks, "kw": kw, "sub": min(kw, 128), "stages": stages}
    return {f"{pre}_{name}": value for name, value in values.items()}


def _held_words(layer: TiledLayer, pre: str, p: Params) -> int:
    """Registers of weights a thread holds when all of them are loaded before the first product."""
    gemm, ks = layer.gemm(pre == "up"), p[f"{pre}_ks"]
    choices = 1 if pre == "up" else next_power_of_two(layer.top_k)
    batches = choices if pre == "up" else -(-choices // max(1, p["down_warps"] // ks))
    return int(gemm["K"] // ks * p[f"{pre}_r"] * gemm["BITS"] // 64 * batches)


def decode_choices() -> dict[str, tuple[Any, ...]]:
    """What to vary around a starting point."""
    return {
        "up_r": (1, 2),
        "up_ks": (1, 2, 4, 8),
        "up_kw": (64, 128, 256, 512),
        "up_sub": (64, 128, 256),
        "up_stages": (0, 2, 3, 4),
        "down_ks": (1, 2, 4, 8),
        "down_kw": (64, 128, 256, 512),
        "down_sub": (64, 128, 256),
        "down_stages": (0, 2, 3),
        "down_warps": (4, 8),
    }


def decode_problem(
    layer: TiledLayer, gemm: Params, pre: str, p: Params
) -> tuple[str, str, str] | None:
    k, group = gemm["K"], gemm["GROUP"]
    ks, kw, sub, stages = (p[f"{pre}_{n}"] for n in ("ks", "kw", "sub", "stages"))
    if kw & (kw - 1) or ks & (ks - 1):
        return f"{pre}_ks, {pre}_kw", f"{ks}, {kw}", "powers of two"
    if k % (ks * kw):
        return f"{pre}_ks x {pre}_kw", str(ks * kw), f"a divisor of {k}"
    if kw % sub or (kw % group and group % kw):
        return f"{pre}_kw", str(kw), f"a multiple of {pre}_sub, and of the group or inside it"
    if pre == "down":
        # On an H200 eight warps on one product of 16 rows gave garbage (Triton 3.6; four did not).
        tiles = next_power_of_two(layer.top_k) * ks * (kw // sub) * p["down_r"]
        if p["down_warps"] > 4 * tiles:
            return "down_warps", str(p["down_warps"]), f"at most {4 * tiles}, 4 for each product"
    if gemm["NR"] % (16 * p[f"{pre}_r"]):
        return f"{pre}_r", str(p[f"{pre}_r"]), f"16 x {pre}_r divides {gemm['NR']}"
    words = _held_words(layer, pre, p)
    if stages == 0 and words > HELD_WORDS:
        return f"{pre}_stages", "0", f"a pipeline: {words} registers of weights a thread"
    return None
