"""Why a backend was chosen for a layer, or why nothing was: read from the store, no device work."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from autosel import buckets, identity, records
from autosel.core import Candidate, Decision, Device, Measurement, Problem, Rejected, TokenBucket
from autosel.decide import NothingUsable, decide
from autosel.fallback import fallback
from autosel.records import Timing
from autosel.store import Store

#: The way of timing that stands for a model at work: other layers' weights fill the caches.
COLD: Mapping[str, Any] = {"cache": "cold"}


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer to one question: this layer, these tokens, this routing, this device.

    status    ``tuned``: ``decision`` holds. ``nothing usable``: it was measured and no candidate
              may be chosen; ``rejected`` says why each. ``not tuned``: nothing is stored under
              this key; ``nearest`` is the closest entry with each field that differs.
    used      what serves the layer: the winner, or the built-in fallback
    measured  when the newest entry of the key was stored (UTC), if there is one
    """

    problem: Problem
    device: Device
    num_tokens: int
    routing: str
    status: str
    used: Candidate
    why: str
    decision: Decision | None = None
    bucket: TokenBucket | None = None
    rejected: tuple[Rejected, ...] = ()
    nearest: identity.Nearest | None = None
    measured: str | None = None
    measurements: tuple[Measurement, ...] = field(default=(), repr=False)

    @property
    def key(self) -> dict[str, Any]:
        """What was looked for in the store."""
        return {
            "problem": self.problem.key,
            "device": self.device.name,
            "driver": self.device.driver,
            "versions": dict(self.device.versions),
            "routing": self.routing,
            "tokens": self.num_tokens,
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "status": self.status,
            "looked_for": self.key,
            "problem": self.problem.to_dict(),
            "device": self.device.to_dict(),
            "used": {**records.candidate_dict(self.used), "key": self.used.key},
            "why": self.why,
            "bucket": None if self.bucket is None else asdict(self.bucket),
            "decision": records.decision_dict(self.decision) if self.decision else None,
            "rejected": [records.rejected_dict(item) for item in self.rejected],
            "nearest": _nearest_dict(self.nearest),
            "measured": self.measured,
            "measurements": [records.measurement_dict(item) for item in self.measurements],
        }


def explain(
    store: Store,
    problem: Problem,
    device: Device,
    num_tokens: int,
    *,
    routing: str = "uniform",
    timing: Mapping[str, Any] | None = None,
) -> Explanation:
    """Explain what is used for ``num_tokens`` tokens of this layer on ``device``.

    Only what was measured on this device, with this driver and these package versions, answers;
    anything nearby is named and never used. ``timing`` picks a way of timing (default: cold
    caches) where a layer was timed in several.
    """
    mode = tuple(sorted((timing or COLD).items()))
    nearest = store.nearest(problem, device, routing)
    measured = nearest.entry.newest if nearest is not None and nearest.exact else None
    asked = _Question(problem, device, num_tokens, routing, measured)
    if nearest is not None and nearest.exact:
        measurements = store.measurements(problem, device, routing, timing=mode)
        decisions = store.decisions(problem, device, routing, timing=mode)
        decision = next((d for d in decisions if num_tokens in d.bucket), None)
        if decision is not None:
            return asked.tuned(decision, _at(measurements, decision.bucket))
        # What failed before it was timed belongs to every way of timing; where another way was
        # timed, those rows alone do not mean that this one was tried.
        tried = any(m.status == "ok" for m in measurements) or not _timed(store, asked)
        if measurements and tried:
            # The sweep found nothing to choose here, or was stopped before it could.
            found = buckets.buckets(m.num_tokens for m in measurements)
            bucket = buckets.bucket_for(found, num_tokens)
            there = _at(measurements, bucket)
            verdict = decide(there, bucket=bucket)
            if isinstance(verdict, NothingUsable):
                return asked.unusable(verdict, there)
            return asked.tuned(verdict, there)
    return asked.untuned(nearest, mode)


@dataclass(frozen=True, slots=True)
class _Question:
    """The key asked about; makes each kind of answer."""

    problem: Problem
    device: Device
    num_tokens: int
    routing: str
    measured: str | None

    def _answer(self, status: str, used: Candidate, why: str, **more: Any) -> Explanation:
        return Explanation(
            self.problem, self.device, self.num_tokens, self.routing, status, used, why,
            measured=self.measured, **more,
        )  # fmt: skip

    def _fallback(self, failed: Collection[str] = ()) -> Candidate:
        return fallback(self.problem, self.device, self.num_tokens, failed=failed)

    def tuned(self, decision: Decision, found: list[Measurement]) -> Explanation:
        return self._answer(
            "tuned", decision.winner, decision.why,
            decision=decision, bucket=decision.bucket, rejected=decision.rejected,
            measurements=tuple(found),
        )  # fmt: skip

    def unusable(self, verdict: NothingUsable, found: list[Measurement]) -> Explanation:
        failed = {item.candidate.backend for item in verdict.rejected}
        return self._answer(
            "nothing usable", self._fallback(failed), verdict.why,
            bucket=verdict.bucket, rejected=verdict.rejected, measurements=tuple(found),
        )  # fmt: skip

    def untuned(self, nearest: identity.Nearest | None, mode: Timing) -> Explanation:
        if nearest is None:
            why = "the database is empty"
        elif nearest.exact:
            way = ", ".join(f"{name}={value}" for name, value in mode)
            why = f"this layer was measured here, but never with {way}"
        else:
            why = f"nothing is stored for this key; the nearest entry differs: {nearest}"
        return self._answer("not tuned", self._fallback(), why, nearest=nearest)


def _timed(store: Store, asked: _Question) -> bool:
    """Whether this layer was timed here in any way."""
    rows = store.measurements(asked.problem, asked.device, asked.routing)
    return any(m.status == "ok" for m in rows)


def _at(measurements: list[Measurement], bucket: TokenBucket) -> list[Measurement]:
    return [m for m in measurements if m.num_tokens == bucket.measured]


def _nearest_dict(nearest: identity.Nearest | None) -> dict[str, Any] | None:
    if nearest is None:
        return None
    entry = nearest.entry
    return {
        "exact": nearest.exact,
        "problem_key": entry.problem.key,
        "problem": entry.problem.to_dict(),
        "device": entry.device.to_dict(),
        "routing": entry.routing,
        "token_counts": list(entry.token_counts),
        "newest": entry.newest,
        "differences": [asdict(item) for item in nearest.differences],
    }
