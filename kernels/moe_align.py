"""Groups the routed slots by expert: one launch, deterministic, any number of experts.

A slot is one (token, choice) pair, ``slot = token * top_k + choice``. The GEMMs work on blocks of
up to BLOCK slots of one expert, so they need

    sorted_slot [S]     slots ordered by expert, and by number within an expert (stable)
    position    [S]     the inverse: where a slot went, -1 if no expert here serves it
    blocks      [B, 4]  expert, first position, one past the last (equal: no such block), unused

Usual implementations count, scan and place in two or three launches joined by atomics, whose order
changes from run to run. Here each expert has a program that reads all ids (128 KB from L2 for
32,768 slots) and needs nothing from the others: its first position is the number of ids below
it, and its blocks start at ``e + first_position // BLOCK``, which leaves room for every expert
before it without knowing how its slots split into blocks. So the list has gaps, at most one an
expert; a GEMM program that finds one ends at once.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["num_slots"])
def align_kernel(ids_ptr, sorted_ptr, position_ptr, blocks_ptr, num_slots, E: tl.constexpr,
                 CHUNK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Grid (E): one program an expert."""
    e = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    below = tl.zeros([CHUNK], tl.int32)
    mine = tl.zeros([CHUNK], tl.int32)
    for first in range(0, num_slots, CHUNK):
        i = first + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + i, mask=i < num_slots, other=-1)
        below += ((ids >= 0) & (ids < e)).to(tl.int32)
        mine += (ids == e).to(tl.int32)
        if e == 0:
            tl.store(position_ptr + i, -1, mask=(i < num_slots) & ((ids < 0) | (ids >= E)))
    start = tl.sum(below)
    end = start + tl.sum(mine)

    if end > start:
        place = start
        for first in range(0, num_slots, CHUNK):
            i = first + tl.arange(0, CHUNK)
            match = tl.load(ids_ptr + i, mask=i < num_slots, other=-1) == e
            to = place + tl.cumsum(match.to(tl.int32), 0) - 1
            tl.store(sorted_ptr + to, i, mask=match)
            tl.store(position_ptr + i, to, mask=match)
            place += tl.sum(match.to(tl.int32))

    first_block = e + start // BLOCK
    next_block = e + 1 + end // BLOCK
    if e == E - 1:
        next_block = E + num_slots // BLOCK
    for b in range(first_block, next_block):
        entry = blocks_ptr + 4 * b
        low = tl.minimum(start + (b - first_block) * BLOCK, end)
        tl.store(entry, e)
        tl.store(entry + 1, low)
        tl.store(entry + 2, tl.minimum(low + BLOCK, end))


def max_blocks(num_slots: int, num_experts: int, block: int) -> int:
    """Length of the block list, known without reading the ids."""
    return num_experts + num_slots // block
