"""Weighted sum over a token's experts: ``out[t] = sum_k weight[t, k] * y[row(t, k)]``.

The products are added in the order of k in float32, so the result does not change from run to
run. Rows of slots that no expert here serves are never read: they hold old memory.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def reduce_kernel(y_ptr, position_ptr, ids_ptr, weights_ptr, out_ptr, N: tl.constexpr,
                  E: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr,
                  SORTED: tl.constexpr, WEIGHTED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """SORTED: y rows are in sorted order (``position``); otherwise row = slot."""
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOPK):
        slot = token * TOPK + k
        if SORTED:
            row = tl.load(position_ptr + slot).to(tl.int64)
            served = row >= 0
        else:
            row = slot
            expert = tl.load(ids_ptr + slot)
            served = (expert >= 0) & (expert < E)
        v = tl.load(y_ptr + row * N + n, mask=(n < N) & served, other=0.0).to(tl.float32)
        if WEIGHTED:
            v = v * tl.load(weights_ptr + slot, mask=served, other=0.0)
        acc += v
    tl.store(out_ptr + token * N + n, acc.to(out_ptr.dtype.element_ty), mask=n < N)
