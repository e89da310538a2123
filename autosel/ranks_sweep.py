"""A sweep for a group of ranks: one tunes, all try what won, and all get the same decisions.

Only the leader measures, with no collective inside, and only its database is used. Then every other
rank packs, runs and verifies each winner on its own weights. What one rank cannot run is excluded
for all, and the leader decides again from what it has measured, until every rank can run every
winner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from autosel import registry
from autosel.core import (
    Candidate,
    Decision,
    Device,
    Measurement,
    Problem,
    Reason,
    Rejected,
    Status,
)
from autosel.decide import NothingUsable, Requirement, decide
from autosel.device import detect
from autosel.failures import CAUGHT, failed
from autosel.ranks import Ranks
from autosel.ranks_choice import exchange, meet
from autosel.records import (
    bucket_from_dict,
    candidate_dict,
    candidate_from_dict,
    decision_dict,
    decision_from_dict,
    measurement_dict,
    measurement_from_dict,
    rejected_dict,
    rejected_from_dict,
)
from autosel.requirements import Required
from autosel.roofline import Ceilings
from autosel.sources import WeightSource
from autosel.store import Store
from autosel.timing import Timer, timer_for
from autosel.trial import Bench
from autosel.tune import sweep
from autosel.tune_types import Observer, SweepResult, SweepSettings

#: What excludes a candidate at a token count: rank, status and reason.
Vetoes = dict[int, dict[Candidate, tuple[int, Status, str]]]


def sweep_together(
    source: WeightSource,
    settings: SweepSettings | None = None,
    *,
    ranks: Ranks,
    device: Device | None = None,
    store: Store | None = None,
    observer: Observer | None = None,
    timer: Timer | None = None,
) -> SweepResult:
    """:func:`autosel.tune.sweep` for a group: every rank calls it with its own part of the layer.

    ``store``, ``observer`` and ``timer`` count on the leader. The result has the same decisions on
    every rank; its measurements are the leader's. Raises RankError, the same line on every rank,
    when the leader's sweep fails, a rank is gone, or the parts are not of one layer.
    """
    chosen = settings or SweepSettings()
    here = device or detect()
    meet(ranks, source.problem)

    own: list[SweepResult] = []  # the leader's, with certificates and cuts

    def lead() -> dict[str, Any]:
        own.append(sweep(source, chosen, device=here, store=store, observer=observer, timer=timer))
        return _result_dict(own[0])

    told = _result(ranks.lead(lead))
    result = replace(own[0], outcomes=told.outcomes) if own else told
    vetoes: Vetoes = defaultdict(dict)
    trial = _Trial(source, chosen, here, result, timer)
    try:
        while True:
            faults = [] if ranks.is_leader else trial.faults(result)
            if not _note(vetoes, exchange(ranks, faults)):
                return result
            decide_again = partial(_decided_again, result, vetoes, chosen, here, store)
            result = replace(result, outcomes=tuple(map(_outcome, ranks.lead(decide_again))))
    finally:
        trial.close()


class _Trial:
    """Tries winners on a rank that did not tune."""

    def __init__(
        self,
        source: WeightSource,
        settings: SweepSettings,
        device: Device,
        result: SweepResult,
        timer: Timer | None,
    ) -> None:
        tokens = tuple(outcome.bucket.measured for outcome in result.outcomes)
        clock = timer or timer_for(device, settings.timing)
        self._bench = Bench(source, settings, device, tokens, clock, Observer())
        self._source, self._device = source, device
        self._good: set[tuple[Candidate, int]] = set()

    def faults(self, result: SweepResult) -> list[dict[str, Any]]:
        """Winners that do not run here, each with its token count, status and reason."""
        found = []
        for decision in result.decisions:
            place = (decision.winner, decision.bucket.measured)
            if place in self._good:
                continue
            status, reason = self._try(*place)
            if status == "ok":
                self._good.add(place)
            else:
                found.append(
                    {
                        "candidate": candidate_dict(decision.winner),
                        "num_tokens": decision.bucket.measured,
                        "status": status,
                        "reason": reason,
                    }
                )
        return found

    def close(self) -> None:
        self._bench.close()

    def _try(self, candidate: Candidate, num_tokens: int) -> tuple[Status, str]:
        try:
            backend = registry.get(candidate.backend)
            support = backend.supports(self._source.problem, self._device)
            if not support:
                return "unsupported", str(support)
            own = self._bench.candidate(backend, candidate.params_dict)
            if own.layout != candidate.layout:
                return "failed", f"layout: found {own.layout}, expected {candidate.layout}"
            self._bench.load()
            row = self._bench.attempt(own, num_tokens)
        except CAUGHT as error:
            return failed(error, f"{candidate.backend} trial")
        return row.status, row.reason


def _note(vetoes: Vetoes, everywhere: list[list[dict[str, Any]]]) -> bool:
    """Add what the ranks met; whether that was anything."""
    for rank, faults in enumerate(everywhere):
        for fault in faults:
            candidate = candidate_from_dict(fault["candidate"])
            why = (rank, fault["status"], fault["reason"])
            vetoes[fault["num_tokens"]].setdefault(candidate, why)
    return any(everywhere)


def _decided_again(
    result: SweepResult,
    vetoes: Vetoes,
    settings: SweepSettings,
    device: Device,
    store: Store | None,
) -> list[dict[str, Any]]:
    """The leader's decisions without what a rank cannot run; stored, so that they replace."""
    outcomes: list[Decision | NothingUsable] = []
    for outcome in result.outcomes:
        gone = vetoes.get(outcome.bucket.measured, {})
        if isinstance(outcome, Decision) and outcome.winner in gone:
            outcome = _without(result.measurements, outcome, gone, settings)
            if store is not None and isinstance(outcome, Decision):
                store.add_decision(outcome, device, _timing(result.measurements, outcome))
        outcomes.append(outcome)
    return [_outcome_dict(outcome) for outcome in outcomes]


