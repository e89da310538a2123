# ruff: noqa: RUF005, B007 (the device language wants both branches, and no stars)
"""Prefill on Hopper, in Gluon: grouped GEMM with the operands' layouts written out.

One program = BN rows of one expert times one block of its tokens. Per step of BK inputs: words go
from shared memory to registers, are unpacked there as the A operand of wgmma, and meet the tokens
(B operand, shared memory). Two programs share an SM, so that one unpacks while the other
multiplies.

What the design answers to, with the numbers of the H200:

* 128 tokens x 128 rows x 64 inputs keep the tensor cores busy for 256 cycles; 37 instructions a
  word, as a straightforward loop needs, take 296. So instructions come first: 9-operation
  unpacking (int4 in bf16; 13 in fp16), ring slots and offsets that are constants (the loop is
  unrolled by STAGES), addresses that advance once a round.
* Token counts are not multiples of 128. ``CLASSES`` lists the widths a block may take, each one or
  two wgmma tiles over the same A registers ("64+16"): 70 tokens cost 80 columns instead of 128.
* Activations lie in sorted order, so the down projection and both epilogues need no index.
* K is rarely a multiple of the ring. The last round then multiplies zeros: 1,408 inputs in rounds
  of 256 cost 24 steps instead of 22.
* Short K (down projection of tensor-parallel ranks): ROWS keeps the tokens in shared memory and
  lets the program walk row tiles instead of inputs.
* Weights, and the block list, do not depend on the previous kernel: the down projection loads
  its first stages before it waits (programmatic dependent launch).

wgmma with A in registers must have finished before its registers are written again; ptxas up to
13.2 does not see that through a software pipeline (triton issue 9433), so every step waits for the
product of the step before, after its own loads and before its own unpacking.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from autosel.kernels.moe_prefill_layouts import (
    num_classes,
    pairs_layout,
    part,
    split_layout,
    split_shape,
    width,
    words_layout,
)
from autosel.kernels.wna16_dequant import (
    _prepare_asm,
    _word_asm,
    accumulator_scale,
    groups_in_tile,
    tiles_in_group,
)

# Triton 3.7 renamed it.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


# ------------------------------------------------------------------ pieces
@gluon.jit
def _gdc(WAIT: gl.constexpr):
    OP: gl.constexpr = "wait" if WAIT else "launch_dependents"
    gl.inline_asm_elementwise(
        "griddepcontrol." + OP + "; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _spread(v, BITS: gl.constexpr):
    v = gl.expand_dims(gl.expand_dims(gl.expand_dims(v, 2), 4), 6)
    return gl.expand_dims(v, 7) if BITS == 8 else v


@gluon.jit
def _unpack(p, s, z, R: gl.constexpr, C: gl.constexpr, NC: gl.constexpr, CC: gl.constexpr,
            JG: gl.constexpr, JJ: gl.constexpr, BITS: gl.constexpr, SYM: gl.constexpr,
            FP16: gl.constexpr, split: gl.constexpr, a_lay: gl.constexpr):  # fmt: skip
    """Words [R, C, 32 BITS] and pairs of scales and zero points [R, NC, 8, JG] to the A operand
    [16 R, 64 C]. The steps are those of :mod:`autosel.kernels.wna16_dequant`."""
    D: gl.constexpr = gl.float16 if FP16 else gl.bfloat16
    if SYM:
        f0, f1, o0, o1 = gl.inline_asm_elementwise(
            _prepare_asm(BITS, SYM, FP16), "=&r,=&r,=&r,=&r,r", [s],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1)  # fmt: skip
    else:
        f0, f1, o0, o1 = gl.inline_asm_elementwise(
            _prepare_asm(BITS, SYM, FP16), "=&r,=&r,=&r,=&r,r,r", [s, z],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1)  # fmt: skip
    p = gl.convert_layout(
        gl.reshape(p, split_shape(R, NC, CC, JG, JJ, BITS)), split, assert_trivial=True
    )
    sources = [p, _spread(f0, BITS), _spread(f1, BITS), _spread(o0, BITS), _spread(o1, BITS)]
    if BITS == 4:
        a0, a1, b0, b1, c0, c1, d0, d1 = gl.inline_asm_elementwise(
            _word_asm(BITS, SYM, FP16), "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r", sources,
            dtype=(gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16),
            is_pure=True, pack=1)  # fmt: skip
        first = gl.join(gl.join(a0, a1), gl.join(b0, b1))
        second = gl.join(gl.join(c0, c1), gl.join(d0, d1))
        y = gl.join(first, second)  # R NC CC g t JG JJ p i0 i1
        y = gl.permute(y, [0, 8, 3, 1, 2, 5, 6, 9, 4, 7])  # R i0 g NC CC JG JJ i1 t p
    else:
        a0, a1, b0, b1 = gl.inline_asm_elementwise(
            _word_asm(BITS, SYM, FP16), "=h,=h,=h,=h,r,r,r,r,r", sources,
            dtype=(gl.int16, gl.int16, gl.int16, gl.int16), is_pure=True, pack=1)  # fmt: skip
        y = gl.join(gl.join(a0, a1), gl.join(b0, b1))  # R NC CC g t JG JJ i1 p i0
        y = gl.permute(y, [0, 9, 3, 1, 2, 5, 6, 7, 4, 8])
    y = gl.reshape(y, [R * 16, C * 64]).to(D, bitcast=True)
    return gl.convert_layout(y, a_lay, assert_trivial=True)


@gluon.jit
def _store(acc, out_ptr, start, end, rt, NR: gl.constexpr, T: gl.constexpr, BN: gl.constexpr,
           UP: gl.constexpr, NW: gl.constexpr):  # fmt: skip
    """Accumulators [BN, T] to rows start .. of out; UP applies SiLU(gate) * up first."""
    acc = acc * accumulator_scale(out_ptr.dtype.element_ty == gl.float16, True)
    R: gl.constexpr = BN // 16
    HALF: gl.constexpr = 2 if UP else 1
    ROWS: gl.constexpr = BN // HALF
    LANES: gl.constexpr = ROWS // 8 if ROWS // 8 <= 16 else 16  # lanes along a token's row
    lay: gl.constexpr = gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [1, NW], [0, 1])
    if UP:
        g, u = gl.split(gl.permute(gl.reshape(acc, [R, 2, 8, T]), [0, 2, 3, 1]))
        acc = gl.reshape(g / (1.0 + gl.exp(-g)) * u, [ROWS, T])
    h = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), lay)
    j = start + gl.arange(0, T, gl.SliceLayout(0, lay))
    n = rt * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, lay))
    pointers = out_ptr + j.to(gl.int64)[None, :] * (NR // HALF) + n[:, None]
    gl.store(pointers, h, mask=(j < end)[None, :] & (n[:, None] >= 0))


@gluon.jit
def _token_rows(sorted_ptr, start, end, T: gl.constexpr, K: gl.constexpr, BK: gl.constexpr,
                UP: gl.constexpr, XDIV: gl.constexpr, lay: gl.constexpr):  # fmt: skip
    """Offsets [T, BK] of the block's inputs and the mask of its rows."""
    j = start + gl.arange(0, T, gl.SliceLayout(1, lay))
    m = j < end
    rows = j
    if UP:
        rows = gl.load(sorted_ptr + j, mask=m, other=0) // XDIV
    k = gl.arange(0, BK, gl.SliceLayout(0, lay))
    return rows.to(gl.int64)[:, None] * K + k[None, :], m[:, None] & (k[None, :] < BK)


