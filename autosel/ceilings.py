"""What this machine can do at best: bytes read and multiplications done in a second, measured.

They turn a time into a share of what is possible (the roofline). Both are torch's own best, not a
data sheet's: a kernel of ours may exceed the product's rate, hardly the read's.
"""

from __future__ import annotations

import torch

from autosel.core import Device
from autosel.dtypes import torch_dtype
from autosel.roofline import Ceilings
from autosel.timing import Call, TimingSettings, timer_for
from autosel.timing_cpu import flush_bytes as cpu_flush_bytes
from autosel.timing_gpu import flush_bytes as gpu_flush_bytes


def measure_ceilings(
    device: Device, dtype: str = "bfloat16", *, size: int | None = None, repeats: int = 7
) -> Ceilings:
    """Measure ``device`` (the one torch uses) in well under a second; the best of ``repeats``.

    The read sums a float32 buffer well over the last-level cache; the product is ``size`` cubed.
    The best counts, not the middle: a ceiling is what the machine does when nothing disturbs it.
    """
    cpu = device.torch_device == "cpu"
    side = size or (1024 if cpu else 8192)
    timer = timer_for(device, TimingSettings(cache="hot"))
    num_bytes = 4 * cpu_flush_bytes(device) if cpu else gpu_flush_bytes(device)
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device.torch_device)
    left = torch.randn(side, side, device=device.torch_device).to(torch_dtype(dtype))  # [S, S]
    right = torch.randn(side, side, device=device.torch_device).to(torch_dtype(dtype))  # [S, S]

    def best_us(call: Call) -> float:
        timer.run(call)
        return min(timer.sample(call, 1).us for _ in range(max(1, repeats)))

    read_us = best_us(lambda: buffer.sum())
    matmul_us = best_us(lambda: left @ right)
    return Ceilings(
        read_gbps=buffer.numel() * 4 / read_us / 1e3,
        matmul_tflops=2 * side**3 / matmul_us / 1e6,
    )
