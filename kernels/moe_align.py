"""Groups the routed slots by expert: one or two launches, deterministic, 1,024 experts and more.

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

That program's time grows with the number of slots (9 us at 8,192). Above 4,096 slots two launches
share the work by chunks of slots instead: ``count_kernel`` counts each chunk's slots by expert and
ranks every slot within its chunk, ``place_kernel`` adds up the counts of the chunks before. Same
results, equally free of atomics.
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


@triton.jit(do_not_specialize=["num_slots"])
def count_kernel(ids_ptr, counts_ptr, rank_ptr, num_slots, E: tl.constexpr, EP: tl.constexpr,
                 CHUNK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Grid (chunks). counts int16 ``[chunks, EP]``, rank int16 ``[slots]``."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    c = tl.program_id(0)
    row = counts_ptr + c * EP
    tl.store(row + tl.arange(0, EP), tl.zeros([EP], tl.int16))
    i = c * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + i, mask=i < num_slots, other=-1)
    PART: tl.constexpr = 16  # slots compared with the whole chunk at a time
    same_sum = tl.zeros([PART, CHUNK], tl.int32)
    rank_sum = tl.zeros([PART, CHUNK], tl.int32)
    for first in range(0, CHUNK, PART):
        j = c * CHUNK + first + tl.arange(0, PART)
        other = tl.load(ids_ptr + j, mask=j < num_slots, other=-1)
        same = (other[:, None] == ids[None, :]).to(tl.int32)  # [PART, CHUNK]
        same_sum += same
        rank_sum += tl.where(j[:, None] < i[None, :], same, 0)
    rank = tl.sum(rank_sum, axis=0)  # one reduction at the end: 8 times fewer shuffles
    count = tl.sum(same_sum, axis=0)
    tl.store(rank_ptr + i, rank.to(tl.int16), mask=i < num_slots)
    tl.debug_barrier()  # the zeros above come first
    first_of_its_expert = (ids >= 0) & (ids < E) & (rank == 0)
    tl.store(row + tl.maximum(ids, 0), count.to(tl.int16), mask=first_of_its_expert)


@triton.jit(do_not_specialize=["num_slots", "num_chunks"])
def place_kernel(ids_ptr, counts_ptr, rank_ptr, sorted_ptr, position_ptr, blocks_ptr, num_slots,
                 num_chunks, E: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr,
                 BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Grid (chunks): places its chunk's slots and writes every num_chunks-th block."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    c = tl.program_id(0)
    i = c * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + i, mask=i < num_slots, other=-1)
    rank = tl.load(rank_ptr + i, mask=i < num_slots, other=0).to(tl.int32)
    experts = tl.arange(0, EP)
    ROWS: tl.constexpr = 8192 // EP if EP <= 1024 else 8
    totals = tl.zeros([ROWS, EP], tl.int32)
    befores = tl.zeros([ROWS, EP], tl.int32)
    for first in tl.range(0, num_chunks, ROWS, num_stages=2):
        r = first + tl.arange(0, ROWS)
        part = tl.load(
            counts_ptr + r[:, None] * EP + experts[None, :], mask=r[:, None] < num_chunks, other=0
        ).to(tl.int32)  # [ROWS, EP]
        totals += part
        befores += tl.where(r[:, None] < c, part, 0)
    total = tl.sum(totals, axis=0)
    before = tl.sum(befores, axis=0)
    start = tl.cumsum(total, 0) - total
    valid = (ids >= 0) & (ids < E)
    place = tl.gather(start + before, tl.where(valid, ids, 0), 0) + rank
    tl.store(position_ptr + i, tl.where(valid, place, -1), mask=i < num_slots)
    tl.store(sorted_ptr + place, i, mask=valid)

    # Expert e's blocks begin at e + start // BLOCK, as above.
    end = start + total
    first_block = experts + start // BLOCK
    next_block = tl.where(experts == E - 1, E + num_slots // BLOCK, experts + 1 + end // BLOCK)
    longest = tl.max(tl.where(experts < E, next_block - first_block, 0))
    for b in range(c, longest, num_chunks):
        entry = blocks_ptr + 4 * (first_block + b)
        has = (experts < E) & (first_block + b < next_block)
        low = tl.minimum(start + b * BLOCK, end)
        tl.store(entry, experts, mask=has)
        tl.store(entry + 1, low, mask=has)
        tl.store(entry + 2, tl.minimum(low + BLOCK, end), mask=has)


def max_blocks(num_slots: int, num_experts: int, block: int) -> int:
    """Length of the block list, known without reading the ids."""
    return num_experts + num_slots // block
