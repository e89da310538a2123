"""Reads what was measured from a file that somebody hands over: a database, a pack or an export.

The file stays as it is: a database is read into memory. Everything in it is somebody else's word,
so it is read strictly, and nothing that is read here decides for a layer.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autosel import records, sqlite_file
from autosel.atomic import SQLITE_HEAD
from autosel.core import Decision, Device, ErrorFigures, Measurement, Problem, TokenBucket
from autosel.errors import AutoselError, StoreError, field_error
from autosel.evidence import Evidence, gather_all, label_of, preset_target
from autosel.packs import content
from autosel.packs.strict_json import parse, read_bytes
from autosel.records import Timing
from autosel.store import Store
from autosel.storefile import Opened
from autosel.tables import Tables


def read(path: str | Path, *, timing: Mapping[str, Any] | None = None) -> list[Evidence]:
    """Every layer in a database, a decision pack or a file of ``autosel export``.

    ``timing`` picks a way of timing (default: cold caches). Raises AutoselError in one line for
    anything else, and for a file in which nothing was measured or decided that way.
    """
    place = Path(path)
    try:
        with place.open("rb") as file:
            head = file.read(len(SQLITE_HEAD))
    except OSError as error:
        raise StoreError(f"{place}: cannot be read: {error.strerror or error}") from None
    found = _database(place, timing) if head == SQLITE_HEAD else _json(place, timing)
    if not found:
        raise StoreError(
            field_error(str(place), "layers measured or decided", "none", "at least one timed so")
        )
    return found


def _database(path: Path, timing: Mapping[str, Any] | None) -> list[Evidence]:
    try:
        opened = Opened(Tables(sqlite_file.read_copy(path), None), None)
    except (sqlite3.Error, OSError, sqlite_file.UnusableError) as error:
        raise StoreError(f"{path}: cannot be read as a database: {error}") from None
    with Store(opened) as store:
        return gather_all(store, timing=timing)


def _json(path: Path, timing: Mapping[str, Any] | None) -> list[Evidence]:
    raw = read_bytes(path)
    try:
        kind = json.loads(raw).get("format")
    except (ValueError, AttributeError, RecursionError):
        kind = None
    if kind == "autosel-export":
        return _export(parse(raw, str(path)), str(path), timing)
    if kind == "autosel-pack":
        return _pack(path, timing)
    raise StoreError(
        field_error(str(path), "content", "something else", "a database, a pack or an export")
    )


def _asked(timing: Mapping[str, Any] | None) -> Timing:
    return tuple(sorted((timing or {"cache": "cold"}).items()))


def _same(asked: Timing, mode: Mapping[str, Any]) -> bool:
    return all(mode[name] == value for name, value in asked if name in mode)


def _pack(path: Path, timing: Mapping[str, Any] | None) -> list[Evidence]:
    asked = _asked(timing)
    pack = content.read(path)
    names = {layers.problem: model.name for model in pack.models for layers in model.layers}
    return [
        Evidence(
            label=f"{names[entry.problem]}: {label_of(entry.problem)}"
            if entry.problem in names
            else label_of(entry.problem),
            problem=entry.problem,
            device=entry.device,
            routing=entry.routing,
            timing=asked,
            # A pack may keep no samples: such a row says that it was right, not how fast.
            measurements=tuple(m.row for m in entry.measured if _whole(m.row)),
            decisions=entry.decisions,
            newest=entry.decided,
            certificates=entry.certificates,
            target=preset_target(entry.problem),
            from_database=False,
        )
        for entry in pack.entries
        if _same(asked, entry.timing)
    ]


def _whole(m: Measurement) -> bool:
    return bool(m.times_us) or m.status != "ok"


def _export(data: Any, where: str, timing: Mapping[str, Any] | None) -> list[Evidence]:
    asked = _asked(timing)
    if data.get("version") != 1:
        raise StoreError(field_error(where, "version", repr(data.get("version")), 1))
    rows: dict[
        tuple[Problem, Device, str], tuple[list[Measurement], list[tuple[Decision, Any]]]
    ] = {}
    for number, item in enumerate(_list(data, "measurements", where)):
        m = _parsed(_measurement, item, f"{where}: measurements[{number}]")
        if _same(asked, records.timing_mode(m.timing)):
            rows.setdefault((m.problem, m.device, m.routing), ([], []))[0].append(m)
    for number, item in enumerate(_list(data, "decisions", where)):
        decision, device = _parsed(_decision, item, f"{where}: decisions[{number}]")
        if _same(asked, item.get("timing") or {}):
            key = (decision.problem, device, decision.routing)
            rows.setdefault(key, ([], []))[1].append((decision, item.get("timing") or {}))
    found = []
    for (problem, device, routing), (measured, decided) in rows.items():
        newest = records.newest_mode(measured)
        kept = [decision for decision, mode in decided if records.fits(mode, newest)]
        found.append(
            Evidence(
                label=label_of(problem),
                problem=problem,
                device=device,
                routing=routing,
                timing=asked,
                measurements=tuple(records.of_newest_mode(measured)),
                decisions=tuple(sorted(kept, key=lambda d: d.bucket.low)),
                target=preset_target(problem),
                from_database=False,
            )
        )
    return found


def _list(data: Any, name: str, where: str) -> list[Any]:
    value = data.get(name)
    if not isinstance(value, list):
        raise StoreError(field_error(where, name, type(value).__name__, "a list"))
    return value


def _parsed(read: Any, item: Any, where: str) -> Any:
    try:
        return read(item)
    except KeyError as error:
        raise StoreError(field_error(where, "field", "nothing", error)) from None
    except (AutoselError, TypeError, ValueError, AttributeError) as error:
        text = " ".join(str(error).split())
        raise StoreError(field_error(where, "record", text, "what export writes")) from None


def _measurement(item: Mapping[str, Any]) -> Measurement:
    errors = item["errors"]
    m = Measurement(
        problem=Problem.from_dict(item["problem"]),
        num_tokens=_count(item["num_tokens"]),
        routing=str(item["routing"]),
        candidate=records.candidate_from_dict(item["candidate"]),
        device=Device.from_dict(item["device"]),
        status=item["status"],
        accuracy=item["accuracy"],
        reason=str(item["reason"]),
        times_us=tuple(map(float, item["times_us"] or ())),
        errors=None if errors is None else ErrorFigures(**errors),
        pack_ms=item["pack_ms"],
        first_call_ms=item["first_call_ms"],
        verify_ms=item.get("verify_ms"),  # older files lack it
        weight_bytes=item["weight_bytes"],
        timing=tuple(sorted(item["timing"].items())),
    )
    records.check_measurement(m)
    return m


def _decision(item: Mapping[str, Any]) -> tuple[Decision, Device]:
    bucket, runner_up, interval = item["bucket"], item["runner_up"], item["margin_interval"]
    low, high, measured = (bucket[name] for name in ("low", "high", "measured"))
    winner_us = float(item["winner_us"])
    if not (math.isfinite(winner_us) and winner_us > 0):
        raise ValueError(f"winner_us {winner_us}")
    decision = Decision(
        problem=Problem.from_dict(item["problem"]),
        bucket=TokenBucket(_count(low), None if high is None else _count(high), _count(measured)),
        routing=str(item["routing"]),
        winner=records.candidate_from_dict(item["winner"]),
        winner_us=winner_us,
        runner_up=None if runner_up is None else records.candidate_from_dict(runner_up),
        runner_up_us=item["runner_up_us"],
        margin=item["margin"],
        margin_interval=None if interval is None else (float(interval[0]), float(interval[1])),
        tie=bool(item["tie"]),
        why=str(item["why"]),
        rejected=tuple(map(records.rejected_from_dict, item["rejected"])),
        accuracy=item["accuracy"],
    )
    return decision, Device.from_dict(item["device"])


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"token count {value!r}")
    return value
