"""Alignment of routed slots to blocks, against a plain loop."""

from __future__ import annotations

import pytest
import torch

from autosel.align import align_batched, align_block_size, capacity, expert_ranks


def expected(ids: list[int], experts: int, block: int) -> tuple[list[list[int]], list[int]]:
    """Blocks of slots and their experts, by the definition."""
    blocks, owners = [], []
    for e in range(experts):
        slots = [s for s, i in enumerate(ids) if i == e]
        for start in range(0, len(slots), block):
            part = slots[start : start + block]
            blocks.append(part + [len(ids)] * (block - len(part)))
            owners.append(e)
    return blocks, owners


@pytest.mark.parametrize("experts", [1, 2, 8, 60, 160, 256, 384])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (1, 2), (7, 2), (64, 4)])
@pytest.mark.parametrize("block", [1, 8, 16, 64])
def test_against_a_loop(experts: int, tokens: int, top_k: int, block: int) -> None:
    rng = torch.Generator().manual_seed(experts * tokens + block)
    ids = torch.randint(-1, experts, (tokens, top_k), generator=rng, dtype=torch.int32)
    found = align_block_size(ids, experts, block)
    blocks, owners = expected(ids.flatten().tolist(), experts, block)
    used = int(found.num_padded)
    assert used == len(blocks) * block
    assert found.sorted_ids.dtype == found.expert_ids.dtype == torch.int32
    assert found.sorted_ids.numel() == capacity(ids.numel(), experts, block)
    assert found.sorted_ids[:used].tolist() == [s for part in blocks for s in part]
    assert (found.sorted_ids[used:] == ids.numel()).all()
    assert found.expert_ids[: len(owners)].tolist() == owners
    assert (found.expert_ids[len(owners) :] == -1).all()
    assert found.num_blocks * block >= found.sorted_ids.numel()


@pytest.mark.parametrize("value", [-5, 4, 2**31 - 1])
def test_wild_ids_take_no_part(value: int) -> None:
    ids = torch.tensor([[0, value], [3, 3]], dtype=torch.int32)
    found = align_block_size(ids, 4, 2)
    assert int(found.num_padded) == 4
    assert found.sorted_ids[:4].tolist() == [0, 4, 2, 3]
    assert found.expert_ids[:2].tolist() == [0, 3]


def test_nothing_served() -> None:
    found = align_block_size(torch.full((3, 2), -1, dtype=torch.int32), 4, 16)
    assert int(found.num_padded) == 0
    assert (found.expert_ids == -1).all()
    assert (found.sorted_ids == 6).all()


@pytest.mark.parametrize("skew", ["one expert", "all but one"])
def test_capacity_holds_the_worst_routing(skew: str) -> None:
    experts, tokens, top_k, block = 64, 40, 2, 16
    if skew == "one expert":
        ids = torch.full((tokens, top_k), 5, dtype=torch.int32)
    else:
        ids = (torch.arange(tokens * top_k) % 63).view(tokens, top_k).to(torch.int32)
        ids[ids >= 5] += 1
    found = align_block_size(ids, experts, block)
    blocks, owners = expected(ids.flatten().tolist(), experts, block)
    assert int(found.num_padded) == len(blocks) * block <= found.sorted_ids.numel()
    assert found.expert_ids[: len(owners)].tolist() == owners


def test_batched() -> None:
    counts = torch.tensor([3, 0, 5, 1], dtype=torch.int32)
    found = align_batched(counts, 5, 2)
    assert int(found.num_padded) == 12
    assert found.sorted_ids[:12].tolist() == [0, 1, 2, 20, 10, 11, 12, 13, 14, 20, 15, 20]
    assert found.expert_ids[:6].tolist() == [0, 0, 2, 2, 2, 3]
    assert (found.expert_ids[6:] == -1).all()
    assert found.sorted_ids.numel() == 4 * 6


def test_batched_with_full_and_empty_buffers() -> None:
    found = align_batched(torch.tensor([4, 4]), 4, 4)
    assert found.sorted_ids.tolist() == list(range(8))
    assert found.expert_ids.tolist() == [0, 1]
    assert int(align_batched(torch.tensor([0, 0]), 4, 4).num_padded) == 0


def test_ranks() -> None:
    ids = torch.tensor([[1, 0], [1, -1], [0, 1]], dtype=torch.int32)
    ranks, counts = expert_ranks(ids, 3)
    assert ranks.tolist() == [[0, 0], [1, -1], [1, 2]]
    assert counts.tolist() == [2, 3, 0]
