# ruff: noqa: RET505, RUF005 (the device language wants both branches, and no stars)
"""Decode: a few tokens, two launches, no sorting.

``decode_gate_up``  one program = R tiles of 16 rows of one slot's expert, all of K
``decode_down``     one program = R tiles of 16 outputs of one token, all its experts, and the
                    weighted sum over them: no atomics, no third launch

At one token a fine-grained layer is a chain of latencies (launch, ids, weights, reduction): 10 us
for Qwen3-30B, of which 20 MB at full bandwidth would be 6. So the loads come first: every weight
of the program is requested before anything waits on anything (STAGES = 0), and ``decode_down``
requests its weights before it waits for ``decode_gate_up`` to finish (programmatic dependent
launch: 6.8 + 4.2 us alone, 10.2 together). Where K is too long for registers the K loop is
pipelined instead (STAGES > 0).

The warps of a program split K: each warp is one batch of a batched ``mma.m16n8k16`` dot, whose
8 token columns all carry the same token. The waste is free, the unit is idle anyway. K is cut
further into pieces of SUB with accumulators of their own, because a chain of 32 dependent mma costs
more than the adds that join four chains of 8.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from autosel.kernels.moe_activation import gated_activation, unary_activation
from autosel.kernels.wna16_dequant import accumulator_scale, dequant_batched


@triton.jit
def _rows_of(acc, ASM: tl.constexpr, FP16: tl.constexpr):
    """Sum accumulators ``[B, rows, 8]`` over the batch; all 8 columns are equal."""
    return tl.max(tl.sum(acc, axis=0), axis=1) * accumulator_scale(FP16, ASM)


@triton.jit
def _dot_pieces(p, s, z, xv, B0: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
                GROUP: tl.constexpr, SUB: tl.constexpr, BITS: tl.constexpr, SYM: tl.constexpr,
                FP16: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Words ``[B0, R, C, 32 BITS]`` times inputs ``[NB B0, SUB]``: ``[NB B0, 16 R, 8]``."""
    NB: tl.constexpr = C * 64 // SUB
    w = dequant_batched(p, s, z, B0, R, C, GROUP, BITS, SYM, FP16, ASM)
    w = tl.permute(tl.reshape(w, [B0, R * 16, NB, SUB]), [2, 0, 1, 3])
    w = tl.reshape(w, [NB * B0, R * 16, SUB])
    xb = tl.broadcast_to(xv[:, :, None], [NB * B0, SUB, 8])
    if ASM:
        return tl.dot(w, xb)
    else:
        return tl.sum(w.to(tl.float32)[:, :, :, None] * xb.to(tl.float32)[:, None], 2)


