"""Router weights on the input (Llama 4): ``weighted[token] = x[token] * weight[token]``.

One launch that also writes the ones by which outputs are weighted then. As four operations of
torch (cast, product, cast, fill) it cost about as much as the whole layer's weights at one token.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def weigh_inputs(x_ptr, weights_ptr, out_ptr, ones_ptr, K: tl.constexpr, BLOCK: tl.constexpr,
                 PDL: tl.constexpr):  # fmt: skip
    """Grid (K / BLOCK, tokens). x and out ``[M, K]``, weights and ones ``[M, 1]`` float32."""
    token = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    w = tl.load(weights_ptr + token)
    x = tl.load(x_ptr + token * K + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * K + k, (x * w).to(out_ptr.dtype.element_ty), mask=k < K)
    if tl.program_id(0) == 0:
        tl.store(ones_ptr + token, 1.0)
