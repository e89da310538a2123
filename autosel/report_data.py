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
from autosel.safe_text import printable
from autosel.words import device_text, problem_text, settled_text

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


@dataclass(frozen=True, slots=True)
class Verdict:
    """The summary of one layer: what to use, why, what else, and what to run to check it."""

    layer: str
    device: str
    use: str
    why: tuple[str, ...]
    check: tuple[str, ...]
    settled: bool = True


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
    unsettled = sum(isinstance(d, Decision) and d.tie for d in outcomes)
    verb = "is" if unsettled == 1 else "are"
    rest = f"; {unsettled} of {len(outcomes)} {verb} not settled" if unsettled else ""
    return f"At {tokens_text(batch)}: {', '.join(parts)}{rest}."


def verdict(one: Evidence, batch: int, place: str = "") -> Verdict:
    """Which backend to use for one layer at ``batch`` tokens, and why."""
    where = f"{printable(device_text(one.device))}, {one.routing} routing"
    check = _check(one, batch, place)
    outcome = one.outcome(batch)
    if outcome is None:
        return Verdict(
            one.label, where, f"Nothing was measured that answers for {tokens_text(batch)}.",
            (), check, False,
        )  # fmt: skip
    if not isinstance(outcome, Decision):
        return Verdict(
            one.label, where, f"Nothing may be used at {tokens_text(batch)}.",
            ("No candidate was right and allowed; the table of rejected candidates has each "
             "reason.",), check, False,
        )  # fmt: skip
    use = (
        f"Use {outcome.winner.backend} at {tokens_text(batch)}: "
        f"{time_text(outcome.winner_us)} a call."
    )
    why = [*_margin(one, outcome), *_priority(one, outcome), *_accuracy(outcome)]
    if outcome.winner.params:
        why.append(f"Its settings: {printable(outcome.winner.key)}.")
    bucket = outcome.bucket
    if bucket.measured != batch:
        why.append(f"Measured at {tokens_text(bucket.measured)}; it answers for {bucket.label}.")
    changes = _elsewhere(one, outcome)
    if changes:
        why.append(changes)
    return Verdict(one.label, where, printable(use), tuple(why), check, not outcome.tie)


def _margin(one: Evidence, d: Decision) -> list[str]:
    if d.runner_up is None or d.margin is None:
        return ["It is the only candidate that was right and allowed."]
    rival = d.runner_up.backend
    if rival == d.winner.backend:
        rival = f"{rival} with other settings"
    span = ""
    if d.margin_interval is not None:
        low, high = (percent_text(part) for part in d.margin_interval)
        span = f" (95 % interval {low.removesuffix(' %')} to {high})"
    other = _next_backend(one, d) if d.runner_up.backend == d.winner.backend else []
    if not d.tie:
        return [f"The next best, {printable(rival)}, takes {_longer(d.margin)}{span}.", *other]
    settled = settled_text(d).removeprefix("no: ")
    return [
        f"Not settled ({settled}): {printable(rival)} measured {percent_text(d.margin)} longer"
        f"{span}. Where candidates tie, a fixed order decides, so that reruns agree; more samples "
        "may tell them apart.",
        *other,
    ]


def _longer(margin: float) -> str:
    """``27.0 % longer``, or ``5.4 times as long`` from twice on."""
    return f"{percent_text(margin)} longer" if margin < 1 else f"{1 + margin:.3g} times as long"


def _next_backend(one: Evidence, d: Decision) -> list[str]:
    """The best of the other backends that were allowed, in a sentence."""
    there = one.at(d.bucket.measured)
    winner = next((m for m in there if m.candidate == d.winner and m.status == "ok"), None)
    allowed = {r.candidate for r in d.rejected if r.status == "ok" and r.time_us is not None}
    names = {m.candidate.backend for m in there} - {d.winner.backend}
    found = [m for name in names if (m := fastest(there, name)) is not None]
    # A published table has no list of rejected candidates; all in it were right.
    may = [m for m in found if one.figures or m.candidate in allowed]
    found = [m for m in may if m.accuracy == "exact"]
    if winner is None or not found:
        return []
    best = min(found, key=lambda m: samples.estimate(m).us)
    ratio = compared(best, winner)
    return [
        f"The next best backend, {printable(best.candidate.backend)}, takes "
        f"{_longer(ratio.margin)}."
    ]


