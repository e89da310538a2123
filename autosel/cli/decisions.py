"""Decisions as tables, for the sweep's summary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autosel.cli.report import Table
from autosel.cli.text import percent_text, time_text, tokens_text
from autosel.core import Decision
from autosel.decide import NothingUsable
from autosel.words import settled_text

Outcomes = Sequence[Decision | NothingUsable]


def outcome_table(outcomes: Outcomes, title: str) -> Table:
    """One row for each token bucket: who was chosen, who came next, and by how much.

    Backends only; their settings stand in :func:`why_lines`, where they do not widen the table.
    """
    columns = ("tokens", "chosen", ">time", "runner-up", ">margin", "95 % interval", "settled")
    return Table(columns, [_row(outcome) for outcome in outcomes], title)


def _row(outcome: Decision | NothingUsable) -> tuple[str, ...]:
    if isinstance(outcome, NothingUsable):
        return (outcome.bucket.label, "nothing usable", "-", "-", "-", "", "")
    return (
        outcome.bucket.label,
        outcome.winner.backend,
        time_text(outcome.winner_us),
        _runner_up(outcome),
        percent_text(outcome.margin),
        interval_text(outcome),
        settled_text(outcome),
    )


def _runner_up(decision: Decision) -> str:
    if decision.runner_up is None:
        return "-"
    name = decision.runner_up.backend
    return f"{name} (other settings)" if name == decision.winner.backend else name


def interval_text(decision: Decision) -> str:
    """``11.0 to 13.6 %``, or nothing where too few samples were taken."""
    if decision.margin_interval is None:
        return ""
    low, high = decision.margin_interval
    return f"{percent_text(low).removesuffix(' %')} to {percent_text(high)}"


def why_lines(outcomes: Outcomes) -> list[str]:
    """One sentence for each token bucket."""
    return [f"{tokens_text(outcome.bucket.label)}: {outcome.why}" for outcome in outcomes]


def left_out_table(outcomes: Outcomes) -> Table | None:
    """Candidates that were never a choice, with the reason, once for all token counts alike."""
    rows: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        for item in outcome.rejected:
            if item.status != "ok":
                key = (item.candidate.key, item.reason.removeprefix("not supported: "))
                rows.setdefault(key, []).append(outcome.bucket.label)
    if not rows:
        return None
    return Table(
        ("left out", "tokens", "reason"),
        [(who, _tokens(labels, outcomes), why) for (who, why), labels in rows.items()],
    )


def _tokens(labels: Iterable[str], outcomes: Outcomes) -> str:
    found = list(labels)
    return "all" if len(found) == len(outcomes) else ", ".join(found)
