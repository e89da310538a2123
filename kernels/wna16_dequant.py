"""From packed words to tensor-core operands in a few instructions a word.

bf16 weights use subnormals. An integer n < 256 in the low byte of a bf16 *is* n * 2^-133: below
128 it is a subnormal, and from 128 on the exponent bit continues the same line. So masking alone
converts, and one ``fma`` applies zero point and scale with a single rounding:

    4 bit, symmetric: 4 and + 1 shift + 4 fma = 9 operations for 8 weights, where the usual
    "magic number" form (or 0x4300, subtract 136, multiply by the scale) takes 15.

A code in bits 4-7 is 16 n * 2^-133, so it needs no shift either, only a scale 16 times smaller.
Weights leave here times 2^-60, to keep ``scale * 2^133`` inside bf16; the accumulator is
multiplied by 2^60 (exact) in the epilogue: see ``accumulator_scale``. With stored zero points the
subtraction n - z happens among subnormals, where it is exact, and a second ``fma`` scales it.

fp16 has no room for that (its scales are near the top of its range already), so it keeps the magic
number 0x6400 = 1024, under which n and z are exact up to 10 bits. A code in bits 4-7 makes it
1024 + 16 n, of which an ``fma`` by 1/16 leaves n - z, exactly: 4 and-or + 1 shift + 8 operations.

Only ``fma`` is used, because sm_80 has no ``mul`` or ``sub`` for packed bf16.

``ASM=False`` is the same arithmetic in float32 and without inline assembly: for the interpreter
and for devices that are not NVIDIA's.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def accumulator_scale(FP16, ASM):
    """What the sums must be multiplied by to undo the operands' power of two."""
    return 2.0**60 if ASM and not FP16 else 1.0


