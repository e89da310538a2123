"""The "what if" and "why not" options of ``explain``, and their answers as text."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import click

from autosel.cli.options import names
from autosel.cli.report import Table
from autosel.cli.text import percent_text, time_text

if TYPE_CHECKING:
    from autosel.core import Problem
    from autosel.explanation import Explanation
    from autosel.planning import Policy
    from autosel.store import Store
    from autosel.what_if import WhatIf, WhyNot

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Conditions:
    """What is asked beside the plain question; None or empty where an option was not given."""

    exclude: tuple[str, ...] = ()
    allow_a8: bool = False
    weight_budget: str | None = None
    histogram: str | None = None
    why_not: tuple[str, ...] = ()

    @property
    def planned(self) -> bool:
        return self.weight_budget is not None or self.histogram is not None

    @property
    def changed(self) -> bool:
        """Whether anything else than now is asked about."""
        return bool(self.exclude) or self.allow_a8 or self.planned

    def policy(self, require: tuple[str, ...] = ()) -> Policy:
        """Checked, with the properties that are required anyway.

        Raises AutoselError in one line for a name, a budget or a file that is none.
        """
        from autosel import planning
        from autosel.weight_budget import WeightBudget
        from autosel.workload import DEFAULT, load

        return planning.Policy(
            workload=load(self.histogram or DEFAULT),
            budget=WeightBudget.parse(self.weight_budget or "1.0x"),
            allow_a8=self.allow_a8,
            exclude=planning.names(self.exclude),
            require=require,
        )


_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--exclude", type=names, metavar="NAME,NAME,...", default=(),
        help="What if: without these backends.",
    ),
    click.option(
        "--allow-a8", is_flag=True,
        help="What if: with backends that quantise activations to 8 bits.",
    ),
    click.option(
        "--weight-budget", metavar="1.0x|1.5x|12GiB",
        help="What if: packed weights may take this much (copies, or bytes of all layers).",
    ),
    click.option(
        "--histogram", metavar="FILE|PRESET",
        help="What if: calls by tokens are these, as for `autosel plan` (budget 1.0x if none).",
    ),
    click.option(
        "--why-not", type=names, metavar="NAME,NAME,...", default=(),
        help="Why these backends are not chosen.",
    ),
)  # fmt: skip


def conditions_options(function: F) -> F:
    """Adds the options of :class:`Conditions`; the function gets them as ``conditions``."""

    @functools.wraps(function)
    def gathered(**kwargs: Any) -> Any:
        chosen = Conditions(**{item.name: kwargs.pop(item.name) for item in fields(Conditions)})
        return function(conditions=chosen, **kwargs)

    wrapped: Any = gathered
    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[no-any-return]


def answered(
    answer: Explanation, conditions: Conditions, policy: Policy, store: Store, layers: int,
    timing: dict[str, Any],
) -> tuple[WhatIf | None, list[WhyNot]]:  # fmt: skip
    """The answers to what was asked beside the plain question."""
    from autosel.requirements import Required
    from autosel.what_if import what_if, why_not

    whys = [why_not(answer, name) for name in conditions.why_not]
    if not conditions.changed:
        return None, whys
    everything: list[Any] = []
    if conditions.planned:
        mode = tuple(sorted(timing.items()))
        problem: Problem = answer.problem
        everything = store.measurements(problem, answer.device, answer.routing, timing=mode)
        everything = everything or list(answer.measurements)
    certified = Required.stored(policy.require, store, answer.problem, answer.device)
    found = what_if(
        answer, policy, planned=conditions.planned, everything=everything, layers=layers,
        certified=certified or None,
    )  # fmt: skip
    return found, whys


def condition_parts(label: str, found: WhatIf | None, whys: list[WhyNot]) -> list[str | Table]:
    """The answers for people."""
    parts: list[str | Table] = []
    if found is not None:
        parts += _what_if(label, found)
    if whys:
        rows = [
            (
                why.backend, why.candidate.key if why.candidate else "-", why.status,
                time_text(why.time_us), ratio_text(why.ratio, why.interval), why.reason,
            )
            for why in whys
        ]  # fmt: skip
        columns = ("why not", "its best", "status", ">time", "beside the chosen", "reason")
        parts.append(Table(columns, rows))
    return parts


def _what_if(label: str, found: WhatIf) -> list[str | Table]:
    from autosel.cli.plans import plan_parts
    from autosel.core import Decision

    rows = [("what if", "; ".join(found.conditions))]
    chosen = found.chosen
    if chosen is not None:
        rows += [
            ("chosen then", chosen.key),
            ("time", time_text(found.time_us)),
            ("beside now", ratio_text(found.ratio, found.interval)),
        ]
        if isinstance(found.outcome, Decision) and found.plan is None:
            rows.append(("why", found.outcome.why))
    if found.refused:
        rows.append(("no answer" if chosen is None else "no plan", found.refused))
    parts: list[str | Table] = [Table(("question", "answer"), rows)]
    if found.plan is not None:
        parts += plan_parts(label, found.plan)
    return parts


def ratio_text(ratio: float | None, interval: tuple[float, float] | None) -> str:
    """``12.3 % longer (95 % interval 11.0 to 13.6 %)``, ``the same candidate`` or ``-``."""
    if ratio is None:
        return "-"
    if interval == (1.0, 1.0):
        return "the same candidate"
    sense = "longer" if ratio >= 1 else "less"
    text = f"{percent_text(abs(ratio - 1))} {sense}"
    if interval is not None:
        low, high = (percent_text(part - 1) for part in interval)
        text += f" (95 % interval {low.removesuffix(' %')} to {high})"
        text += ", not settled" if interval[0] <= 1 <= interval[1] else ""
    return text
