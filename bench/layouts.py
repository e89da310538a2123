"""How fast weights are packed into each layout and back: milliseconds and GB/s, as CSV.

    python -m bench.layouts --device cuda --experts 128 --hidden 2048 --intermediate 768

The default is one layer of Qwen3-30B-A3B (4 bit, groups of 128). GB/s counts the canonical bytes
read and the packed bytes written (for unpacking the reverse). Median of ``--repeats`` calls after
one that is not counted.
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

from autosel.core import Problem, QuantScheme
from autosel.errors import UnsupportedError
from autosel.interfaces import Layout
from autosel.layouts.exllama import Exllama
from autosel.layouts.flashinfer_mxint4 import FlashInferMxInt4
from autosel.layouts.humming import Humming
from autosel.layouts.marlin import Marlin
from autosel.layouts.nfirst_bytes import NFirstBytes
from autosel.sources import RandomSource

FIELDS = (
    "layout", "device", "bits", "group_size", "symmetric", "canonical_mb", "packed_mb",
    "pack_ms", "pack_gbps", "unpack_ms", "unpack_gbps", "note",
)  # fmt: skip
LAYOUTS: tuple[Layout, ...] = (
    Marlin(), Humming(), NFirstBytes(), FlashInferMxInt4(), Exllama("bfloat16"),
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--bits", type=int, default=4, choices=(4, 8))
    parser.add_argument("--group", type=int, nargs="+", default=[128, 32])
    parser.add_argument("--asymmetric", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
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
        for layout in LAYOUTS:
            row: dict[str, Any] = {
                "layout": layout.key,
                "device": args.device,
                "bits": args.bits,
                "group_size": group,
                "symmetric": scheme.symmetric,
                "canonical_mb": round(experts.nbytes / 1e6, 1),
            }
            try:
                packed = layout.pack(experts)
            except UnsupportedError as error:
                writer.writerow({**row, "note": str(error)})
                continue
            moved = experts.nbytes + packed.nbytes
            row["packed_mb"] = round(packed.nbytes / 1e6, 1)
            for name, call in (
                ("pack", lambda layout=layout, experts=experts: layout.pack(experts)),
                ("unpack", lambda layout=layout, packed=packed: layout.unpack(packed)),
            ):
                took = timed_ms(call, args.repeats, device)
                row[f"{name}_ms"] = round(took, 2)
                row[f"{name}_gbps"] = round(moved / took / 1e6, 2)
            writer.writerow(row)
            sys.stdout.flush()
            del packed
    return 0


if __name__ == "__main__":
    sys.exit(main())
