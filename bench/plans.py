"""Plans from the shipped tables: what one copy of the weights costs, and what a second one gains.

    python -m bench.plans
    python -m bench.plans --exclude cpu_native,wna16_tiled

From ``results/nvidia-h200/kernels.csv`` and ``results/amd-epyc-2-cores/cpu.csv``; bytes are those
of the backends' layouts. The tables hold single figures instead of samples, so no interval is
known: a gain is taken for real when it is above 1 %, which a sweep of your own would put to the
test. Needs no device.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from autosel import registry
from autosel.core import Candidate, Problem, TokenBucket
from autosel.errors import AutoselError
from autosel.evidence import Evidence
from autosel.plan_solve import Instance, Set, by_copies, solve
from autosel.plan_traffic import break_even
from autosel.samples import estimate
from autosel.weight_budget import WeightBudget
from autosel.workload import PRESETS, shares
from bench.results_data import RESULTS, epyc_evidence, h200_evidence

TRAFFIC = ("decode-heavy", "mixed", "prefill-heavy")
MIB = 2**20


def packing(problem: Problem, candidate: Candidate, evidence: Evidence) -> tuple[str, int]:
    """Key and bytes of the layout that a backend reads with its default settings; its own name
    where its package, which knows, is not installed (then the table has the bytes)."""
    backend = registry.get(candidate.backend)
    try:
        layout = backend.layout(problem, backend.space(problem, 1, evidence.device).default)
    except AutoselError:
        return f"that of {backend.name}", 0
    return layout.key, layout.nbytes(problem)


def instance_of(evidence: Evidence, exclude: set[str]) -> tuple[Instance, list[TokenBucket]]:
    """The table as times and bytes; weights are filled in by the caller."""
    buckets = [decision.bucket for decision in evidence.decisions]
    sizes: dict[str, int] = {}
    times: list[dict[str, float]] = [{} for _ in buckets]
    for m in evidence.measurements:
        if m.accuracy != "exact" or m.candidate.backend in exclude:
            continue
        key, nbytes = packing(evidence.problem, m.candidate, evidence)
        sizes[key] = m.weight_bytes or nbytes
        place = next(i for i, bucket in enumerate(buckets) if bucket.measured == m.num_tokens)
        us = estimate(m).us
        times[place][key] = min(us, times[place].get(key, us))
    return Instance(sizes, times, [1.0] * len(buckets)), buckets


def lines(evidence: Evidence, exclude: set[str]) -> Iterator[str]:
    """A layer's plans for one copy under each traffic, and the price of the next copy."""
    table, buckets = instance_of(evidence, exclude)
    if not table.sizes:
        return
    unit = min(table.sizes.values())
    for name in TRAFFIC:
        instance = Instance(table.sizes, table.times, shares(PRESETS[name], buckets).calls)

        def real(one: Set, other: Set, instance: Instance = instance) -> bool:
            return instance.time(one) > 1.01 * instance.time(other)

        chosen = solve(instance, WeightBudget().bytes(unit, 1), real)
        if chosen is None:
            continue
        loss = chosen.time_us / instance.time(tuple(table.sizes)) - 1
        words = f"{name:14} {chosen.layouts[0]:22} {chosen.nbytes / MIB:7.1f} MiB "
        words += f"{chosen.time_us:9.1f} us, {loss:.2%} above winners; "
        more = next((c for c in by_copies(instance) if len(c.layouts) > 1), chosen)
        gain = 1 - more.time_us / chosen.time_us
        price = f"{(more.nbytes - chosen.nbytes) / MIB:.1f} MiB for {gain:.2%} faster"
        yield words + (f"second copy: {price}" if gain > 0 else "nothing to gain")
        for other in table.sizes:
            even = break_even(instance, buckets, chosen.layouts[0], other)
            if even is not None:
                yield (
                    f"{'':14} break-even: {other} alone above {even.break_even:.1%} of calls at "
                    f"{', '.join(even.buckets)} tokens; here {even.share:.1%}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description="Plans from the shipped tables.")
    parser.add_argument("--exclude", default="", help="backends to leave out")
    exclude = set(filter(None, parser.parse_args().exclude.split(",")))
    tables = [
        *h200_evidence(RESULTS / "nvidia-h200" / "kernels.csv"),
        *epyc_evidence(RESULTS / "amd-epyc-2-cores" / "cpu.csv"),
    ]
    for evidence in tables:
        print(f"{evidence.label} on {evidence.device.name}")
        for line in lines(evidence, exclude):
            print(f"  {line}")


if __name__ == "__main__":
    main()
