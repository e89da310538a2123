"""Who serves where a decision's winner cannot: by samples where there are any, else by figures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from autosel.core import Candidate, Decision, Measurement, Reason, TokenBucket
from autosel.decide import decide
from autosel.errors import AutoselError

#: Whether a candidate may not serve here.
Banned = Callable[[Candidate], bool]


def again(
    rows: Sequence[Measurement],
    bucket: TokenBucket,
    banned: Banned,
    *,
    allow_a8: bool = False,
    layout: str | None = None,
) -> Decision | None:
    """The decision that the rows of the bucket's token count give without what is banned.

    ``layout`` lets only candidates of that layout win. None where the rows give no decision.
    """
    there = [m for m in rows if m.num_tokens == bucket.measured and not banned(m.candidate)]

    def of_layout(m: Measurement) -> Reason | None:
        same = layout is None or m.candidate.layout == layout
        return None if same else Reason("layout", m.candidate.layout, str(layout))

    try:
        found = decide(there, bucket=bucket, allow_a8=allow_a8, require=[of_layout])
    except AutoselError:  # no rows, or rows of several ways of timing: nothing to go by
        return None
    return found if isinstance(found, Decision) else None


def named(
    decision: Decision, banned: Banned, *, allow_a8: bool = False, layout: str | None = None
) -> Decision | None:
    """The fastest candidate that ``decision`` names and that may serve, by its figures alone.

    Packs without samples have nothing else. None where it names none.
    """
    everyone = [(decision.winner_us, decision.winner, decision.accuracy)]
    everyone += [
        (r.time_us, r.candidate, r.accuracy)
        for r in decision.rejected
        if r.status == "ok" and r.time_us is not None
    ]
    fit = [
        (us, place)
        for place, (us, candidate, accuracy) in enumerate(everyone)
        if (layout is None or candidate.layout == layout)
        and (accuracy == "exact" or allow_a8)
        and not banned(candidate)
    ]
    if not fit:
        return None
    us, candidate, accuracy = everyone[min(fit)[1]]
    if candidate == decision.winner:
        return decision
    why = f"{candidate.key} takes {us:.4g} us; {decision.winner.key} cannot serve here"
    return replace(
        decision, winner=candidate, winner_us=us, accuracy=accuracy, runner_up=None,
        runner_up_us=None, margin=None, margin_interval=None, tie=False, why=why, rejected=(),
    )  # fmt: skip


def without(decision: Decision, gone: Collection[Candidate]) -> Decision:
    """``decision`` with those among the rejected marked that failed on this machine."""
    rejected = tuple(
        replace(r, status="failed", reason="it failed on this machine")
        if r.candidate in gone
        else r
        for r in decision.rejected
    )
    return replace(decision, rejected=rejected)


def instead(
    decision: Decision,
    rows: Sequence[Measurement],
    banned: Banned,
    *,
    allow_a8: bool = False,
    layout: str | None = None,
) -> Decision | None:
    """``decision`` where its winner may serve, else the next best; None where nobody may."""
    fits = layout is None or decision.winner.layout == layout
    if fits and (allow_a8 or decision.accuracy == "exact") and not banned(decision.winner):
        return decision
    found = again(rows, decision.bucket, banned, allow_a8=allow_a8, layout=layout)
    return found or named(decision, banned, allow_a8=allow_a8, layout=layout)
