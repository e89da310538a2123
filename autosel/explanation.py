"""Why a backend was chosen for a layer, or why nothing was: from what is stored, no device work."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from autosel import buckets, identity, records
from autosel.core import (
    Candidate,
    Certificate,
    Decision,
    Device,
    Measurement,
    Problem,
    Rejected,
    TokenBucket,
)
from autosel.decide import NothingUsable, decide
from autosel.fallback import fallback
from autosel.records import Timing
from autosel.requirements import Required
from autosel.store import Store
from autosel.tiers import Found, Origin, Tiers

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
    origin    where the decision comes from: the user's database, or another tier of results
    certificates  what is proven about candidates of this layer on this device
    required  properties that were asked for
    told      decisions of packs that may not decide here, and why not (``origin.note``)
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
    origin: Origin | None = None
    told: tuple[Found, ...] = field(default=(), repr=False)
    certificates: tuple[Certificate, ...] = field(default=(), repr=False)
    required: tuple[str, ...] = ()

    @property
    def certificate(self) -> Certificate | None:
        """What is proven about the candidate that is used."""
        return next((c for c in self.certificates if c.candidate == self.used), None)

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
            "origin": self.origin.to_dict() if self.origin else None,
            "required": list(self.required),
            "certificate": self.certificate.to_dict() if self.certificate else None,
            "certificates": [_proven(item) for item in self.certificates],
            "told": [
                {"decision": records.decision_dict(f.decision), "origin": f.origin.to_dict()}
                for f in self.told
            ],
            "measurements": [records.measurement_dict(item) for item in self.measurements],
        }


def explain(
    results: Store | Tiers,
    problem: Problem,
    device: Device,
    num_tokens: int,
    *,
    routing: str = "uniform",
    timing: Mapping[str, Any] | None = None,
    require: Iterable[str] = (),
) -> Explanation:
    """Explain what is used for ``num_tokens`` tokens of this layer on ``device``.

    Only what was measured on this device, with this driver and these package versions, answers,
    or a pack that may decide here (:mod:`autosel.tiers`); anything nearby is named and never used.
    ``timing`` picks a way of timing (default: cold caches) where a layer was timed in several.
    ``require`` names properties (:data:`autosel.core.PROPERTIES`): the stored samples are decided
    again among the candidates that are certified for them. AutoselError for an unknown one.
    A Store alone is asked without the other tiers.
    """
    tiers = results if isinstance(results, Tiers) else None
    store = tiers.store if tiers is not None else results
    assert isinstance(store, Store)
    mode = tuple(sorted((timing or COLD).items()))
    nearest = store.nearest(problem, device, routing)
    measured = nearest.entry.newest if nearest is not None and nearest.exact else None
    required = Required.stored(require, store, problem, device)
    certificates = tuple(store.certificates(problem, device)) if device.name.strip() else ()
    asked = _Question(problem, device, num_tokens, routing, measured, required, certificates)
    here: Explanation | None = None
    if nearest is not None and nearest.exact:
        here = _here(store, asked, mode)
    if here is not None and here.status == "tuned":
        return here
    answers = tiers.answers(problem, device, routing=routing, timing=mode) if tiers else None
    elsewhere = answers.find(num_tokens) if answers else None
    if elsewhere is not None and not asked.lacks(elsewhere):
        return asked.answered(elsewhere)
    if here is not None:
        return here
    if tiers is not None and (nearest is None or not nearest.exact):
        entries = [entry for _, entry in tiers.entries()]
        nearest = identity.nearest(problem, device, entries, routing)
    return asked.untuned(nearest, mode, answers.told(num_tokens) if answers else ())


def _here(store: Store, asked: _Question, mode: Timing) -> Explanation | None:
    """What the user's database says by itself; None where it does not know this way of timing."""
    key = (asked.problem, asked.device, asked.routing)
    measurements = records.of_newest_mode(store.measurements(*key, timing=mode))
    decisions = store.decisions(*key, timing=mode)
    decision = next((d for d in decisions if asked.num_tokens in d.bucket), None)
    if decision is not None and not asked.required:
        return asked.tuned(decision, _at(measurements, decision.bucket))
    # What failed before it was timed belongs to every way of timing; where another way was
    # timed, those rows alone do not mean that this one was tried.
    tried = any(m.status == "ok" for m in measurements) or not _timed(store, asked)
    if not measurements or not tried:
        return None
    # The sweep found nothing to choose here, or was stopped before it could.
    found = buckets.buckets(m.num_tokens for m in measurements)
    bucket = buckets.bucket_for(found, asked.num_tokens)
    there = _at(measurements, bucket)
    verdict = decide(there, bucket=bucket, require=[asked.required] if asked.required else ())
    if isinstance(verdict, NothingUsable):
        return asked.unusable(verdict, there)
    return asked.tuned(verdict, there)


