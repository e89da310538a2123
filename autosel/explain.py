"""Why a backend was chosen for a layer, or why nothing was: read from the store, no device work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from autosel import buckets, identity, records
from autosel.core import Candidate, Decision, Device, Measurement, Problem, Rejected, TokenBucket
from autosel.decide import NothingUsable, decide
from autosel.errors import NothingUsableError
from autosel.store import Store

#: Runs every layer on every device, so it is what an untuned layer falls back to.
FALLBACK = Candidate("emulation")


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer to one question: this layer, these tokens, this routing, this device.

    status    ``tuned``: ``decision`` holds. ``nothing usable``: it was measured and no candidate
              may be chosen; ``rejected`` says why each. ``not tuned``: nothing is stored under
              this key; ``nearest`` is the closest entry with each field that differs.
    used      what serves the layer: the winner, or :data:`FALLBACK`
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
    mode = tuple(sorted((timing or {"cache": "cold"}).items()))
    nearest = store.nearest(problem, device, routing)
    measured = nearest.entry.newest if nearest is not None and nearest.exact else None
    asked = _Question(problem, device, num_tokens, routing, measured)
    if nearest is not None and nearest.exact:
        decisions = store.decisions(problem, device, routing, timing=mode)
        decision = _covering(decisions, num_tokens)
        counts = sorted(
            {m.num_tokens for m in store.measurements(problem, device, routing, timing=mode)}
        )
        at = decision.bucket.measured if decision else _measured_at(counts, num_tokens)
        found = (
            store.measurements(problem, device, routing, num_tokens=at, timing=mode) if at else []
        )
        if decision is not None:
            return asked.tuned(decision, found)
        if found:
            # The sweep found nothing to choose, or was stopped before it could.
            bucket = buckets.bucket_for(buckets.buckets(counts), num_tokens)
            verdict = decide(found, bucket=bucket)
            if isinstance(verdict, NothingUsable):
                return asked.unusable(verdict, found)
            return asked.tuned(verdict, found)
    return asked.untuned(nearest)


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

    def tuned(self, decision: Decision, found: list[Measurement]) -> Explanation:
        return self._answer(
            "tuned", decision.winner, decision.why,
            decision=decision, bucket=decision.bucket, rejected=decision.rejected,
            measurements=tuple(found),
        )  # fmt: skip

    def unusable(self, verdict: NothingUsable, found: list[Measurement]) -> Explanation:
        return self._answer(
            "nothing usable", FALLBACK, verdict.why,
            bucket=verdict.bucket, rejected=verdict.rejected, measurements=tuple(found),
        )  # fmt: skip

    def untuned(self, nearest: identity.Nearest | None) -> Explanation:
        if nearest is None:
            why = "the database is empty"
        elif nearest.exact:
            counts = ", ".join(map(str, nearest.entry.token_counts)) or "none"
            why = f"this layer is tuned here, but not for these tokens (measured: {counts})"
        else:
            why = f"nothing is stored for this key; the nearest entry differs: {nearest}"
        return self._answer("not tuned", FALLBACK, why, nearest=nearest)


def _covering(decisions: list[Decision], num_tokens: int) -> Decision | None:
    for decision in decisions:
        if num_tokens in decision.bucket:
            return decision
    return None


def _measured_at(counts: list[int], num_tokens: int) -> int | None:
    """The measured token count that answers for ``num_tokens``."""
    if not counts:
        return None
    try:
        return buckets.bucket_for(buckets.buckets(counts), num_tokens).measured
    except NothingUsableError:
        return None


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
