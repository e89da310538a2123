"""Does verification catch every planted fault, and does it refuse a correct backend?

    python -m bench.planted_faults                   # the table and 200 seeds of correct backends
    python -m bench.planted_faults --seeds 20 --only race

Every fault of :mod:`bench.faults` is planted into correct backends that run here, and judged by
:func:`autosel.certify.certify`, which the sweep calls. Exit status 1 when a fault passed
or a correct backend was refused. Runs on the CPU, a Triton kernel in its interpreter.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch

from autosel import registry
from autosel.certify import certify
from autosel.core import (
    Activation,
    CanonicalExperts,
    Certificate,
    Device,
    Level,
    Params,
    Problem,
    QuantScheme,
    Routing,
)
from autosel.device import detect
from autosel.errors import AutoselError, UnsupportedError
from autosel.interfaces import Backend, Layout, PackedExperts
from autosel.layouts.marlin import Marlin
from autosel.packing import pack_last, unpack_last
from autosel.sources import RandomSource
from autosel.verify_suite import Suite
from bench.fault_kernel import Canonical, Int8Kernel, Kernel
from bench.faults import FAULTS, Fault

RESULTS = Path(__file__).resolve().parent.parent / "results" / "planted-faults"

#: Backends into which faults of the weights and of the call are planted.
WEIGHTS, CALLS = ("emulation", "cpu_native", "marlin"), ("emulation", "cpu_native")
#: Backends that must not be refused.
CORRECT = ("kernel", "int8_kernel", "emulation", "cpu_native", "torch_int4", "torch_int8", "marlin")


class Unpacked(Kernel):
    """The correct kernel on Marlin's layout, whose own kernel needs a GPU: what it reads is what
    the layout's inverse gives back."""

    name: ClassVar[str] = "marlin_unpacked"

    def layout(self, problem: Problem, params: Params) -> Layout:
        if problem.act_dtype == "float32":
            raise UnsupportedError("Marlin's kernel has 16-bit activations")
        layout = Marlin(problem.act_dtype)
        layout.check(problem)
        return layout

    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        layout = Marlin(packed.problem.act_dtype)
        canonical = Canonical().pack(layout.unpack(packed))
        return super().run(canonical, x, routing, params, out)


def correct(name: str) -> Backend:
    """A correct backend by name; ``triton`` runs in the interpreter."""
    made = {"kernel": Kernel, "int8_kernel": Int8Kernel, "marlin": Unpacked}
    return made[name]() if name in made else registry.get(name)


@dataclass(frozen=True)
class Row:
    """One planted fault and what became of it."""

    fault: Fault
    backend: str
    certificate: Certificate

    @property
    def caught_by(self) -> str:
        return self.certificate.reason.partition(":")[0] if self.certificate.reason else ""


@lru_cache(maxsize=4)
def suite(problem: Problem, seed: int = 0) -> Suite:
    return Suite(RandomSource(problem, seed).load(), seed=seed)


def judged(
    backend: Backend, on: Suite, device: Device, *, level: Level = "full"
) -> Certificate | None:
    """The certificate of a backend's default on a suite; None where it refuses the layer."""
    problem = on.experts.problem
    params: Params = {}
    if not isinstance(backend, Kernel):
        inner = getattr(backend, "correct", backend)
        if not isinstance(inner, Kernel) and inner.name != "triton":
            if not inner.supports(problem, device):
                return None
            params = dict(inner.space(problem, 17, device).default)
    try:
        packed = backend.layout(problem, params).pack(on.experts)
    except UnsupportedError:
        return None
    except AutoselError:
        return None
    return certify(backend, packed, params, on, device=device, level=level)


def plant(fault: Fault, device: Device, names: tuple[str, ...] = ()) -> Iterator[Row]:
    """Judge one fault in every backend it can be planted into."""
    into = {"weights": WEIGHTS, "call": CALLS, "kernel": ("kernel",)}[fault.where]
    for name in names or into:
        certificate = judged(fault.plant(correct(name)), suite(fault.problem), device)
        if certificate is not None:
            yield Row(fault, name, certificate)


# correct backends --------------------------------------------------------------------------------

_SCHEMES = (
    QuantScheme(4, 32, True),
    QuantScheme(4, 32, False),
    QuantScheme(4, 128, True, scale_dtype="float16"),
    QuantScheme(8, 32, True),
    QuantScheme(8, -1, True),
    QuantScheme(4, -1, True),
    QuantScheme(4, 64, False, scale_dtype="float16"),
    QuantScheme(4, 32, True, has_g_idx=True),
)
_SHAPES = ((4, 2, 128, 64), (8, 2, 128, 128), (6, 3, 256, 64), (1, 1, 128, 64), (8, 1, 128, 96))
_ACTS = (
    Activation("silu"),
    Activation("gelu"),
    Activation("swigluoai"),
    Activation("relu2_no_mul"),
    Activation("silu", limit=7.0),
    Activation("gelu_tanh"),
)
_DTYPES = ("bfloat16", "float16", "bfloat16", "float32")
#: How the codes lie: as drawn, all above the zero point, one sign pattern, all equal.
WEIGHT_KINDS = ("drawn", "one sign", "rank one", "equal")


