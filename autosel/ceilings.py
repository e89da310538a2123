"""What this machine can do at best: bytes read and multiplications done in a second, measured.

They turn a time into a share of what is possible (the roofline). Both are torch's own best, not a
data sheet's: a kernel of ours may exceed the product's rate, hardly the read's.
"""

from __future__ import annotations

import functools

import torch

from autosel.core import Device
from autosel.dtypes import torch_dtype
from autosel.roofline import Ceilings
from autosel.timing import Call, Timer, TimingSettings, timer_for
from autosel.timing_cpu import flush_bytes as cpu_flush_bytes
from autosel.timing_gpu import flush_bytes as gpu_flush_bytes

#: Seconds for each figure: repeats stop after that, and the product is kept small enough.
PATIENCE_S = 0.5


def measure_ceilings(device: Device, dtype: str = "bfloat16", *, repeats: int = 15) -> Ceilings:
    """Measure ``device`` (the one torch uses) in a second or two; the best run counts.

    The read sums a float32 buffer well over the last-level cache. The product is a square one in
    ``dtype`` or in float32, whichever is faster: a CPU without 16-bit arithmetic computes in
    float32, as a kernel on it may. The best counts and not the middle, since a ceiling is what the
    machine does when nothing disturbs it.
    """
    cpu = device.torch_device == "cpu"
    timer = timer_for(device, TimingSettings(cache="hot"))
    num_bytes = 4 * cpu_flush_bytes(device) if cpu else gpu_flush_bytes(device)
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device.torch_device)
    read_us = _best_us(buffer.sum, timer, repeats)
    sizes = (128, 256, 512, 1024) if cpu else (1024, 4096, 8192)
    rates = [
        _matmul_tflops(name, sizes, device, timer, repeats)
        for name in dict.fromkeys((dtype, "float32"))
    ]
    return Ceilings(read_gbps=buffer.numel() * 4 / read_us / 1e3, matmul_tflops=max(rates))


@functools.cache
def ceilings(device: Device, dtype: str) -> Ceilings:
    """:func:`measure_ceilings`, once a process: a model's layers are swept one after the other."""
    return measure_ceilings(device, dtype)


def _matmul_tflops(
    dtype: str, sizes: tuple[int, ...], device: Device, timer: Timer, repeats: int
) -> float:
    """Best rate over growing squares; a size is left out when it would take too long."""
    best = 0.0
    for side in sizes:
        if best and 2 * side**3 / (best * 1e12) > PATIENCE_S / 2:
            break
        left, right = (
            torch.randn(side, side, device=device.torch_device).to(torch_dtype(dtype))
            for _ in range(2)
        )
        us = _best_us(lambda a=left, b=right: a @ b, timer, repeats)  # type: ignore[misc]
        best = max(best, 2 * side**3 / us / 1e6)
    return best


def _best_us(call: Call, timer: Timer, repeats: int) -> float:
    timer.run(call)
    start = timer.now()
    best = timer.sample(call, 1).us
    for _ in range(repeats - 1):
        if timer.now() - start > PATIENCE_S:
            break
        best = min(best, timer.sample(call, 1).us)
    return max(best, 1e-3)
