"""Runs a candidate on the judged cases and watches what it does besides computing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch

from autosel.audit import audit
from autosel.bias import SignedError
from autosel.compare import AUDIT_LIMIT, LIMITS, Verdict, compare
from autosel.core import (
    AccuracyClass,
    CanonicalExperts,
    CertifiedCase,
    ErrorFigures,
    Limits,
    Params,
    Problem,
    Routing,
)
from autosel.errors import field_error
from autosel.guarded import fingerprint, run_guarded, same_bits
from autosel.interfaces import Backend, PackedExperts
from autosel.rivals import evidence, rival_verdict
from autosel.verify_cases import TOKEN_COUNTS, Case, make_cases

__all__ = [
    "AUDIT_LIMIT",
    "LIMITS",
    "TOKEN_COUNTS",
    "Case",
    "Limits",
    "Verdict",
    "compare",
    "fingerprint",
    "make_cases",
    "verify_candidate",
]


def verify_candidate(
    backend: Backend,
    packed: PackedExperts,
    params: Params,
    cases: Sequence[Case],
    *,
    experts: CanonicalExperts | None = None,
    accuracy: AccuracyClass | None = None,
    repeats: int = 2,
) -> Verdict:
    """Run every case ``repeats`` times and judge each output; the first fault ends it.

    Each run gets a copy of the activations and an output of its own, filled with NaN, between
    guards. Besides wrong numbers these are faults: an element not written, a write outside the
    output, a change of the activations or of the packed weights, an exception. What no single
    output shows is judged over all cases together: signed errors (:mod:`autosel.bias`), another
    activation that is nearly the same (:mod:`autosel.rivals`), single wrong weights. The figures
    of an ok are the worst over all cases.

    experts   the weights that were packed: with them, the outputs of all cases together are also
              audited for single wrong weights (:mod:`autosel.audit`), one more pass over them
    accuracy  defaults to the class that the backend declares for ``params``
    """
    accuracy = backend.accuracy(params) if accuracy is None else accuracy
    before = {name: fingerprint(tensor) for name, tensor in packed.tensors.items()}
    runs = _Runs(Verdict("ok", repeatable=None if repeats < 2 else True))
    for case in cases:
        if not runs.add(case, backend, packed, params, accuracy, repeats):
            break
    verdict = replace(runs.total, results=tuple(runs.results), runs=runs.calls)
    if verdict:
        verdict = _together(verdict, runs, accuracy)
    if verdict and experts is not None:
        verdict = _audited(verdict, experts, runs, accuracy)
    changed = [name for name, t in packed.tensors.items() if fingerprint(t) != before[name]]
    if changed:
        reason = f"it changed its packed weights: {', '.join(changed)}"
        if verdict:
            verdict = replace(verdict, status="wrong", reason=reason, fault="weights_untouched")
        verdict = replace(verdict, weights_changed=True)
    return verdict


@dataclass(slots=True)
class _Runs:
    """What the cases showed so far: the verdict, each case's result, the first outputs."""

    total: Verdict
    results: list[CertifiedCase] = field(default_factory=list)
    outputs: list[tuple[Case, torch.Tensor]] = field(default_factory=list)
    calls: int = 0

    def add(
        self,
        case: Case,
        backend: Backend,
        packed: PackedExperts,
        params: Params,
        accuracy: AccuracyClass,
        repeats: int,
    ) -> bool:
        """Run a case and take it into account; False when it ended the verification."""
        worst: Verdict | None = None
        for turn in range(repeats):
            verdict, out = run_guarded(backend, packed, params, case, accuracy)
            self.calls += 1
            if not verdict:
                worst = verdict
                break
            if turn == 0:
                self.outputs.append((case, out))
            elif not same_bits(self.outputs[-1][1], out):
                self.total = replace(self.total, repeatable=False)
            worst = verdict if worst is None else _worst(worst, verdict)
        assert worst is not None
        # Infinite where no rounding at all explains the error.
        bounded = worst.score is not None and math.isfinite(worst.score)
        score = worst.score if bounded else None
        self.results.append(
            CertifiedCase(case.name, len(case.x), case.kind, score, bool(worst), case.optional)
        )
        names = (*self.total.cases, case.name)
        # Only where being wrong in numbers costs no more than a property; a crash is a crash.
        if not worst and case.optional and worst.status in ("wrong", "nonfinite"):
            missed = (*self.total.missed, case.proves)
            self.total = replace(self.total, missed=missed, cases=names)
            return True
        if not worst:
            reason = f"{case.name}: {worst.reason}"
            self.total = replace(
                worst, reason=reason, cases=names, repeatable=self.total.repeatable
            )
            return False
        self.total = replace(_worst(self.total, worst), cases=names)
        return True

    @property
    def independent(self) -> list[tuple[Case, torch.Tensor]]:
        return [(case, out) for case, out in self.outputs if case.independent and len(case.x)]


