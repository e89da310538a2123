"""Verifies backends on every format, group size, bit width and activation type; prints CSV.

    python -m bench.verify_backends --jobs 12 --csv results/nvidia-h200/verify_backends.csv

Weights are made up, written in the format as its packing tool would and read back, so that the
whole way from file to kernel is covered. Each candidate runs every verification case from an
output full of NaN and is judged against the emulation (:mod:`autosel.verify`). A backend that
refuses a layer gives a row with its reasons. Exit status 1 when a candidate that was not refused
is not ok.

``--jobs`` processes share the device (compiling kernels takes most of the time); one that a faulty
kernel takes down costs only the row of that backend.

vLLM's operators are found as :mod:`autosel.backends._vllm_ops` describes (environment variable
AUTOSEL_VLLM_MOE_LIB); humming-kernels must be importable.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autosel import registry
from autosel.core import CanonicalExperts, Device
from autosel.device import detect
from autosel.errors import AutoselError, UnsupportedError
from autosel.interfaces import Backend
from autosel.verify import verify_candidate
from autosel.verify_cases import Case, make_cases
from bench import verify_jobs
from bench.verify_grid import BACKENDS, FORMATS, LAYERS, Task, experts_of, points, tasks

FIELDS = (
    "format", "bits", "group_size", "symmetric", "scale_dtype", "act_dtype", "layer", "backend",
    "params", "status", "reason", "rel_rms", "rel_rms_worst_token", "score", "repeatable",
    "pack_ms", "verify_s", "device",
)  # fmt: skip
#: Token counts: one row, more rows than the smallest block, and blocks that are full.
TOKENS = (1, 17, 64)


def rows_of(
    backend: Backend, experts: CanonicalExperts, cases: list[Case], device: Device, axes: bool
) -> Iterator[dict[str, Any]]:
    """One row a candidate, or one with the reasons for no."""
    problem = experts.problem
    support = backend.supports(problem, device)
    if not support:
        yield {"status": "unsupported", "reason": str(support)}
        return
    packed: dict[Any, Any] = {}
    for params in points(backend, problem, device, axes):
        row: dict[str, Any] = {"params": json.dumps(params)}
        layout = backend.layout(problem, params)
        try:
            if layout not in packed:
                packed.clear()  # one packed copy at a time
                start = time.perf_counter()
                packed[layout] = layout.pack(experts)
                _wait(device)
                row["pack_ms"] = round((time.perf_counter() - start) * 1e3, 2)
        except UnsupportedError as error:
            yield {**row, "status": "unsupported", "reason": str(error)}
            continue
        start = time.perf_counter()
        verdict = verify_candidate(backend, packed[layout], params, cases, experts=experts)
        errors = verdict.errors
        yield {
            **row,
            "status": verdict.status,
            "reason": verdict.reason,
            "rel_rms": errors and errors.rel_rms,
            "rel_rms_worst_token": errors and errors.rel_rms_worst_token,
            "score": verdict.score,
            "repeatable": verdict.repeatable,
            "verify_s": round(time.perf_counter() - start, 2),
        }


def _wait(device: Device) -> None:
    """Also raises what a kernel left behind."""
    if device.kind != "cpu":
        torch.accelerator.synchronize()


def verify_task(
    task: Task,
    backends: Sequence[str],
    *,
    device: Device,
    tokens: tuple[int, ...],
    axes: bool,
    seed: int,
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """``(backend, None)`` when it begins, then ``(backend, row)`` for each candidate of it.

    A device that a kernel has broken ends the process: nothing after it can be trusted.
    """
    try:
        experts = experts_of(task, device.torch_device, seed)
    except AutoselError as error:
        refused = isinstance(error, UnsupportedError)
        status = "unsupported" if refused else "failed"
        for name in list(backends):
            yield name, None
            yield name, {"status": status, "reason": f"weights: {error}"}
        return
    cases = make_cases(experts, token_counts=tokens)
    for name in list(backends):
        yield name, None
        try:
            for row in rows_of(registry.get(name), experts, cases, device, axes):
                yield name, row
        except Exception as error:  # a third party's code may raise anything
            first = (str(error).splitlines() or [""])[0]
            yield name, {"status": "failed", "reason": f"{type(error).__name__}: {first}"}
        try:
            _wait(device)
        except RuntimeError as error:
            sys.exit(f"{task.label}, {name}: device lost: {error}")


def main() -> int:
    names = [case.label for case in FORMATS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", default="-", help="file to write, - for standard output")
    parser.add_argument("--device", help="cpu, cuda, rocm or xpu; the best one by default")
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS))
    parser.add_argument("--formats", nargs="+", default=names, choices=names)
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--axes", action="store_true", help="also change one parameter at a time")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the device")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a backend on a layer")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.jobs > 1:
        os.environ["OMP_NUM_THREADS"] = "1"  # of the processes to come: they are the parallelism
    device, seen, start = detect(args.device), Counter[str](), time.perf_counter()
    work = functools.partial(
        verify_task, device=device, tokens=tuple(args.tokens), axes=args.axes, seed=args.seed
    )
    found = verify_jobs.run(
        work, tasks(args.formats, args.layers), args.backends, args.jobs, args.limit
    )
    stream = sys.stdout if args.csv == "-" else open(args.csv, "w", newline="")  # noqa: SIM115
    with stream:
        writer = csv.DictWriter(stream, FIELDS, lineterminator="\n")
        writer.writeheader()
        for task, backend, row in found:
            writer.writerow({**task.fields, "backend": backend, "device": device.name, **row})
            stream.flush()
            seen[row["status"]] += 1
            if row["status"] not in ("ok", "unsupported"):
                print(f"{backend}: {task.label} {row.get('params', '')}: {row['status']}: "
                      f"{row['reason']}", file=sys.stderr)  # fmt: skip
    took = time.perf_counter() - start
    counts = ", ".join(f"{count} {status}" for status, count in sorted(seen.items()))
    print(f"{seen.total()} rows in {took:.0f} s: {counts}", file=sys.stderr)
    return 0 if set(seen) <= {"ok", "unsupported"} else 1


if __name__ == "__main__":
    sys.exit(main())
