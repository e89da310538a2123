"""Rows of activations to int8, each with a scale of its own."""

import triton
import triton.language as tl


@triton.jit
def quantize_rows_kernel(x_ptr, q_ptr, scale_ptr, factor, N: tl.constexpr,
                         BLOCK: tl.constexpr):  # fmt: skip
    """``q = round(x / s)`` with ``s`` the row's largest magnitude over 127; ``s * factor`` stored.

    One program a row, BLOCK a power of two at least N. Ties go away from zero. A row of zeros has
    the scale 1e-10 / 127.
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x), 0), 1e-10)
    scaled = x * (127.0 / largest)
    rounded = tl.where(scaled < 0, tl.ceil(scaled - 0.5), tl.floor(scaled + 0.5))
    tl.store(q_ptr + row * N + n, rounded.to(tl.int8), mask=n < N)
    tl.store(scale_ptr + row, largest / 127.0 * factor)