@gluon.jit
def _refill(wsm, ssm, zsm, xsm, ysm, wp, sp, zp, xp, yp, xm, ym, group0, more,
            NEXT: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr,
            SYM: gl.constexpr, R: gl.constexpr, C: gl.constexpr, NC: gl.constexpr,
            JG: gl.constexpr, BK: gl.constexpr, T1: gl.constexpr, ROWS: gl.constexpr,
            STAGES: gl.constexpr, TAIL: gl.constexpr, w_lay: gl.constexpr,
            sc_lay: gl.constexpr):  # fmt: skip
    """Start the copies of step NEXT, counted from the start of this round. From STAGES on it
    belongs to the next round, and where TAIL steps make the last round it may be none of K's:
    then it exists if ``more``, and where it does not, zeros are written."""
    slot: gl.constexpr = NEXT % STAGES
    wrap: gl.constexpr = NEXT >= STAGES
    if ROWS:
        row: gl.constexpr = R if wrap else 0
        wn = wp + (row * (K * BITS // 2) + slot * (BK * BITS // 2))
        pair = row * (K // GROUP * 8) + slot * BK // GROUP * 8
    else:
        wn = wp + NEXT * (BK * BITS // 2)
        pair = group0 * 8 + NEXT * BK // GROUP * 8
    if wrap or TAIL > 0:
        wm = gl.full([R, C, 32 * BITS], 1, gl.int1, w_lay) & more
        pm = gl.full([R, NC, JG, 8], 1, gl.int1, sc_lay) & more
        async_copy.async_copy_global_to_shared(wsm[slot], wn, mask=wm)
        async_copy.async_copy_global_to_shared(ssm[slot], sp + pair, mask=pm)
        if not SYM:
            async_copy.async_copy_global_to_shared(zsm[slot], zp + pair, mask=pm)
        xm = xm & more
        ym = ym & more
    else:
        async_copy.async_copy_global_to_shared(wsm[slot], wn)
        async_copy.async_copy_global_to_shared(ssm[slot], sp + pair)
        if not SYM:
            async_copy.async_copy_global_to_shared(zsm[slot], zp + pair)
    if not ROWS:
        async_copy.async_copy_global_to_shared(xsm[slot], xp + NEXT * BK, mask=xm)
        if T1 > 0:
            async_copy.async_copy_global_to_shared(ysm[slot], yp + NEXT * BK, mask=ym)
    async_copy.commit_group()


@gluon.jit
def _tile(x_ptr, w_ptr, s_ptr, z_ptr, out_ptr, sorted_ptr, e, start, end, rt, K: gl.constexpr,
          NR: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr, SYM: gl.constexpr,
          UP: gl.constexpr, XDIV: gl.constexpr, T0: gl.constexpr, T1: gl.constexpr,
          BN: gl.constexpr, BK: gl.constexpr, RT: gl.constexpr, STAGES: gl.constexpr,
          LATE: gl.constexpr, NW: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    FP16: gl.constexpr = x_ptr.dtype.element_ty == gl.float16
    D: gl.constexpr = gl.float16 if FP16 else gl.bfloat16
    R: gl.constexpr = BN // 16
    C: gl.constexpr = BK // 64
    CC: gl.constexpr = tiles_in_group(GROUP, C)
    JG: gl.constexpr = groups_in_tile(GROUP)
    NC: gl.constexpr = C // CC
    JJ: gl.constexpr = 4 // JG
    NG: gl.constexpr = NC * JG  # groups in a step
    NIT: gl.constexpr = K // BK
    # A slot is refilled when its wgmma is known to be over: two steps later, or, if the step waits
    # before it copies (LATE), one step later.
    AHEAD: gl.constexpr = STAGES - 1 if LATE else STAGES - 2
    ROWS: gl.constexpr = RT > 1
    ROUNDS: gl.constexpr = RT if ROWS else (NIT + STAGES - 1) // STAGES
    TAIL: gl.constexpr = 0 if ROWS else NIT % STAGES  # steps of a last round that is no whole one
    gl.static_assert(
        ROWS or STAGES * BK % GROUP == 0 or GROUP % (STAGES * BK) == 0, "a round cuts a group"
    )
    gl.static_assert(ROWS or NIT >= STAGES, "K must be at least BK * STAGES")
    mma0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, T0, 16])
    a0_lay: gl.constexpr = gl.DotOperandLayout(0, mma0, 2)
    WORDS: gl.constexpr = 32 * BITS  # of 16 rows x 64 inputs
    words: gl.constexpr = words_layout(R, C, BITS, NW)
    split: gl.constexpr = split_layout(R, NC, CC, JG, JJ, BITS, NW)
    s_lay: gl.constexpr = pairs_layout(split, BITS)
    x_lay: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [NW, 1], [1, 0])
    w_lay: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 1, 32], [NW, 1, 1], [2, 1, 0])
    sc_lay: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 4], [16 // NG, NC, JG, 2], [NW, 1, 1, 1], [3, 2, 1, 0])  # fmt: skip
    xs_lay: gl.constexpr = gl.NVMMASharedLayout.get_default_for([T0, BK], D)
    ws_lay: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    ss_lay: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    xsm = ()  # one buffer a stage: Triton then sees that a step's copies and loads never meet
    wsm = ()
    ssm = ()
    zsm = ()
    for i in gl.static_range(STAGES):
        xsm = xsm + (gl.allocate_shared_memory(D, [T0, BK], xs_lay),)
        wsm = wsm + (gl.allocate_shared_memory(gl.int32, [R, C, WORDS], ws_lay),)
        ssm = ssm + (gl.allocate_shared_memory(gl.int32, [R, NC, JG, 8], ss_lay),)
        if not SYM:
            zsm = zsm + (gl.allocate_shared_memory(gl.int32, [R, NC, JG, 8], ss_lay),)

    tile = e.to(gl.int64) * (NR // 16) + rt * (R * RT)  # first row tile of the program
    r3 = gl.arange(0, R, gl.SliceLayout(1, gl.SliceLayout(2, w_lay)))
    c3 = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(2, w_lay)))
    q3 = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, w_lay)))
    wp = w_ptr + tile * (K * BITS // 2) + (
        gl.expand_dims(gl.expand_dims(r3, 1), 2) * (K * BITS // 2)
        + gl.expand_dims(gl.expand_dims(c3, 0), 2) * WORDS
        + gl.expand_dims(gl.expand_dims(q3, 0), 1)
    )  # [R, C, WORDS]  # fmt: skip
    S123: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, sc_lay)))
    S023: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, sc_lay)))
    S013: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, sc_lay)))
    S012: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, sc_lay)))
    sr = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, R, S123), 1), 2), 3)
    sc = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, NC, S023), 0), 2), 3)
    sj = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, JG, S013), 0), 1), 3)
    sg = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 8, S012), 0), 1), 2)
    pairs = sr * (K // GROUP * 8) + sc * (JG * 8) + sj * 8 + sg  # [R, NC, JG, 8]
    sp = s_ptr + tile * (K // GROUP * 8) + pairs
    zp = sp if SYM else z_ptr + tile * (K // GROUP * 8) + pairs

    for i in gl.static_range(AHEAD):
        async_copy.async_copy_global_to_shared(wsm[i], wp + i * (BK * BITS // 2))
        async_copy.async_copy_global_to_shared(ssm[i], sp + i * BK // GROUP * 8)
        if not SYM:
            async_copy.async_copy_global_to_shared(zsm[i], zp + i * BK // GROUP * 8)
    if PDL == 2:
        _gdc(True)
    xo, xm = _token_rows(sorted_ptr, start, end, T0, K, BK, UP, XDIV, x_lay)
    xp = x_ptr + xo
    if T1 > 0:
        mma1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, T1, 16])
        a1_lay: gl.constexpr = gl.DotOperandLayout(0, mma1, 2)
        ys_lay: gl.constexpr = gl.NVMMASharedLayout.get_default_for([T1, BK], D)
        ysm = ()
        for i in gl.static_range(STAGES):
            ysm = ysm + (gl.allocate_shared_memory(D, [T1, BK], ys_lay),)
        yo, ym = _token_rows(sorted_ptr, start + T0, end, T1, K, BK, UP, XDIV, x_lay)
        yp = x_ptr + yo
    else:
        ysm = xsm
        yp = xp
        ym = xm
    for i in gl.static_range(AHEAD):
        async_copy.async_copy_global_to_shared(xsm[i], xp + i * BK, mask=xm)
        if T1 > 0:
            async_copy.async_copy_global_to_shared(ysm[i], yp + i * BK, mask=ym)
        if ROWS and i == AHEAD - 1:
            for k in gl.static_range(AHEAD, NIT):
                async_copy.async_copy_global_to_shared(xsm[k], xp + k * BK, mask=xm)
                if T1 > 0:
                    async_copy.async_copy_global_to_shared(ysm[k], yp + k * BK, mask=ym)
        async_copy.commit_group()

    acc0 = warpgroup_mma_init(gl.zeros([BN, T0], gl.float32, mma0))
    if T1 > 0:
        acc1 = warpgroup_mma_init(gl.zeros([BN, T1], gl.float32, mma1))
    group0 = 0  # first scale group of the round, if a group is longer than a round
    for q in range(ROUNDS):
        for u in gl.static_range(STAGES):
            if LATE:
                if T1 > 0:
                    sum0, sum1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
                    acc1 = warpgroup_mma_init(sum1)
                else:
                    sum0 = warpgroup_mma_wait(0, deps=[acc0])
                acc0 = warpgroup_mma_init(sum0)
            async_copy.wait_group(AHEAD - 1)
            thread_barrier()  # right behind the wait, or Triton adds one of its own
            fence_async_shared()  # the copies were ordinary writes, wgmma is another proxy
            more = q + 1 < ROUNDS if TAIL == 0 else q * STAGES + (u + AHEAD) < NIT
            _refill(wsm, ssm, zsm, xsm, ysm, wp, sp, zp, xp, yp, xm, ym, group0, more, u + AHEAD,
                    K, GROUP, BITS, SYM, R, C, NC, JG, BK, T1, ROWS, STAGES, TAIL, w_lay,
                    sc_lay)  # fmt: skip
            p = wsm[u].load(words)
            s = ssm[u].permute((0, 1, 3, 2)).load(s_lay)
            z = s if SYM else zsm[u].permute((0, 1, 3, 2)).load(s_lay)
            if not LATE:
                if T1 > 0:
                    acc0, acc1, p = warpgroup_mma_wait(0, deps=[acc0, acc1, p])
                else:
                    acc0, p = warpgroup_mma_wait(0, deps=[acc0, p])
            a = _unpack(p, s, z, R, C, NC, CC, JG, JJ, BITS, SYM, FP16, split, a0_lay)
            acc0 = warpgroup_mma(
                a, xsm[u].permute((1, 0)), acc0,
                use_acc=(not ROWS) or u > 0, is_async=True)  # fmt: skip
            if T1 > 0:
                acc1 = warpgroup_mma(
                    gl.convert_layout(a, a1_lay, assert_trivial=True),
                    ysm[u].permute((1, 0)), acc1,
                    use_acc=(not ROWS) or u > 0, is_async=True)  # fmt: skip
        if ROWS:
            if T1 > 0:
                sum0, sum1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
                _store(sum1, out_ptr, start + T0, end, rt * RT + q, NR, T1, BN, UP, NW)
                acc1 = warpgroup_mma_init(sum1)
            else:
                sum0 = warpgroup_mma_wait(0, deps=[acc0])
            _store(sum0, out_ptr, start, end, rt * RT + q, NR, T0, BN, UP, NW)
            acc0 = warpgroup_mma_init(sum0)
            wp += R * (K * BITS // 2)
            sp += R * (K // GROUP) * 8
            zp += R * (K // GROUP) * 8
        else:
            wp += STAGES * (BK * BITS // 2)
            xp += STAGES * BK
            if T1 > 0:
                yp += STAGES * BK
            if GROUP >= STAGES * BK:
                group0 = (q + 1) * (STAGES * BK) // GROUP
            else:
                sp += STAGES * BK // GROUP * 8
                zp += STAGES * BK // GROUP * 8
    if not ROWS:
        if T1 > 0:
            sum0, sum1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
        else:
            sum0 = warpgroup_mma_wait(0, deps=[acc0])
        async_copy.wait_group(0)  # the last, masked copies write zeros: before the buffers end
        if T1 > 0:
            _store(sum1, out_ptr, start + T0, end, rt, NR, T1, BN, UP, NW)
        _store(sum0, out_ptr, start, end, rt, NR, T0, BN, UP, NW)


@gluon.jit(do_not_specialize=["num_blocks"])
def prefill_gemm(x_ptr, w_ptr, s_ptr, z_ptr, out_ptr, sorted_ptr, blocks_ptr, num_blocks,
                 K: gl.constexpr, NR: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr,
                 SYM: gl.constexpr, UP: gl.constexpr, XDIV: gl.constexpr, CLASSES: gl.constexpr,
                 BN: gl.constexpr, BK: gl.constexpr, RT: gl.constexpr, STAGES: gl.constexpr,
                 LATE: gl.constexpr, NEAR: gl.constexpr, NW: gl.constexpr,
                 PDL: gl.constexpr):  # fmt: skip
    """Grid: token blocks x NR / (BN RT), NEAR consecutive blocks of the list side by side, so that
    blocks of one expert read its weights while they are in L2."""
    NT: gl.constexpr = NR // (BN * RT)
    if PDL == 1:
        _gdc(True)
    if PDL:
        _gdc(False)
    pid = gl.program_id(0)
    b = pid // (NT * NEAR) * NEAR + pid % NEAR
    rt = pid % (NT * NEAR) // NEAR
    used = b < num_blocks
    e = gl.load(blocks_ptr + 4 * b, mask=used, other=0)
    start = gl.load(blocks_ptr + 4 * b + 1, mask=used, other=0)
    end = gl.load(blocks_ptr + 4 * b + 2, mask=used, other=0)
    count = end - start
    for i in gl.static_range(num_classes(CLASSES)):
        if (count > width(CLASSES, i - 1)) & (count <= width(CLASSES, i)):
            _tile(x_ptr, w_ptr, s_ptr, z_ptr, out_ptr, sorted_ptr, e, start, end, rt, K, NR, GROUP,
                  BITS, SYM, UP, XDIV, part(CLASSES, i, 0), part(CLASSES, i, 1), BN, BK, RT,
                  STAGES, LATE, NW, PDL)  # fmt: skip
