"""Act-order inputs: ``gathered[slot] = x[token][order of the slot's expert]``.

Only layers whose w13 keeps a g_idx pay for this launch; w2's order is folded into w13's rows when
the weights are packed.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def gather_inputs(x_ptr, ids_ptr, order_ptr, out_ptr, K: tl.constexpr, COLUMNS: tl.constexpr,
                  E: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """order ``[E, COLUMNS]``; x and out have K columns, those past COLUMNS are zero."""
    slot = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    e = tl.load(ids_ptr + slot).to(tl.int64)
    served = (e >= 0) & (e < E)
    source = tl.load(order_ptr + e * COLUMNS + k, mask=(k < COLUMNS) & served, other=0)
    v = tl.load(x_ptr + slot // TOPK * K + source, mask=(k < COLUMNS) & served, other=0.0)
    tl.store(out_ptr + slot * K + k, v, mask=k < K)
