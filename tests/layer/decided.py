"""Puts decisions into a database as a sweep would, with made-up times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autosel import registry
from autosel.buckets import buckets
from autosel.core import Candidate, Decision, Device, ErrorFigures, Measurement, Problem
from autosel.decide import decide
from autosel.store import Store

#: What the CPU timer records of a cold measurement.
MODE = (("cache", "cold"),)


def candidate(name: str, problem: Problem, device: Device, tokens: int = 1) -> Candidate:
    """A backend with its default settings."""
    backend = registry.get(name)
    params = backend.space(problem, tokens, device).default
    return Candidate.of(name, params, backend.layout(problem, params).key)


def store_times(
    store: Store,
    problem: Problem,
    device: Device,
    times: Mapping[int, Mapping[Candidate, float]],
    *,
    routing: str = "uniform",
    allow_a8: bool = False,
    a8: Sequence[Candidate] = (),
) -> list[Decision]:
    """``times`` in microseconds by token count and candidate; decides each count and stores all."""
    made = []
    for bucket in buckets(times):
        rows = [
            Measurement(
                problem=problem,
                num_tokens=bucket.measured,
                routing=routing,
                candidate=candidate,
                device=device,
                status="ok",
                accuracy="a8" if candidate in a8 else "exact",
                times_us=tuple(us * (1 + 0.001 * i) for i in range(25)),
                errors=ErrorFigures(1e-3, 1e-3, 1e-3, 0.0),
                weight_bytes=1000,
                timing=MODE,
            )
            for candidate, us in times[bucket.measured].items()
        ]
        store.add_measurements(rows)
        decision = decide(rows, bucket=bucket, allow_a8=allow_a8)
        if isinstance(decision, Decision):
            store.add_decision(decision, device, MODE)
            made.append(decision)
    return made
