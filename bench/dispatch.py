"""What a call of the layer costs in Python, beside the kernel that it calls.

    python -m bench.dispatch

The kernel is replaced by one that returns at once, so what is left is the layer: looking up what
serves the token count, checking what was passed, bringing it into the form that kernels read, and
making the result. Times are the least of many short runs: other work on the machine only ever
adds. On a GPU the same Python runs, and each conversion is a launch beside it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from autosel import FusedMoE
from autosel.core import Problem, QuantScheme
from autosel.sharding import shard_ep
from autosel.sources import RandomSource

LOOPS, TOKENS = 100, 8
SCHEME = QuantScheme(4, 32, True)
PROBLEM = Problem(8, 8, 2, 64, 32, SCHEME, SCHEME)


def forms() -> dict[str, Callable[[], torch.Tensor]]:
    """Calls in each form that a caller may choose, with a kernel that does nothing."""
    torch.set_num_threads(1)
    source = RandomSource(PROBLEM)
    whole = FusedMoE.from_source(source, db=":memory:")
    part = FusedMoE.from_experts(shard_ep(source.load(), 0, 2), ep_rank=0, ep_size=2, db=":memory:")
    for layer in (whole, part):
        for entry in layer._runtime.entries:
            backend: Any = entry.backend
            backend._run = lambda packed, x, routing, params, out: out
    x = torch.zeros(TOKENS, PROBLEM.hidden_size, dtype=torch.bfloat16)
    ids = torch.zeros(TOKENS, PROBLEM.top_k, dtype=torch.int32)
    wide, weights, out = ids.long(), torch.zeros(ids.shape), torch.empty_like(x)
    return {
        "int32 ids": lambda: whole(x, ids, weights),
        "int32 ids, trusted": lambda: whole(x, ids, weights, trusted=True),
        "int32 ids, out=": lambda: whole(x, ids, weights, out=out),
        "int64 ids": lambda: whole(x, wide, weights),
        "expert map, int32 ids": lambda: part(x, ids, weights),
    }


def microseconds(call: Callable[[], torch.Tensor], repeats: int) -> float:
    """Least time of one call over ``repeats`` runs."""
    best = float("inf")
    with torch.inference_mode():
        for _ in range(repeats):
            start = time.perf_counter_ns()
            for _ in range(LOOPS):
                call()
            best = min(best, time.perf_counter_ns() - start)
    return best / LOOPS / 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=500, help=f"runs of {LOOPS} calls each")
    chosen = parser.parse_args()
    print("microseconds a call")
    for name, call in forms().items():
        print(f"{microseconds(call, chosen.repeats):6.1f}  {name}")


if __name__ == "__main__":
    main()