@triton.constexpr_function
def tiles_in_group(GROUP, C):
    """64-wide tiles that share a scale, among the C tiles at hand."""
    return min(max(GROUP // 64, 1), C)


@triton.constexpr_function
def groups_in_tile(GROUP):
    """Scale groups in one 64-wide tile."""
    return max(64 // GROUP, 1)


@triton.constexpr_function
def _prepare_asm(BITS, SYM, FP16):
    """Pair of scales (and of zero points) to four registers: factor and offset of each row."""
    lines = [".reg .b32 a, b, z, n;", "prmt.b32 a, $4, $4, 0x1010;", "prmt.b32 b, $4, $4, 0x3232;"]
    if FP16:
        lines += ["mov.b32 $0, a;", "mov.b32 $1, b;"]
        if SYM:  # -(1024 + z), and for codes at bit 4 -(64 + z)
            low, high = (0xE408E408, 0xD480D480) if BITS == 4 else (0xE480E480, 0xE480E480)
            lines += [f"mov.b32 $2, {low:#x};", f"mov.b32 $3, {high:#x};"]
        else:
            lines += [
                "prmt.b32 z, $5, $5, 0x1010;",
                "or.b32 $2, z, 0xe400e400;",
                "prmt.b32 z, $5, $5, 0x3232;",
                "or.b32 $3, z, 0xe400e400;",
            ]
            if BITS == 4:
                lines += ["mov.b32 n, 0x63806380;", "add.rn.f16x2 $3, $3, n;"]  # + 960
        return "{" + " ".join(lines) + "}"
    low = 0x64006400  # 2^73: the code at bit 0 is n * 2^-133, the weight leaves times 2^-60
    high = 0x62006200 if BITS == 4 else low  # 2^69: the code at bit 4 is 16 times larger
    lines += [
        "mov.b32 n, 0x80008000;",
        f"mov.b32 z, {low:#x};",
        "fma.rn.bf16x2 $0, a, z, n;",
        f"mov.b32 z, {high:#x};",
        "fma.rn.bf16x2 $1, b, z, n;",
    ]
    if SYM:
        offset = 0xA300A300 if BITS == 4 else 0xA500A500  # -8 * 2^-60, -128 * 2^-60
        lines += [
            f"mov.b32 z, {offset:#x};",
            "fma.rn.bf16x2 $2, a, z, n;",
            "fma.rn.bf16x2 $3, b, z, n;",
        ]
    else:
        lines += ["prmt.b32 z, $5, $5, 0x1010;", "or.b32 $2, z, n;"]
        lines += ["prmt.b32 z, $5, $5, 0x3232;"]
        if BITS == 4:
            lines += ["shl.b32 z, z, 4;"]
        lines += ["or.b32 $3, z, n;"]
    return "{" + " ".join(lines) + "}"


@triton.constexpr_function
def _apply(SYM, FP16, d, factor, offset, by):
    """Instructions that turn the masked code in ``d`` into a weight; ``by`` (fp16): 1, or 1/16
    for a code at bit 4."""
    if FP16:
        return [f"fma.rn.f16x2 {d}, {d}, {by}, {offset};", f"mul.rn.f16x2 {d}, {d}, {factor};"]
    if SYM:
        return [f"fma.rn.bf16x2 {d}, {d}, {factor}, {offset};"]
    return [
        f"fma.rn.bf16x2 {d}, {d}, one, {offset};",  # offset holds -z: exact among subnormals
        f"fma.rn.bf16x2 {d}, {d}, {factor}, neg0;",
    ]


@triton.constexpr_function
def _word_asm(BITS, SYM, FP16):
    """One word to 8 (4 bit) or 4 (8 bit) weights, in 16-bit outputs."""
    outputs = 8 if BITS == 4 else 4
    p, f0, f1, o0, o1 = (f"${outputs + i}" for i in range(5))
    lines = [".reg .b32 s, t0, t1, t2, t3, one, part, neg0;"]
    if FP16:
        lines += ["mov.b32 one, 0x3c003c00;", "mov.b32 part, 0x2c002c00;"]  # 1, 1/16
    elif not SYM:
        lines += ["mov.b32 one, 0x3f803f80;", "mov.b32 neg0, 0x80008000;"]
    masks = ("0x000f000f", "0x00f000f0") if BITS == 4 else ("0x00ff00ff",)
    lines += [f"shr.u32 s, {p}, 8;"]
    for i in range(outputs // 2):
        source, mask = (p if i < len(masks) else "s"), masks[i % len(masks)]
        if FP16:
            lines += [f"lop3.b32 t{i}, {source}, {mask}, 0x64006400, 0xea;"]
        else:
            lines += [f"and.b32 t{i}, {source}, {mask};"]
    by = ("one", "part" if BITS == 4 else "one")
    for i in range(outputs // 2):
        lines += _apply(SYM, FP16, f"t{i}", (f0, f1)[i % 2], (o0, o1)[i % 2], by[i % 2])
    lines += [f"mov.b32 {{${2 * i},${2 * i + 1}}}, t{i};" for i in range(outputs // 2)]
    return "{" + " ".join(lines) + "}"


@triton.constexpr_function
def _pair_asm(BITS, SYM, FP16):
    """Two neighbouring weights (pack=2): $1 word, $3 shift, $5 mask, $7 factor, $9 offset, and
    for 4 bits in fp16 $11, by which a code at bit 4 is brought down."""
    lines = [".reg .b32 t, one, neg0;"]
    if FP16:
        lines += ["mov.b32 one, 0x3c003c00;"]
    elif not SYM:
        lines += ["mov.b32 one, 0x3f803f80;", "mov.b32 neg0, 0x80008000;"]
    lines += ["shr.u32 t, $1, $3;"]
    lines += ["lop3.b32 t, t, $5, 0x64006400, 0xea;" if FP16 else "and.b32 t, t, $5;"]
    by = "$11" if BITS == 4 else "one"
    lines += [*_apply(SYM, FP16, "t", "$7", "$9", by), "mov.b32 $0, t;"]
    return "{" + " ".join(lines) + "}"


@triton.jit
def _half(pair, HIGH: tl.constexpr, FP16: tl.constexpr):
    """One 16-bit float of a packed pair, as float32 (plain path)."""
    bits = (pair >> 16 if HIGH else pair).to(tl.int16)
    return bits.to(tl.float16 if FP16 else tl.bfloat16, bitcast=True).to(tl.float32)


@triton.jit
def prepare(s, z, BITS: tl.constexpr, SYM: tl.constexpr, FP16: tl.constexpr, ASM: tl.constexpr):
    """Scale pairs (and zero point pairs) to ``(factor_low, factor_high, offset_low, offset_high)``.

    Once a group and 16-row tile, so its 7 instructions are shared by 8 words (group 128).
    """
    if ASM:
        if SYM:
            f0, f1, o0, o1 = tl.inline_asm_elementwise(
                _prepare_asm(BITS, SYM, FP16), "=&r,=&r,=&r,=&r,r", [s],
                (tl.int32, tl.int32, tl.int32, tl.int32), True, 1)  # fmt: skip
        else:
            f0, f1, o0, o1 = tl.inline_asm_elementwise(
                _prepare_asm(BITS, SYM, FP16), "=&r,=&r,=&r,=&r,r,r", [s, z],
                (tl.int32, tl.int32, tl.int32, tl.int32), True, 1)  # fmt: skip
    else:
        f0 = _half(s, False, FP16)
        f1 = _half(s, True, FP16)
        if SYM:
            o0 = tl.full(s.shape, 1 << (BITS - 1), tl.float32)
            o1 = o0
        else:
            o0 = (z & 0xFFFF).to(tl.float32)
            o1 = ((z >> 16) & 0xFFFF).to(tl.float32)
    return f0, f1, o0, o1


@triton.jit
def _code(p, SHIFT: tl.constexpr, BITS: tl.constexpr, factor, offset, FP16: tl.constexpr):
    code = ((p >> SHIFT) & ((1 << BITS) - 1)).to(tl.float32)
    return ((code - offset) * factor).to(tl.float16 if FP16 else tl.bfloat16)


@triton.jit
def _words(p, f0, f1, o0, o1, BITS: tl.constexpr, SYM: tl.constexpr, FP16: tl.constexpr,
           ASM: tl.constexpr):  # fmt: skip
    """Words ``[...]`` to weights ``[..., p, i0]`` (8 bit) or ``[..., p, i0, i1]`` (4 bit)."""
    if BITS == 4:
        if ASM:
            a0, a1, b0, b1, c0, c1, d0, d1 = tl.inline_asm_elementwise(
                _word_asm(BITS, SYM, FP16), "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r",
                [p, f0, f1, o0, o1],
                (tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
                True, 1)  # fmt: skip
        else:
            a0 = _code(p, 0, 4, f0, o0, FP16)
            b0 = _code(p, 4, 4, f1, o1, FP16)
            c0 = _code(p, 8, 4, f0, o0, FP16)
            d0 = _code(p, 12, 4, f1, o1, FP16)
            a1 = _code(p, 16, 4, f0, o0, FP16)
            b1 = _code(p, 20, 4, f1, o1, FP16)
            c1 = _code(p, 24, 4, f0, o0, FP16)
            d1 = _code(p, 28, 4, f1, o1, FP16)
        first = tl.join(tl.join(a0, a1), tl.join(b0, b1))
        second = tl.join(tl.join(c0, c1), tl.join(d0, d1))
        y = tl.join(first, second)
    else:
        if ASM:
            a0, a1, b0, b1 = tl.inline_asm_elementwise(
                _word_asm(BITS, SYM, FP16), "=h,=h,=h,=h,r,r,r,r,r",
                [p, f0, f1, o0, o1], (tl.int16, tl.int16, tl.int16, tl.int16),
                True, 1)  # fmt: skip
        else:
            a0 = _code(p, 0, 8, f0, o0, FP16)
            b0 = _code(p, 8, 8, f1, o1, FP16)
            a1 = _code(p, 16, 8, f0, o0, FP16)
            b1 = _code(p, 24, 8, f1, o1, FP16)
        y = tl.join(tl.join(a0, a1), tl.join(b0, b1))
    if ASM:
        y = y.to(tl.float16 if FP16 else tl.bfloat16, bitcast=True)
    return y


@triton.jit
def dequant(p, s, z, R: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
            SYM: tl.constexpr, FP16: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """The wgmma operand: words p ``[R, C, 32 * BITS]`` and pairs s, z ``[R, NG, 8]`` to weights
    ``[16 R, 64 C]`` in natural order. The conversion to the operand's layout moves nothing."""
    CC: tl.constexpr = tiles_in_group(GROUP, C)
    JG: tl.constexpr = groups_in_tile(GROUP)
    NC: tl.constexpr = C // CC
    JJ: tl.constexpr = 4 // JG
    f0, f1, o0, o1 = prepare(s, z, BITS, SYM, FP16, ASM)
    if BITS == 4:
        p = tl.reshape(p, [R, NC, CC, 8, 4, JG, JJ])
        f0 = _spread(f0, R, NC, JG)
        f1 = _spread(f1, R, NC, JG)
        o0 = _spread(o0, R, NC, JG)
        o1 = _spread(o1, R, NC, JG)
        y = _words(p, f0, f1, o0, o1, BITS, SYM, FP16, ASM)  # R NC CC g t JG JJ p i0 i1
        y = tl.permute(y, [0, 8, 3, 1, 2, 5, 6, 9, 4, 7])  # R i0 g NC CC JG JJ i1 t p
    else:
        p = tl.reshape(p, [R, NC, CC, 8, 4, JG, JJ, 2])
        f0 = _spread(f0, R, NC, JG)[:, :, :, :, :, :, :, None]
        f1 = _spread(f1, R, NC, JG)[:, :, :, :, :, :, :, None]
        o0 = _spread(o0, R, NC, JG)[:, :, :, :, :, :, :, None]
        o1 = _spread(o1, R, NC, JG)[:, :, :, :, :, :, :, None]
        y = _words(p, f0, f1, o0, o1, BITS, SYM, FP16, ASM)  # R NC CC g t JG JJ i1 p i0
        y = tl.permute(y, [0, 9, 3, 1, 2, 5, 6, 7, 4, 8])
    return tl.reshape(y, [R * 16, C * 64])


@triton.jit
def _spread(v, R: tl.constexpr, NC: tl.constexpr, JG: tl.constexpr):
    """Per-group values ``[R, NG, 8]`` to the words' axes ``[R, NC, 1, 8, 1, JG, 1]``."""
    v = tl.permute(tl.reshape(v, [R, NC, JG, 8]), [0, 1, 3, 2])
    return tl.reshape(v, [R, NC, 1, 8, 1, JG, 1])


@triton.jit
def dequant_batched(p, s, z, B: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
                    GROUP: tl.constexpr, BITS: tl.constexpr, SYM: tl.constexpr,
                    FP16: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """The operand of a batched ``mma.m16n8k16`` dot: words p ``[B, R, C, 32 * BITS]`` and pairs
    s, z ``[B, R, NG, 8]`` to weights ``[B, 16 R, 64 C]``.

    Built from pairs over a broadcast word instead of ``join``: after ``join`` Triton chooses a
    k order for mma that needs the tokens permuted.
    """
    CC: tl.constexpr = tiles_in_group(GROUP, C)
    JG: tl.constexpr = groups_in_tile(GROUP)
    NC: tl.constexpr = C // CC
    JJ: tl.constexpr = 4 // JG
    D: tl.constexpr = tl.float16 if FP16 else tl.bfloat16
    f0, f1, o0, o1 = prepare(s, z, BITS, SYM, FP16, ASM)
    if BITS == 4:
        p = tl.reshape(p, [B * R, NC, CC, 8, 4, JG, JJ, 1, 1, 1])
    else:
        p = tl.reshape(p, [B * R, NC, CC, 8, 4, JG, JJ, 2, 1, 1])
    i1 = tl.reshape(tl.arange(0, 2), [1, 1, 1, 1, 1, 1, 1, 2, 1, 1])
    i0 = tl.reshape(tl.arange(0, 2), [1, 1, 1, 1, 1, 1, 1, 1, 2, 1])
    pp = tl.reshape(tl.arange(0, 2), [1, 1, 1, 1, 1, 1, 1, 1, 1, 2])
    factor = tl.where(i0 == 0, _spread10(f0, B * R, NC, JG), _spread10(f1, B * R, NC, JG))
    offset = tl.where(i0 == 0, _spread10(o0, B * R, NC, JG), _spread10(o1, B * R, NC, JG))
    if ASM:
        if BITS == 8:
            shift = 8 * i0 + 0 * i1
            mask = 0 * i0 + 0x00FF00FF
        else:
            shift = 8 * i1 + 0 * i0
            mask = 0x000F000F * (1 + 15 * i0)
        if BITS == 4 and FP16:
            by = tl.where(i0 == 0, 0x3C003C00, 0x2C002C00)  # 1, 1/16
            y = tl.inline_asm_elementwise(
                _pair_asm(BITS, SYM, FP16), "=r,r,r,r,r,r,r,r,r,r,r,r,r",
                [p, shift + 0 * pp, mask + 0 * i1, factor, offset, by], tl.int16, True,
                2)  # fmt: skip
        else:
            y = tl.inline_asm_elementwise(
                _pair_asm(BITS, SYM, FP16), "=r,r,r,r,r,r,r,r,r,r,r",
                [p, shift + 0 * pp, mask + 0 * i1, factor, offset], tl.int16, True,
                2)  # fmt: skip
        y = y.to(D, bitcast=True)
    else:
        place = 4 * i0 + 8 * i1 + 16 * pp if BITS == 4 else 8 * i0 + 16 * pp
        code = ((p >> place) & ((1 << BITS) - 1)).to(tl.float32)
        y = ((code - offset) * factor).to(D)
    y = tl.permute(y, [0, 8, 3, 1, 2, 5, 6, 7, 4, 9])  # BR i0 g NC CC JG JJ i1 t p
    return tl.reshape(y, [B, R * 16, C * 64])


@triton.jit
def _spread10(v, BR: tl.constexpr, NC: tl.constexpr, JG: tl.constexpr):
    v = tl.permute(tl.reshape(v, [BR, NC, JG, 8]), [0, 1, 3, 2])
    return tl.reshape(v, [BR, NC, 1, 8, 1, JG, 1, 1, 1, 1])
