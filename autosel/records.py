"""Text forms of the core types: what identifies them in a database, and their JSON export.

Two things are the same thing to a database when their texts here are equal, so every property
that can change which kernel is right or fast must be part of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any, get_args

from autosel import samples
from autosel.core import (
    Candidate,
    Decision,
    Device,
    ErrorFigures,
    Measurement,
    Problem,
    Rejected,
    Scalar,
    Status,
    TokenBucket,
)
from autosel.errors import StoreError, field_error
from autosel.stats import LEAST_US

Timing = tuple[tuple[str, Scalar], ...]

#: Names in ``Measurement.timing`` that say how it was timed: measurements that differ in one of
#: them stand side by side. All other names are observations (load, samples taken, wall time).
MODE_NAMES = ("cache", "clock", "graph", "huge_pages")


def timing_mode(timing: Timing) -> dict[str, Scalar]:
    """The part of ``timing`` that belongs to a measurement's identity; empty if never timed."""
    known = dict(timing)
    return {name: known[name] for name in MODE_NAMES if name in known}


def comparable(timing: Timing) -> dict[str, Scalar]:
    """What must agree for two measurements to be compared.

    A candidate that cannot be captured in a graph is timed as it would run, without one, and
    competes all the same.
    """
    return {**timing_mode(timing), "graph": None}


def of_newest_mode(measurements: Sequence[Measurement]) -> list[Measurement]:
    """All but the correct ones that were timed in another way than the last correct one.

    Those of another clock, or of an older autosel that recorded fewer settings, are not comparable.
    Who failed before it was timed belongs to every way.
    """
    newest = newest_mode(measurements)
    return [m for m in measurements if m.status != "ok" or comparable(m.timing) == newest]


def newest_mode(measurements: Sequence[Measurement]) -> dict[str, Scalar] | None:
    """What of the last correct one's timing must agree; None where nothing correct was timed."""
    newest = next((m for m in reversed(measurements) if m.status == "ok"), None)
    return None if newest is None else comparable(newest.timing)


def fits(mode: Mapping[str, Scalar], newest: Mapping[str, Scalar] | None) -> bool:
    """Whether a decision of that timing mode may stand beside measurements of the newest one; so
    may one that does not say its mode."""
    return newest is None or not mode or comparable(tuple(mode.items())) == newest


def to_json(value: object) -> str:
    """Canonical JSON: sorted names, no spaces, no NaN or infinity (StoreError)."""
    try:
        return json.dumps(
            value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False
        )
    except (TypeError, ValueError) as error:
        raise StoreError(field_error("record", "value", error, "plain finite JSON")) from None


def problem_text(problem: Problem) -> str:
    """Identity of a layer: its logical sizes and everything else, never a packed size."""
    data = problem.to_dict()
    # 7 and 7.0 are one limit; JSON would tell them apart.
    data["activation"] = {
        name: float(value) if isinstance(value, int) else value
        for name, value in data["activation"].items()
    }
    return to_json(data)


def device_text(device: Device) -> str:
    """Identity of the hardware, without driver and packages."""
    data = device.to_dict()
    del data["driver"], data["versions"]
    return to_json(data)


def versions_text(device: Device) -> str:
    """Identity of the software on it: driver and package versions."""
    return to_json({"driver": device.driver, "packages": dict(device.versions)})


@lru_cache(maxsize=1024)
def device_from_texts(device: str, versions: str) -> Device:
    software = json.loads(versions)
    return Device.from_dict(
        {**json.loads(device), "driver": software["driver"], "versions": software["packages"]}
    )


# Many rows are about few layers and devices, which are frozen and may be shared.
@lru_cache(maxsize=4096)
def problem_from_text(text: str) -> Problem:
    return Problem.from_dict(json.loads(text))


def candidate_dict(candidate: Candidate) -> dict[str, Any]:
    return {
        "backend": candidate.backend,
        "params": candidate.params_dict,
        "layout": candidate.layout,
    }


def candidate_from_dict(data: Mapping[str, Any]) -> Candidate:
    return Candidate.of(data["backend"], data["params"], data["layout"])


def check_measurement(m: Measurement) -> None:
    """StoreError unless ``m`` can be stored and read back without misleading anybody."""
    fault = _fault(m)
    if fault is not None:
        where = f"measurement of {m.candidate.key} at {m.num_tokens} tokens"
        raise StoreError(field_error(where, *fault))


def _fault(m: Measurement) -> tuple[str, object, object] | None:
    """What is wrong with ``m``: the field, what was found and what was expected."""
    if m.status not in _STATUSES:
        return "status", repr(m.status), "one of " + ", ".join(_STATUSES)
    if m.num_tokens < 1:
        return "num_tokens", m.num_tokens, "at least 1"
    if m.status == "ok" and not m.times_us:
        return "times_us", "no sample", "at least 1 when ok"
    if m.status != "ok" and not m.reason:
        return "reason", "nothing", f"why it is {m.status}"
    for time_us in m.times_us:
        if not LEAST_US <= time_us < math.inf:
            return "times_us", time_us, f"finite and at least {LEAST_US:g}"
    numbers = {name: getattr(m, name) for name in ("pack_ms", "first_call_ms", "verify_ms")}
    if m.errors is not None:
        numbers |= {name: getattr(m.errors, name) for name in _FIGURES}
    for name, value in numbers.items():
        if value is not None and not math.isfinite(value):
            return name, value, "a finite number or nothing"
    return None


