"""Reads a pack from plain JSON values and believes nothing that it has not checked."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

from autosel import records
from autosel.core import (
    AccuracyClass,
    Candidate,
    Decision,
    Device,
    Measurement,
    Problem,
    Rejected,
    Scalar,
    Status,
)
from autosel.errors import PackError
from autosel.packs import fields as f
from autosel.packs import parts as p
from autosel.packs.model import (
    FORMAT,
    VERSION,
    Entry,
    Measured,
    Model,
    ModelLayers,
    Pack,
    Source,
    Undecided,
)
from autosel.packs.strict_json import shown

TOP = ("format", "version", "models", "problems", "candidates", "sources", "entries")
KINDS = ("checkpoint", "preset")
_MODEL = ("name", "kind", "model_type", "quantization_sha256", "shapes_sha256", "layers")
_ENTRY = (
    *("problem", "source", "routing", "timing", "decided", "outcomes", "measurements"),
    *("certificates", "plan"),
)
_DECISION = (
    *("bucket", "winner", "winner_us", "runner_up", "runner_up_us", "margin"),
    *("margin_interval", "tie", "accuracy", "why", "rejected"),
)
_MEASURED = (
    *("num_tokens", "candidate", "status", "accuracy", "reason", "summary", "errors"),
    *("pack_ms", "first_call_ms", "weight_bytes"),
)
_REJECTED = ("candidate", "status", "reason", "accuracy", "time_us")
_STATUSES, _ACCURACIES = get_args(Status), get_args(AccuracyClass)


def check_version(data: Any, where: str) -> None:
    """PackError unless ``data`` is a pack of a version that is read here."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = shown(data.get("format")) if isinstance(data, dict) else f.kind(data)
        f.refuse(where, "format", found, f"an object with format {FORMAT!r}")
    version = data.get("version")
    if isinstance(version, int) and not isinstance(version, bool) and version > VERSION:
        raise PackError(
            f"{where}: version: found {shown(version)}, expected at most {VERSION}: written by a "
            "newer autosel"
        )
    if version != VERSION or isinstance(version, bool):
        f.refuse(where, "version", shown(version), VERSION)


def from_data(data: Any, where: str) -> Pack:
    """The pack in ``data``; PackError, in one line with the place, for anything that is not one."""
    check_version(data, where)
    f.object_of(data, where, TOP)
    tables = _Tables(
        f.items(data["problems"], f"{where}: problems", p.problem, most=10_000),
        f.items(data["candidates"], f"{where}: candidates", p.candidate),
        f.items(data["sources"], f"{where}: sources", p.source, most=1000),
    )
    models = f.items(data["models"], f"{where}: models", tables.model, most=1000)
    entries = f.items(data["entries"], f"{where}: entries", tables.entry, most=10_000)
    seen = set()
    for number, entry in enumerate(entries):
        key = (entry.problem, entry.device, entry.routing, records.to_json(dict(entry.timing)))
        if key in seen:
            f.refuse(f"{where}: entries[{number}]", "key", "twice", "each key once")
        seen.add(key)
    return Pack(tuple(models), tuple(entries))


def _mode(value: Any, where: str) -> dict[str, Scalar]:
    """How it was timed. Its texts are words for people, such as ``device events, net``."""
    f.object_of(value, where, (), value if isinstance(value, dict) else ())
    unknown = [key for key in value if key not in records.MODE_NAMES]
    if unknown:
        f.refuse(where, "key", shown(unknown[0]), f"one of {records.MODE_NAMES}")
    return {key: f.scalar(item, f"{where}.{key}") for key, item in value.items()}


