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
from dataclasses import dataclass, field, replace

from autosel import conditions, samples, stats
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
from autosel.errors import AutoselError, NothingUsableError, field_error
from autosel.racing import CONFIDENCE, EPSILON, RERUNS, SEPARATES, Eliminated
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

#: Rivals that a reason names.
NAMED = 2

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


Ratio = stats.LogRatio | PairedRatio


@dataclass(slots=True, eq=False)
class _Entry:
    """A correct, timed candidate; ``out`` says who showed in their race that it is slower."""

    measurement: Measurement
    us: float
    out: Eliminated[Candidate] | None = None
    _estimate: stats.Estimate | None = field(default=None, repr=False)

    @property
    def candidate(self) -> Candidate:
        return self.measurement.candidate

    def over(self, other: _Entry) -> Ratio:
        """How much slower this one is: round by round where they raced, else independently."""
        ratio = samples.paired(self.measurement, other.measurement)
        return ratio or self._estimated().over(other._estimated())

    def _estimated(self) -> stats.Estimate:
        if self._estimate is None:  # thousands of resamples; a race seldom asks for them
            self._estimate = samples.estimate(self.measurement)
        return self._estimate


def _entry(m: Measurement) -> _Entry:
    times_us = samples.ranking(m).times_us
    return _Entry(m, stats.summarize(times_us, stats.ranking_quantile(m.device.kind)).estimate_us)


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
    allowed: list[_Entry] = []
    a8: list[_Entry] = []
    for m in current:
        reason = _unusable(m, require)
        if reason is not None:
            rejected.append(Rejected(m.candidate, m.status, reason, m.accuracy))
            continue
        entry = _entry(m)
        (allowed if allow_a8 or m.accuracy == "exact" else a8).append(entry)
    if not allowed:
        rejected = [_barred(e, None, confidence) for e in sorted(a8, key=_us)] + rejected
        why = _why_nothing(rejected)
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
    words = {**dict.fromkeys(unsettled, UNSETTLED), **dict.fromkeys(tied, TIED)}
    slower = [
        _slower(e, winner, words.get(e, SLOWER), confidence) for e in ranked if e is not winner
    ]
    barred = [_barred(e, winner, confidence) for e in sorted(a8, key=_us)]
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
    why = _why(decision, tied, unsettled, confidence)
    if winner.candidate in defaults:
        why += _default_kept(winner, ranked)
    if barred and a8[0].us < winner.us:
        why += f"; {barred[0].candidate.key} {barred[0].reason}"
    said = conditions.words([e.measurement for e in ranked])
    return replace(decision, why="; ".join((why, *said)))


def _put_out(
    allowed: Sequence[_Entry], barred: Sequence[_Entry], epsilon: float, confidence: float
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
    ranked: Sequence[_Entry], epsilon: float, confidence: float
) -> tuple[list[_Entry], list[_Entry]]:
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


def _us(entry: _Entry) -> float:
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


def _percent(value: float) -> str:
    percent = 100 * value
    return f"{percent:.3g} %" if abs(percent) < 1000 else f"{percent:.0f} %"


def _span(interval: tuple[float, float] | None, confidence: float) -> str:
    if interval is None:
        return "too few undisturbed samples for an interval"
    low, high = interval
    return f"{confidence:.0%} interval {_percent(low).removesuffix(' %')} to {_percent(high)}"


SLOWER = "slower by"
TIED = "within the noise of the winner:"
UNSETTLED = "not settled, looks slower by"


def _slower(entry: _Entry, winner: _Entry, words: str, confidence: float) -> Rejected:
    ratio = entry.over(winner)
    span = ratio.interval(confidence)
    if entry.out is not None:
        more = f", {_span(span, confidence)}" if span else ""
        reason = f"{entry.out.text} (looks {_percent(ratio.margin)}{more})"
    else:
        reason = f"{words} {_percent(ratio.margin)} ({_span(span, confidence)})"
    m = entry.measurement
    return Rejected(m.candidate, m.status, reason, m.accuracy, entry.us)


def _barred(entry: _Entry, winner: _Entry | None, confidence: float) -> Rejected:
    """An 8-bit-activation candidate that was not allowed, with what it would gain."""
    reason = "not allowed (quantises activations to 8 bits)"
    if winner is not None:
        gain = winner.over(entry)
        verb = "would gain" if gain.margin > 0 else "would gain nothing:"
        reason += (
            f"; {verb} {_percent(gain.margin)} ({_span(gain.interval(confidence), confidence)})"
        )
    m = entry.measurement
    return Rejected(m.candidate, m.status, reason, m.accuracy, entry.us)


def _why(
    d: Decision, tied: Sequence[_Entry], unsettled: Sequence[_Entry], confidence: float
) -> str:
    at = f"{d.winner.key} takes {d.winner_us:.4g} us at {d.bucket.measured} tokens"
    if d.runner_up is None or d.margin is None:
        return f"{at} and is the only candidate that may be chosen"
    span = _span(d.margin_interval, confidence)
    versus = f"{d.runner_up.key} with {d.runner_up_us:.4g} us ({_percent(d.margin)}; {span})"
    rivals = [e.candidate for e in tied if e.candidate != d.winner]
    noisy = [e.candidate for e in unsettled]
    if rivals:
        own = {rival.backend for rival in rivals} == {d.winner.backend}
        which = f"{len(tied)} of its settings" if own else str(len(tied))
        named = "" if own or d.runner_up in rivals else f" with {_some(rivals)}"
        text = f"{at}; tie of {which} within the noise{named}, next {versus}"
        text += "; canonical order decided"
    else:
        text = f"{at}, {'looks ' if d.runner_up in noisy else ''}faster than {versus}"
    if noisy:
        looks, which = ("looks", "is") if len(noisy) == 1 else ("look", "are")
        named = "" if noisy == [d.runner_up] else f" ({_some(noisy)})"
        text += f"; {len(noisy)} that {looks} slower {which} not settled with the samples there are"
        text += named
    return text


def _some(candidates: Sequence[Candidate]) -> str:
    """The first ones by name: a sentence does not hold thirty settings."""
    names = ", ".join(c.key for c in candidates[:NAMED])
    more = len(candidates) - NAMED
    return f"{names} and {more} more" if more > 0 else names


def _default_kept(winner: _Entry, ranked: Sequence[_Entry]) -> str:
    tuned = sum(e.candidate.backend == winner.candidate.backend for e in ranked) - 1
    if not tuned:
        return ""
    return f"; its default settings are kept, none of {tuned} tuned ones is clearly faster"


def _why_nothing(rejected: Sequence[Rejected]) -> str:
    reasons = "; ".join(f"{r.candidate.key} {r.reason}" for r in rejected)
    return f"nothing usable: none of {len(rejected)} candidates may be chosen ({reasons})"
