"""The steps around the GEMM operators: activation, int8 rows, sum over slots.

On a GPU they are our own Triton kernels, one launch each, computing in float32 and
rounding once; on the CPU (where only tests come) plain torch.
"""

from __future__ import annotations

from typing import Any

import torch

from autosel import workspace
from autosel.activations import activate, constants
from autosel.core import Activation, Problem

MAX_GRID_Y = 65535  # CUDA's limit for the second dimension of a grid


def _plain(tensor: torch.Tensor) -> bool:
    """Whether to use plain torch instead of a kernel."""
    return tensor.device.type == "cpu"


def activation_constants(activation: Activation) -> dict[str, Any]:
    """Compile-time arguments of the activation kernels; 0 means absent for a limit."""
    values = constants(activation)
    return {
        "ACT": activation.name,
        "LIMIT": values.get("limit", 0.0),
        "ALPHA": values.get("alpha", 1.0),
        "BETA": values.get("beta", 0.0),
        "LINEAR_BETA": values.get("linear_beta", 0.0),
    }


def buffers(
    problem: Problem, x: torch.Tensor, rows: int, inner: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the steps of a layer write: ``[rows, s * I]`` by the first GEMM, ``[rows, I]`` by the
    activation, ``[rows, H]`` by the second GEMM.

    In the dtype of x ``[M, H]``, with anything in them. ``inner`` is I where the weights are
    packed with another than the problem's.
    """
    inner = problem.intermediate_size if inner is None else inner
    widths = (problem.num_shards * inner, inner, x.shape[1])
    h, a, y = (workspace.empty((rows, width), x.dtype, x.device) for width in widths)
    return h, a, y


def slot_rows(x: torch.Tensor, topk_ids: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """One row of inputs for each slot, ``[M * top_k, H]``, in the order of the slot's expert.

    order  int32 ``[E, H]``: input that stands at each place, or None for the natural order.
    Rows of slots that no expert here serves hold anything.
    """
    num_tokens, top_k = topk_ids.shape
    if order is None or _plain(x):
        tokens = torch.arange(num_tokens, device=x.device).repeat_interleave(top_k)
        if order is None:
            return x[tokens]
        places = order[topk_ids.flatten().clamp(min=0).long()].long()  # [M * top_k, H]
        return x[tokens].gather(1, places)
    from autosel.kernels.moe_gather import gather_inputs

    slots, width = topk_ids.numel(), x.shape[1]
    out = workspace.empty((slots, width), x.dtype, x.device)
    block = min(1024, 1 << (width - 1).bit_length())
    for start in range(0, num_tokens, MAX_GRID_Y // top_k):
        end = min(start + MAX_GRID_Y // top_k, num_tokens)
        gather_inputs[(-(-width // block), (end - start) * top_k)](
            x[start:end],
            topk_ids[start:end],
            order,
            out[start * top_k :],
            K=width,
            COLUMNS=width,
            E=order.shape[0],
            TOPK=top_k,
            BLOCK=block,
            PDL=False,
        )
    return out


def activate_into(out: torch.Tensor, h: torch.Tensor, activation: Activation) -> torch.Tensor:
    """``out[R, I] = act(h[R, s * I])``; halves form, contiguous, same dtype."""
    if _plain(h):
        return out.copy_(activate(h.float(), activation))
    from autosel.kernels.moe_wna16_plain import activation_kernel

    rows, width = out.shape
    block = min(1024, 1 << (width - 1).bit_length())
    activation_kernel[(rows, -(-width // block))](
        h, out, N=width, GATED=activation.gated, BLOCK=block, **activation_constants(activation)
    )
    return out


def quantize_rows(x: torch.Tensor, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 ``[R, N]`` and float32 ``[R, 1]`` whose product over ``factor`` is x ``[R, N]``.

    The scale of a row is its largest magnitude over 127; rows of old memory may give anything.
    """
    rows, width = x.shape
    if _plain(x):
        largest = x.float().abs().amax(1, keepdim=True).clamp(min=1e-10)
        scaled = x.float() * (127.0 / largest)
        away = torch.where(scaled < 0, (scaled - 0.5).ceil(), (scaled + 0.5).floor())
        return away.to(torch.int8), largest / 127.0 * factor
    from autosel.kernels.row_int8 import quantize_rows_kernel

    q = workspace.empty((rows, width), torch.int8, x.device)
    scales = workspace.empty((rows, 1), torch.float32, x.device)
    block = 1 << (width - 1).bit_length()
    warps = min(max(block // 256, 1), 8)
    quantize_rows_kernel[(rows,)](x, q, scales, factor, N=width, BLOCK=block, num_warps=warps)
    return q, scales


def reduce_into(
    out: torch.Tensor,
    y: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    weights: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out[t] = sum over j of weights[t, j] * y[row(t, j)]``, in float32 and in order of j.

    y ``[R, H]``; row(t, j) is ``t * top_k + j``, or ``rows[t, j]`` (int32 ``[M, top_k]``, -1 for
    none). Rows of slots that no expert here serves are never read: they hold old memory, and NaN
    times 0 is NaN.
    """
    num_tokens, top_k = topk_ids.shape
    if _plain(out):
        served = (topk_ids >= 0) & (topk_ids < num_experts)
        source = torch.arange(topk_ids.numel()).view_as(topk_ids) if rows is None else rows.long()
        total = torch.zeros(out.shape, dtype=torch.float32)
        for j in range(top_k):
            part = y[source[:, j].clamp(min=0)].float()
            if weights is not None:
                part = part * weights[:, j, None]
            total += torch.where(served[:, j, None], part, 0.0)
        return out.copy_(total)
    from autosel.kernels.moe_reduce import reduce_kernel

    width = out.shape[1]
    block = min(1024, 1 << (width - 1).bit_length())
    for start in range(0, num_tokens, MAX_GRID_Y):
        end = min(start + MAX_GRID_Y, num_tokens)
        reduce_kernel[(-(-width // block), end - start)](
            y if rows is not None else y[start * top_k :],
            None if rows is None else rows[start:end],
            topk_ids[start:end],
            None if weights is None else weights[start:end],
            out[start:end],
            N=width,
            E=num_experts,
            TOPK=top_k,
            BLOCK=block,
            SORTED=rows is not None,
            WEIGHTED=weights is not None,
            PDL=False,
        )
    return out
