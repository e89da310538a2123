"""Groups the routed slots by expert: one launch, deterministic, up to 1,024 experts.

A slot is one (token, choice) pair, ``slot = token * top_k + choice``. The GEMMs work on blocks of
up to BLOCK slots of one expert, so they need

    sorted_slot [S]     slots ordered by expert, and by number within an expert (stable)
    position    [S]     the inverse: where a slot went, -1 if no expert here serves it
    blocks      [B, 4]  expert, first position, one past the last, unused
    num_blocks  [1]

Usual implementations count, scan and place in two or three launches joined by atomics, whose order
changes from run to run. Here every program counts all slots itself (32,768 ids are 128 KB from L2)
and keeps two histograms: of all slots, and of the slots before its own chunk. Position = start of
the expert + slots of the same expert before the chunk + rank within the chunk. Programs never
talk to each other.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["num_slots"])
def align_kernel(ids_ptr, sorted_ptr, position_ptr, blocks_ptr, num_blocks_ptr, num_slots,
                 E: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr, SCAN: tl.constexpr,
                 BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """EP: E rounded up to a power of two. CHUNK: slots placed by one program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pid = tl.program_id(0)
    experts = tl.arange(0, EP)  # [EP]
    start = pid * CHUNK
    total = tl.zeros([EP], tl.int32)
    before = tl.zeros([EP], tl.int32)
    for first in range(0, num_slots, SCAN):
        i = first + tl.arange(0, SCAN)
        ids = tl.load(ids_ptr + i, mask=i < num_slots, other=-1)
        valid = (ids >= 0) & (ids < E)
        ids = tl.where(valid, ids, 0)
        total += tl.histogram(ids, EP, mask=valid)
        if first < start:
            before += tl.histogram(ids, EP, mask=valid & (i < start))

    i = start + tl.arange(0, CHUNK)  # [CHUNK]
    inside = i < num_slots
    ids = tl.load(ids_ptr + i, mask=inside, other=-1)
    valid = (ids >= 0) & (ids < E)
    rank = tl.zeros([CHUNK], tl.int32)
    PART: tl.constexpr = 32  # columns compared at a time: 256 x 32 booleans fit in registers
    for c in tl.static_range(0, CHUNK, PART):
        j = start + c + tl.arange(0, PART)  # [PART]
        other = tl.load(ids_ptr + j, mask=j < num_slots, other=-1)
        same = (ids[:, None] == other[None, :]) & (j[None, :] < i[:, None])  # [CHUNK, PART]
        rank += tl.sum(same.to(tl.int32), axis=1)

    offset = tl.cumsum(total, 0) - total  # [EP] first position of each expert
    place = tl.gather(offset + before, tl.where(valid, ids, 0), 0) + rank
    tl.store(position_ptr + i, tl.where(valid, place, -1), mask=inside)
    tl.store(sorted_ptr + place, i, mask=inside & valid)

    # The block list is shared out: program p writes blocks p, p + P, ... of every expert.
    count = (total + BLOCK - 1) // BLOCK
    first_block = tl.cumsum(count, 0) - count
    if pid == 0:
        tl.store(num_blocks_ptr, tl.sum(count))
    for b in range(pid, tl.max(count), tl.num_programs(0)):
        entry = blocks_ptr + 4 * (first_block + b)
        has = b < count
        tl.store(entry, experts, mask=has)
        tl.store(entry + 1, offset + b * BLOCK, mask=has)
        tl.store(entry + 2, tl.minimum(offset + total, offset + (b + 1) * BLOCK), mask=has)


def max_blocks(num_slots: int, num_experts: int, block: int) -> int:
    """Upper bound of the number of blocks, known without reading the ids."""
    return min(num_slots, num_experts + num_slots // block)
