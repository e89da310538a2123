"""Measurements, decisions, sweeps and entries as database columns, and back.

The back way is strict: a row that does not make a valid object is left out with a warning, since
one damaged or hand-edited row must neither be believed nor hide the others.
"""

from __future__ import annotations

import json
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from autosel import records
from autosel.core import Candidate, Decision, Device, Measurement, Problem, TokenBucket
from autosel.errors import AutoselError, StoreError, field_error
from autosel.identity import Entry
from autosel.records import Timing
from autosel.stats import LEAST_US
from autosel.tables import Row

T = TypeVar("T")

#: Joined columns that name the layer, the device and its versions of a row ``x``.
NAMES = "p.spec AS problem_spec, d.spec AS device_spec, v.spec AS versions_spec"
JOINS = (
    "JOIN problems AS p ON p.id = x.problem_id JOIN devices AS d ON d.id = x.device_id"
    " JOIN versions AS v ON v.id = x.versions_id"
)


class StoreWarning(UserWarning):
    """The store could not do what was asked as it was asked; the message is one line."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """One tuning run; ``finished`` is None while it runs and for ever if it was interrupted.

    ``id`` is a row number of one file; ``uid`` names the sweep wherever it is merged to.
    """

    id: int
    device: Device
    label: str
    settings: Mapping[str, Any]
    ceilings: Mapping[str, Any] | None
    started: str
    finished: str | None
    uid: str = ""


@dataclass(frozen=True, slots=True)
class StoredDecision:
    """A decision with what it was decided for: device, versions and timing mode.

    ``withdrawn``: a newer measurement says that the winner failed inside the bucket. ``id`` is its
    row number.
    """

    decision: Decision
    device: Device
    mode: Mapping[str, Any]
    created: str
    withdrawn: bool = False
    id: int = 0


_clock_lock = threading.Lock()
_last = datetime.min.replace(tzinfo=UTC)


def now() -> str:
    """The time in UTC, with microseconds so that texts sort as times do.

    Each answer in a process is later than the one before, also where the clock is set back: what
    was stored last must count as the newest.
    """
    global _last
    with _clock_lock:
        _last = max(datetime.now(UTC), _last + timedelta(microseconds=1))
        return _last.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def identity(problem: Problem | None, device: Device | None, routing: str | None) -> Row:
    """Filter of a select with :data:`JOINS`; what is None lets everything pass."""
    return {
        "p.spec": records.problem_text(problem) if problem else None,
        "d.spec": records.device_text(device) if device else None,
        "v.spec": records.versions_text(device) if device else None,
        "x.routing": routing,
    }


def candidate_columns(candidate: Candidate) -> dict[str, str]:
    params = records.to_json(candidate.params_dict)
    return {"backend": candidate.backend, "params": params, "layout": candidate.layout}


def same_mode(asked: Timing, stored: Mapping[str, Any]) -> bool:
    """Whether the settings that both sides have agree."""
    wanted = records.timing_mode(asked)
    return all(wanted[name] == stored[name] for name in wanted.keys() & stored.keys())


def measurement_columns(m: Measurement) -> Row:
    """Columns of a checked measurement, without its row numbers."""
    records.check_measurement(m)
    return {
        "num_tokens": m.num_tokens,
        "routing": m.routing,
        "mode": records.to_json(records.timing_mode(m.timing)),
        "status": m.status,
        "accuracy": m.accuracy,
        "reason": m.reason,
        "times_us": records.to_json([float(t) for t in m.times_us]),
        "timing": records.to_json(dict(m.timing)),
        "errors": records.to_json(asdict(m.errors)) if m.errors else None,
        "pack_ms": m.pack_ms,
        "first_call_ms": m.first_call_ms,
        "verify_ms": m.verify_ms,
        "weight_bytes": m.weight_bytes,
        "created": now(),
    }


def measurement(row: Row) -> Measurement:
    m = Measurement(
        problem=records.problem_from_text(row["problem_spec"]),
        num_tokens=row["num_tokens"],
        routing=row["routing"],
        candidate=_candidate(row),
        device=records.device_from_texts(row["device_spec"], row["versions_spec"]),
        status=row["status"],
        accuracy=row["accuracy"],
        reason=row["reason"],
        times_us=tuple(map(float, json.loads(row["times_us"]))),
        errors=records.errors_from_text(row["errors"]),
        pack_ms=row["pack_ms"],
        first_call_ms=row["first_call_ms"],
        verify_ms=row["verify_ms"],
        weight_bytes=row["weight_bytes"],
        timing=tuple(sorted(json.loads(row["timing"]).items())),
    )
    records.check_measurement(m)
    return m


def decision_columns(d: Decision, timing: Timing) -> Row:
    """Columns of a decision, without its row numbers."""
    low, high = d.margin_interval or (None, None)
    numbers = {
        "winner_us": d.winner_us,
        "runner_up_us": d.runner_up_us,
        "margin": d.margin,
        "margin_low": low,
        "margin_high": high,
    }
    for name, value in numbers.items():
        if value is not None and not math.isfinite(value):
            raise StoreError(field_error(f"decision {d.bucket.label}", name, value, "finite"))
    _check_times(d)
    return {
        **numbers,
        "routing": d.routing,
        "mode": records.to_json(records.timing_mode(timing)),
        "bucket_low": d.bucket.low,
        "bucket_high": d.bucket.high,
        "bucket_measured": d.bucket.measured,
        "tie": int(d.tie),
        "accuracy": d.accuracy,
        "why": d.why,
        "rejected": records.to_json([records.rejected_dict(r) for r in d.rejected]),
        "created": now(),
    }


def decision(row: Row) -> StoredDecision:
    low, high = row["margin_low"], row["margin_high"]
    decided = Decision(
        problem=records.problem_from_text(row["problem_spec"]),
        bucket=TokenBucket(row["bucket_low"], row["bucket_high"], row["bucket_measured"]),
        routing=row["routing"],
        winner=_candidate(row),
        winner_us=row["winner_us"],
        runner_up=_candidate(row, "r_") if row["r_backend"] is not None else None,
        runner_up_us=row["runner_up_us"],
        margin=row["margin"],
        margin_interval=None if low is None or high is None else (low, high),
        tie=bool(row["tie"]),
        why=row["why"],
        rejected=tuple(map(records.rejected_from_dict, json.loads(row["rejected"]))),
        accuracy=row["accuracy"],
    )
    _check_times(decided)
    device = records.device_from_texts(row["device_spec"], row["versions_spec"])
    mode = json.loads(row["mode"])
    withdrawn = bool(row["withdrawn"])
    return StoredDecision(decided, device, mode, row["created"], withdrawn, row["id"])


def _check_times(d: Decision) -> None:
    times = {"winner_us": d.winner_us, "runner_up_us": d.runner_up_us}
    times |= {f"time_us of {r.candidate.key}": r.time_us for r in d.rejected}
    for name, value in times.items():
        if value is not None and not LEAST_US <= value < math.inf:
            expected = f"finite and at least {LEAST_US:g}"
            raise StoreError(field_error(f"decision {d.bucket.label}", name, value, expected))


def entry(row: Row) -> Entry:
    return Entry(
        problem=records.problem_from_text(row["problem_spec"]),
        device=records.device_from_texts(row["device_spec"], row["versions_spec"]),
        routing=row["routing"],
        token_counts=tuple(sorted(json.loads(row["tokens"]))),
        decisions=row["decisions"],
        newest=row["newest"],
    )


def sweep(row: Row) -> Sweep:
    ceilings = row["ceilings"]
    return Sweep(
        id=row["id"],
        device=records.device_from_texts(row["device_spec"], row["versions_spec"]),
        label=row["label"],
        settings=json.loads(row["settings"]),
        ceilings=None if ceilings is None else json.loads(ceilings),
        started=row["started"],
        finished=row["finished"],
        uid=row["uid"],
    )


def parsed(table: str, rows: Iterable[Row], parse: Callable[[Row], T]) -> list[T]:
    """``parse`` of every row; one that is no valid object is left out with a StoreWarning."""
    found: list[T] = []
    for row in rows:
        try:
            found.append(parse(row))
        except (AutoselError, TypeError, ValueError, KeyError, AttributeError) as error:
            text = " ".join(str(error).split())
            number = row.get("id", "?")
            warnings.warn(f"database row {table} {number} ignored: {text}", StoreWarning, 4)
    return found


def _candidate(row: Row, prefix: str = "") -> Candidate:
    names: Sequence[str] = ("backend", "params", "layout")
    backend, params, layout = (row[prefix + name] for name in names)
    return Candidate.of(backend, json.loads(params), layout)
