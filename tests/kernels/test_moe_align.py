"""Alignment: a stable sort by expert, block by block, whatever the ids."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from autosel.kernels.wna16_layer import TiledLayer
from autosel.kernels.wna16_moe import align


def run(ids, experts, block):
    layer = TiledLayer({}, experts, ids.shape[1], 128, 128, 128, 128, asm=False, pdl=False)
    launches, (order, position, blocks) = align(layer, ids, block)
    for t in (order, position, blocks):
        t.fill_(-7)
    for launch in launches:
        launch.run()
    assert (blocks[:, :3] >= 0).all(), "an entry of the list was not written"
    return order, position, blocks[blocks[:, 2] > blocks[:, 1]]


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "block"),
    [
        (1, 8, 2, 16),
        (37, 8, 2, 16),
        (64, 40, 8, 16),
        (20, 80, 8, 16),
        (2100, 8, 2, 128),
        (520, 40, 8, 16),
    ],
)
def test_blocks_cover_every_served_slot_once(tokens, experts, top_k, block):
    gen = torch.Generator().manual_seed(tokens)
    ids = torch.rand((tokens, experts), generator=gen).topk(top_k, 1).indices.to(torch.int32)
    ids[torch.rand(ids.shape, generator=gen) < 0.2] = -1
    order, position, blocks = run(ids, experts, block)
    flat = ids.flatten()
    served = torch.where(flat >= 0)[0]
    expected = served[torch.argsort(flat[served], stable=True)]
    assert torch.equal(order[: len(served)].long(), expected)
    assert torch.equal(position[expected].long(), torch.arange(len(served)))
    assert (position[flat < 0] == -1).all()
    covered = []
    for e, start, end, _ in blocks.tolist():
        assert 0 < end - start <= block
        assert (flat[order[start:end].long()] == e).all()
        covered += range(start, end)
    assert covered == list(range(len(served)))


def test_nothing_to_do():
    ids = torch.full((3, 2), -1, dtype=torch.int32)
    _, position, blocks = run(ids, 4, 16)
    assert (position == -1).all()
    assert len(blocks) == 0