def _priority(one: Evidence, d: Decision) -> list[str]:
    """What vLLM's fixed order would take, and what that costs."""
    table = speedup_data([one])
    rows: Any = table[table["num_tokens"] == d.bucket.measured].to_dict("records")
    row = rows[0] if rows else None
    if row is None or pd.isna(row["baseline"]) or pd.isna(row["speedup"]):
        return []
    name = printable(row["baseline"])
    if row["baseline"] == row["chosen"]:
        return [f"vLLM's fixed order of backends takes {name} as well."]
    change = row["speedup"] - 1
    sense = "longer" if change > 0 else "less"
    unsure = " (the interval includes no difference)" if row["settled"] is False else ""
    words = [
        f"vLLM's fixed order of backends takes {name}, which takes "
        f"{percent_text(abs(change))} {sense}{unsure}."
    ]
    if "(a8)" in name:
        words.append(f"{name} computes with 8-bit activations: other numbers, not only other time.")
    return words


def _accuracy(d: Decision) -> list[str]:
    if d.accuracy != "exact":
        return ["It quantises activations to 8 bits inside, which was allowed."]
    faster = [r for r in d.rejected if r.accuracy == "a8" and r.status == "ok" and r.time_us]
    best = min(faster, key=lambda r: r.time_us or 0, default=None)
    if best is None or best.time_us is None or best.time_us >= d.winner_us:
        return []
    gain = percent_text(d.winner_us / best.time_us - 1)
    return [
        f"{printable(best.candidate.backend)}, which quantises activations to 8 bits inside, would "
        f"gain {gain}; it is chosen only where allowed (--allow-a8)."
    ]


def _elsewhere(one: Evidence, d: Decision) -> str:
    """Which other backends are chosen at other token counts."""
    others: dict[str, list[str]] = {}
    for outcome in one.outcomes:
        if isinstance(outcome, Decision) and outcome.winner.backend != d.winner.backend:
            others.setdefault(outcome.winner.backend, []).append(outcome.bucket.label)
    parts = [f"{printable(name)} at {', '.join(labels)}" for name, labels in others.items()]
    return f"At other token counts: {'; '.join(parts)} tokens." if parts else ""


def _check(one: Evidence, batch: int, place: str) -> tuple[str, ...]:
    if one.command:
        sweep = f"autosel sweep {one.target} --tokens {batch}" if one.target else ""
        return tuple(line for line in (one.command, sweep) if line)
    target = one.target or "CHECKPOINT"
    db = f" --db {shlex.quote(printable(place))}" if place else ""
    routing = "" if one.routing == "uniform" else f" --routing {shlex.quote(one.routing)}"
    return (
        f"autosel explain {target} --tokens {batch}{routing}{db}",
        f"autosel sweep {target} --tokens {batch}{routing} --db fresh.db",
    )


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
        "One row for each range of token counts. Margin: how much longer the runner-up takes. "
        "Settled: whether another run would choose the same; ties go to a fixed order. Speed-up: "
        "over the backend that vLLM's fixed order takes, at its own fastest settings (? where the "
        "95 % interval includes 1)."
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
        counts = ",".join(map(str, one.token_counts)) or "1,16"
        target = one.target or f"CHECKPOINT  # {printable(one.label)}"
        routing = "" if one.routing == "uniform" else f" --routing {shlex.quote(one.routing)}"
        words, _, comment = target.partition("  # ")
        command = f"autosel sweep {words} --tokens {counts}{routing} --db fresh.db"
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
