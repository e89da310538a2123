"""Keeps a layer to its plan: decisions that read no more packed copies than are to be resident.

A plan names the copies and what each token range runs. What it leaves open, or what failed since,
is served by the best candidate on a resident copy. Without a plan one copy is resident: that of the
layout that loses least time under mixed traffic (:data:`autosel.workload.DEFAULT`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autosel import registry
from autosel.buckets import newest_cover
from autosel.core import Candidate, Decision, Measurement, Plan, PlannedBucket, Problem, TokenBucket
from autosel.errors import AutoselError
from autosel.plan_solve import Instance, solve
from autosel.weight_budget import WeightBudget
from autosel.workload import DEFAULT, PRESETS, shares

#: The best candidate of one layout for a bucket; None where it has none.
Best = Callable[[TokenBucket, str], Decision | None]


def by_plan(
    decided: Sequence[Decision], plan: Plan, best: Best, usable: Callable[[PlannedBucket], bool]
) -> list[Decision]:
    """The plan's buckets, then those of ``decided`` for what it does not say.

    ``usable`` says whether a planned candidate may still serve.
    """
    copies = [item.layout for item in plan.resident]
    planned = [_planned(plan, item) for item in plan.buckets if usable(item)]
    # The planned ones come first and are apart, so none of them is cut.
    cover = newest_cover([*planned, *decided])
    return [d if d in planned else _restricted(d, copies, best) for d in cover]


def _restricted(decision: Decision, copies: Sequence[str], best: Best) -> Decision:
    """The best on a resident copy for a decision's tokens.

    Where no resident copy serves, the tokens keep what does: a call must not fail.
    """
    if decision.winner.layout in copies:
        return decision
    found = [d for layout in copies if (d := best(decision.bucket, layout)) is not None]
    chosen = min(found, key=lambda d: (d.winner_us, d.winner.layout), default=decision)
    return compared(replace(chosen, bucket=decision.bucket), decision)


def one_copy(
    decided: Sequence[Decision], best: Best, measured: Sequence[Measurement]
) -> list[Decision]:
    """The same buckets from one copy, or the winners where no layout serves them all.

    A copy of several times the smallest one's bytes is taken only where no smaller one serves.
    """
    known = {m.candidate.layout for m in measured if m.status == "ok"}
    layouts = sorted(known | {d.winner.layout for d in decided})
    if len(layouts) < 2 or not decided:
        return list(decided)
    rows: list[dict[str, Decision]] = []
    for decision in decided:
        found = {
            layout: decision if decision.winner.layout == layout else best(decision.bucket, layout)
            for layout in layouts
        }
        rows.append({layout: d for layout, d in found.items() if d is not None})
    sizes = _sizes(decided[0].problem, rows, measured)
    weights = shares(PRESETS[DEFAULT], [d.bucket for d in decided]).calls
    times = [{layout: d.winner_us for layout, d in row.items()} for row in rows]
    instance = Instance(sizes, times, weights)
    budget = WeightBudget().bytes(min(sizes.values()), 1)
    chosen = solve(instance, budget, copies=1) or solve(instance, None, copies=1)
    if chosen is None:
        return list(decided)
    (layout,) = chosen.layouts
    return [compared(row[layout], d) for row, d in zip(rows, decided, strict=True)]


def compared(decision: Decision, winner: Decision) -> Decision:
    """``decision`` saying what the bucket's winner on another copy would have been."""
    if decision.winner.layout == winner.winner.layout:
        return decision
    loss = 100 * (decision.winner_us / winner.winner_us - 1)
    why = (
        f"{decision.why}; {winner.winner.key} is {loss:.3g} % faster and reads another layout, "
        "which is not resident"
    )
    return replace(decision, why=why)


def _planned(plan: Plan, item: PlannedBucket) -> Decision:
    copies = " + ".join(copy.layout for copy in plan.resident)
    why = f"{item.candidate.key} by the plan for {plan.workload.name} traffic (resident: {copies})"
    if item.best != item.candidate:
        loss = 100 * (item.time_us / item.best_us - 1)
        why += f"; {item.best.key} is {loss:.3g} % faster and not resident"
    return Decision(
        problem=plan.problem,
        bucket=item.bucket,
        routing=plan.routing,
        winner=item.candidate,
        winner_us=item.time_us,
        runner_up=None,
        runner_up_us=None,
        margin=None,
        margin_interval=None,
        tie=item.tie,
        why=why,
        accuracy=item.accuracy,
    )


def _sizes(
    problem: Problem, rows: Sequence[Mapping[str, Decision]], measured: Sequence[Measurement]
) -> dict[str, int]:
    """Bytes of each layout that occurs: measured, else as its backend computes them."""
    sizes = {m.candidate.layout: m.weight_bytes for m in measured if m.weight_bytes}
    for row in rows:
        for layout, decision in row.items():
            sizes.setdefault(layout, _nbytes(problem, decision.winner))
    used = {layout for row in rows for layout in row}
    return {layout: size for layout, size in sizes.items() if layout in used and size is not None}


def _nbytes(problem: Problem, candidate: Candidate) -> int:
    try:
        layout = registry.get(candidate.backend).layout(problem, candidate.params_dict)
        return max(layout.nbytes(problem), 1)
    except AutoselError:  # its package is not here; the candidate will be given up anyway
        return 1
