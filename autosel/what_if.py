"""What would be chosen under other conditions, and why not a backend that somebody asks about.

From stored samples, without a device: the same decision rules run again on what was measured, with
the conditions added (:mod:`autosel.decide`), or a plan is made for a budget and a workload
(:mod:`autosel.plans`). Nothing is stored and nothing that serves changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autosel import records, registry, samples
from autosel.core import Candidate, Decision, Device, Measurement, Plan, Problem
from autosel.decide import NothingUsable, Requirement, decide
from autosel.errors import AutoselError, NothingUsableError
from autosel.evidence import ratio as compared
from autosel.explanation import Explanation
from autosel.planning import Policy, built_in
from autosel.plans import plan as make_plan


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The answer under other conditions.

    conditions  in words
    outcome     what would be chosen at this token count; None where nothing was measured
    plan        with a budget or a workload: what would stay resident, None without
    refused     why there is no plan, or no answer at all
    ratio       the conditions' time over the one chosen now, ``interval`` its 95 % interval
    """

    conditions: tuple[str, ...]
    outcome: Decision | NothingUsable | None = None
    plan: Plan | None = None
    refused: str = ""
    ratio: float | None = None
    interval: tuple[float, float] | None = None

    @property
    def chosen(self) -> Candidate | None:
        """What would run: the plan's candidate where there is one, else the decision's."""
        if self.plan is not None:
            return self._planned[0]
        return self.outcome.winner if isinstance(self.outcome, Decision) else None

    @property
    def time_us(self) -> float | None:
        if self.plan is not None:
            return self._planned[1]
        return self.outcome.winner_us if isinstance(self.outcome, Decision) else None

    @property
    def _planned(self) -> tuple[Candidate | None, float | None]:
        if self.plan is None or self.outcome is None:
            return None, None
        found = self.plan.bucket(self.outcome.bucket.measured)
        return (None, None) if found is None else (found.candidate, found.time_us)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        chosen = self.chosen
        outcome = self.outcome
        return {
            "conditions": list(self.conditions),
            "chosen": None
            if chosen is None
            else {**records.candidate_dict(chosen), "key": chosen.key},
            "time_us": self.time_us,
            "ratio": self.ratio,
            "interval": None if self.interval is None else list(self.interval),
            "decision": records.decision_dict(outcome) if isinstance(outcome, Decision) else None,
            "rejected": [records.rejected_dict(r) for r in outcome.rejected] if outcome else [],
            "plan": self.plan.to_dict() if self.plan else None,
            "refused": self.refused or None,
        }


@dataclass(frozen=True, slots=True)
class WhyNot:
    """Why a backend is not what is used: its best candidate beside the one that is.

    status   as measured; ``chosen``, ``not measured``, or ``unsupported``
    reason   in words
    ratio    its time over the chosen one's, ``interval`` its 95 % interval; None without times
    """

    backend: str
    status: str
    reason: str
    candidate: Candidate | None = None
    time_us: float | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "backend": self.backend,
            "status": self.status,
            "reason": self.reason,
            "candidate": None if self.candidate is None else self.candidate.key,
            "time_us": self.time_us,
            "ratio": self.ratio,
            "interval": None if self.interval is None else list(self.interval),
        }


def what_if(
    answer: Explanation,
    policy: Policy,
    *,
    planned: bool = False,
    everything: Sequence[Measurement] = (),
    layers: int = 1,
    certified: Requirement | None = None,
) -> WhatIf:
    """What ``answer`` would be under ``policy``'s conditions.

    planned     whether its budget and workload count as well; then ``everything`` that was
                measured of the layer is planned for, in ``layers`` alike layers
    certified   who is certified for ``policy.require``, where that asks for anything
    """
    words = policy.words
    conditions = (*policy.conditions, certified) if certified else policy.conditions
    if planned:
        words = (
            *words,
            f"packed weights of at most {policy.budget}",
            f"{policy.workload.name} traffic",
        )
    there = answer.measurements
    if not there:
        return WhatIf(words, refused="nothing was measured here at this token count")
    if not any(m.times_us for m in there):
        return WhatIf(words, refused="only the decision is kept, not the samples behind it")
    defaults = built_in(answer.problem, answer.device, there)
    outcome = decide(
        there,
        bucket=answer.bucket,
        defaults=defaults,
        allow_a8=policy.allow_a8,
        require=conditions,
    )
    made, refused = None, ""
    if planned:
        try:
            made = make_plan(
                everything,
                workload=policy.workload,
                budget=policy.budget,
                layers=layers,
                defaults=built_in(answer.problem, answer.device, everything),
                allow_a8=policy.allow_a8,
                require=conditions,
                requirements=policy.words,
            )
        except NothingUsableError as error:
            refused = str(error)
    if isinstance(outcome, NothingUsable):
        refused = refused or outcome.why
    found = WhatIf(words, outcome, made, refused)
    now, then = _row(there, answer.used), _row(there, found.chosen)
    if now is None or then is None:
        return found
    ratio, interval = _ratio(then, now)
    return replace(found, ratio=ratio, interval=interval)


def why_not(answer: Explanation, backend: str) -> WhyNot:
    """Why ``backend`` is not used for ``answer``'s question.

    Raises AutoselError, with close names, when there is no such backend.
    """
    there = [m for m in answer.measurements if m.candidate.backend == backend]
    if not there:
        name = registry.get(backend).name  # a mistyped name is refused here
        if name != backend:
            return why_not(answer, name)
        return _unmeasured(backend, answer.problem, answer.device)
    if answer.used.backend == backend and answer.status == "tuned":
        return WhyNot(backend, "chosen", answer.why, answer.used)
    right = [m for m in there if m.status == "ok" and m.times_us]
    if not right:
        worst = there[0]
        return WhyNot(backend, worst.status, worst.reason, worst.candidate)
    best = min(right, key=lambda m: samples.estimate(m).us)
    said = {r.candidate: r.reason for r in answer.rejected}.get(best.candidate, "")
    now = _row(answer.measurements, answer.used)
    ratio, interval = _ratio(best, now) if now is not None else (None, None)
    return WhyNot(
        backend, best.status, said or "it was right and timed, and is not the one chosen",
        best.candidate, samples.estimate(best).us, ratio, interval,
    )  # fmt: skip


def _unmeasured(backend: str, problem: Problem, device: Device) -> WhyNot:
    try:
        support = registry.get(backend).supports(problem, device)
    except AutoselError as error:
        return WhyNot(backend, "not measured", str(error))
    if support:
        return WhyNot(backend, "not measured", "it supports this layer here; a sweep measures it")
    return WhyNot(backend, "unsupported", str(support))


def _row(there: Sequence[Measurement], candidate: Candidate | None) -> Measurement | None:
    found = {m.candidate: m for m in there if m.status == "ok" and m.times_us}
    return found.get(candidate) if candidate is not None else None


def _ratio(slow: Measurement, fast: Measurement) -> tuple[float, tuple[float, float] | None]:
    if slow.candidate == fast.candidate:
        return 1.0, (1.0, 1.0)
    ratio = compared(slow, fast)
    interval = ratio.interval(0.95)
    return 1 + ratio.margin, None if interval is None else (1 + interval[0], 1 + interval[1])
