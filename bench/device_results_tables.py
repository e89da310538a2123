"""``samples.csv`` and ``decisions.csv`` as text; ``results/README.md`` says what columns mean."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from autosel import records, samples
from autosel.core import Candidate, Decision
from autosel.evidence import Evidence
from autosel.packs.build import line
from autosel.plots.speedup import speedup_data
from autosel.racing_pace import PACE

#: One figure a sample each, where the device tells.
OBSERVED = ("switches", "sm_mhz", "memory_mhz", "celsius", "watts", "throttle")
SAMPLE_COLUMNS = (
    "model", "tokens", "routing", "cache", "backend", "params", "layout", "accuracy", "status",
    "reason", "estimate_us", "samples_us", "race", "blocks", "pace", *OBSERVED, "rel_rms",
    "weight_bytes", "pack_ms", "first_call_ms", "verify_ms",
)  # fmt: skip
DECISION_COLUMNS = (
    "model", "tokens", "low", "high", "routing", "cache", "winner", "winner_params", "accuracy",
    "winner_us", "runner_up", "runner_up_params", "runner_up_us", "margin", "margin_low",
    "margin_high", "tie", "vllm_order", "vllm_order_us", "speedup", "speedup_low", "speedup_high",
    "roofline_us", "roofline_share", "why",
)  # fmt: skip


def samples_text(found: Sequence[Evidence]) -> str:
    """One row for each measurement: every layer, token count and candidate."""
    return _text(SAMPLE_COLUMNS, (row for one in found for row in _sample_rows(one)))


def decisions_text(found: Sequence[Evidence]) -> str:
    """One row for each layer and measured token count, those without a winner included."""
    return _text(DECISION_COLUMNS, (row for one in found for row in _decision_rows(one)))


def _sample_rows(one: Evidence) -> Iterator[dict[str, Any]]:
    rows = (m for count in one.token_counts for m in one.at(count))
    for m in sorted(rows, key=lambda m: (m.num_tokens, m.candidate.key, m.candidate.layout)):
        timing, summary = dict(m.timing), samples.summary(m)
        yield {
            **_layer(one),
            "tokens": m.num_tokens,
            **_candidate(m.candidate, "backend", "params"),
            "layout": m.candidate.layout,
            "accuracy": m.accuracy,
            "status": m.status,
            "reason": line(m.reason),
            "estimate_us": _figures(summary.estimate_us) if summary else "",
            "samples_us": records.to_json(list(m.times_us)) if m.times_us else "",
            "race": timing.get("race"),
            "blocks": timing.get("blocks"),
            PACE: timing.get(PACE),
            **{name: timing.get(name) for name in OBSERVED},
            "rel_rms": _figures(m.errors.rel_rms) if m.errors else "",
            "weight_bytes": m.weight_bytes,
            **{name: _figures(getattr(m, name)) for name in _STEPS},
        }


def _decision_rows(one: Evidence) -> Iterator[dict[str, Any]]:
    over: dict[int, Any] = {row["num_tokens"]: row for row in _speedups(one)}
    for outcome in one.outcomes:
        bucket = outcome.bucket
        row: dict[str, Any] = {
            **_layer(one),
            "tokens": bucket.measured,
            "low": bucket.low,
            "high": bucket.high,
            "why": line(outcome.why),
        }
        there = over.get(bucket.measured, {})
        row |= {
            "vllm_order": there.get("baseline"),
            "vllm_order_us": _figures(there.get("baseline_us")),
            "speedup": _figures(there.get("speedup")),
            "speedup_low": _figures(there.get("low")),
            "speedup_high": _figures(there.get("high")),
        }
        if isinstance(outcome, Decision):
            row |= _chosen(one, outcome)
        yield row


def _chosen(one: Evidence, d: Decision) -> dict[str, Any]:
    bound = one.bound(d.bucket.measured)
    low, high = d.margin_interval or (None, None)
    return {
        **_candidate(d.winner, "winner", "winner_params"),
        "accuracy": d.accuracy,
        "winner_us": _figures(d.winner_us),
        **(_candidate(d.runner_up, "runner_up", "runner_up_params") if d.runner_up else {}),
        "runner_up_us": _figures(d.runner_up_us),
        "margin": _figures(d.margin),
        "margin_low": _figures(low),
        "margin_high": _figures(high),
        "tie": "yes" if d.tie else "no",
        "roofline_us": _figures(bound.time_us) if bound else "",
        "roofline_share": _figures(bound.time_us / d.winner_us) if bound else "",
    }


def _speedups(one: Evidence) -> list[dict[str, Any]]:
    found: Any = speedup_data([one]).to_dict("records")
    return list(found)


def _layer(one: Evidence) -> dict[str, Any]:
    cache = dict(one.timing).get("cache", "cold")
    return {"model": one.label, "routing": one.routing, "cache": cache}


def _candidate(candidate: Candidate, name: str, params: str) -> dict[str, str]:
    settings = records.to_json(candidate.params_dict) if candidate.params else ""
    return {name: candidate.backend, params: settings}


_STEPS = ("pack_ms", "first_call_ms", "verify_ms")


def _figures(value: float | None) -> str:
    """Six significant digits; nothing for what is not known."""
    if value is None or math.isnan(value):
        return ""
    return f"{value:.6g}" if abs(value) < 1e6 else f"{value:.0f}"


def _text(columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
