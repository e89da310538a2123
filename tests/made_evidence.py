"""Evidence made by hand: every time and decision is known."""

from autosel.core import Candidate, Decision, Device, Measurement, Problem, QuantScheme, TokenBucket
from autosel.evidence import Evidence
from autosel.roofline import Ceilings

INT4 = QuantScheme(4, 128, True)
PROBLEM = Problem(8, 8, 2, 256, 128, INT4, INT4)
CPU = Device("cpu", "Test CPU", threads=2, versions=(("torch", "2.13.0"),))
GPU = Device("cuda", "Test GPU", capability=(9, 0), driver="1", versions=(("torch", "2.13.0"),))
COLD = (("cache", "cold"),)


def samples(us, count=20, spread=0.01):
    """``count`` times around ``us`` whose median is ``us``; the same at each call."""
    return tuple(us * (1 + spread * ((i * 7) % 11 - 5) / 5) for i in range(count))


def row(backend, tokens, us, *, status="ok", reason="", accuracy="exact", device=GPU,
        problem=PROBLEM, routing="uniform", layout="", weight_bytes=None, spread=0.01, timing=(),
        pack_ms=None, first_call_ms=None, verify_ms=None, **params):  # fmt: skip
    """One measurement; ``us`` is the median of its samples."""
    return Measurement(
        problem, tokens, routing, Candidate.of(backend, params, layout), device, status, accuracy,
        reason or ("" if status == "ok" else "why not"),
        samples(us, spread=spread) if status == "ok" else (),
        weight_bytes=weight_bytes, timing=tuple(sorted((*COLD, *timing))),
        pack_ms=pack_ms, first_call_ms=first_call_ms, verify_ms=verify_ms,
    )  # fmt: skip


def decided(measurement, low, high, *, tie=False, rejected=(), why="why", runner_up=None,
            margin=0.25, interval=(0.2, 0.3)):  # fmt: skip
    us = sorted(measurement.times_us)[len(measurement.times_us) // 2]
    return Decision(
        measurement.problem, TokenBucket(low, high, measurement.num_tokens), measurement.routing,
        measurement.candidate, us, runner_up, us * (1 + margin) if runner_up else None,
        margin if runner_up else None, interval if runner_up else None, tie, why, tuple(rejected),
        measurement.accuracy,
    )  # fmt: skip


def evidence(measurements, decisions=(), *, label="layer", device=GPU, problem=PROBLEM, **more):
    more.setdefault("ceilings", Ceilings(100.0, 1.0))
    more.setdefault("newest", "2026-11-29T10:00:00.000000Z")
    return Evidence(
        label, problem, device, "uniform", COLD, tuple(measurements), tuple(decisions), **more
    )
