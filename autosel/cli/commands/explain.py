"""``autosel explain``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from autosel.cli.conditions import Conditions, condition_parts, conditions_options
from autosel.cli.group import Command
from autosel.cli.options import (
    MAX_TOKENS,
    LayerOptions,
    cache_option,
    db_option,
    device_option,
    layer_options,
    require_option,
    routing_option,
    target_argument,
)
from autosel.cli.report import Report, Table
from autosel.cli.text import percent_text, time_text, tokens_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autosel.core import Decision
    from autosel.explanation import Explanation
    from autosel.predictions import Likely


@click.command(cls=Command)
@target_argument
@click.option(
    "--tokens",
    type=click.IntRange(1, MAX_TOKENS),
    metavar="M",
    required=True,
    help="Tokens in the call.",
)
@conditions_options
@require_option
@layer_options
@routing_option
@device_option
@cache_option
@db_option
def command(
    target: str,
    tokens: int,
    conditions: Conditions,
    require: tuple[str, ...],
    layer_options: LayerOptions,
    routing: str,
    device: str | None,
    cache: str,
    db: str | None,
) -> Report:
    """Say what is used for this many tokens and why, from the database alone.

    Shows the winner, the runner-up and the margin between them, and every other candidate with its
    reason. Where nothing is stored for the layer on this device: what was looked for, the nearest
    entry, each field that differs, what is used instead, and, labelled, what other layers measured
    here predict.

    Asked what if (--exclude, --allow-a8, --weight-budget, --histogram) it decides again from the
    stored samples, with no device, and says what that costs beside what is used now.
    """
    from autosel.cli.conditions import answered
    from autosel.cli.database import reading
    from autosel.cli.plans import planned_dict, planned_lines
    from autosel.cli.target import check_routing, resolve, retype
    from autosel.device import detect
    from autosel.explanation import explain
    from autosel.planning import held
    from autosel.predictions import predict
    from autosel.tiers import mode as tiers_mode
    from autosel.tiers import open_tiers

    policy = conditions.policy(require)
    found = resolve(target, layer_options)
    check_routing(routing, found)
    here = detect(device)
    timing = {"cache": cache}
    model = found.name if found.kind == "checkpoint" else None
    with reading(db) as store, open_tiers(store, model) as tiers:
        answers = [
            (
                layer.label,
                explain(
                    tiers,
                    layer.problem,
                    here,
                    tokens,
                    routing=routing,
                    timing=timing,
                    require=require,
                ),
            )
            for layer in found.layers
        ]
        asked = [
            answered(answer, conditions, policy, store, max(len(layer.indices), 1), timing)
            for layer, (_, answer) in zip(found.layers, answers, strict=True)
        ]
        likely = [
            predict(store, answer.problem, here, tokens, routing=routing, timing=tiers_mode(timing))
            if answer.status == "not tuned"
            else ()
            for _, answer in answers
        ]
        plans = [
            held(store, answer.problem, here, routing, tiers_mode(timing)) for _, answer in answers
        ]
        where = str(store.path) if store.path else None
    again = f"autosel sweep {retype(found, layer_options)}"
    again += "".join(
        f" --{name} {value}"
        for name, value, usual in (
            ("routing", routing, "uniform"), ("cache", cache, "cold"), ("device", device, None),
            ("require", ",".join(require), ""),
        )
        if value != usual
    )  # fmt: skip
    parts: list[str | Table] = []
    planned = [plan.bucket(tokens) if plan else None for plan in plans]
    for (label, answer), (then, whys), guesses, plan, item in zip(
        answers, asked, likely, plans, planned, strict=True
    ):
        parts += [*_heading(label, answer), *_body(answer, again), *_likely(guesses)]
        parts += planned_lines(plan, item)
        parts += [*condition_parts(label, then, whys), ""]
    data = {
        "target": found.name,
        "database": where,
        "answers": [
            {
                "layer": label,
                **answer.to_dict(),
                "what_if": then.to_dict() if then else None,
                "why_not": [why.to_dict() for why in whys],
                "predicted": [guess.to_dict() for guess in guesses],
                "planned": planned_dict(plan, item),
            }
            for (label, answer), (then, whys), guesses, plan, item in zip(
                answers, asked, likely, plans, planned, strict=True
            )
        ],
    }
    return Report(data, parts[:-1])


def _heading(label: str, answer: Explanation) -> list[str]:
    from autosel.words import device_text, problem_text

    return [
        f"{label}: {problem_text(answer.problem)}",
        f"{tokens_text(answer.num_tokens)}, {answer.routing} routing, "
        f"on {device_text(answer.device)}",
    ]


def _body(answer: Explanation, again: str) -> list[str | Table]:
    if answer.decision is not None:
        return [_decision(answer), *_rejected(answer)]
    # Every reason stands in the table; the sentence would say them all again.
    short = f"none of {len(answer.rejected)} candidates may be chosen"
    parts: list[str | Table] = [f"{answer.status}: {short if answer.rejected else answer.why}"]
    if answer.nearest is not None and not answer.nearest.exact:
        parts.append(
            Table(
                ("field", "looked for", "nearest entry has"),
                [(d.field, _value(d.wanted), _value(d.stored)) for d in answer.nearest.differences],
                f"Nearest entry: {answer.nearest.entry.problem.key}",
            )
        )
    parts += [*_told(answer), *_rejected(answer)]
    looked_for = f"{answer.problem.key} on {answer.device.name} with {answer.routing} routing"
    parts.append(f"looked for: {looked_for}")
    parts.append(f"used instead: {answer.used.key}, the first built-in default that fits")
    if answer.status == "not tuned":
        parts.append(f"to tune it: {again}")
    return parts


def _likely(guesses: Sequence[Likely]) -> list[Table]:
    """Predictions, called so in every row: they were not measured and decide nothing."""
    rows = [
        (
            guess.backend, guess.prediction.label, time_text(guess.prediction.us),
            f"{time_text(guess.prediction.low_us)} to {time_text(guess.prediction.high_us)}",
            guess.how,
        )
        for guess in guesses
    ]  # fmt: skip
    columns = ("backend", "status", ">time", "95 % interval", "from")
    title = "Not measured, predicted from other layers on this device; nothing is chosen by it"
    return [Table(columns, rows, title)] if rows else []


def _decision(answer: Explanation) -> Table:
    decision = answer.decision
    assert decision is not None
    bucket = decision.bucket
    rows = [
        ("chosen", decision.winner.key),
        ("time", time_text(decision.winner_us)),
        ("runner-up", decision.runner_up.key if decision.runner_up else "none"),
        ("runner-up's time", time_text(decision.runner_up_us)),
        ("margin", margin_text(decision)),
        ("holds for", f"{tokens_text(bucket.label)}; measured at {bucket.measured}"),
        ("measured", answer.measured or "-"),
        ("why", decision.why),
    ]
    if answer.origin is not None:
        rows.append(("from", answer.origin.text))
    return Table(("decision", "value"), rows)


def _told(answer: Explanation) -> list[Table]:
    """What packs say that may not decide here, and every field that keeps them from it."""
    rows = [
        (
            found.origin.tier,
            found.origin.graded.grade,
            found.decision.winner.key,
            time_text(found.decision.winner_us),
            found.origin.note,
        )
        for found in answer.told
    ]
    columns = ("not used: results", "grade", "chosen there", ">time", "why not")
    return [Table(columns, rows)] if rows else []


def margin_text(decision: Decision) -> str:
    """``12.3 % (95 % interval 11.0 to 13.6 %)``, ``tie: ...``, ``1 too noisy: ...`` or ``-``.

    Where it is another rival than the runner-up that is too noisy, that comes last.
    """
    from autosel.words import is_settled, open_rivals, settled_text

    if decision.margin is None:
        return "-"
    text = percent_text(decision.margin)
    if decision.margin_interval is not None:
        low, high = decision.margin_interval
        text += f" (95 % interval {percent_text(low).removesuffix(' %')} to {percent_text(high)})"
    if is_settled(decision):
        return text
    settled = settled_text(decision).removeprefix("no: ")
    rivals = open_rivals(decision)
    about_another = rivals and decision.runner_up not in rivals
    return f"{text}; {settled}" if about_another else f"{settled}: {text}"


def _rejected(answer: Explanation) -> list[Table]:
    rows = [
        (item.candidate.key, item.accuracy, item.status, time_text(item.time_us), item.reason)
        for item in answer.rejected
    ]
    columns = ("not chosen", "accuracy", "status", ">time", "reason")
    return [Table(columns, rows)] if rows else []


def _value(value: object) -> str:
    return "none" if value is None else str(value)
