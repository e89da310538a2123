"""Launches a whole MoE layer: which kernels, which grids, which arguments.

A call is a list of ``Launch`` objects, so that the same description runs a layer, compiles it ahead
of time and is counted in tests. Parameters are plain numbers and strings (see
``wna16_space`` for the spaces and the starting points).
"""

from __future__ import annotations

from typing import Any

import torch

from autosel import workspace
from autosel.kernels.moe_align import align_kernel, count_kernel, max_blocks, place_kernel
from autosel.kernels.moe_decode import decode_down, decode_gate_up
from autosel.kernels.moe_gather import gather_inputs
from autosel.kernels.moe_grouped import grouped_down_rows, grouped_gemm
from autosel.kernels.moe_reduce import reduce_kernel
from autosel.kernels.moe_weigh import weigh_inputs
from autosel.kernels.wna16_layer import (
    Launch,
    Params,
    TiledLayer,
    block_of,
    next_power_of_two,
    padded,
    pdl_option,
    register_option,
)

#: With more slots than this the programs of a scan do not look for their own: verification calls
#: settings that were chosen for a few tokens with hundreds, which made vectors of 4,096 slots times
#: 16 to 64 tokens. Triton compiled these for 2 to 28 s.
SCANNED = 512


# ------------------------------------------------------------------ single launches
def align(
    layer: TiledLayer, ids: torch.Tensor, block: int
) -> tuple[list[Launch], tuple[torch.Tensor, ...]]:
    """The align launches and their results ``(sorted_slot, position, blocks)``."""
    slots = ids.numel()

    def new(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return workspace.empty(size, dtype, ids.device)

    out = (new(slots), new(slots), new(max_blocks(slots, layer.experts, block), 4))
    common = dict(E=layer.experts, PDL=layer.pdl, **pdl_option(layer))
    # One launch up to where it takes longer than two (H200: 9 us, 8,192 slots of 128 experts).
    if slots <= 4096 or (slots <= 8192 and layer.experts <= 128):
        chunk = max(128, min(4096, next_power_of_two(slots)))
        common |= {"CHUNK": chunk, "BLOCK": block, "num_warps": max(4, chunk // 256)}
        return [Launch(align_kernel, (layer.experts,), (ids, *out, slots), common)], out
    chunk, bins = 256, padded(layer.experts)
    chunks = -(-slots // chunk)
    counts, rank = new(chunks, bins, dtype=torch.int16), new(slots, dtype=torch.int16)
    common |= {"EP": bins, "CHUNK": chunk, "num_warps": 8}
    return [
        Launch(count_kernel, (chunks,), (ids, counts, rank, slots), common),
        Launch(
            place_kernel,
            (chunks,),
            (ids, counts, rank, *out, slots, chunks),
            common | {"BLOCK": block},
        ),
    ], out


def reduce(
    layer: TiledLayer,
    y: torch.Tensor,
    position: torch.Tensor | None,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
) -> Launch:
    tokens, n = out.shape
    block = 256 if tokens <= 16 else 1024 if n % 1024 == 0 else 512
    return Launch(
        reduce_kernel,
        (-(-n // block), tokens),
        (y, ids if position is None else position, ids, weights, out),
        dict(
            N=n,
            E=layer.experts,
            TOPK=layer.top_k,
            BLOCK=block,
            SORTED=position is not None,
            WEIGHTED=True,
            PDL=layer.pdl,
            num_warps=2 if block == 256 else 4,
            **pdl_option(layer),
        ),
    )


def _decode_options(layer: TiledLayer, pre: str, p: Params) -> dict[str, Any]:
    """Constants that both decode kernels have."""
    options = {name.upper(): p[f"{pre}_{name}"] for name in ("r", "ks", "kw", "sub", "stages")}
    return options | {"ASM": layer.asm, "PDL": layer.pdl}


def decode_up_launch(
    layer: TiledLayer, x: torch.Tensor, ids: torch.Tensor, h: torch.Tensor, xdiv: int, p: Params
) -> Launch:
    grid = (ids.numel(), layer.rows13 // (16 * p["up_r"]))
    return Launch(
        decode_gate_up,
        grid,
        (x, *layer.weights(True), ids, h),
        dict(
            **layer.gemm(True),
            **layer.act(),
            XDIV=xdiv,
            **_decode_options(layer, "up", p),
            num_warps=p["up_ks"],
            **pdl_option(layer),
        ),
    )


def decode_down_launch(
    layer: TiledLayer,
    h: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    p: Params,
) -> Launch:
    return Launch(
        decode_down,
        (out.shape[0], layer.hidden // (16 * p["down_r"])),
        (h, *layer.weights(False), ids, weights, out),
        dict(
            **layer.gemm(False),
            TOPK=layer.top_k,
            TP=next_power_of_two(layer.top_k),
            **_decode_options(layer, "down", p),
            num_warps=p["down_warps"],
            **pdl_option(layer),
        ),
    )


def _columns(
    layer: TiledLayer, ids: torch.Tensor, tok: int, sorted_: tuple[Any, ...] | None
) -> tuple[int, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Program columns of a grouped GEMM, the order of the slots and the blocks, and the constants
    by which a column finds its slots; one that is no block is a slot or an expert.
    """
    slots, is_sorted = ids.numel(), sorted_ is not None
    by_slot = not is_sorted and slots <= layer.experts
    order, blocks = (ids, ids) if sorted_ is None else (sorted_[0], sorted_[2])
    if is_sorted:
        columns = max_blocks(slots, layer.experts, tok)
    else:
        columns = slots if by_slot else min(slots, layer.experts + slots // tok)
    scan = 16 if is_sorted else max(16, next_power_of_two(slots))
    constants = {"SORTED": is_sorted, "BY_SLOT": by_slot, "EP": padded(layer.experts)}
    return columns, order, blocks, constants | {"S": scan, "TOK": tok}


def grouped_launch(
    layer: TiledLayer,
    up: bool,
    x: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor,
    xdiv: int,
    sorted_: tuple[Any, ...] | None,
    p: Params,
) -> Launch:
    pre, slots = "up" if up else "down", ids.numel()
    tok, bn = block_of(p), p[f"{pre}_bn"]
    columns, order, blocks, scan = _columns(layer, ids, tok, sorted_)
    gemm = layer.gemm(up)
    pdl = 0 if not layer.pdl else 1 if up else 2
    return Launch(
        grouped_gemm,
        (columns * (gemm["NR"] // bn),),
        (x, *layer.weights(up), out, ids, order, blocks, slots),
        dict(
            **gemm,
            **layer.act(),
            XDIV=xdiv,
            UP=up,
            **scan,
            BN=bn,
            BK=p[f"{pre}_bk"],
            STAGES=p[f"{pre}_stages"],
            PREFETCH=0 if up or not layer.pdl else p["prefetch"],
            ASM=layer.asm,
            PDL=pdl,
            num_warps=p[f"{pre}_warps"],
            num_stages=p[f"{pre}_stages"],
            **pdl_option(layer),
            **register_option(layer, p, pre),
        ),
    )


def rows_launch(
    layer: TiledLayer,
    h: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor,
    sorted_: tuple[Any, ...] | None,
    p: Params,
) -> Launch:
    slots, tok, bn, rt = ids.numel(), block_of(p), p["down_bn"], p["down_rt"]
    columns, order, blocks, scan = _columns(layer, ids, tok, sorted_)
    return Launch(
        grouped_down_rows,
        (columns * (layer.hidden // (bn * rt)),),
        (h, *layer.weights(False), out, ids, order, blocks, slots),
        dict(
            **layer.gemm(False),
            **scan,
            BN=bn,
            RT=rt,
            STAGES=p["down_stages"],
            ASM=layer.asm,
            PDL=layer.pdl,
            num_warps=p["down_warps"],
            num_stages=p["down_stages"],
            **pdl_option(layer),
            **register_option(layer, p, "down"),
        ),
    )


# ------------------------------------------------------------------ whole layers
def layer_launches(
    layer: TiledLayer,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    p: Params,
) -> list[Launch]:
    """Every launch of one call; x and out ``[M, hidden]``, ids and weights ``[M, top_k]``."""
    slots = ids.numel()
    launches: list[Launch] = []

    def scratch(columns: int) -> torch.Tensor:
        return workspace.empty((slots, columns), x.dtype, x.device)

    if layer.weight_on_input:
        launch, x, weights = _weigh(layer, x, weights)
        launches.append(launch)
    xdiv = layer.top_k
    if "x_order" in layer.tensors:  # act-order: inputs of each slot in its expert's order
        gathered = scratch(layer.hidden)
        launches.append(_gather(layer, x, ids, gathered))
        x, xdiv = gathered, 1
    h = scratch(layer.intermediate)
    if p["path"] == "decode":
        launches.append(decode_up_launch(layer, x, ids, h, xdiv, p))
        launches.append(decode_down_launch(layer, h, ids, weights, out, p))
        return launches

    sorted_ = None
    if p["path"] == "sorted" or slots > SCANNED:
        aligning, sorted_ = align(layer, ids, block_of(p))
        launches += aligning
    y = scratch(layer.hidden)
    for up, source, target, div in ((True, x, h, xdiv), (False, h, y, 1)):
        kind = p["up_with" if up else "down_with"]
        if kind == "gluon":
            launches.append(prefill_launch(layer, up, source, target, div, sorted_, slots, p))
        elif kind == "rows":
            launches.append(rows_launch(layer, source, ids, target, sorted_, p))
        else:
            launches.append(grouped_launch(layer, up, source, ids, target, div, sorted_, p))
    launches.append(reduce(layer, y, sorted_[1] if sorted_ else None, ids, weights, out))
    return launches


def prefill_launch(
    layer: TiledLayer,
    up: bool,
    x: torch.Tensor,
    out: torch.Tensor,
    xdiv: int,
    sorted_: tuple[Any, ...],
    slots: int,
    p: Params,
) -> Launch:
    from autosel.kernels.moe_prefill import prefill_gemm  # Gluon: imported where it is used

    pre, gemm = "up" if up else "down", layer.gemm(up)
    weights = layer.weights(up)[:3]  # no bias: ``gluon_gemm``
    near, bn, rt = p["near"], p[f"{pre}_bn"], 1 if up else p["down_rt"]
    blocks = max_blocks(slots, layer.experts, block_of(p))
    columns = -(-blocks // near) * near
    return Launch(
        prefill_gemm,
        (columns * (gemm["NR"] // (bn * rt)),),
        (x, *weights, out, sorted_[0], sorted_[2], blocks),
        {
            "K": gemm["K"],
            "NR": gemm["NR"],
            "GROUP": gemm["GROUP"],
            "BITS": gemm["BITS"],
            "SYM": gemm["SYM"],
            "UP": up,
            "XDIV": xdiv,
            "CLASSES": p["classes"],
            "BN": bn,
            "BK": p[f"{pre}_bk"],
            "RT": rt,
            "STAGES": p[f"{pre}_stages"],
            "LATE": p[f"{pre}_late"],
            "NEAR": near,
            "NW": p[f"{pre}_warps"],
            "PDL": (1 if up else 2) if layer.pdl else 0,
            "num_warps": p[f"{pre}_warps"],
            **register_option(layer, p, pre),
            **pdl_option(layer),
        },
    )


def _weigh(
    layer: TiledLayer, x: torch.Tensor, weights: torch.Tensor
) -> tuple[Launch, torch.Tensor, torch.Tensor]:
    """Weighted inputs, and the weights that are left for the outputs: ones."""
    weighted = workspace.empty((len(x), layer.hidden), x.dtype, x.device)
    ones = workspace.empty((len(x), 1), weights.dtype, x.device)
    launch = Launch(
        weigh_inputs,
        (-(-layer.hidden // 1024), len(x)),
        (x, weights, weighted, ones),
        dict(K=layer.hidden, BLOCK=1024, PDL=layer.pdl, num_warps=4, **pdl_option(layer)),
    )
    return launch, weighted, ones


def _gather(
    layer: TiledLayer, x: torch.Tensor, ids: torch.Tensor, gathered: torch.Tensor
) -> Launch:
    columns = layer.tensors["x_order"].shape[1]
    return Launch(
        gather_inputs,
        (-(-layer.hidden // 1024), ids.numel()),
        (x, ids, layer.tensors["x_order"], gathered),
        dict(
            K=layer.hidden,
            COLUMNS=columns,
            E=layer.experts,
            TOPK=layer.top_k,
            BLOCK=1024,
            PDL=layer.pdl,
            **pdl_option(layer),
        ),
    )


def moe_forward(
    layer: TiledLayer,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    p: Params,
) -> torch.Tensor:
    for launch in layer_launches(layer, x, ids, weights, out, p):
        launch.run()
    return out