def _together(verdict: Verdict, runs: _Runs, accuracy: AccuracyClass) -> Verdict:
    """What only the sum over the cases shows."""
    signed = SignedError()
    for case, out in runs.independent:
        signed = signed + SignedError.of(out, case.judged, accuracy)
    verdict = replace(verdict, bias=signed.towards_zero)
    which, found, limit = signed.worst(LIMITS[accuracy].bias)
    if abs(found) > limit:
        what = f"signed error {which}, over rounding"
        reason = field_error("all cases", what, f"{found:.3g}", f"at most {limit:.3g} either way")
        return replace(verdict, status="wrong", reason=reason, score=abs(found) / limit)
    verdict = replace(verdict, rival=evidence(runs.independent, accuracy))
    return with_rival(verdict)


def with_rival(verdict: Verdict) -> Verdict:
    """The verdict, or that another activation was computed."""
    found = rival_verdict(verdict.rival)
    if found is None or not verdict:
        return verdict
    return replace(verdict, status=found.status, reason=found.reason, score=found.score)


def _audited(
    verdict: Verdict, experts: CanonicalExperts, runs: _Runs, accuracy: AccuracyClass
) -> Verdict:
    used = runs.independent
    if not used:
        return verdict
    suspect = audit(
        torch.cat([c.x for c, _ in used]),
        experts,
        Routing(
            torch.cat([c.routing.topk_ids for c, _ in used]),
            torch.cat([c.routing.topk_weights for c, _ in used]),
        ),
        torch.cat([out.to(c.judged.reference.dtype) - c.judged.reference for c, out in used]),
        torch.cat([c.judged.scales[accuracy] for c, _ in used]),
        expert_map=used[0][0].expert_map,
        accuracy=accuracy,
        dtype=used[0][0].judged.reference.dtype,
        shared=_shared(used, experts.problem, accuracy),
    )
    if suspect is None:
        return verdict
    verdict = replace(verdict, audit_score=suspect.score)
    if not suspect.guilty:
        return verdict
    reason = field_error(
        f"audit: {suspect}",
        "evidence of a wrong weight",
        f"{suspect.score:.3g}",
        f"at most {AUDIT_LIMIT:g}",
    )
    return replace(verdict, status="wrong", reason=reason, score=suspect.score / AUDIT_LIMIT)


def _shared(
    used: Sequence[tuple[Case, torch.Tensor]], problem: Problem, accuracy: AccuracyClass
) -> torch.Tensor | None:
    """What outputs have in common: an error of 8 bits in an input, of a router weight on it, or of
    float32 in a sum reaches all of them; sixteen bits round each output by itself."""
    alone = accuracy == "exact" and problem.act_dtype != "float32"
    if alone and not problem.router_weight_on_input:
        return None
    return torch.cat([case.judged.shared[accuracy] for case, _ in used])


def worst_of(before: Verdict, verdict: Verdict) -> Verdict:
    """Two verdicts on one candidate as one: the worse status, the larger figures."""
    if not verdict:
        return replace(verdict, audit_score=verdict.audit_score or before.audit_score)
    total = _worst(replace(verdict, errors=before.errors, score=before.score), verdict)
    repeated = [v.repeatable for v in (before, verdict) if v.repeatable is not None]
    biases = [v.bias for v in (before, verdict) if v.bias is not None]
    scores = [v.audit_score for v in (before, verdict) if v.audit_score is not None]
    return replace(
        total,
        repeatable=all(repeated) if repeated else None,
        bias=max(biases, key=abs, default=None),
        audit_score=max(scores, default=None),
        missed=before.missed + verdict.missed,
        rival=(before.rival[0] + verdict.rival[0], before.rival[1] + verdict.rival[1]),
        cases=before.cases + verdict.cases,
    )


def _worst(total: Verdict, verdict: Verdict) -> Verdict:
    """``total`` with the larger of both scores and, figure by figure, the larger error."""
    if total.errors is None or verdict.errors is None:
        return replace(total, errors=verdict.errors or total.errors, score=verdict.score)
    figures = {
        item.name: max(
            (getattr(total.errors, item.name), getattr(verdict.errors, item.name)),
            # An undefined figure is one without a bound.
            key=lambda value: float("inf") if value is None else abs(value),
        )
        for item in fields(ErrorFigures)
    }
    score = max(total.score or 0.0, verdict.score or 0.0)
    return replace(total, errors=ErrorFigures(**figures), score=score)
