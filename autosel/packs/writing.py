"""Packs as plain JSON values. :mod:`autosel.packs.reading` is the way back.

Problems, candidates and sources stand once in lists of their own; everything else names them by
their place there. A model's sixty equal layers are one entry.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Generic, TypeVar

from autosel import records
from autosel.core import Candidate, Decision, Problem
from autosel.packs.model import FORMAT, VERSION, Entry, Measured, Pack, Source

T = TypeVar("T")


class _Table(Generic[T]):
    """Values, each once, by their place."""

    def __init__(self) -> None:
        self.places: dict[T, int] = {}

    def __call__(self, value: T) -> int:
        return self.places.setdefault(value, len(self.places))


def to_data(pack: Pack) -> dict[str, Any]:
    """The content of ``pack`` as JSON values, without hash and signature."""
    problems: _Table[Problem] = _Table()
    candidates: _Table[Candidate] = _Table()
    sources: _Table[Source] = _Table()
    models = [
        {
            "name": model.name,
            "kind": model.kind,
            "model_type": model.model_type,
            "quantization_sha256": model.quantization_sha256,
            "shapes_sha256": model.shapes_sha256,
            "layers": [
                {"problem": problems(layer.problem), "indices": list(layer.indices)}
                for layer in model.layers
            ],
        }
        for model in pack.models
    ]
    entries = [_entry_data(entry, problems, candidates, sources) for entry in pack.entries]
    return {
        "format": FORMAT,
        "version": VERSION,
        "models": models,
        "problems": [problem_data(problem) for problem in problems.places],
        "candidates": [records.candidate_dict(candidate) for candidate in candidates.places],
        "sources": [
            {
                "device": source.device.to_dict(),
                "autosel": {"version": source.autosel_version, "commit": source.commit},
                "created": source.created,
                "command": source.command,
            }
            for source in sources.places
        ],
        "entries": entries,
    }


def problem_data(problem: Problem) -> dict[str, Any]:
    """The one form of a problem: equal problems give equal text, 7 and 7.0 included."""
    data = problem.to_dict()
    data["activation"] = {
        key: float(value) if isinstance(value, int) else value
        for key, value in data["activation"].items()
    }
    return data


def _entry_data(
    entry: Entry,
    problems: _Table[Problem],
    candidates: _Table[Candidate],
    sources: _Table[Source],
) -> dict[str, Any]:
    outcomes = [_decision_data(d, candidates) for d in entry.decisions]
    outcomes += [
        {"bucket": asdict(item.bucket), "winner": None, "why": item.why} for item in entry.undecided
    ]
    return {
        "problem": problems(entry.problem),
        "source": sources(entry.source),
        "routing": entry.routing,
        "timing": dict(entry.timing),
        "decided": entry.decided,
        "outcomes": sorted(outcomes, key=lambda item: item["bucket"]["low"]),
        "measurements": [_measured_data(m, candidates) for m in entry.measured],
        "certificates": [certificate.to_dict() for certificate in entry.certificates],
        "plan": entry.plan.to_dict() if entry.plan else None,
    }


def _decision_data(d: Decision, candidates: _Table[Candidate]) -> dict[str, Any]:
    return {
        "bucket": asdict(d.bucket),
        "winner": candidates(d.winner),
        "winner_us": d.winner_us,
        "runner_up": None if d.runner_up is None else candidates(d.runner_up),
        "runner_up_us": d.runner_up_us,
        "margin": d.margin,
        "margin_interval": list(d.margin_interval) if d.margin_interval else None,
        "tie": d.tie,
        "accuracy": d.accuracy,
        "why": d.why,
        "rejected": [
            {
                "candidate": candidates(r.candidate),
                "status": r.status,
                "reason": r.reason,
                "accuracy": r.accuracy,
                "time_us": r.time_us,
            }
            for r in d.rejected
        ],
    }


def _measured_data(m: Measured, candidates: _Table[Candidate]) -> dict[str, Any]:
    row = m.row
    data: dict[str, Any] = {
        "num_tokens": row.num_tokens,
        "candidate": candidates(row.candidate),
        "status": row.status,
        "accuracy": row.accuracy,
        "reason": row.reason,
        "summary": asdict(m.summary) if m.summary else None,
        "errors": asdict(row.errors) if row.errors else None,
        "pack_ms": row.pack_ms,
        "first_call_ms": row.first_call_ms,
        "weight_bytes": row.weight_bytes,
    }
    if row.verify_ms is not None:
        data["verify_ms"] = row.verify_ms
    if row.times_us:
        data |= {"times_us": list(row.times_us), "timing": dict(row.timing)}
    return data