class _Tables:
    """Reads what refers to problems, candidates and sources."""

    def __init__(
        self, problems: list[Problem], candidates: list[Candidate], sources: list[Source]
    ) -> None:
        self._problems, self._candidates, self._sources = problems, candidates, sources

    def model(self, value: Any, where: str) -> Model:
        f.object_of(value, where, _MODEL)
        return Model(
            f.name(value["name"], f"{where}.name"),
            f.choice(value["kind"], f"{where}.kind", KINDS),
            f.optional(value["model_type"], f"{where}.model_type", f.name),
            f.optional(value["quantization_sha256"], f"{where}.quantization_sha256", f.sha256),
            f.sha256(value["shapes_sha256"], f"{where}.shapes_sha256"),
            tuple(f.items(value["layers"], f"{where}.layers", self._layers)),
        )

    def _layers(self, value: Any, where: str) -> ModelLayers:
        f.object_of(value, where, ("problem", "indices"))
        indices = f.items(value["indices"], f"{where}.indices", partial(f.integer, high=100_000))
        return ModelLayers(p.at(self._problems, value["problem"], where), tuple(indices))

    def entry(self, value: Any, where: str) -> Entry:
        f.object_of(value, where, _ENTRY)
        problem = p.at(self._problems, value["problem"], f"{where}.problem")
        source = p.at(self._sources, value["source"], f"{where}.source")
        routing = f.name(value["routing"], f"{where}.routing")
        timing = _mode(value["timing"], f"{where}.timing")

        def outcome(item: Any, place: str) -> Decision | Undecided:
            return self._outcome(item, place, problem, routing)

        def measured(item: Any, place: str) -> Measured:
            return self._measured(item, place, problem, routing, source.device, timing)

        outcomes = f.items(value["outcomes"], f"{where}.outcomes", outcome, most=10_000)
        p.check_cover([item.bucket for item in outcomes], f"{where}.outcomes")
        certificates = f.items(value["certificates"], f"{where}.certificates", p.certificate)
        plan = f.optional(value["plan"], f"{where}.plan", p.plan)
        for place, item in (*((f"{where}.certificates", c) for c in certificates), ("plan", plan)):
            if item is not None and (item.problem, item.device) != (problem, source.device):
                f.refuse(f"{where}: {place}", "layer and device", "another", "the entry's own")
        return Entry(
            problem=problem,
            source=source,
            routing=routing,
            timing=timing,
            decided=p.moment(value["decided"], f"{where}.decided"),
            decisions=tuple(item for item in outcomes if isinstance(item, Decision)),
            undecided=tuple(item for item in outcomes if isinstance(item, Undecided)),
            measured=tuple(f.items(value["measurements"], f"{where}.measurements", measured)),
            certificates=tuple(certificates),
            plan=plan,
        )

    def _outcome(
        self, value: Any, where: str, problem: Problem, routing: str
    ) -> Decision | Undecided:
        if isinstance(value, dict) and value.get("winner", 0) is None:
            f.object_of(value, where, ("bucket", "winner", "why"))
            bucket = p.bucket(value["bucket"], f"{where}.bucket")
            return Undecided(bucket, f.text(value["why"], f"{where}.why"))
        f.object_of(value, where, _DECISION)
        at = partial(p.at, self._candidates)
        margin = partial(f.number, low=-1, high=1e12)
        winner = at(value["winner"], f"{where}.winner")
        runner_up = f.optional(value["runner_up"], f"{where}.runner_up", at)
        runner_up_us = f.optional(value["runner_up_us"], f"{where}.runner_up_us", f.time_us)
        if (runner_up is None) != (runner_up_us is None):
            f.refuse(f"{where}.runner_up_us", "value", runner_up_us, "one with each runner_up")
        if runner_up == winner:
            f.refuse(f"{where}.runner_up", "candidate", "the winner", "another one")
        interval = f.optional(
            value["margin_interval"],
            f"{where}.margin_interval",
            lambda found, place: f.items(found, place, margin, most=2),
        )
        if interval is not None and (len(interval) != 2 or interval[0] > interval[1]):
            f.refuse(f"{where}.margin_interval", "value", interval, "[low, high]")
        return Decision(
            problem=problem,
            bucket=p.bucket(value["bucket"], f"{where}.bucket"),
            routing=routing,
            winner=winner,
            winner_us=f.time_us(value["winner_us"], f"{where}.winner_us"),
            runner_up=runner_up,
            runner_up_us=runner_up_us,
            margin=f.optional(value["margin"], f"{where}.margin", margin),
            margin_interval=(interval[0], interval[1]) if interval else None,
            tie=f.boolean(value["tie"], f"{where}.tie"),
            why=f.text(value["why"], f"{where}.why"),
            rejected=tuple(f.items(value["rejected"], f"{where}.rejected", self._rejected)),
            accuracy=f.choice(value["accuracy"], f"{where}.accuracy", _ACCURACIES),
        )

    def _rejected(self, value: Any, where: str) -> Rejected:
        f.object_of(value, where, _REJECTED)
        return Rejected(
            p.at(self._candidates, value["candidate"], where),
            f.choice(value["status"], where, _STATUSES),
            f.text(value["reason"], where),
            f.choice(value["accuracy"], where, _ACCURACIES),
            f.optional(value["time_us"], where, f.time_us),
        )

    def _measured(
        self,
        value: Any,
        where: str,
        problem: Problem,
        routing: str,
        device: Device,
        mode: dict[str, Any],
    ) -> Measured:
        f.object_of(value, where, _MEASURED, ("times_us", "timing", "verify_ms"))
        milliseconds = partial(f.number, low=0, high=1e9)
        times = f.times_us(value.get("times_us", []), f"{where}.times_us")
        status = f.choice(value["status"], f"{where}.status", _STATUSES)
        summary = f.optional(value["summary"], f"{where}.summary", p.summary)
        if (summary is not None) != (status == "ok") or (times and status != "ok"):
            f.refuse(f"{where}.summary", "value", shown(value["summary"]), "one exactly when ok")
        if times and (summary is None or not 0 < summary.samples <= len(times)):
            f.refuse(f"{where}.times_us", "samples", len(times), "those of the summary")
        row = Measurement(
            problem=problem,
            num_tokens=f.integer(value["num_tokens"], f"{where}.num_tokens", 1, 2**31 - 1),
            routing=routing,
            candidate=p.at(self._candidates, value["candidate"], f"{where}.candidate"),
            device=device,
            status=status,
            accuracy=f.choice(value["accuracy"], f"{where}.accuracy", _ACCURACIES),
            reason=f.text(value["reason"], f"{where}.reason"),
            times_us=times,
            errors=f.optional(value["errors"], f"{where}.errors", p.errors),
            pack_ms=f.optional(value["pack_ms"], f"{where}.pack_ms", milliseconds),
            first_call_ms=f.optional(
                value["first_call_ms"], f"{where}.first_call_ms", milliseconds
            ),
            verify_ms=f.optional(value.get("verify_ms"), f"{where}.verify_ms", milliseconds),
            weight_bytes=f.optional(value["weight_bytes"], f"{where}.weight_bytes", f.integer),
            timing=p.observations(value.get("timing", mode), f"{where}.timing"),
        )
        if status != "ok" and not row.reason:
            f.refuse(f"{where}.reason", "text", "nothing", f"why it is {status}")
        return Measured(row, summary)
