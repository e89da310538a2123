"""The plain WNA16 fused-MoE GEMM in Triton, over rows of packed bytes, and its activation.

One program multiplies BLOCK_M routed slots of one expert with BLOCK_N outputs. Per step along K it
loads codes, forms ``(code - zero) * scale`` in float32, rounds it to the activations' type as a
dequantised 16-bit weight would be, and accumulates in float32. No inline assembly and no layout
tricks: this is the version to compare the faster ones with, and it runs anywhere Triton does.

    a         [rows, K]       row of a slot = slot // TOP_K
    b         uint8 [E, N, ceil(K * BITS / 8)], 4 bit: low nibble = even k
    scales    [E, N, G]       any float type
    zeros     uint8 [E, ceil(N * BITS / 8), G], 4 bit: low nibble = even n
    bias      [E, N]
    g_idx     int32 [E, K]    act-order: group of each input, instead of k // GROUP
    weights   float32 [slots]
    c         [slots, N]
"""

import triton
import triton.language as tl

from autosel.kernels.moe_activation import gated_activation, unary_activation


# Neither number makes the code faster, and each value of its own would be compiled anew.
@triton.jit(do_not_specialize=["num_slots", "num_blocks_m"])
def moe_gemm_kernel(a_ptr, b_ptr, c_ptr, scales_ptr, zeros_ptr, bias_ptr, g_idx_ptr, weights_ptr,
                    sorted_ids_ptr, expert_ids_ptr, num_padded_ptr, num_slots, num_blocks_m,
                    N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
                    TOP_K: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
                    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, ACT_ORDER: tl.constexpr,
                    WEIGHT_INPUT: tl.constexpr, WEIGHT_OUTPUT: tl.constexpr,
                    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                    GROUP_M: tl.constexpr, FP32_DOT: tl.constexpr):  # fmt: skip
    """ZERO: the implicit zero point. WEIGHT_INPUT: the router weight belongs to the input (it
    multiplies before the bias); WEIGHT_OUTPUT: to the output (after the bias). FP32_DOT casts the
    operands of the product to float32, for the interpreter and for float32 activations."""
    PER_BYTE: tl.constexpr = 8 // BITS
    ROW_BYTES: tl.constexpr = (K + PER_BYTE - 1) // PER_BYTE
    ZERO_ROWS: tl.constexpr = (N + PER_BYTE - 1) // PER_BYTE
    MASK: tl.constexpr = (1 << BITS) - 1
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    # One scale column serves the whole step where blocks don't straddle groups.
    ONE_GROUP: tl.constexpr = (GROUP % BLOCK_K == 0) and not ACT_ORDER

    # Programs that share weights run next to each other: GROUP_M blocks of slots per column.
    pid = tl.program_id(0)
    num_blocks_n = (N + BLOCK_N - 1) // BLOCK_N
    per_group = GROUP_M * num_blocks_n
    first_m = pid // per_group * GROUP_M
    size_m = tl.minimum(num_blocks_m - first_m, GROUP_M)
    pid_m = first_m + pid % per_group % size_m
    pid_n = pid % per_group // size_m
    if pid_m * BLOCK_M >= tl.load(num_padded_ptr):
        return
    expert = tl.load(expert_ids_ptr + pid_m).to(tl.int64)
    if expert < 0:
        return

    slots = tl.load(sorted_ids_ptr + pid_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    valid = slots < num_slots  # [BM]
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)  # [BN]
    in_n = n < N
    rows = slots // TOP_K
    scale_base = scales_ptr + (expert * N + n.to(tl.int64)) * G  # [BN]
    if HAS_ZEROS:
        zero_base = zeros_ptr + (expert * ZERO_ROWS + (n // PER_BYTE).to(tl.int64)) * G  # [BN]
        zero_shift = (n % PER_BYTE * BITS)[:, None]  # [BN, 1]
    b_base = b_ptr + (expert * N + n.to(tl.int64)) * ROW_BYTES  # [BN]

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)  # [BK]
        in_k = k < K
        a_mask = valid[:, None] if EVEN_K else valid[:, None] & in_k[None, :]
        a = tl.load(a_ptr + rows[:, None] * K + k[None, :], mask=a_mask, other=0.0)
        kb = start // PER_BYTE + tl.arange(0, BLOCK_K // PER_BYTE)
        b_mask = in_n[:, None] if EVEN_K else in_n[:, None] & (kb < ROW_BYTES)[None, :]
        packed = tl.load(b_base[:, None] + kb[None, :], mask=b_mask, other=0)
        if BITS == 4:
            codes = tl.interleave(packed & 0xF, packed >> 4)  # [BN, BK]
        else:
            codes = packed
        if ONE_GROUP:
            at = tl.full([1, 1], start // GROUP, tl.int32)
            s_mask = in_n[:, None]
        else:
            if ACT_ORDER:
                at = tl.load(g_idx_ptr + expert * K + k, mask=in_k, other=0)[None, :]
            else:
                at = (k // GROUP)[None, :]
            s_mask = in_n[:, None] & in_k[None, :]
        scale = tl.load(scale_base[:, None] + at, mask=s_mask, other=0.0).to(tl.float32)
        if HAS_ZEROS:
            zero = tl.load(zero_base[:, None] + at, mask=s_mask, other=0)
            zero = ((zero >> zero_shift) & MASK).to(tl.float32)
            w = (codes.to(tl.float32) - zero) * scale
        else:
            w = (codes.to(tl.float32) - ZERO) * scale
        w = tl.trans(w.to(a.dtype))  # [BK, BN]
        if FP32_DOT:
            acc = tl.dot(a.to(tl.float32), w.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, w, acc)

    if WEIGHT_INPUT:
        acc *= tl.load(weights_ptr + slots, mask=valid, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * N + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    if WEIGHT_OUTPUT:
        acc *= tl.load(weights_ptr + slots, mask=valid, other=0.0)[:, None]
    c_mask = valid[:, None] & in_n[None, :]
    tl.store(c_ptr + slots[:, None] * N + n[None, :], acc.to(c_ptr.dtype.element_ty), mask=c_mask)


@triton.jit
def activation_kernel(h_ptr, out_ptr, N: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
                      ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
                      BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):  # fmt: skip
    """``out[r, :N] = act(h[r])``; gated rows are N gate values, then N up values."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    if GATED:
        gate = tl.load(h_ptr + row * (2 * N) + n, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(h_ptr + row * (2 * N) + N + n, mask=inside, other=0.0).to(tl.float32)
        value = gated_activation(gate, up, ACT, LIMIT, ALPHA, BETA, LINEAR_BETA)
    else:
        h = tl.load(h_ptr + row * N + n, mask=inside, other=0.0).to(tl.float32)
        value = unary_activation(h, ACT)
    tl.store(out_ptr + row * N + n, value.to(out_ptr.dtype.element_ty), mask=inside)