_STATUSES = get_args(Status)
_FIGURES = tuple(field.name for field in fields(ErrorFigures))


def rejected_from_dict(data: Mapping[str, Any]) -> Rejected:
    return Rejected(
        candidate_from_dict(data["candidate"]),
        data["status"],
        data["reason"],
        data["accuracy"],
        data["time_us"],
    )


def errors_from_text(text: str | None) -> ErrorFigures | None:
    return None if text is None else ErrorFigures(**json.loads(text))


def measurement_dict(m: Measurement) -> dict[str, Any]:
    """JSON-able form for people and other programs; times are null where nothing was timed."""
    summary = samples.summary(m)
    return {
        "problem": m.problem.to_dict(),
        "problem_key": m.problem.key,
        "num_tokens": m.num_tokens,
        "routing": m.routing,
        "candidate": {**candidate_dict(m.candidate), "key": m.candidate.key},
        "device": m.device.to_dict(),
        "timing": dict(m.timing),
        "status": m.status,
        "accuracy": m.accuracy,
        "reason": m.reason,
        "summary_us": asdict(summary) if summary else None,
        "time_us": summary.estimate_us if summary else None,
        "times_us": list(m.times_us) if m.times_us else None,
        "errors": asdict(m.errors) if m.errors else None,
        "pack_ms": m.pack_ms,
        "first_call_ms": m.first_call_ms,
        "verify_ms": m.verify_ms,
        "weight_bytes": m.weight_bytes,
    }


def decision_dict(d: Decision) -> dict[str, Any]:
    """JSON-able form of a decision."""
    return {
        "problem": d.problem.to_dict(),
        "problem_key": d.problem.key,
        "bucket": {**asdict(d.bucket), "label": d.bucket.label},
        "routing": d.routing,
        "winner": {**candidate_dict(d.winner), "key": d.winner.key},
        "winner_us": d.winner_us,
        "runner_up": (
            {**candidate_dict(d.runner_up), "key": d.runner_up.key} if d.runner_up else None
        ),
        "runner_up_us": d.runner_up_us,
        "margin": d.margin,
        "margin_interval": list(d.margin_interval) if d.margin_interval else None,
        "tie": d.tie,
        "why": d.why,
        "accuracy": d.accuracy,
        "rejected": [rejected_dict(r) for r in d.rejected],
    }


def measurement_from_dict(data: Mapping[str, Any]) -> Measurement:
    """The inverse of :func:`measurement_dict`; for JSON that this program wrote."""
    return Measurement(
        problem=Problem.from_dict(data["problem"]),
        num_tokens=data["num_tokens"],
        routing=data["routing"],
        candidate=candidate_from_dict(data["candidate"]),
        device=Device.from_dict(data["device"]),
        status=data["status"],
        accuracy=data["accuracy"],
        reason=data["reason"],
        times_us=tuple(data["times_us"] or ()),
        errors=ErrorFigures(**data["errors"]) if data["errors"] else None,
        pack_ms=data["pack_ms"],
        first_call_ms=data["first_call_ms"],
        verify_ms=data.get("verify_ms"),  # older files lack it
        weight_bytes=data["weight_bytes"],
        timing=tuple(sorted(data["timing"].items())),
    )


def decision_from_dict(data: Mapping[str, Any]) -> Decision:
    """The inverse of :func:`decision_dict`; for JSON that this program wrote."""
    interval = data["margin_interval"]
    return Decision(
        problem=Problem.from_dict(data["problem"]),
        bucket=bucket_from_dict(data["bucket"]),
        routing=data["routing"],
        winner=candidate_from_dict(data["winner"]),
        winner_us=data["winner_us"],
        runner_up=candidate_from_dict(data["runner_up"]) if data["runner_up"] else None,
        runner_up_us=data["runner_up_us"],
        margin=data["margin"],
        margin_interval=(interval[0], interval[1]) if interval else None,
        tie=data["tie"],
        why=data["why"],
        rejected=tuple(map(rejected_from_dict, data["rejected"])),
        accuracy=data["accuracy"],
    )


def bucket_from_dict(data: Mapping[str, Any]) -> TokenBucket:
    """Of a decision's JSON, whose label only repeats the borders."""
    return TokenBucket(data["low"], data["high"], data["measured"])


def rejected_dict(r: Rejected) -> dict[str, Any]:
    return {
        "candidate": {**candidate_dict(r.candidate), "key": r.candidate.key},
        "status": r.status,
        "reason": r.reason,
        "accuracy": r.accuracy,
        "time_us": r.time_us,
    }