@triton.jit
def _weight_places(w_ptr, tile, piece, K: tl.constexpr, KQ: tl.constexpr, C: tl.constexpr,
                   NG: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr):  # fmt: skip
    """Pointers to the first words ``[B, R, C, 32 BITS]``, the first input of each batch and the
    places of the first scales ``[1 or B, R, NG, 8]``, for row tiles ``[1 or B, R]`` and pieces of
    K ``[B]``."""
    WORDS: tl.constexpr = 32 * BITS  # words in one 16 x 64 tile
    wp = (
        w_ptr
        + tile[:, :, None, None] * (K // 64 * WORDS)
        + piece[:, None, None, None] * (KQ // 64 * WORDS)
        + tl.arange(0, C)[None, None, :, None] * WORDS
        + tl.arange(0, WORDS)[None, None, None, :]
    )
    group0 = piece[:, None, None, None] * KQ
    pair = tile[:, :, None, None] * (K // GROUP * 8) + tl.arange(0, NG)[
        None, None, :, None
    ] * 8 + tl.arange(0, 8)[None, None, None, :]  # fmt: skip
    return wp, group0, pair


@triton.jit
def _requested(wp, s_ptr, z_ptr, xp, group0, pair, NIT: tl.constexpr, C: tl.constexpr,
               KW: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
               SYM: tl.constexpr):  # fmt: skip
    """Words, scales, zero points and inputs of all steps, in registers; no inputs without xp."""
    ps = ()
    for it in tl.static_range(NIT):
        ps = ps + (tl.load(wp + it * (C * 32 * BITS)),)
    ss = ()
    zs = ()
    xs = ()
    for it in tl.static_range(NIT):
        so = pair + (group0 + it * KW) // GROUP * 8
        ss = ss + (tl.load(s_ptr + so),)
        if SYM:
            zs = zs + (0,)
        else:
            zs = zs + (tl.load(z_ptr + so),)
        if xp is not None:
            xs = xs + (tl.load(xp + it * KW),)
    return ps, ss, zs, xs


@triton.jit
def _dot_requested(acc, ps, ss, zs, xs, NIT: tl.constexpr, B0: tl.constexpr, R: tl.constexpr,
                   C: tl.constexpr, GROUP: tl.constexpr, SUB: tl.constexpr, BITS: tl.constexpr,
                   SYM: tl.constexpr, FP16: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """The products of what :func:`_requested` gave, added to ``acc``."""
    for it in tl.static_range(NIT):
        acc += _dot_pieces(ps[it], ss[it], zs[it], xs[it], B0, R, C, GROUP, SUB, BITS, SYM,
                           FP16, ASM)  # fmt: skip
    return acc


@triton.jit
def _dot_pipelined(acc, wp, s_ptr, z_ptr, xp, served, group0, pair, STAGES: tl.constexpr,
                   NIT: tl.constexpr, KW: tl.constexpr, B0: tl.constexpr, R: tl.constexpr,
                   C: tl.constexpr, GROUP: tl.constexpr, SUB: tl.constexpr, BITS: tl.constexpr,
                   SYM: tl.constexpr, FP16: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Load and multiply step by step, added to ``acc``; inputs that are not served are 0."""
    for it in tl.range(0, NIT, num_stages=STAGES):
        so = pair + (group0 + it * KW) // GROUP * 8
        p = tl.load(wp + it * (C * 32 * BITS))
        s = tl.load(s_ptr + so)
        z = 0 if SYM else tl.load(z_ptr + so)
        if served is None:
            xv = tl.load(xp + it * KW)
        else:
            xv = tl.load(xp + it * KW, mask=served[:, None], other=0.0)
        acc += _dot_pieces(p, s, z, xv, B0, R, C, GROUP, SUB, BITS, SYM, FP16, ASM)
    return acc


@triton.jit
def decode_gate_up(x_ptr, w_ptr, s_ptr, z_ptr, b_ptr, ids_ptr, h_ptr,
                   K: tl.constexpr, NR: tl.constexpr, E: tl.constexpr, GROUP: tl.constexpr,
                   XDIV: tl.constexpr, BITS: tl.constexpr, SYM: tl.constexpr, BIAS: tl.constexpr,
                   GATED: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr,
                   ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
                   R: tl.constexpr, KS: tl.constexpr, KW: tl.constexpr, SUB: tl.constexpr,
                   STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Grid (slots, NR / 16 R). x ``[slots / XDIV, K]``, h ``[slots, NR / 2]`` (NR if not gated).

    KS warps split K; a warp takes KW inputs at a time."""
    slot = tl.program_id(0)  # fastest: slots of one expert read its rows at about the same time
    rt = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    e = tl.load(ids_ptr + slot).to(tl.int64)
    if (e < 0) | (e >= E):
        return
    FP16: tl.constexpr = x_ptr.dtype.element_ty == tl.float16
    C: tl.constexpr = KW // 64
    NG: tl.constexpr = KW // GROUP if KW >= GROUP else 1
    NB: tl.constexpr = KW // SUB
    KQ: tl.constexpr = K // KS
    NIT: tl.constexpr = KQ // KW
    ks = tl.arange(0, KS)
    r = tl.arange(0, R)
    tile = e * (NR // 16) + rt * R + r  # [R] row tiles of this expert
    wp, group0, pair = _weight_places(w_ptr, tile[None, :], ks, K, KQ, C, NG, GROUP, BITS)
    bb = tl.arange(0, NB * KS)
    xp = (
        x_ptr
        + (slot // XDIV).to(tl.int64) * K
        + ((bb % KS)[:, None] * KQ + (bb // KS)[:, None] * SUB + tl.arange(0, SUB)[None, :])
    )  # [NB KS, SUB]
    acc = tl.zeros([NB * KS, R * 16, 8], tl.float32)
    if STAGES == 0:
        ps, ss, zs, xs = _requested(
            wp, s_ptr, z_ptr, xp, group0, pair, NIT, C, KW, GROUP, BITS, SYM
        )
        acc = _dot_requested(acc, ps, ss, zs, xs, NIT, KS, R, C, GROUP, SUB, BITS, SYM, FP16, ASM)
    else:
        acc = _dot_pipelined(acc, wp, s_ptr, z_ptr, xp, None, group0, pair, STAGES, NIT, KW,
                             KS, R, C, GROUP, SUB, BITS, SYM, FP16, ASM)  # fmt: skip
    v = _rows_of(acc, ASM, FP16)  # [16 R]
    if BIAS:
        v += tl.load(b_ptr + e * NR + rt * (R * 16) + tl.arange(0, R * 16))
    if GATED:
        g, u = tl.split(tl.permute(tl.reshape(v, [R, 2, 8]), [0, 2, 1]))
        act = gated_activation(g, u, ACT, LIMIT, ALPHA, BETA, LINEAR_BETA)
        n = rt * (R * 8) + tl.reshape(tl.arange(0, R * 8), [R, 8])
        tl.store(h_ptr + slot.to(tl.int64) * (NR // 2) + n, act.to(h_ptr.dtype.element_ty))
    else:
        n = rt * (R * 16) + tl.arange(0, R * 16)
        act = unary_activation(v, ACT)
        tl.store(h_ptr + slot.to(tl.int64) * NR + n, act.to(h_ptr.dtype.element_ty))


@triton.jit
def decode_down(h_ptr, w_ptr, s_ptr, z_ptr, b_ptr, ids_ptr, weights_ptr, out_ptr,
                K: tl.constexpr, NR: tl.constexpr, E: tl.constexpr, GROUP: tl.constexpr,
                TOPK: tl.constexpr, TP: tl.constexpr, BITS: tl.constexpr, SYM: tl.constexpr,
                BIAS: tl.constexpr, R: tl.constexpr, KS: tl.constexpr, KW: tl.constexpr,
                SUB: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    """Grid (tokens, NR / 16 R). The batch is TP choices (top_k rounded up) x KS pieces of K."""
    token = tl.program_id(0)
    rt = tl.program_id(1)
    FP16: tl.constexpr = h_ptr.dtype.element_ty == tl.float16
    C: tl.constexpr = KW // 64
    NG: tl.constexpr = KW // GROUP if KW >= GROUP else 1
    NB: tl.constexpr = KW // SUB
    KQ: tl.constexpr = K // KS
    NIT: tl.constexpr = KQ // KW
    B0: tl.constexpr = TP * KS
    b0 = tl.arange(0, B0)
    choice = b0 // KS
    ids = tl.load(ids_ptr + token * TOPK + choice, mask=choice < TOPK, other=-1)
    e = tl.where((ids >= 0) & (ids < E), ids, 0).to(tl.int64)  # [B0]; unserved: weight 0 below
    r = tl.arange(0, R)
    tile = e[:, None] * (NR // 16) + rt * R + r[None, :]  # [B0, R]
    wp, group0, pair = _weight_places(w_ptr, tile, b0 % KS, K, KQ, C, NG, GROUP, BITS)
    if STAGES == 0:  # all weights into registers before anything waits
        ps, ss, zs, _ = _requested(
            wp, s_ptr, z_ptr, None, group0, pair, NIT, C, KW, GROUP, BITS, SYM
        )
    bb = tl.arange(0, NB * B0)
    c1 = bb % B0 // KS
    slot = token * TOPK + c1
    ids1 = tl.load(ids_ptr + slot, mask=c1 < TOPK, other=-1)
    served = (ids1 >= 0) & (ids1 < E)
    weight = tl.load(weights_ptr + slot, mask=served, other=0.0)  # [NB B0]
    hp = (
        h_ptr
        + slot.to(tl.int64)[:, None] * K
        + ((bb % KS)[:, None] * KQ + (bb // B0)[:, None] * SUB + tl.arange(0, SUB)[None, :])
    )  # [NB B0, SUB]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()  # only h depends on the previous kernel
    acc = tl.zeros([NB * B0, R * 16, 8], tl.float32)
    if STAGES == 0:
        hs = ()
        for it in tl.static_range(NIT):
            hs = hs + (tl.load(hp + it * KW, mask=served[:, None], other=0.0),)
        acc = _dot_requested(acc, ps, ss, zs, hs, NIT, B0, R, C, GROUP, SUB, BITS, SYM, FP16, ASM)
    else:
        acc = _dot_pipelined(acc, wp, s_ptr, z_ptr, hp, served, group0, pair, STAGES, NIT, KW,
                             B0, R, C, GROUP, SUB, BITS, SYM, FP16, ASM)  # fmt: skip
    v = _rows_of(acc * weight[:, None, None], ASM, FP16)  # [16 R]
    n = rt * (R * 16) + tl.arange(0, R * 16)
    if BIAS:
        for k in tl.static_range(TOPK):
            ek = tl.load(ids_ptr + token * TOPK + k)
            ok = (ek >= 0) & (ek < E)
            wk = tl.load(weights_ptr + token * TOPK + k)
            v += tl.load(b_ptr + ek.to(tl.int64) * NR + n, mask=ok, other=0.0) * tl.where(
                ok, wk, 0.0
            )
    tl.store(out_ptr + token.to(tl.int64) * NR + n, v.to(out_ptr.dtype.element_ty))