@dataclass(frozen=True, slots=True)
class _Question:
    """The key asked about; makes each kind of answer."""

    problem: Problem
    device: Device
    num_tokens: int
    routing: str
    measured: str | None
    required: Required
    certificates: tuple[Certificate, ...]

    def lacks(self, found: Found) -> str:
        """What another tier's winner is not certified for, by its own certificates."""
        entry = found.answer.entry
        proven = Required.of(self.required.names, entry.certificates if entry else ())
        return proven.lacks(found.decision.winner)

    def _answer(self, status: str, used: Candidate, why: str, **more: Any) -> Explanation:
        origin = more.get("origin")
        return Explanation(
            self.problem, self.device, self.num_tokens, self.routing, status, used, why,
            measured=origin.decided if origin else self.measured,
            certificates=self.certificates, required=self.required.names, **more,
        )  # fmt: skip

    def _fallback(self, failed: Collection[str] = ()) -> Candidate:
        return fallback(self.problem, self.device, self.num_tokens, failed=failed)

    def tuned(self, decision: Decision, found: list[Measurement]) -> Explanation:
        return self._answer(
            "tuned", decision.winner, decision.why,
            decision=decision, bucket=decision.bucket, rejected=decision.rejected,
            measurements=tuple(found),
        )  # fmt: skip

    def answered(self, found: Found) -> Explanation:
        """By another tier than the user's database."""
        decision, rows = found.decision, found.answer.measurements
        return self._answer(
            "tuned", decision.winner, decision.why,
            decision=decision, bucket=decision.bucket, rejected=decision.rejected,
            measurements=tuple(_at(list(rows), decision.bucket)), origin=found.origin,
        )  # fmt: skip

    def unusable(self, verdict: NothingUsable, found: list[Measurement]) -> Explanation:
        failed = {item.candidate.backend for item in verdict.rejected}
        return self._answer(
            "nothing usable", self._fallback(failed), verdict.why,
            bucket=verdict.bucket, rejected=verdict.rejected, measurements=tuple(found),
        )  # fmt: skip

    def untuned(
        self, nearest: identity.Nearest | None, mode: Timing, told: tuple[Found, ...] = ()
    ) -> Explanation:
        if told:
            first = told[0]
            why = (
                f"nothing that may decide here is stored; {first.origin.text} have "
                f"{first.decision.winner.key}, {first.origin.note}"
            )
        elif nearest is None:
            why = "the database is empty"
        elif nearest.exact:
            way = ", ".join(f"{name}={value}" for name, value in mode)
            why = f"this layer was measured here, but never with {way}"
        else:
            why = f"nothing is stored for this key; the nearest entry differs: {nearest}"
        return self._answer("not tuned", self._fallback(), why, nearest=nearest, told=told)


def _proven(certificate: Certificate) -> dict[str, Any]:
    """A certificate in short; the whole of the used candidate's stands beside."""
    return {
        "candidate": {
            **records.candidate_dict(certificate.candidate),
            "key": certificate.candidate.key,
        },
        "status": certificate.status,
        "reason": certificate.reason,
        "level": certificate.level,
        "score": certificate.score,
        "bias": certificate.bias,
        "properties": dict(certificate.properties),
        "created": certificate.created,
    }


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
