"""What a decision lookup costs in a hot loop.

    python -m bench.lookup                  # nanoseconds
    python -m bench.lookup --instructions   # instructions, counted by valgrind's callgrind

A lookup is what a layer does in each call to find the candidate of its token count
(:class:`autosel.layer_lookup.Lookup`). Times are the least of many short runs, each of 1,000
lookups of other token counts, less an empty loop: other work on the machine only ever adds, so the
least is nearest to the truth, and it says nothing where every run was disturbed. Instructions
hardly depend on the load; they include the loop.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from autosel.buckets import buckets
from autosel.layer_lookup import Lookup

LOOPS = 1000
COUNTS = (1, 4, 14, 64)


def table(size: int) -> Lookup[int]:
    """A table of ``size`` buckets, measured at powers of two."""
    measured = [2**power for power in range(size)]
    return Lookup([(bucket, place) for place, bucket in enumerate(buckets(measured))])


def tokens(size: int) -> list[int]:
    """Token counts all over the buckets, in an order that no branch predictor learns."""
    return [pow(3, i, 65537) % 2 ** min(size, 20) + 1 for i in range(LOOPS)]


def nanoseconds(size: int, repeats: int) -> float:
    """Least time of one lookup over ``repeats`` runs, without the loop around it."""
    at, asked = table(size).at, tokens(size)
    best = empty = float("inf")
    for _ in range(repeats):
        start = time.perf_counter_ns()
        for count in asked:
            at(count)
        middle = time.perf_counter_ns()
        for _count in asked:
            pass
        end = time.perf_counter_ns()
        best, empty = min(best, middle - start), min(empty, end - middle)
    return (best - empty) / LOOPS


def instructions(size: int) -> float:
    """Instructions of one lookup: the difference of two runs under callgrind."""
    runs = 300  # so that the start of Python, which varies by some millions, does not show
    return (_counted(size, runs) - _counted(size, 0)) / (runs * LOOPS)


def loop(size: int, runs: int) -> None:
    """What is counted: ``runs`` times 1,000 lookups."""
    at, asked = table(size).at, tokens(size)
    for _ in range(runs):
        for count in asked:
            at(count)


def _counted(size: int, runs: int) -> int:
    code = f"from bench.lookup import loop; loop({size}, {runs})"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out",
            sys.executable, "-c", code,
        ]  # fmt: skip
        ran = subprocess.run(
            command, capture_output=True, text=True, check=True,
            cwd=Path(__file__).parent.parent, env={"PYTHONHASHSEED": "0", "PYTHONPATH": "."},
        )  # fmt: skip
    found = re.search(r"Collected : (\d+)", ran.stderr)
    if found is None:
        raise RuntimeError(f"callgrind printed no count: {ran.stderr[-500:]}")
    return int(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--instructions", action="store_true", help="count instead of timing")
    parser.add_argument("--repeats", type=int, default=2000, help="runs of 1,000 lookups each")
    chosen = parser.parse_args()
    if chosen.instructions and shutil.which("valgrind") is None:
        raise SystemExit("valgrind: found nothing, expected the program on the path")
    unit = "instructions" if chosen.instructions else "nanoseconds"
    print(f"buckets  {unit} a lookup")
    for size in COUNTS:
        cost = instructions(size) if chosen.instructions else nanoseconds(size, chosen.repeats)
        print(f"{size:7}  {cost:.0f}")


if __name__ == "__main__":
    main()
