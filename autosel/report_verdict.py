"""The summary of one layer in words: what to use, why, how sure that is, and how to check it."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from autosel import registry
from autosel.cli.text import percent_text, time_text, tokens_text
from autosel.core import Decision, TokenBucket
from autosel.evidence import Evidence
from autosel.plots.speedup import speedup_data
from autosel.safe_text import printable
from autosel.sweep_words import cache_words
from autosel.words import device_text, is_settled, open_rivals, quant_text, settled_text


@dataclass(frozen=True, slots=True)
class Verdict:
    """The summary of one layer: what to use, why, what else, and what to run to check it."""

    layer: str
    device: str
    use: str
    why: tuple[str, ...]
    check: tuple[str, ...]
    settled: bool = True


def verdict(one: Evidence, batch: int, place: str = "") -> Verdict:
    """Which backend to use for one layer at ``batch`` tokens, and why."""
    where = (
        f"{quant_text(one.problem)}, {one.problem.act_dtype} activations; measured on "
        f"{printable(device_text(one.device))}, {one.routing} routing"
    )
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
    why = [*_margin(outcome), *_priority(one, outcome), *_accuracy(outcome), *_ours(outcome)]
    if outcome.winner.params:
        why.append(f"Its settings: {printable(outcome.winner.key)}.")
    bucket = outcome.bucket
    if bucket.measured != batch:
        why.append(f"Measured at {tokens_text(bucket.measured)}; it answers for {bucket.label}.")
    changes = _elsewhere(one, outcome)
    if changes:
        why.append(changes)
    return Verdict(one.label, where, printable(use), tuple(why), check, is_settled(outcome))


def _margin(d: Decision) -> list[str]:
    if d.runner_up is None or d.margin is None:
        return ["It is the only candidate that was right and allowed."]
    rival = d.runner_up.backend
    if rival == d.winner.backend:
        rival = f"{rival} with other settings"
    span = _span(d.margin, d.margin_interval)
    following = f"The next best, {printable(rival)}, takes {_longer(d.margin)}{span}."
    if is_settled(d):
        return [following]
    settled = settled_text(d).removeprefix("no: ")
    rivals = open_rivals(d)
    if rivals and d.runner_up not in rivals:  # somebody who looks slower than the next best
        names = ", ".join(rival.key for rival in rivals[:2])
        names += " and others" if len(rivals) > 2 else ""
        open_text = f"Not settled ({settled}): {printable(names)}; more samples may tell."
        return [f"{following} {open_text}"]
    return [
        f"Not settled ({settled}): {printable(rival)} measured {percent_text(d.margin)} longer"
        f"{span}. Where candidates tie, a fixed order decides, so that reruns agree; more samples "
        "may tell them apart.",
    ]


def _longer(margin: float) -> str:
    """``27.0 % longer``, or ``5.4 times as long`` from twice on."""
    return f"{percent_text(margin)} longer" if margin < 1 else f"{1 + margin:.3g} times as long"


def _span(margin: float, interval: tuple[float, float] | None) -> str:
    """The interval in the unit of :func:`_longer`."""
    if interval is None:
        return ""
    if margin < 1:
        low, high = (percent_text(part) for part in interval)
        return f" (95 % interval {low.removesuffix(' %')} to {high})"
    low, high = (f"{1 + part:.3g}" for part in interval)
    return f" (95 % interval {low} to {high})"


def _priority(one: Evidence, d: Decision) -> list[str]:
    """What vLLM's fixed order would take, and what that costs."""
    table = speedup_data([one])
    rows: Any = table[table["num_tokens"] == d.bucket.measured].to_dict("records")
    row = rows[0] if rows else None
    if row is None or pd.isna(row["baseline"]) or pd.isna(row["speedup"]):
        return []
    name = printable(row["baseline"])
    rival = d.runner_up.backend if d.runner_up else ""
    same = d.margin is not None and math.isclose(row["speedup"] - 1, d.margin, abs_tol=5e-4)
    if row["baseline"] == rival != d.winner.backend and same:
        return [f"{name} is also what vLLM's fixed order of backends takes."]
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


def _ours(d: Decision) -> list[str]:
    """Who runs a backend that no engine has."""
    name = d.winner.backend
    if not any(backend.ours and backend.name == name for backend in registry.all_backends()):
        return []
    return [
        f"{printable(name)} is autosel's own kernel: autosel.FusedMoE runs it, and vLLM with "
        "autosel's plugin; vLLM alone has no option for it."
    ]


def _elsewhere(one: Evidence, d: Decision) -> str:
    """Which other backends are chosen at other token counts; neighbouring buckets as one."""
    others: dict[str, list[TokenBucket]] = {}
    for outcome in one.outcomes:
        if not isinstance(outcome, Decision) or outcome.winner.backend == d.winner.backend:
            continue
        known, bucket = others.setdefault(outcome.winner.backend, []), outcome.bucket
        if known and known[-1].high == bucket.low - 1:
            bucket = replace(known.pop(), high=bucket.high)
        known.append(bucket)
    parts = [
        f"{printable(name)} at {', '.join(bucket.label for bucket in buckets)}"
        for name, buckets in others.items()
    ]
    return f"At other token counts: {'; '.join(parts)} tokens." if parts else ""


def _check(one: Evidence, batch: int, place: str) -> tuple[str, ...]:
    if one.command:
        sweep = f"autosel sweep {one.target} --tokens {batch}" if one.target else ""
        return tuple(line for line in (one.command, sweep) if line)
    target = one.target or "CHECKPOINT"
    db = f" --db {shlex.quote(printable(place))}" if place and one.from_database else ""
    routing = "" if one.routing == "uniform" else f" --routing {shlex.quote(one.routing)}"
    asked = "".join([f" --tokens {batch}{routing}", *(f" {word}" for word in cache_words(one))])
    return (
        f"autosel explain {target}{asked}{db}",
        f"autosel sweep {target}{asked} --db fresh.db",
    )
