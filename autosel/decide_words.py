"""What a decision (:mod:`autosel.decide`) says: its reason, and why others were not chosen."""

from __future__ import annotations

from collections.abc import Sequence

from autosel.core import Candidate, Decision, Rejected
from autosel.decide_entry import Entry

#: Rivals that a reason names.
NAMED = 2


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


def slower(
    ranked: Sequence[Entry],
    winner: Entry,
    tied: Sequence[Entry],
    unsettled: Sequence[Entry],
    confidence: float,
) -> list[Rejected]:
    """Everybody but the winner who might have been chosen, in the order of ``ranked``."""
    words = {**dict.fromkeys(unsettled, UNSETTLED), **dict.fromkeys(tied, TIED)}
    return [_slower(e, winner, words.get(e, SLOWER), confidence) for e in ranked if e is not winner]


def _slower(entry: Entry, winner: Entry, words: str, confidence: float) -> Rejected:
    ratio = entry.over(winner)
    span = ratio.interval(confidence)
    if entry.out is not None:
        more = f", {_span(span, confidence)}" if span else ""
        reason = f"{entry.out.text} (looks {_percent(ratio.margin)}{more})"
    else:
        reason = f"{words} {_percent(ratio.margin)} ({_span(span, confidence)})"
    m = entry.measurement
    return Rejected(m.candidate, m.status, reason, m.accuracy, entry.us)


def barred(entry: Entry, winner: Entry | None, confidence: float) -> Rejected:
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


def why(d: Decision, tied: Sequence[Entry], unsettled: Sequence[Entry], confidence: float) -> str:
    """Who won, by how much over whom, and what the samples leave open."""
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


def default_kept(winner: Entry, ranked: Sequence[Entry]) -> str:
    """Said of a built-in setting that won although others were tried."""
    tuned = sum(e.candidate.backend == winner.candidate.backend for e in ranked) - 1
    if not tuned:
        return ""
    return f"; its default settings are kept, none of {tuned} tuned ones is clearly faster"


def why_nothing(rejected: Sequence[Rejected]) -> str:
    """Said where there is no winner: every reason."""
    reasons = "; ".join(f"{r.candidate.key} {r.reason}" for r in rejected)
    return f"nothing usable: none of {len(rejected)} candidates may be chosen ({reasons})"
