"""Sorts routed slots by expert and pads each expert's run to whole blocks, in plain torch.

A slot is one (token, choice) pair, ``slot = token * top_k + choice``. The fused MoE operators of
vLLM, Humming and SGLang all read this form. It is the reference for operators that do the same,
and stands in where there is none. Nothing here reads a value back to the host, so it can be
captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Aligned:
    """Slots by expert, in blocks of ``block``.

    sorted_ids   int32 ``[cap]``   slot at each place; padding holds the number of slots
    expert_ids   int32 ``[ceil(cap / block)]``   expert of each block; -1 past the last one
    num_padded   int32 ``[1]``     places in use, a multiple of ``block``
    """

    sorted_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_padded: torch.Tensor
    block: int

    @property
    def num_blocks(self) -> int:
        return int(self.expert_ids.shape[0])


def capacity(num_slots: int, num_experts: int, block: int) -> int:
    """Places that suffice whatever the routing."""
    places = num_slots + num_experts * (block - 1)
    # Fewer slots than experts: at most one block for each slot.
    return min(places, num_slots * block) if num_slots < num_experts else places


def align_block_size(topk_ids: torch.Tensor, num_experts: int, block: int) -> Aligned:
    """Align ids int ``[M, top_k]``; those outside ``[0, num_experts)`` take no part."""
    ids = topk_ids.flatten().long()  # [S]
    num_slots, device = ids.numel(), ids.device
    served = (ids >= 0) & (ids < num_experts)
    keys, order = torch.sort(torch.where(served, ids, num_experts), stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, keys, torch.ones_like(keys))
    padded = (counts + block - 1) // block * block
    padded[num_experts] = 0
    ends = padded.cumsum(0)
    first = counts.cumsum(0) - counts
    rank = torch.arange(num_slots, device=device) - first[keys]
    places = capacity(num_slots, num_experts, block)
    # Slots that take no part all land on one extra place, which is cut off.
    target = torch.where(keys < num_experts, (ends - padded)[keys] + rank, places)
    sorted_ids = torch.full((places + 1,), num_slots, dtype=torch.int32, device=device)
    sorted_ids.scatter_(0, target, order.to(torch.int32))
    return Aligned(
        sorted_ids[:places],
        _block_experts(ends[:num_experts], places, block),
        ends[num_experts : num_experts + 1].to(torch.int32),
        block,
    )


def align_batched(counts: torch.Tensor, max_tokens: int, block: int) -> Aligned:
    """Align rows ``[E, max_tokens]`` of which the first ``counts[e]`` of each expert are used.

    Row ``e * max_tokens + r``; padding holds ``E * max_tokens``.
    """
    num_experts, device = counts.numel(), counts.device
    stride = -(-max_tokens // block) * block
    padded = (counts.long() + block - 1) // block * block
    ends = padded.cumsum(0)
    r = torch.arange(stride, device=device)[None, :]  # [1, stride]
    places = num_experts * stride
    start = (ends - padded)[:, None]  # [E, 1]
    target = torch.where(r < padded[:, None], start + r, places)  # [E, stride]
    row = torch.arange(num_experts, device=device)[:, None] * max_tokens + r
    row = torch.where(r < counts[:, None], row, num_experts * max_tokens)
    sorted_ids = torch.full(
        (places + 1,), num_experts * max_tokens, dtype=torch.int32, device=device
    )
    sorted_ids.scatter_(0, target.flatten(), row.flatten().to(torch.int32))
    return Aligned(
        sorted_ids[:places],
        _block_experts(ends, places, block),
        ends[-1:].to(torch.int32),
        block,
    )


def _block_experts(ends: torch.Tensor, places: int, block: int) -> torch.Tensor:
    """Expert of each block from the ends of the experts' runs ``[E]``; -1 past the last."""
    starts = torch.arange(-(-places // block), device=ends.device) * block
    expert = torch.searchsorted(ends, starts, right=True)
    return torch.where(expert < ends.numel(), expert, -1).to(torch.int32)


def expert_ranks(topk_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of each slot within its expert, and slots of each expert.

    Returns int64 ``[M, top_k]`` (-1 for ids outside ``[0, num_experts)``) and int32 ``[E]``.
    """
    ids = topk_ids.flatten().long()
    served = (ids >= 0) & (ids < num_experts)
    keys, order = torch.sort(torch.where(served, ids, num_experts), stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, keys, torch.ones_like(keys))
    first = counts.cumsum(0) - counts
    rank = torch.arange(ids.numel(), device=ids.device) - first[keys]
    out = torch.empty_like(ids)
    out[order] = torch.where(keys < num_experts, rank, -1)
    return out.view(topk_ids.shape), counts[:num_experts].to(torch.int32)
