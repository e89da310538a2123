"""Alignment of routed slots to blocks by vLLM's operator, or in torch where that does not serve."""

from __future__ import annotations

from typing import Any

import torch

from autosel import workspace
from autosel.align import Aligned, align_block_size, capacity
from autosel.backends import _vllm_ops

#: The operator takes fewer than 1,024 experts, rounded up to 32, and one extra expert takes the
#: slots that are served elsewhere. Above, torch does its work.
MAX_EXPERTS = 991

_asked: dict[tuple[Any, torch.device], bool] = {}
_maps: dict[tuple[int, torch.device], torch.Tensor] = {}


def align(topk_ids: torch.Tensor, num_experts: int, block: int) -> Aligned:
    """Align ids int32 ``[M, top_k]``; those outside ``[0, num_experts)`` take no part.

    By vLLM's operator where it takes an expert map. Its newer releases leave out ids that are no
    expert, in one launch. Older ones use them as indices: there an id of -1 becomes expert
    ``num_experts``, which the map says is elsewhere.
    """
    op = _vllm_ops.find("_moe_C", "moe_align_block_size")
    # Without contents (autosel.triton_offline) there is nothing for the operator to read.
    has_op = op is not None and topk_ids.device.type != "meta"
    takes_map = has_op and "expert_map" in _vllm_ops.arguments(op)
    if not takes_map or num_experts > MAX_EXPERTS:
        return align_block_size(topk_ids, num_experts, block)
    device = topk_ids.device
    if _leaves_out_strays(op, device):
        return _call(op, topk_ids, num_experts, block, None)
    ids = topk_ids.remainder(num_experts + 1)
    return _call(op, ids, num_experts + 1, block, _local_map(num_experts, device))


def _call(
    op: Any, ids: torch.Tensor, num_experts: int, block: int, expert_map: torch.Tensor | None
) -> Aligned:
    places = capacity(ids.numel(), num_experts, block)

    def ints(count: int) -> torch.Tensor:
        return workspace.empty((count,), torch.int32, ids.device)

    aligned = Aligned(ints(places), ints(-(-places // block)), ints(1), block)
    _vllm_ops.call(
        op,
        {
            "topk_ids": ids,
            "num_experts": num_experts,
            "block_size": block,
            "sorted_token_ids": aligned.sorted_ids,
            "experts_ids": aligned.expert_ids,
            "num_tokens_post_pad": aligned.num_padded,
            "expert_map": expert_map,
            "scatter_idx": None,
        },
    )
    return aligned


def _leaves_out_strays(op: Any, device: torch.device) -> bool:
    """Whether ids outside the experts take no part; asked of the operator once for each device.

    Only of releases with the argument ``scatter_idx`` (0.33 and newer, whose kernels compare an id
    with both bounds): in an older one the question itself could write out of bounds. The two
    sizes take the operator's two paths, one block for few experts and two launches for many.
    """
    if "scatter_idx" not in _vllm_ops.arguments(op):
        return False
    known = _asked.get((op, device))
    if known is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # an answer cannot be read here; the next ordinary call asks
        known = all(_answer(op, experts, slots, device) for experts, slots in ((4, 8), (128, 2048)))
        _asked[op, device] = known
    return known


def _answer(op: Any, experts: int, slots: int, device: torch.device) -> bool:
    ids = torch.arange(slots, dtype=torch.int32, device=device).remainder(experts)
    ids[0::4], ids[1::8] = -1, experts
    aligned = _call(op, ids.view(-1, 1), experts, 16, None)
    expected = align_block_size(ids.view(-1, 1), experts, 16)
    used = int(expected.num_padded)
    if int(aligned.num_padded) != used:
        return False
    found = (aligned.sorted_ids[:used], expected.sorted_ids[:used])
    blocks = used // 16
    # The order inside an expert's run is the operator's own.
    same = torch.equal(*(ids.view(-1, 16).sort(1).values for ids in found))
    return same and torch.equal(aligned.expert_ids[:blocks], expected.expert_ids[:blocks])


def _local_map(num_experts: int, device: torch.device) -> torch.Tensor:
    """int32 ``[num_experts + 1]``: every expert is here but the last."""
    if (num_experts, device) not in _maps:
        made = torch.arange(num_experts + 1, dtype=torch.int32, device=device)
        made[num_experts] = -1
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return made  # memory of the graph's own pool: not to be kept
        _maps[num_experts, device] = made
    return _maps[num_experts, device]
