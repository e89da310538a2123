"""Verifies backends on every format, group size, bit width and activation type; prints CSV.

    python -m bench.verify_backends --csv results/nvidia-h200/verify_backends.csv

Weights are made up, written in the format as its packing tool would and read back, so that the
whole way from file to kernel is covered. Each candidate runs every verification case from an
output full of NaN and is judged against the emulation (:mod:`autosel.verify`). A backend that
refuses a layer gives a row with its reasons. Exit status 1 when a candidate that was not refused
is not ok.

vLLM's operators are found as :mod:`autosel.backends._vllm_ops` describes (environment variable
AUTOSEL_VLLM_MOE_LIB); humming-kernels must be importable.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from autosel import registry
from autosel.core import Activation, CanonicalExperts, Device, Problem, QuantScheme, QuantWeight
from autosel.device import detect
from autosel.errors import AutoselError, UnsupportedError
from autosel.formats import all_formats
from autosel.formats.base import LinearQuant, Origin
from autosel.interfaces import Backend
from autosel.sources import RandomSource
from autosel.verify import verify_candidate
from autosel.verify_cases import Case, make_cases

BACKENDS = ("marlin", "batched_marlin", "humming", "triton", "emulation")
GROUPS = (32, 64, 128, -1)
DTYPES = ("bfloat16", "float16")
FIELDS = (
    "format", "bits", "group_size", "symmetric", "scale_dtype", "act_dtype", "layer", "backend",
    "params", "status", "reason", "rel_rms", "rel_rms_worst_token", "score", "repeatable",
    "pack_ms", "verify_s", "device",
)  # fmt: skip


@dataclass(frozen=True)
class FormatCase:
    """A checkpoint format with the choices it leaves."""

    label: str
    format: str
    bits: tuple[int, ...]
    symmetric: bool
    scale_dtype: str
    zeros_minus_one: bool = False


FORMATS = (
    FormatCase("gptq", "gptq", (4, 8), True, "float16", zeros_minus_one=True),
    FormatCase("awq", "awq", (4,), False, "float16"),
    FormatCase("compressed-tensors sym", "compressed-tensors", (4, 8), True, "bfloat16"),
    FormatCase("compressed-tensors asym", "compressed-tensors", (4, 8), False, "bfloat16"),
)

#: Layers besides the plain one, each of which a kernel or a layout has a special path for.
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one group in w2": {"intermediate_size": 128, "hidden_size": 512},
    "padded intermediate": {"intermediate_size": 96},
    "non-gated": {"activation": Activation("relu2_no_mul")},
    "swigluoai": {"activation": Activation("swigluoai"), "intermediate_size": 96},
    "bias": {"has_bias": True},
    "expert parallel": {"num_experts": 16, "top_k": 4},
    "router weight on input": {"top_k": 1, "router_weight_on_input": True},
    "60 experts": {"num_experts": 60, "num_local_experts": 60, "top_k": 4},
}


def problem_of(case: FormatCase, bits: int, group: int, act_dtype: str, layer: str) -> Problem:
    scheme = QuantScheme(bits, group, case.symmetric, False, case.scale_dtype)
    plain = Problem(8, 8, 2, 512, 256, scheme, scheme, act_dtype=act_dtype)
    return replace(plain, **LAYERS[layer])


def through_format(experts: CanonicalExperts, case: FormatCase) -> CanonicalExperts:
    """Write every projection in the format and read it back; gate and up are two of them."""
    fmt = next(f for f in all_formats() if f.name == case.format)

    def linear(weight: QuantWeight, e: int, rows: slice) -> QuantWeight:
        parts = {n: t[e : e + 1] if n == "g_idx" else t[e : e + 1, rows]
                 for n, t in weight.tensors.items()}  # fmt: skip
        one = replace(weight, **parts)
        quant = LinearQuant(
            weight.scheme.num_bits,
            weight.scheme.group_size,
            weight.scheme.symmetric,
            zeros_minus_one=case.zeros_minus_one,
        )
        tensors = fmt.write(one, quant)
        return fmt.read(tensors, quant, one.num_outputs, one.num_inputs, Origin("experts"))

    def whole(weight: QuantWeight, shards: int) -> QuantWeight:
        size = weight.num_outputs // shards
        rows = [slice(s * size, (s + 1) * size) for s in range(shards)]
        read = [[linear(weight, e, part) for part in rows] for e in range(weight.num_experts)]
        fields = {
            name: torch.cat([torch.cat([p.tensors[name] for p in parts], 1) for parts in read])
            for name in read[0][0].tensors
        }
        return QuantWeight(read[0][0].scheme, weight.num_inputs, **fields)

    problem = experts.problem
    back = replace(experts, w13=whole(experts.w13, problem.num_shards), w2=whole(experts.w2, 1))
    for name in ("w13", "w2"):
        for key, tensor in getattr(experts, name).tensors.items():
            if not torch.equal(getattr(back, name).tensors[key].to(tensor.dtype), tensor):
                raise AutoselError(
                    f"{case.label}: {name}.{key} changed on its way through the file"
                )
    return back


def points(backend: Backend, problem: Problem, device: Device, axes: bool) -> list[dict[str, Any]]:
    """The default parameters; with ``axes`` also every legal change of one of them."""
    space = backend.space(problem, 64, device)
    found = [dict(space.default)]
    for name, values in space.choices.items() if axes else ():
        for value in values:
            point = {**space.default, name: value}
            if point not in found and space.constraint(point) is None:
                found.append(point)
    return found


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
                torch.accelerator.synchronize() if device.kind != "cpu" else None
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


def sweep(args: argparse.Namespace, device: Device) -> Iterator[dict[str, Any]]:
    backends = [registry.get(name) for name in args.backends]
    for case, layer in itertools.product(FORMATS, args.layers):
        if case.label not in args.formats:
            continue
        for bits, group, dtype in itertools.product(case.bits, GROUPS, DTYPES):
            if layer != "plain" and (group, bits) not in ((128, 4), (-1, 8)):
                continue  # special layers: one grouped and one per-channel scheme
            try:
                problem = problem_of(case, bits, group, dtype, layer)
                experts = RandomSource(problem, args.seed).load()
                experts = through_format(experts, case).to(device.torch_device)
            except AutoselError as error:
                print(f"{case.label} {bits} bit g{group} {layer}: {error}", file=sys.stderr)
                continue
            cases = make_cases(experts, token_counts=args.tokens)
            for backend in backends:
                for row in rows_of(backend, experts, cases, device, args.axes):
                    yield {
                        "format": case.label,
                        "bits": bits,
                        "group_size": group,
                        "symmetric": case.symmetric,
                        "scale_dtype": case.scale_dtype,
                        "act_dtype": dtype,
                        "layer": layer,
                        "backend": backend.name,
                        "device": device.name,
                        **row,
                    }


def main() -> int:
    names = [case.label for case in FORMATS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", default="-", help="file to write, - for standard output")
    parser.add_argument("--device", help="cpu, cuda, rocm or xpu; the best one by default")
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS))
    parser.add_argument("--formats", nargs="+", default=names, choices=names)
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 3, 17, 64, 200])
    parser.add_argument("--axes", action="store_true", help="also change one parameter at a time")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device, bad, count = detect(args.device), 0, 0
    stream = sys.stdout if args.csv == "-" else open(args.csv, "w", newline="")  # noqa: SIM115
    with stream:
        writer = csv.DictWriter(stream, FIELDS, lineterminator="\n")
        writer.writeheader()
        for row in sweep(args, device):
            writer.writerow(row)
            stream.flush()
            count += 1
            if row["status"] not in ("ok", "unsupported"):
                bad += 1
                print(f"{row['backend']} {row['format']} {row['bits']} bit g{row['group_size']} "
                      f"{row['act_dtype']} {row['layer']} {row.get('params')}: {row['status']}: "
                      f"{row['reason']}", file=sys.stderr)  # fmt: skip
    print(f"{count} rows, {bad} neither ok nor refused", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
