"""How fast weights are packed into each layout and back: milliseconds and GB/s, as CSV.

    python -m bench.layouts --device cuda --experts 128 --hidden 2048 --intermediate 768

The default is one layer of Qwen3-30B-A3B (4 bit, groups of 128). GB/s counts the canonical bytes
read and the packed bytes written (for unpacking the reverse). Median of ``--repeats`` calls after
one that is not counted. ``extra_mb`` is the most memory that packing held at once beyond the
canonical and the packed weights; ``expert_mb`` is one expert with a byte a code. On a GPU only.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from autosel.core import CanonicalExperts, Problem, QuantScheme
from autosel.errors import UnsupportedError
from autosel.interfaces import Layout, PackedExperts
from autosel.layouts.aten_int4 import AtenInt4
from autosel.layouts.aten_int8 import AtenInt8
from autosel.layouts.blocked_int4 import BlockedInt4
from autosel.layouts.dense import Dense
from autosel.layouts.exllama import Exllama
from autosel.layouts.flashinfer_mxint4 import FlashInferMxInt4
from autosel.layouts.humming import Humming
from autosel.layouts.marlin import Marlin
from autosel.layouts.nfirst_bytes import NFirstBytes
from autosel.layouts.panel16 import Panel16Layout
from autosel.layouts.vllm_cpu_dense import VllmCpuDense
from autosel.layouts.wna16_tiled import Wna16Tiled
from autosel.layouts.zen_s4 import ZenS4
from autosel.sources import RandomSource

FIELDS = (
    "layout", "device", "bits", "group_size", "symmetric", "canonical_mb", "packed_mb",
    "pack_ms", "pack_gbps", "unpack_ms", "unpack_gbps", "extra_mb", "expert_mb", "note",
)  # fmt: skip
#: Layouts of kernels for GPUs; packing is plain torch, so any device can do it.
GPU: tuple[Layout, ...] = (
    Marlin(), Humming(), NFirstBytes(), NFirstBytes(signed=True, scale_dtype="bfloat16"),
    FlashInferMxInt4(), Exllama("bfloat16"), Wna16Tiled(), Dense(),
)  # fmt: skip
#: Layouts of kernels for CPUs; some are made by CPU operators.
CPU: tuple[Layout, ...] = (
    Panel16Layout(), AtenInt4(), AtenInt8(), BlockedInt4(), ZenS4(), VllmCpuDense(),
)  # fmt: skip


def timed_ms(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Median wall time; the device is idle before and after every call."""
    times = []
    for _ in range(repeats + 1):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def extra_bytes(call: Callable[[], PackedExperts], device: torch.device) -> int | None:
    """Peak of the allocator during ``call`` beyond what was there and what it returns."""
    if device.type != "cuda":
        return None
    _wait(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    packed = call()
    return torch.cuda.max_memory_allocated(device) - before - packed.nbytes


def row_of(layout: Layout, experts: CanonicalExperts, repeats: int) -> dict[str, Any]:
    """Both directions; where the layout or the operator behind it refuses, why."""
    device = experts.w13.codes.device
    row: dict[str, Any] = {}
    try:
        extra = extra_bytes(lambda: layout.pack(experts), device)
        packed = layout.pack(experts)
    except UnsupportedError as error:
        return {"note": str(error)}
    moved = experts.nbytes + packed.nbytes
    row["packed_mb"] = round(packed.nbytes / 1e6, 1)
    row["extra_mb"] = None if extra is None else round(extra / 1e6, 1)
    calls: dict[str, Callable[[], Any]] = {"pack": lambda: layout.pack(experts)}
    if layout.invertible:
        calls["unpack"] = lambda: layout.unpack(packed)
    for name, call in calls.items():
        took = timed_ms(call, repeats, device)
        row[f"{name}_ms"] = round(took, 2)
        row[f"{name}_gbps"] = round(moved / took / 1e6, 2)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--bits", type=int, default=4, choices=(4, 8))
    parser.add_argument("--group", type=int, nargs="+", default=[128, 32])
    parser.add_argument("--asymmetric", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    device = torch.device(args.device)
    writer = csv.DictWriter(sys.stdout, FIELDS, lineterminator="\n")
    writer.writeheader()
    for group in args.group:
        scheme = QuantScheme(args.bits, group, not args.asymmetric)
        problem = Problem(
            args.experts, args.experts, 1, args.hidden, args.intermediate, scheme, scheme
        )
        experts = RandomSource(problem).load(device)
        codes = (problem.num_shards + 1) * args.hidden * args.intermediate
        for layout in GPU + (CPU if device.type == "cpu" else ()):
            head = {
                "layout": layout.key,
                "device": args.device,
                "bits": args.bits,
                "group_size": group,
                "symmetric": scheme.symmetric,
                "canonical_mb": round(experts.nbytes / 1e6, 1),
                "expert_mb": round(codes / 1e6, 1),
            }
            writer.writerow({**head, **row_of(layout, experts, args.repeats)})
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
