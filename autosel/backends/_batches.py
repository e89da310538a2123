"""A buffer of rows for each expert, as all-to-all dispatch of expert parallelism gives.

With DeepEP's low-latency mode (or NIXL) every expert's tokens arrive in a buffer of its own and
the router weights are applied after the way back. Here the buffer is filled from ordinary
activations, so that such a path can be verified and timed on one device; that costs a copy which a
real dispatch has already paid for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autosel.align import expert_ranks
from autosel.backends._steps import slot_rows


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """Rows by expert.

    inputs  ``[E * length, H]``   expert e's rows begin at ``e * length``; those past its count
                                  hold old memory
    counts  int32 ``[E]``         rows in use
    rows    int32 ``[M, top_k]``  row of each slot, -1 where no expert here serves it
    """

    inputs: torch.Tensor
    counts: torch.Tensor
    rows: torch.Tensor
    length: int


def fill(
    x: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, order: torch.Tensor | None
) -> Batches:
    """x ``[M, H]`` by local ids int32 ``[M, top_k]``; ``order`` as in :func:`slot_rows`."""
    ranks, counts = expert_ranks(topk_ids, num_experts)  # [M, top_k], [E]
    length = _length(counts, topk_ids.numel())
    rows = torch.where(ranks >= 0, topk_ids * length + ranks, -1)  # [M, top_k]
    # One place past the end takes the slots that no expert here serves.
    places = torch.where(rows >= 0, rows, num_experts * length).flatten()
    shape = (num_experts * length + 1, x.shape[1])
    inputs = torch.empty(shape, dtype=x.dtype, device=x.device)
    inputs[places] = slot_rows(x, topk_ids, order)
    return Batches(inputs[:-1], counts, rows.to(torch.int32), length)


def _length(counts: torch.Tensor, num_slots: int) -> int:
    """Rows of each expert's buffer: the busiest expert's, or the bound where a read would break a
    graph capture, or where tensors have no contents.
    """
    if counts.device.type == "meta":
        return num_slots
    if counts.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return num_slots
    return max(1, int(counts.max()))
