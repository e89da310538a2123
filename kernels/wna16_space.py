"""Where to start and what to try: parameters of a layer call, by tokens per expert.

The starting points are what won on an H200 (``results/nvidia-h200``: few tokens over 13 layers,
more over five). The regime is a matter of slots (tokens x top_k) and of how they share experts:

    decode   few slots, most with an expert of their own: two launches, no grouping, an expert is
             read for each of its slots
    scan     up to 32 slots: programs find their tokens themselves
    sorted   more: one alignment for all; Gluon GEMMs where they apply (sm_90, SiLU, no bias),
             plain Triton otherwise
"""

from __future__ import annotations

from typing import Any

from autosel.kernels.wna16_decode_space import NAMES as DECODE_NAMES
from autosel.kernels.wna16_decode_space import decode_choices, decode_problem, decode_start
from autosel.kernels.wna16_gemm_space import (
    gemm_choices,
    gemm_problem,
    says_all,
    scan_start,
    sorted_start,
)
from autosel.kernels.wna16_layer import TiledLayer

Params = dict[str, Any]


def starting_params(layer: TiledLayer, tokens: int, share: float = 1.0) -> Params:
    """What the kernels do by themselves."""
    return starting_points(layer, tokens, share)[0]


def starting_points(layer: TiledLayer, tokens: int, share: float = 1.0) -> list[Params]:
    """The starting point of each path that may be fastest, that of uniform routing first.

    Which one is depends on how many slots share experts: tokens are often more alike than uniform
    routing has them (8 tokens of Qwen3-30B, decode against sorted: 44 and 46 us; all on the same
    experts 40 and 23).

    share  of all experts that are here (expert parallelism): so many of the slots have work
    """
    slots = tokens * layer.top_k
    served = slots * share
    mean = served / layer.experts
    if tokens == 1:
        return [decode_start(layer, served)]
    if served > 128:
        return [sorted_start(layer, mean)]
    chosen = min(1.0, layer.top_k * share / layer.experts)  # by a token, if routing is uniform
    apart = layer.experts * (1 - (1 - chosen) ** tokens) / served  # experts hit, for each slot
    ways = {"decode": apart > 0.6, "scan": slots <= 64, "sorted": tokens > 2}
    if served <= 80 and apart > 0.82:
        first = "decode"
    elif slots <= 32 and (served < layer.experts or (layer.experts <= 16 and slots <= 16)):
        first = "scan"
    else:
        first = "sorted"
    make = {
        "decode": lambda: decode_start(layer, served),
        "scan": lambda: scan_start(layer),
        "sorted": lambda: sorted_start(layer, mean),
    }
    return [make[first](), *(make[way]() for way, may in ways.items() if may and way != first)]


def is_complete(p: Params) -> bool:
    """Whether a setting leaves nothing to the starting point, which need not be made then: that
    takes 6 to 28 us of a call, and some layers take the device 10."""
    if p.get("path") == "decode":
        return p.keys() >= DECODE_NAMES
    return p.get("path") in ("scan", "sorted") and says_all(p)


def choices(layer: TiledLayer, start: Params) -> dict[str, tuple[Any, ...]]:
    """What to vary around a starting point; :func:`problem_with` says which points are legal."""
    return decode_choices() if start["path"] == "decode" else gemm_choices(start)


def blocks(choices: dict[str, tuple[Any, ...]]) -> tuple[tuple[str, ...], ...]:
    """Parameters of each GEMM's kernel, then those of both."""
    up, down = (tuple(n for n in choices if n.startswith(pre)) for pre in ("up_", "down_"))
    return up, down, tuple(n for n in choices if n not in (*up, *down))


def problem_with(layer: TiledLayer, p: Params) -> tuple[str, str, str] | None:
    """Why a point is illegal, as (what, found, required); known before anything is compiled."""
    for up, pre in ((True, "up"), (False, "down")):
        gemm = layer.gemm(up)
        found = (
            decode_problem(layer, gemm, pre, p)
            if p["path"] == "decode"
            else gemm_problem(gemm, pre, p)
        )
        if found:
            return found
    return None
