"""Measurements in, decisions out: pure functions without torch, clock or database.

**Who wins.** Candidates that were timed in one race are put through that race again
(:mod:`autosel.racing`): whom it eliminates is slower. Of those that remain the fastest is the one
with the lowest ranking quantile (:mod:`autosel.stats`) of its undisturbed samples
(:mod:`autosel.samples`). Candidates of another race, or of unknown origin, cannot be paired with it
round by round; such a rival counts as slower when a bootstrap interval of their ratio lies above
``1 + epsilon / 2``, at the same strictness as a race's. What is not slower and near the fastest is
a tie, and the canonical order decides. Near means within epsilon, or within 3.5 standard errors
where the race tells less than that; without a race, and at most, it means ``TIE_LIMIT``: the less
is known, the more it matters that reruns agree. What looks slower than that is never preferred by
the order; while it is not shown to be slower (at ``confidence``), the decision is marked as a tie
as well: another run might find it faster.

**Canonical order** of tied candidates: exact weights and activations before 8-bit activations,
fewer bytes of packed weights, backend name, a backend's default before its tuned settings, then
parameters by name and value. It depends on no timing, so reruns and ranks agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from autosel import conditions, decide_words, stats
from autosel.buckets import bucket_for, buckets, newest_cover
from autosel.core import (
    Candidate,
    Decision,
    Measurement,
    Problem,
    Reason,
    Rejected,
    TokenBucket,
)
from autosel.decide_entry import Entry, entry_of
from autosel.errors import AutoselError, NothingUsableError, field_error
from autosel.racing import CONFIDENCE, EPSILON, RERUNS, SEPARATES
from autosel.racing_bounds import PairedRatio
from autosel.racing_stored import rerun
from autosel.records import comparable

__all__ = [
    "NothingUsable",
    "Requirement",
    "backends_only",
    "bucket_for",
    "buckets",
    "canonical_order",
    "decide",
    "max_weight_bytes",
    "newest_cover",
]

#: The order chooses nothing that looks slower than epsilon and than so many standard errors ...
NEAR_STDERRS = 3.5
#: ... and never what looks slower than this.
TIE_LIMIT = 0.15

#: Says why a measured candidate may not be chosen, or None when it may.
Requirement = Callable[[Measurement], Reason | None]


@dataclass(frozen=True, slots=True)
class NothingUsable:
    """No candidate of a bucket may be chosen; ``rejected`` has each with its reason."""

    problem: Problem
    bucket: TokenBucket
    routing: str
    why: str
    rejected: tuple[Rejected, ...] = ()

    def error(self) -> NothingUsableError:
        return NothingUsableError(self.why)


def backends_only(names: Collection[str]) -> Requirement:
    """Requirement: one of these backends."""
    wanted = ", ".join(sorted(names))
    return lambda m: (
        None if m.candidate.backend in names else Reason("backend", m.candidate.backend, wanted)
    )


def max_weight_bytes(limit: int) -> Requirement:
    """Requirement: packed weights of at most ``limit`` bytes; an unknown size does not pass."""
    return lambda m: (
        None
        if m.weight_bytes is not None and m.weight_bytes <= limit
        else Reason("weight_bytes", str(m.weight_bytes), f"at most {limit}")
    )


def decide(
    measurements: Sequence[Measurement],
    *,
    bucket: TokenBucket | None = None,
    defaults: Collection[Candidate] = (),
    allow_a8: bool = False,
    require: Sequence[Requirement] = (),
    epsilon: float = EPSILON,
    confidence: float = CONFIDENCE,
) -> Decision | NothingUsable:
    """Choose for one bucket from what was measured at one token count.

    measurements  one problem, token count, routing, device and timing mode; where a candidate
                  stands in the list twice, the later entry counts (AutoselError when mixed)
    bucket        the tokens the answer holds for; only the measured count when left out
    defaults      the backends' built-in settings, kept unless something is clearly faster
    allow_a8      whether 8-bit activations may win; otherwise the best one is only reported
    require       further conditions; who fails one is rejected with its reason
    """
    if not (0 < confidence < 1 and epsilon >= 0):
        found = f"confidence {confidence}, epsilon {epsilon}"
        raise AutoselError(field_error("decide", "limits", found, "in (0, 1) and at least 0"))
    current = list({m.candidate: m for m in measurements}.values())
    _check_alike(current)
    first = current[0]
    bucket = bucket or TokenBucket(first.num_tokens, first.num_tokens, first.num_tokens)
    rejected: list[Rejected] = []
    allowed: list[Entry] = []
    a8: list[Entry] = []
    for m in current:
        reason = _unusable(m, require)
        if reason is not None:
            rejected.append(Rejected(m.candidate, m.status, reason, m.accuracy))
            continue
        entry = entry_of(m)
        (allowed if allow_a8 or m.accuracy == "exact" else a8).append(entry)
    if not allowed:
        a8.sort(key=_us)
        rejected = [*(decide_words.barred(e, None, confidence) for e in a8), *rejected]
        why = decide_words.why_nothing(rejected)
        return NothingUsable(first.problem, bucket, first.routing, why, tuple(rejected))

    _put_out(allowed, a8, epsilon, confidence)
    ranked = sorted(allowed, key=lambda e: (e.out is not None, e.us))
    tied, unsettled = _not_slower(ranked, epsilon, confidence)
    winner = min(tied, key=lambda e: canonical_order(e.measurement, defaults))
    # Another backend first: settings differ by a per cent. Then by time and not as in `ranked`,
    # where a fast one that its race put out comes after a slow noisy one.
    others = (e for e in allowed if e is not winner)
    mine = winner.candidate.backend
    runner_up = min(others, key=lambda e: (e.candidate.backend == mine, e.us), default=None)
    ratio = runner_up.over(winner) if runner_up else None
    slower = decide_words.slower(ranked, winner, tied, unsettled, confidence)
    barred = [decide_words.barred(e, winner, confidence) for e in sorted(a8, key=_us)]
    decision = Decision(
        problem=first.problem,
        bucket=bucket,
        routing=first.routing,
        winner=winner.candidate,
        winner_us=winner.us,
        runner_up=runner_up.candidate if runner_up else None,
        runner_up_us=runner_up.us if runner_up else None,
        margin=ratio.margin if ratio else None,
        margin_interval=ratio.interval(confidence) if ratio else None,
        tie=len(tied) + len(unsettled) > 1,
        why="",
        rejected=(*slower, *barred, *rejected),
        accuracy=winner.measurement.accuracy,
    )
    why = decide_words.why(decision, tied, unsettled, confidence)
    if winner.candidate in defaults:
        why += decide_words.default_kept(winner, ranked)
    if barred and a8[0].us < winner.us:
        why += f"; {barred[0].candidate.key} {barred[0].reason}"
    said = conditions.words([e.measurement for e in ranked])
    return replace(decision, why="; ".join((why, *said)))


def _put_out(
    allowed: Sequence[Entry], barred: Sequence[Entry], epsilon: float, confidence: float
) -> None:
    """Run their races again. Only what may be chosen puts out what may be chosen."""
    classes = {e.candidate: e in allowed for e in (*allowed, *barred)}
    found = rerun(
        [e.measurement for e in (*allowed, *barred)],
        classes,
        epsilon=epsilon or EPSILON,
        confidence=confidence,
    )
    for entry in (*allowed, *barred):
        entry.out = found.get(entry.candidate)


def _not_slower(
    ranked: Sequence[Entry], epsilon: float, confidence: float
) -> tuple[list[Entry], list[Entry]]:
    """Who is tied with the fastest, itself included, and who looks slower but is not settled."""
    fastest = ranked[0]
    strict = 1 - (1 - confidence) / RERUNS
    tied, unsettled = [], []
    for entry in ranked:
        if entry.out is not None:
            continue
        ratio = entry.over(fastest)
        raced = isinstance(ratio, PairedRatio)
        near = max(math.log1p(epsilon), NEAR_STDERRS * ratio.stderr) if raced else math.inf
        if ratio.log <= min(near, math.log1p(TIE_LIMIT)):
            # A race that both survived has judged them already, as strictly.
            if raced or not ratio.exceeds(SEPARATES * epsilon, strict):
                tied.append(entry)
        # The order would not choose it, so reruns agree without the stricter level.
        elif not ratio.exceeds(SEPARATES * epsilon, confidence):
            unsettled.append(entry)
    return tied, unsettled


def canonical_order(m: Measurement, defaults: Collection[Candidate] = ()) -> tuple[object, ...]:
    """Sort key of tied candidates; see the head of this module."""
    params = tuple((name, _sortable(value)) for name, value in m.candidate.params)
    return (
        m.accuracy != "exact",
        math.inf if m.weight_bytes is None else m.weight_bytes,
        m.candidate.backend,
        m.candidate not in defaults,
        params,
        m.candidate.layout,
    )


def _us(entry: Entry) -> float:
    return entry.us


def _sortable(value: object) -> tuple[str, float, str]:
    number = isinstance(value, int | float)
    kind = "number" if number else type(value).__name__
    return (kind, float(value) if number else 0.0, str(value))  # type: ignore[arg-type]


def _check_alike(measurements: Sequence[Measurement]) -> None:
    if not measurements:
        raise AutoselError(field_error("decide", "measurements", "none", "at least one"))
    first = measurements[0]
    for m in measurements:
        for name in ("problem", "num_tokens", "routing", "device"):
            if getattr(m, name) != getattr(first, name):
                raise AutoselError(
                    field_error(
                        "decide",
                        name,
                        f"{getattr(first, name)!r} and {getattr(m, name)!r}",
                        "one value in all measurements",
                    )
                )
    # Who failed before it was timed has no mode.
    modes = [comparable(m.timing) for m in measurements if m.status == "ok"]
    for mode in modes:
        if mode != modes[0]:
            raise AutoselError(
                field_error("decide", "timing", f"{modes[0]} and {mode}", "one mode in all")
            )


def _unusable(m: Measurement, require: Sequence[Requirement]) -> str | None:
    """Why a measurement cannot win, in words; None when it is correct, timed and permitted."""
    if m.status != "ok":
        return f"{_STATUS_WORDS.get(m.status, m.status)}: {m.reason or 'no reason was recorded'}"
    if m.errors is not None and (m.errors.rel_rms is None or not math.isfinite(m.errors.rel_rms)):
        return "its distance from the reference is not finite"
    try:
        stats.checked(m.times_us)
    except AutoselError as error:
        return f"no usable time: {error}"
    reasons = [str(reason) for check in require if (reason := check(m)) is not None]
    return "; ".join(reasons) or None


_STATUS_WORDS = {
    "unsupported": "not supported",
    "wrong": "wrong result",
    "nonfinite": "result is not finite",
    "oom": "does not fit in memory",
    "timeout": "ran past its time limit",
    "crashed": "took its process down",
}