def problem_of(seed: int) -> Problem:
    """Another layer for each seed, every scheme with every type and activation in turn."""
    experts, top_k, hidden, inter = _SHAPES[seed % len(_SHAPES)]
    scheme = _SCHEMES[seed // 2 % len(_SCHEMES)]
    local = experts // 2 if seed % 7 == 3 and experts % 2 == 0 else experts
    return Problem(
        experts,
        local,
        top_k,
        hidden,
        inter,
        scheme,
        replace(scheme, group_size=32) if scheme.group_size > inter else scheme,
        activation=_ACTS[seed % len(_ACTS)],
        act_dtype=_DTYPES[seed // 3 % len(_DTYPES)],
        has_bias=seed % 5 == 4,
        router_weight_on_input=top_k == 1 and seed % 2 == 1,
    )


def experts_of(seed: int) -> CanonicalExperts:
    """Weights of that layer, of one kind of :data:`WEIGHT_KINDS`."""
    experts = RandomSource(problem_of(seed), seed).load()
    kind = WEIGHT_KINDS[seed % len(WEIGHT_KINDS)]
    for name in ("w13", "w2") if kind != "drawn" else ():
        weight = getattr(experts, name)
        bits = weight.scheme.num_bits
        middle = 1 << (bits - 1)
        codes = unpack_last(weight.codes, bits, weight.num_inputs).int()
        size = (codes - middle).abs().clamp(1, middle - 1)
        if kind == "rank one":
            generator = torch.Generator().manual_seed(seed)
            rows = 2 * torch.randint(0, 2, codes.shape[:2], generator=generator) - 1
            columns = 2 * torch.randint(0, 2, codes.shape[2:], generator=generator) - 1
            size = size * rows.unsqueeze(-1) * columns
        codes = torch.full_like(codes, 2 * middle - 1) if kind == "equal" else middle + size
        packed = pack_last(codes.to(torch.uint8), bits)
        experts = replace(experts, **{name: replace(weight, codes=packed)})
    return experts


def false_alarms(
    seeds: range, device: Device, names: tuple[str, ...] = CORRECT
) -> Iterator[tuple[int, str, Certificate]]:
    """(seed, backend, certificate) of correct backends; every tenth seed on the full set."""
    for seed in seeds:
        on = Suite(experts_of(seed), seed=seed)
        for name in names:
            level: Level = "full" if seed % 10 == 0 else "quick"
            certificate = judged(correct(name), on, device, level=level)
            if certificate is not None:
                yield seed, name, certificate


# command -----------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200, help="seeds of correct backends")
    parser.add_argument("--first", type=int, default=0, help="first seed, to split the work")
    parser.add_argument("--only", default="", help="faults whose name has this text")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV files")
    options = parser.parse_args()
    device = detect("cpu")
    options.out.mkdir(parents=True, exist_ok=True)
    missed = _table(options.out / "faults.csv", options.only, device)
    seeds = range(options.first, options.first + options.seeds)
    refused = _seeds(options.out / "correct.csv", seeds, device)
    return 1 if missed or refused else 0


def _table(path: Path, only: str, device: Device) -> int:
    missed = 0
    total = 0
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("fault", "what", "planted_in", "backend", "status", "caught_by", "score"))
        for fault in FAULTS:
            if only not in fault.name:
                continue
            for row in plant(fault, device):
                found = row.certificate
                total += 1
                missed += bool(found)
                score = "" if found.score is None else f"{found.score:.3g}"
                writer.writerow(
                    (fault.name, fault.what, fault.where, row.backend, found.status,
                     row.caught_by, score)
                )  # fmt: skip
                file.flush()
                state = "MISSED" if found else found.status
                print(
                    f"{fault.name:25} {row.backend:11} {state:10} {row.caught_by:32} {score:>9}",
                    flush=True,
                )
    print(f"{total - missed} of {total} planted faults caught")
    return missed


def _seeds(path: Path, seeds: range, device: Device) -> int:
    refused = judged_ = 0
    worst: dict[str, float] = {}
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ("seed", "weights", "problem", "backend", "status", "score", "bias", "audit")
        )
        for seed, name, found in false_alarms(seeds, device):
            judged_ += 1
            refused += not found
            worst[name] = max(worst.get(name, 0.0), found.score or 0.0)
            numbers = (found.score, found.bias, found.audit.score)
            writer.writerow(
                (seed, WEIGHT_KINDS[seed % len(WEIGHT_KINDS)], found.problem.key, name,
                 found.status, *("" if n is None else f"{n:.4g}" for n in numbers))
            )  # fmt: skip
            file.flush()
            if not found:
                print(f"REFUSED seed {seed} {found.problem.key} {name}: {found.reason}", flush=True)
    shares = ", ".join(f"{name} {value:.2f}" for name, value in sorted(worst.items()))
    print(f"{refused} of {judged_} correct candidates refused; worst share of a limit: {shares}")
    return refused


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sys.exit(main())
