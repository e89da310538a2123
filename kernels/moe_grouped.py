"""Grouped GEMM for the middle: from a few tokens an expert up to about 64.

``y^T = W x^T``: weights fill the 64-row side of the tensor core instruction (wgmma on Hopper) and
are unpacked straight into its A registers; tokens are its columns, in tiles as narrow as 16. The
kernel streams weights, so what counts is bytes in flight and what happens around the stream.

Two ways to find the tokens of an expert:

    SORTED     a block list made by ``moe_align``: any number of slots. Activations are written in
               sorted order, so the down projection reads and writes contiguous rows.
    otherwise  each program looks through all ids itself. That spares the align launch and two
               dependent loads, and costs every program about a microsecond: it pays up to some
               32 slots (Qwen3-30B at 16 tokens, 128 slots: 68.5 us against 64.5 sorted).

With programmatic dependent launch the down projection asks L2 for its first weights before it
waits for the activations.

Form of the main loop: Triton 3.6 with ptxas up to 13.2 lets wgmma read A registers that the next
step is already overwriting (triton issue 9433). ``_settle`` reads the accumulator inside the loop,
which makes the compiler wait for the product first.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from autosel.kernels.moe_activation import activate_rows
from autosel.kernels.wna16_dequant import accumulator_scale, dequant


@triton.constexpr_function
def _prefetch_asm(nbytes):
    return f"cp.async.bulk.prefetch.L2.global [$1], {nbytes}; mov.u32 $0, 0;"


@triton.jit
def _settle(acc, ASM: tl.constexpr):
    """A use of the accumulator that ptxas cannot remove and that costs nothing."""
    if ASM:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], tl.float32, True, 1)
    return acc


@triton.jit
def dot(w, x, acc, ASM: tl.constexpr):
    if ASM:
        return tl.dot(w, x, acc)
    # The interpreter has no bf16 product.
    return tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def scan_block(ids_ptr, b, num_slots, E: tl.constexpr, EP: tl.constexpr, S: tl.constexpr,
               TOK: tl.constexpr, BY_SLOT: tl.constexpr):  # fmt: skip
    """Block b of up to TOK slots of one expert, found by looking through all ids.

    Returns the expert (-1: no such block), its slots ``[TOK]`` in order, and how many are used.
    BY_SLOT (few slots): block b starts at slot b if that is its expert's 1st, TOK + 1st, ... slot.
    Otherwise block b is the b-th in order of experts. No loop over blocks: around the pipelined
    stream it would cost 60 registers a thread, and with them a quarter of the programs on an SM.
    """
    i = tl.arange(0, S)
    ids = tl.load(ids_ptr + i, mask=i < num_slots, other=-1)
    if BY_SLOT:
        e = tl.load(ids_ptr + b)
        match = (ids == e).to(tl.int32)
        t0 = tl.sum(tl.where(i < b, match, 0))
        e = tl.where((e < E) & (t0 % TOK == 0), e, -1)
        count = tl.sum(match)
    else:
        valid = (ids >= 0) & (ids < E)
        experts = tl.arange(0, EP)
        counts = tl.histogram(tl.where(valid, ids, 0), EP, mask=valid)
        blocks = (counts + TOK - 1) // TOK
        past = tl.cumsum(blocks, 0)  # blocks of this expert and those before it
        e = tl.sum((past <= b).to(tl.int32))
        mine = experts == e
        t0 = (b - tl.sum(tl.where(mine, past - blocks, 0))) * TOK
        count = tl.sum(tl.where(mine, counts, 0))
        e = tl.where(count > 0, e, -1)
        match = (ids == e).to(tl.int32)
    nth = tl.where(match > 0, tl.cumsum(match, 0) - 1, -1)
    j = tl.arange(0, TOK)
    slots = tl.sum(tl.where(nth[:, None] == (t0 + j)[None, :], i[:, None], 0), axis=0)
    return e, slots, count - t0


@triton.jit
def _stream(x_ptr, w_ptr, s_ptr, z_ptr, rows, m, e, rt, K: tl.constexpr, NR: tl.constexpr,
            GROUP: tl.constexpr, BITS: tl.constexpr, SYM: tl.constexpr, TOK: tl.constexpr,
            BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
            ASM: tl.constexpr):  # fmt: skip
    """Rows ``rt BN ..`` of expert e times the inputs at ``rows``: ``[BN, TOK]`` float32."""
    FP16: tl.constexpr = x_ptr.dtype.element_ty == tl.float16
    R: tl.constexpr = BN // 16
    C: tl.constexpr = BK // 64
    WORDS: tl.constexpr = 32 * BITS
    NG: tl.constexpr = BK // GROUP if BK >= GROUP else 1
    r = tl.arange(0, R)
    tile = e.to(tl.int64) * (NR // 16) + rt * R + r  # [R]
    xp = x_ptr + rows.to(tl.int64)[None, :] * K + tl.arange(0, BK)[:, None]  # [BK, TOK]
    wp = (
        w_ptr
        + tile[:, None, None] * (K // 64 * WORDS)
        + tl.arange(0, C)[None, :, None] * WORDS
        + tl.arange(0, WORDS)[None, None, :]
    )  # [R, C, WORDS]
    pair = (
        tile[:, None, None] * (K // GROUP * 8)
        + tl.arange(0, NG)[None, :, None] * 8
        + tl.arange(0, 8)[None, None, :]
    )  # [R, NG, 8]
    acc = tl.zeros([BN, TOK], tl.float32)
    for it in tl.range(0, K // BK, num_stages=STAGES):
        p = tl.load(wp + it * (C * WORDS))
        s = tl.load(s_ptr + pair + it * BK // GROUP * 8)
        z = 0 if SYM else tl.load(z_ptr + pair + it * BK // GROUP * 8)
        xt = tl.load(xp + it * BK, mask=m[None, :], other=0.0)
        w = dequant(p, s, z, R, C, GROUP, BITS, SYM, FP16, ASM)
        acc = _settle(dot(w, xt, acc, ASM), ASM)
    return acc * accumulator_scale(FP16, ASM)


@triton.jit
def _prefetch_weights(w_ptr, e, rt, K: tl.constexpr, NR: tl.constexpr, BITS: tl.constexpr,
                      BN: tl.constexpr, INPUTS: tl.constexpr):  # fmt: skip
    """Ask L2 for the first INPUTS columns of this program's weights, 128 pieces, one a thread."""
    R: tl.constexpr = BN // 16
    PIECES: tl.constexpr = 128 // R  # pieces of one row tile
    NBYTES: tl.constexpr = INPUTS * 2 * BITS // PIECES  # 16 rows x INPUTS x BITS / 8
    i = tl.arange(0, 128)
    tile = e.to(tl.int64) * (NR // 16) + rt * R + i // PIECES
    word = tile * (K // 64 * 32 * BITS) + (i % PIECES) * (NBYTES // 4)
    address = (w_ptr + word).to(tl.int64, bitcast=True)
    tl.inline_asm_elementwise(_prefetch_asm(NBYTES), "=r,l", [address], tl.int32, False, 1)


@triton.jit
def _finish(acc, b_ptr, out_ptr, out_rows, m, e, rt, NR: tl.constexpr, BN: tl.constexpr,
            TOK: tl.constexpr, BIAS: tl.constexpr, UP: tl.constexpr, GATED: tl.constexpr,
            ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
            LINEAR_BETA: tl.constexpr):  # fmt: skip
    """Bias, activation (UP: this is the first GEMM), store."""
    if BIAS:
        acc += tl.load(b_ptr + e.to(tl.int64) * NR + rt * BN + tl.arange(0, BN))[:, None]
    if UP:
        acc = activate_rows(acc, BN // 16, TOK, GATED, ACT, LIMIT, ALPHA, BETA, LINEAR_BETA)
    HALF: tl.constexpr = 2 if UP and GATED else 1
    n = rt * (BN // HALF) + tl.arange(0, BN // HALF)
    tl.store(
        out_ptr + out_rows.to(tl.int64)[None, :] * (NR // HALF) + n[:, None],
        acc.to(out_ptr.dtype.element_ty),
        mask=m[None, :],
    )


@triton.jit(do_not_specialize=["num_slots"])
def grouped_gemm(x_ptr, w_ptr, s_ptr, z_ptr, b_ptr, out_ptr, ids_ptr, sorted_ptr, blocks_ptr,
                 num_slots, K: tl.constexpr, NR: tl.constexpr, E: tl.constexpr,
                 GROUP: tl.constexpr, XDIV: tl.constexpr, BITS: tl.constexpr, SYM: tl.constexpr,
                 BIAS: tl.constexpr, UP: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
                 LIMIT: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
                 LINEAR_BETA: tl.constexpr, SORTED: tl.constexpr, BY_SLOT: tl.constexpr,
                 EP: tl.constexpr, S: tl.constexpr, TOK: tl.constexpr, BN: tl.constexpr,
                 BK: tl.constexpr,
                 STAGES: tl.constexpr, PREFETCH: tl.constexpr, ASM: tl.constexpr,
                 PDL: tl.constexpr):  # fmt: skip
    """Grid (columns x NR / BN). UP: x rows are tokens (slot / XDIV), out rows hold activations.

    PDL 1: everything depends on the previous kernel. PDL 2: only x does (down projection)."""
    NT: tl.constexpr = NR // BN
    rt = tl.program_id(0) % NT
    b = tl.program_id(0) // NT
    j = tl.arange(0, TOK)
    if PDL == 1:
        gdc_wait()
        gdc_launch_dependents()
    elif PDL == 2:
        gdc_launch_dependents()
    if SORTED:
        e = tl.load(blocks_ptr + 4 * b)
        start = tl.load(blocks_ptr + 4 * b + 1)
        end = tl.load(blocks_ptr + 4 * b + 2)
        used = start < end
        if used and PREFETCH > 0:
            _prefetch_weights(w_ptr, e, rt, K, NR, BITS, BN, PREFETCH)
        if PDL == 2:
            gdc_wait()
        if used:
            m = (start + j) < end
            if UP:
                rows = tl.load(sorted_ptr + start + j, mask=m, other=0) // XDIV
            else:
                rows = start + j
            acc = _stream(x_ptr, w_ptr, s_ptr, z_ptr, rows, m, e, rt, K, NR, GROUP, BITS, SYM,
                          TOK, BN, BK, STAGES, ASM)  # fmt: skip
            _finish(acc, b_ptr, out_ptr, start + j, m, e, rt, NR, BN, TOK, BIAS, UP, GATED, ACT,
                    LIMIT, ALPHA, BETA, LINEAR_BETA)  # fmt: skip
    else:
        e, slots, count = scan_block(ids_ptr, b, num_slots, E, EP, S, TOK, BY_SLOT)
        if e >= 0 and PREFETCH > 0:
            _prefetch_weights(w_ptr, e, rt, K, NR, BITS, BN, PREFETCH)
        if PDL == 2:
            gdc_wait()
        if e >= 0:
            m = j < count
            acc = _stream(x_ptr, w_ptr, s_ptr, z_ptr, slots // XDIV, m, e, rt, K, NR, GROUP,
                          BITS, SYM, TOK, BN, BK, STAGES, ASM)  # fmt: skip
            _finish(acc, b_ptr, out_ptr, slots, m, e, rt, NR, BN, TOK, BIAS, UP, GATED, ACT,
                    LIMIT, ALPHA, BETA, LINEAR_BETA)  # fmt: skip


@triton.jit(do_not_specialize=["num_slots"])
def grouped_down_rows(x_ptr, w_ptr, s_ptr, z_ptr, b_ptr, out_ptr, ids_ptr, sorted_ptr,
                      blocks_ptr, num_slots, K: tl.constexpr, NR: tl.constexpr,
                      E: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
                      SYM: tl.constexpr, BIAS: tl.constexpr, SORTED: tl.constexpr,
                      BY_SLOT: tl.constexpr, EP: tl.constexpr, S: tl.constexpr,
                      TOK: tl.constexpr, BN: tl.constexpr, RT: tl.constexpr, STAGES: tl.constexpr,
                      ASM: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Down projection for short K (256, 512: tensor-parallel ranks of wide models).

    The tokens stay in shared memory and the program walks RT row tiles with the weights
    pipelined across them: with K = 256 a program per tile would be all prologue (212 against
    171 us for a layer of DeepSeek-V3 on 8 ranks at 64 tokens)."""
    FP16: tl.constexpr = x_ptr.dtype.element_ty == tl.float16
    R: tl.constexpr = BN // 16
    C: tl.constexpr = K // 64
    WORDS: tl.constexpr = 32 * BITS
    NG: tl.constexpr = K // GROUP
    CH: tl.constexpr = NR // (BN * RT)
    ch = tl.program_id(0) % CH
    b = tl.program_id(0) // CH
    j = tl.arange(0, TOK)
    if PDL:
        gdc_launch_dependents()
    if SORTED:
        e = tl.load(blocks_ptr + 4 * b)
        start = tl.load(blocks_ptr + 4 * b + 1)
        count = tl.load(blocks_ptr + 4 * b + 2) - start
        e = tl.where(count > 0, e, -1)
        slots = start + j
    else:
        e, slots, count = scan_block(ids_ptr, b, num_slots, E, EP, S, TOK, BY_SLOT)
    if PDL:
        gdc_wait()
    if e < 0:
        return
    r = tl.arange(0, R)
    tile = e.to(tl.int64) * (NR // 16) + ch * (RT * R) + r
    wp = (
        w_ptr
        + tile[:, None, None] * (C * WORDS)
        + tl.arange(0, C)[None, :, None] * WORDS
        + tl.arange(0, WORDS)[None, None, :]
    )  # [R, C, WORDS]
    pair = (
        tile[:, None, None] * (NG * 8)
        + tl.arange(0, NG)[None, :, None] * 8
        + tl.arange(0, 8)[None, None, :]
    )  # [R, NG, 8]
    m = j < count
    xt = tl.load(
        x_ptr + slots.to(tl.int64)[None, :] * K + tl.arange(0, K)[:, None],
        mask=m[None, :],
        other=0.0,
    )  # [K, TOK]
    for q in tl.range(0, RT, num_stages=STAGES):
        p = tl.load(wp + q * (R * C * WORDS))
        s = tl.load(s_ptr + pair + q * (R * NG * 8))
        z = 0 if SYM else tl.load(z_ptr + pair + q * (R * NG * 8))
        w = dequant(p, s, z, R, C, GROUP, BITS, SYM, FP16, ASM)
        acc = dot(w, xt, tl.zeros([BN, TOK], tl.float32), ASM)
        acc = acc * accumulator_scale(FP16, ASM)
        _finish(acc, b_ptr, out_ptr, slots, m, e, ch * RT + q, NR, BN, TOK, BIAS, False, False,
                "", 0.0, 0.0, 0.0, 0.0)  # fmt: skip
