"""The layouts of ``moe_prefill``'s operands, and the widths its blocks may take.

All of it is computed while a kernel is compiled.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _bases(size, axis, rank):
    """Linear-layout bases that walk ``axis``: 1, 2, 4, ... below size."""
    out, step = [], 1
    while step < size:
        out.append([step if a == axis else 0 for a in range(rank)])
        step *= 2
    return out


@gluon.constexpr_function
def words_layout(R, C, BITS, NW):
    """[R, C, 32 BITS] words: BITS neighbours a lane, lanes along the tile, warps along row
    tiles."""
    rows = _bases(R, 0, 3)
    warps = rows[: NW.bit_length() - 1]
    warps += [[0, 0, 0]] * (NW.bit_length() - 1 - len(warps))
    reg = _bases(BITS, 2, 3) + _bases(C, 1, 3) + rows[NW.bit_length() - 1 :]
    lane = [[0, 0, BITS << i] for i in range(5)]
    return gl.DistributedLinearLayout(reg, lane, warps, [], [R, C, 32 * BITS])


@gluon.constexpr_function
def split_shape(R, NC, CC, JG, JJ, BITS):
    """The words of a step by what they hold: 8 rows g, 4 lanes t of them, JG x JJ steps of 16
    inputs, and with 8 bits two words for each."""
    return [R, NC, CC, 8, 4, JG, JJ] + ([2] if BITS == 8 else [])


@gluon.constexpr_function
def split_layout(R, NC, CC, JG, JJ, BITS, NW):
    """The same words as :func:`split_shape`."""
    rank = 7 if BITS == 4 else 8
    rows = _bases(R, 0, rank)
    warps = rows[: NW.bit_length() - 1]
    warps += [[0] * rank] * (NW.bit_length() - 1 - len(warps))
    reg = _bases(JJ, 6, rank) + _bases(JG, 5, rank) + _bases(CC, 2, rank) + _bases(NC, 1, rank)
    if BITS == 8:
        reg = _bases(2, 7, rank) + reg
    lane = _bases(4, 4, rank) + _bases(8, 3, rank)
    return gl.DistributedLinearLayout(
        reg + rows[NW.bit_length() - 1 :], lane, warps, [], split_shape(R, NC, CC, JG, JJ, BITS)
    )


@gluon.constexpr_function
def pairs_layout(split, BITS):
    """Scale pairs [R, NC, 8 g, JG] beside the words that they scale."""
    if BITS == 8:
        split = gl.SliceLayout(7, split)
    return gl.SliceLayout(2, gl.SliceLayout(4, gl.SliceLayout(6, split)))


# ------------------------------------------------------------------ widths
@gluon.constexpr_function
def part(CLASSES, i, second):
    """Width of the first or second wgmma tile of class i of a text like "64,64+16,128"."""
    parts = CLASSES.split(",")[i].split("+")
    return int(parts[second]) if second < len(parts) else 0


@gluon.constexpr_function
def width(CLASSES, i):
    return sum(int(p) for p in CLASSES.split(",")[i].split("+")) if i >= 0 else 0


@gluon.constexpr_function
def num_classes(CLASSES):
    return len(CLASSES.split(","))