def _without(
    measurements: tuple[Measurement, ...],
    outcome: Decision,
    gone: Mapping[Candidate, tuple[int, Status, str]],
    settings: SweepSettings,
) -> Decision | NothingUsable:
    rows = [m for m in measurements if m.num_tokens == outcome.bucket.measured]

    def on_all_ranks(m: Measurement) -> Reason | None:
        if m.candidate not in gone:
            return None
        rank, status, reason = gone[m.candidate]
        return Reason("ranks", f"rank {rank}: {status}: {reason}", "all ranks to run it")

    certificates = [m.certificate for m in measurements if m.certificate is not None]
    certified = Required.of(settings.require, certificates)
    conditions: list[Requirement] = [on_all_ranks, certified]
    found = decide(rows, bucket=outcome.bucket, allow_a8=settings.allow_a8, require=conditions)
    return replace(found, rejected=tuple(_marked(item, gone) for item in found.rejected))


def _marked(item: Rejected, gone: Mapping[Candidate, tuple[int, Status, str]]) -> Rejected:
    """A rejected candidate with the status that the rank met instead of the leader's ok."""
    if item.candidate not in gone:
        return item
    rank, status, reason = gone[item.candidate]
    return replace(item, status=status, reason=f"rank {rank}: {reason}")


def _timing(measurements: tuple[Measurement, ...], decision: Decision) -> Any:
    for m in measurements:
        if m.candidate == decision.winner and m.num_tokens == decision.bucket.measured:
            return m.timing
    return ()


# as JSON -------------------------------------------------------------------------------------


def _result_dict(result: SweepResult) -> dict[str, Any]:
    return {
        "label": result.label,
        "routing": result.routing,
        "problem": result.problem.to_dict(),
        "device": result.device.to_dict(),
        "ceilings": asdict(result.ceilings) if result.ceilings else None,
        "measurements": [measurement_dict(m) for m in result.measurements],
        "outcomes": [_outcome_dict(outcome) for outcome in result.outcomes],
    }


def _result(data: Mapping[str, Any]) -> SweepResult:
    return SweepResult(
        problem=Problem.from_dict(data["problem"]),
        device=Device.from_dict(data["device"]),
        label=data["label"],
        routing=data["routing"],
        measurements=tuple(map(measurement_from_dict, data["measurements"])),
        outcomes=tuple(map(_outcome, data["outcomes"])),
        ceilings=Ceilings(**data["ceilings"]) if data["ceilings"] else None,
    )


def _outcome_dict(outcome: Decision | NothingUsable) -> dict[str, Any]:
    if isinstance(outcome, Decision):
        return {"decision": decision_dict(outcome)}
    return {
        "problem": outcome.problem.to_dict(),
        "bucket": asdict(outcome.bucket),
        "routing": outcome.routing,
        "why": outcome.why,
        "rejected": [rejected_dict(item) for item in outcome.rejected],
    }


def _outcome(data: Mapping[str, Any]) -> Decision | NothingUsable:
    if "decision" in data:
        return decision_from_dict(data["decision"])
    return NothingUsable(
        Problem.from_dict(data["problem"]),
        bucket_from_dict(data["bucket"]),
        data["routing"],
        data["why"],
        tuple(map(rejected_from_dict, data["rejected"])),
    )
