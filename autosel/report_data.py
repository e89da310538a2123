"""What a report says: summary, tables, figures' words and commands, as plain data for a page.

Nothing here draws or writes HTML. Every text may hold what strangers wrote; the page escapes it.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from autosel import samples
from autosel.cli.text import bytes_text, percent_text, time_text, tokens_text
from autosel.core import Candidate, Decision, Device
from autosel.core.certificate import PROPERTIES, Certificate
from autosel.evidence import Evidence
from autosel.evidence import ratio as compared
from autosel.plots.speedup import fastest, speedup_data
from autosel.report_verdict import Verdict, verdict
from autosel.safe_text import printable
from autosel.sweep_words import cache_words, sweep_commands
from autosel.words import is_settled, problem_text, settled_text

#: The batch that the summary speaks of unless asked for another.
BATCH = 16


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: what is shown, and the number or text that sorts it."""

    text: str
    sort: float | str = ""

    @staticmethod
    def of(value: object, sort: float | str | None = None) -> Cell:
        text = printable(value)
        return Cell(text, text if sort is None else sort)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the page; columns whose name starts with ``>`` are numbers."""

    id: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class ReportData:
    """The page's words and tables; ``overall`` is the summary in one sentence."""

    title: str
    overall: str
    made: str
    batch: int
    verdicts: tuple[Verdict, ...]
    tables: tuple[Table, ...]
    environment: tuple[Table, ...]
    commands: tuple[str, ...]
    layers: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())


def report_data(
    found: Sequence[Evidence], *, title: str, made: str, batch: int = BATCH, place: str = ""
) -> ReportData:
    """Everything the page says in words and tables about ``found``.

    made   when the report was made, as it is to be shown
    batch  tokens that the summary speaks of; the bucket that holds them answers
    place  the database or pack, for the commands; empty where it is the usual one
    """
    tables = [_decisions(found), _candidates(found), _rejected(found), _certificates(found)]
    return ReportData(
        title=printable(title),
        overall=_overall(found, batch),
        made=made,
        batch=batch,
        verdicts=tuple(verdict(one, batch, place) for one in found),
        tables=tuple(table for table in tables if table.rows),
        environment=tuple(
            _environment(device, number)
            for number, device in enumerate(dict.fromkeys(one.device for one in found))
        ),
        commands=tuple(_commands(found, place)),
        layers=tuple(f"{one.label}: {printable(problem_text(one.problem))}" for one in found),
        notes=tuple(_notes(found)),
    )


def _overall(found: Sequence[Evidence], batch: int) -> str:
    """``At 16 tokens: humming for 4 layers, marlin for 1; 1 of 5 is not settled.``"""
    outcomes = [one.outcome(batch) for one in found]
    chosen = Counter(d.winner.backend for d in outcomes if isinstance(d, Decision))
    if not chosen:
        return f"At {tokens_text(batch)} no layer has a backend that may be used."
    parts = [
        f"{printable(name)} for {count} layer{'' if count == 1 else 's'}"
        for name, count in chosen.most_common()
    ]
    missing = len(outcomes) - sum(chosen.values())
    parts += [f"nothing for {missing}"] if missing else []
    unsettled = sum(isinstance(d, Decision) and not is_settled(d) for d in outcomes)
    verb = "is" if unsettled == 1 else "are"
    rest = f"; {unsettled} of {len(outcomes)} {verb} not settled" if unsettled else ""
    return f"At {tokens_text(batch)}: {', '.join(parts)}{rest}."


