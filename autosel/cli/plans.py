"""Plans as tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autosel.cli.report import Table
from autosel.cli.text import bytes_text, percent_text, time_text, tokens_text
from autosel.core import Decision, Measurement, Plan, PlannedBucket
from autosel.records import candidate_dict


def plan_parts(label: str, plan: Plan) -> list[str | Table]:
    """A plan for people: the table by token range, then what it costs and what would change it."""
    layers = f"{plan.layers} layer{'' if plan.layers == 1 else 's'}"
    title = f"{label}: {plan.workload.name} traffic, weight budget {plan.budget}, {layers}"
    columns = (
        "tokens", ">of calls", ">of tokens", "runs", "layout", ">time",
        "fastest of all", ">its time", ">loss",
    )  # fmt: skip
    parts: list[str | Table] = [Table(columns, [_row(item) for item in plan.buckets], title)]
    parts += [_resident(plan), *_next_copy(plan), *_break_even(plan), *_single(plan)]
    parts.append(f"why: {plan.why}")
    return parts


def copies_line(decisions: Sequence[Decision], measured: Sequence[Measurement]) -> str:
    """What running every range's winner would cost in packed copies of the weights."""
    sizes = {m.candidate.layout: m.weight_bytes for m in measured if m.weight_bytes}
    layouts = sorted({d.winner.layout for d in decisions})
    known = [sizes[layout] or 0 for layout in layouts if layout in sizes]
    size = f", {bytes_text(sum(known))} a layer" if len(known) == len(layouts) else ""
    copies = f"{len(layouts)} packed cop{'y' if len(layouts) == 1 else 'ies'} of the weights"
    return f"these winners read {', '.join(layouts)}: {copies}{size}"


def short_lines(plan: Plan) -> list[str]:
    """A plan in two sentences, for the end of a sweep."""
    loss = plan.time_us / plan.best_us - 1
    backends = ", ".join(dict.fromkeys(item.candidate.backend for item in plan.buckets))
    names = " and ".join(item.layout for item in plan.resident)
    return [
        f"plan ({plan.workload.name} traffic, {plan.budget}): {names} resident, "
        f"{bytes_text(plan.resident_bytes)} a layer, runs {backends}; "
        f"{time_text(plan.time_us)} a call, {percent_text(loss)} above the winners",
        *(_next_copy(plan) if plan.next_copy is not None and plan.next_copy.worth else ()),
    ]


def planned_lines(plan: Plan | None, item: PlannedBucket | None) -> list[str]:
    """What a layer runs by its plan at one token count, which need not be the winner."""
    if plan is None or item is None:
        return []
    names = " and ".join(copy.layout for copy in plan.resident)
    text = f"a layer runs {item.candidate.key}: its plan ({plan.workload.name} traffic, "
    text += f"{plan.budget}) keeps {names} resident"
    if item.candidate != item.best:
        saving = percent_text(1 - item.best_us / item.time_us)
        text += f"; {item.best.key} would save {saving} and reads {item.best.layout}"
    return [text]


def planned_dict(plan: Plan | None, item: PlannedBucket | None) -> dict[str, Any] | None:
    """The same for other programs."""
    if plan is None or item is None:
        return None
    return {
        "candidate": {**candidate_dict(item.candidate), "key": item.candidate.key},
        "time_us": item.time_us,
        "workload": plan.workload.name,
        "budget": plan.budget,
        "resident": [copy.layout for copy in plan.resident],
    }


def _row(item: PlannedBucket) -> tuple[str, ...]:
    same = item.best == item.candidate
    return (
        item.bucket.label,
        percent_text(item.calls),
        percent_text(item.tokens),
        item.candidate.backend,
        item.candidate.layout,
        time_text(item.time_us),
        "the same" if same else item.best.backend,
        time_text(item.best_us),
        "" if same else percent_text(item.time_us / item.best_us - 1),
    )


def _resident(plan: Plan) -> str:
    names = " and ".join(item.layout for item in plan.resident)
    whole = bytes_text(plan.resident_bytes * plan.layers)
    return (
        f"resident: {names}; {bytes_text(plan.resident_bytes)} a layer, {whole} in all; "
        f"{time_text(plan.time_us)} a call, {time_text(plan.step_us)} a step of {plan.layers}"
    )


def _next_copy(plan: Plan) -> list[str]:
    """Price and gain of one more copy."""
    price = plan.next_copy
    if price is None:
        return ["one more copy: nothing to gain"]
    names = " and ".join(item.layout for item in price.resident)
    gain = f"{time_text(price.gain_us)} a call ({percent_text(price.gain_us / plan.time_us)}"
    if price.gain_interval is not None:
        low, high = (value / plan.time_us for value in price.gain_interval)
        gain += f"; 95 % interval {percent_text(low).removesuffix(' %')} to {percent_text(high)}"
    cost = bytes_text(price.extra_bytes * plan.layers)
    text = f"one more copy: {names} cost {cost} more in all and save {gain})"
    if not price.worth:
        known = price.gain_interval is not None
        text += "; that is within the noise" if known else "; too few undisturbed samples to tell"
        text += ", so it is not bought"
    elif not price.fits:
        text += f"; over the budget of {plan.budget}"
    if price.worth and price.break_even_calls is not None:
        text += f"; packing is repaid after {price.break_even_calls:,.0f} calls"
    return [text]


def _break_even(plan: Plan) -> list[str]:
    even = plan.break_even
    if even is None:
        return []
    where = tokens_text(", ".join(even.buckets))
    return [
        f"break-even: {even.layout} alone is better where more than "
        f"{percent_text(even.break_even)} of calls have {where}; here {percent_text(even.share)} do"
    ]


def _single(plan: Plan) -> list[str]:
    return [
        f"a {item.server} server with one copy: {item.layout}, {time_text(item.time_us)} a call, "
        f"{percent_text(item.time_us / item.best_us - 1)} above every range's winner"
        for item in plan.single
    ]