def _decisions(found: Sequence[Evidence]) -> Table:
    columns = (
        "layer", ">tokens", "chosen", ">time", "runner-up", ">margin", "95 % interval", "settled",
        "vLLM's choice", ">speed-up", ">roofline",
    )  # fmt: skip
    rows = []
    for one in found:
        speed: Any = speedup_data([one]).set_index("num_tokens").to_dict("index")
        for outcome in one.outcomes:
            bucket = outcome.bucket
            base = speed.get(bucket.measured, {})
            first = (Cell.of(one.label), Cell.of(bucket.label, bucket.low))
            if not isinstance(outcome, Decision):
                rest = (Cell("-", -1.0),) * (len(columns) - 3)
                rows.append((*first, Cell.of("nothing usable"), *rest))
                continue
            point = one.bound(bucket.measured)
            share = point.time_us / outcome.winner_us if point else None
            rows.append(
                (
                    *first,
                    Cell.of(_named(outcome.winner, outcome.accuracy)),
                    _time(outcome.winner_us),
                    Cell.of(outcome.runner_up.backend if outcome.runner_up else "-"),
                    _percent(outcome.margin),
                    Cell.of(_interval(outcome)),
                    Cell.of(settled_text(outcome)),
                    Cell.of(base.get("baseline") or "-"),
                    _factor(base.get("speedup"), base.get("settled")),
                    _percent(share),
                )
            )
    note = (
        "One row for each range of token counts. Margin: how much longer the runner-up takes, the "
        "fastest other backend. Settled: whether another run would choose the same backend; ties "
        "go to a fixed order. Speed-up: "
        "over the backend that vLLM's fixed order takes, at its own fastest settings (? where the "
        "95 % interval includes 1 and it is another backend)."
    )
    return Table("decisions", "What to use", columns, tuple(rows), note)


def _candidates(found: Sequence[Evidence]) -> Table:
    """Each backend's fastest correct setting at each token count."""
    columns = (
        "layer", ">tokens", "backend", "settings", "accuracy", ">time", ">over chosen",
        ">relative error", ">bytes", ">samples",
    )  # fmt: skip
    rows = []
    for one in found:
        for count in one.token_counts:
            there = one.at(count)
            outcome = one.outcome(count)
            winner = outcome.winner if isinstance(outcome, Decision) else None
            chosen = next((m for m in there if m.candidate == winner and m.status == "ok"), None)
            for backend in sorted({m.candidate.backend for m in there}):
                m = fastest(there, backend)
                if m is None:
                    continue
                over = 1 + compared(m, chosen).margin if chosen is not None else None
                error = m.errors.rel_rms if m.errors else None
                rows.append(
                    (
                        Cell.of(one.label),
                        Cell.of(count, float(count)),
                        Cell.of(backend),
                        Cell.of(_settings(m.candidate)),
                        Cell.of(m.accuracy),
                        _time(samples.estimate(m).us),
                        _factor(over, None),
                        Cell("-", -1.0) if error is None else Cell(f"{error:.2e}", error),
                        Cell(bytes_text(m.weight_bytes), float(m.weight_bytes or -1)),
                        Cell.of(len(m.times_us), float(len(m.times_us))),
                    )
                )
    note = (
        "Each backend's fastest setting that was right. Relative error: root mean square over the "
        "reference's, against dequantise and multiply."
    )
    return Table("candidates", "Every backend's best", columns, tuple(rows), note)


def _rejected(found: Sequence[Evidence]) -> Table:
    """Candidates that could not be chosen, token counts with one reason together."""
    columns = ("layer", "candidate", "status", "tokens", "reason")
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    counts: dict[tuple[str, str, str, str], int] = {}
    for one in found:
        for outcome in one.outcomes:
            for item in outcome.rejected:
                if item.status == "ok" and not item.reason.startswith("not allowed"):
                    continue  # slower; the table of backends has it
                key = (one.label, item.candidate.key, item.status, item.reason)
                rows.setdefault(key, []).append(outcome.bucket.label)
                counts[key] = len(one.outcomes)
    made = tuple(
        (
            Cell.of(label), Cell.of(candidate), Cell.of("not allowed" if s == "ok" else s),
            Cell.of("all" if len(labels) == counts[label, candidate, s, reason]
                    else ", ".join(labels)),
            Cell.of(reason),
        )
        for (label, candidate, s, reason), labels in rows.items()
    )  # fmt: skip
    note = "Candidates that were never a choice: not supported, wrong, failed, or not allowed."
    return Table("rejected", "Rejected, with reasons", columns, made, note)


def _certificates(found: Sequence[Evidence]) -> Table:
    columns = ("layer", "candidate", "verdict", "level", ">cases", ">worst share of limit",
               "properties shown", "properties refuted", "weights checked")  # fmt: skip
    rows = [_certificate(one.label, item) for one in found for item in one.certificates]
    note = (
        "What was proven about candidates on this layer's weights. Share of limit: below 1 is "
        "right. Properties: " + "; ".join(f"{k}: {v}" for k, v in PROPERTIES.items()) + "."
    )
    return Table("certificates", "Certificates", columns, tuple(rows), note)


def _certificate(label: str, item: Certificate) -> tuple[Cell, ...]:
    def those(wanted: bool) -> Cell:
        return Cell.of(", ".join(n for n, value in item.properties if value is wanted) or "-")

    audit = {True: "all are the checkpoint's", False: "differ from the checkpoint", None: "no"}
    return (
        Cell.of(label),
        Cell.of(item.candidate.key),
        Cell.of(item.status if item else f"{item.status}: {item.reason}"),
        Cell.of(item.level),
        Cell.of(len(item.cases), float(len(item.cases))),
        Cell("-", -1.0) if item.score is None else Cell(f"{item.score:.2f}", item.score),
        those(True),
        those(False),
        Cell.of(audit[item.audit.passed]),
    )


def _environment(device: Device, number: int) -> Table:
    facts = [
        ("device", device.name or "(no name)"),
        ("kind", device.kind),
        ("compute capability", ".".join(map(str, device.capability)) if device.capability else ""),
        ("multiprocessors", device.multiprocessors),
        ("memory", bytes_text(device.memory_bytes) if device.memory_bytes else ""),
        ("last-level cache", bytes_text(device.cache_bytes) if device.cache_bytes else ""),
        ("threads", device.threads),
        ("driver", device.driver),
        ("instruction sets", " ".join(device.flags)),
        *((f"package {name}", version) for name, version in device.versions),
    ]
    rows = tuple((Cell.of(name), Cell.of(value)) for name, value in facts if value)
    return Table(f"environment-{number}", f"{printable(device.name)}", ("what", "found"), rows)


def _commands(found: Sequence[Evidence], place: str) -> Iterable[str]:
    """Commands that make these measurements again, on the machine they were made on."""
    yield from dict.fromkeys(one.command for one in found if one.command)
    for one in found:
        if one.command:
            continue
        if one.swept or (one.sweeps and one.target):
            for command in [one.swept] if one.swept else sweep_commands(one):
                yield f"{command} --db fresh.db"
            continue
        counts = ",".join(map(str, one.token_counts)) or "1,16"
        target = one.target or f"CHECKPOINT  # {printable(one.label)}"
        routing = "" if one.routing == "uniform" else f" --routing {shlex.quote(one.routing)}"
        words, _, comment = target.partition("  # ")
        options = "".join(f" {word}" for word in cache_words(one))
        command = f"autosel sweep {words} --tokens {counts}{routing}{options} --db fresh.db"
        yield command + (f"  # {comment}" if comment else "")
    if place:
        yield f"autosel diff {shlex.quote(printable(place))} fresh.db"


def _notes(found: Sequence[Evidence]) -> Iterable[str]:
    if any(not one.target and not one.command for one in found):
        yield "CHECKPOINT stands for the model's folder."
    if any(one.figures for one in found):
        yield "Some of this comes from published tables without samples: no intervals there."
    if not any(one.certificates for one in found):
        yield (
            "No certificates are kept with these results: each candidate was compared with the "
            "emulation before it was timed, and its error stands in the table of backends."
        )


def _named(candidate: Candidate, accuracy: str) -> str:
    return candidate.backend + ("" if accuracy == "exact" else f" ({accuracy})")


def _settings(candidate: Candidate) -> str:
    return ", ".join(f"{name}={value}" for name, value in candidate.params) or "-"


def _interval(d: Decision) -> str:
    if d.margin_interval is None:
        return "-"
    low, high = (percent_text(part) for part in d.margin_interval)
    return f"{low.removesuffix(' %')} to {high}"


def _time(us: float) -> Cell:
    return Cell(time_text(us), us)


def _percent(value: float | None) -> Cell:
    return Cell("-", -1.0) if value is None else Cell(percent_text(value), value)


def _factor(value: float | None, settled: object) -> Cell:
    if value is None or pd.isna(value):
        return Cell("-", -1.0)
    return Cell(f"{value:.2f}x" + ("?" if settled is False else ""), value)
