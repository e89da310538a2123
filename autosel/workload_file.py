"""Reads a histogram of tokens a call from CSV, JSON or what Prometheus scrapes from a server.

The kind is told by the content. Files are hostile: whatever is wrong is one line that names the
file and the place. From a Prometheus text dump (``curl .../metrics``), or the JSON answer of
Prometheus' query interface, the histogram ``vllm:iteration_tokens_total`` is taken: tokens that
vLLM processed in each engine step, which is one call of every MoE layer. Its buckets are
cumulative (``le``, "less or equal"), so neighbours are subtracted; series that differ in other
labels (engines, models) are added up. See vLLM's documentation, "Production Metrics", and
Prometheus', "Exposition formats" and "Histograms and summaries".
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from autosel.core import TokenBin, Workload
from autosel.errors import AutoselError, field_error

#: A metrics page is some hundred kB; more than this is a mistake.
MAX_BYTES = 64 << 20
MAX_TOKENS = 2**31 - 1
#: Histograms of tokens a step, as servers call them; relabelling often replaces the colon.
METRICS = ("vllm:iteration_tokens_total", "vllm_iteration_tokens_total")
#: What a column or field may be called, by what it counts.
CALLS = ("calls", "count", "steps", "weight", "share")
TOKENS = ("total_tokens", "tokens_total", "tokens_processed")
SIZE = ("tokens", "num_tokens", "tokens_per_call")

Edges = tuple[int, int | None]
_SIZE = re.compile(r"\s*(\d{1,11})(?:\.0+)?\s*(?:(\+)|-\s*(\d{1,11}))?\s*", re.ASCII)


def read(path: Path) -> Workload:
    """The workload in ``path``; AutoselError in one line for anything that cannot be trusted."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise AutoselError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(raw) > MAX_BYTES:
        _refuse(str(path), "bytes", f"more than {MAX_BYTES}", f"at most {MAX_BYTES}")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        _refuse(f"{path}:{line}", "text", "bytes that are not UTF-8", "UTF-8")
    start = text.lstrip()[:1]
    if not start:
        _refuse(str(path), "content", "nothing", "CSV, JSON or Prometheus text")
    if start in "{[":
        return _Json(path, text).workload()
    if re.search(r"^(# (TYPE|HELP) |[^\s,#{]+\{[^\n]*\} )", text, re.MULTILINE):
        return _prometheus(path, _text_samples(path, text))
    return _csv(path, text)


def _refuse(where: str, what: str, found: object, expected: object) -> NoReturn:
    shown = found if isinstance(found, int | float) else " ".join(str(found).split())[:80]
    raise AutoselError(field_error(where, what, shown, expected))


def _made(path: Path, parts: Iterable[tuple[str, Edges, float]], weighted_by: str) -> Workload:
    """Bins from ``(where, edges, value)``, equal ones added up; tokens turned into calls."""
    found: dict[Edges, float] = defaultdict(float)
    places: dict[Edges, str] = {}
    for where, edges, value in parts:
        found[edges] += value
        places.setdefault(edges, where)
    bins: list[TokenBin] = []
    ordered = sorted(found, key=lambda e: (e[0], math.inf if e[1] is None else e[1]))
    last: Edges | None = None
    for low, high in ordered:
        if last is not None and (last[1] is None or low <= last[1]):
            _refuse(places[low, high], "tokens", _label(low, high), f"apart from {_label(*last)}")
        last = low, high
        value = found[low, high]
        if weighted_by == "tokens":
            from autosel.workload import mean_tokens

            value /= mean_tokens(Workload("", (TokenBin(low, high, 1.0),)))
        bins.append(TokenBin(low, high, value))
    total = sum(item.calls for item in bins)
    if not (math.isfinite(total) and total > 0):
        _refuse(str(path), "calls in all", total, "finite and above 0")
    return Workload(path.name, tuple(item for item in bins if item.calls > 0), weighted_by)


def _label(low: int, high: int | None) -> str:
    return f"{low}+" if high is None else str(low) if low == high else f"{low}-{high}"


def _edges(where: str, text: object) -> Edges | None:
    """``16``, ``9-16`` or ``1025+``; None for 0 tokens, which call nothing."""
    if isinstance(text, int) and not isinstance(text, bool):
        text = str(text)
    found = re.fullmatch(
        r"\s*(\d{1,11})(?:\.0+)?\s*(?:(\+)|-\s*(\d{1,11}))?\s*", str(text), re.ASCII
    )
    if found is None:
        _refuse(where, "tokens", repr(text), "a whole number, or 9-16, or 1025+")
    low = int(found[1])
    high = None if found[2] else int(found[3] or low)
    if max(low, high or 0) > MAX_TOKENS or (high is not None and high < low):
        _refuse(where, "tokens", text, f"counts up to {MAX_TOKENS} in ascending order")
    if high == 0:
        return None
    return max(low, 1), high


def _number(where: str, what: str, value: object, *, text_counts: bool = True) -> float:
    no_number = isinstance(value, bool) or (isinstance(value, str) and not text_counts)
    try:
        number = math.nan if no_number else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        _refuse(where, what, repr(value), "a finite number of at least 0")
    return number


def _column(path: Path, names: Iterable[str]) -> tuple[str, str, str]:
    """Which name holds the size, which the value, and what the value counts."""
    known = {str(name).strip().lower(): str(name) for name in names}
    sizes = [known[name] for name in SIZE if name in known]
    calls = [known[name] for name in CALLS if name in known]
    tokens = [known[name] for name in TOKENS if name in known]
    if len(sizes) != 1 or len(calls) + len(tokens) != 1:
        _refuse(
            f"{path}:1",
            "names",
            ", ".join(known) or "none",
            f"tokens (of a call) and one of {', '.join((*CALLS, *TOKENS))}",
        )
    return sizes[0], (calls + tokens)[0], "calls" if calls else "tokens"


def _csv(path: Path, text: str) -> Workload:
    rows = csv.DictReader(text.splitlines(), strict=True, skipinitialspace=True)
    parts: list[tuple[str, Edges, float]] = []
    try:
        size, value, weighted_by = _column(path, rows.fieldnames or ())
        for row in rows:
            where = f"{path}:{rows.line_num}"
            if None in row or None in row.values():
                _refuse(where, "fields", "another number of them", len(rows.fieldnames or ()))
            edges = _edges(where, row[size])
            number = _number(where, value, row[value])
            if edges is not None:
                parts.append((where, edges, number))
    except csv.Error as error:
        raise AutoselError(f"{path}:{rows.line_num}: not valid CSV: {error}") from None
    return _made(path, parts, weighted_by)


class _Json:
    """A mapping of sizes to calls, a list of them, a workload's own form, or a query's answer."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.where = path, str(path)
        try:
            self.data = json.loads(text, object_pairs_hook=self._once)
        except (ValueError, RecursionError) as error:
            raise AutoselError(f"{path}: not valid JSON: {error}") from None

    def _once(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            _refuse(self.where, "name", f"{twice!r} twice", "each once")
        return found

    def workload(self) -> Workload:
        data, weighted_by = self.data, "calls"
        if isinstance(data, dict) and "data" in data and "status" in data:
            return _prometheus(self.path, self._query_samples(data))
        if isinstance(data, dict) and "bins" in data:
            return self._own(data)
        if isinstance(data, dict) and "histogram" in data:
            weighted_by = data.get("weighted_by", "calls")
            if weighted_by not in ("calls", "tokens"):
                _refuse(f"{self.where}: weighted_by", "value", weighted_by, "calls or tokens")
            data = data["histogram"]
        if isinstance(data, dict):
            return _made(self.path, self._pairs(data.items()), weighted_by)
        if isinstance(data, list) and data and all(isinstance(item, dict) for item in data):
            size, value, weighted_by = _column(self.path, data[0])
            named = [(item.get(size), item.get(value)) for item in data]
            return _made(self.path, self._pairs(named), weighted_by)
        if isinstance(data, list) and all(isinstance(i, list) and len(i) == 2 for i in data):
            return _made(self.path, self._pairs(map(tuple, data)), weighted_by)
        shown = f"{type(data).__name__} of other things"
        _refuse(
            self.where, "content", shown, '{"16": calls}, [[16, calls]] or [{"tokens": 16, ..}]'
        )

    def _pairs(self, pairs: Iterable[Any]) -> Iterable[tuple[str, Edges, float]]:
        for number, (size, value) in enumerate(pairs):
            where = f"{self.where}: entry {number}"
            edges = _edges(where, size)
            calls = _number(where, "calls", value, text_counts=False)
            if edges is not None:
                yield where, edges, calls

    def _own(self, data: Mapping[str, Any]) -> Workload:
        try:
            return Workload.from_dict(data)
        except AutoselError as error:
            raise AutoselError(f"{self.where}: {error}") from None
        except (KeyError, TypeError) as error:
            _refuse(self.where, "workload", error, "name, weighted_by and bins of low, high, calls")

    def _query_samples(self, data: Mapping[str, Any]) -> Iterable[_Sample]:
        try:
            for item in data["data"]["result"]:
                labels = dict(item["metric"])
                # A range query has several moments; the counters' last values count all.
                moment = item["value"] if "value" in item else item["values"][-1]
                yield self.where, labels.pop("__name__", METRICS[0] + "_bucket"), labels, moment[1]
        except (KeyError, TypeError, IndexError, ValueError) as error:
            _refuse(self.where, "query result", error, "data.result of metrics and values")


#: Where it stands, the series' name, its labels and its value.
_Sample = tuple[str, str, Mapping[str, str], object]

_LINE = re.compile(r'([^\s{]+)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?\s+(\S+)(?:\s+-?\d+)?\s*')
_LABEL = re.compile(r'\s*([^\s=,]+)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')


def _text_samples(path: Path, text: str) -> Iterable[_Sample]:
    """Lines of the text format that are about a histogram we know."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith(METRICS):
            continue
        # OpenMetrics puts an exemplar behind " # ".
        found = _LINE.fullmatch(line.partition(" # ")[0])
        if found is None:
            _refuse(f"{path}:{number}", "line", line, "NAME{LABELS} VALUE")
        yield f"{path}:{number}", found[1], dict(_LABEL.findall(found[2] or "")), found[3]


def _prometheus(path: Path, samples: Iterable[_Sample]) -> Workload:
    """The histogram's cumulative buckets, differenced for each series and added up."""
    series: dict[tuple[object, ...], dict[float, tuple[str, float]]] = defaultdict(dict)
    sums: list[float] = []
    for where, name, labels, text in samples:
        metric = next((m for m in METRICS if name in (f"{m}_bucket", f"{m}_sum")), None)
        if metric is None:
            continue
        value = _number(where, name, text)
        if name.endswith("_sum"):
            sums.append(value)
            continue
        if "le" not in labels:
            _refuse(where, "label le", "none", "the bucket's upper edge")
        edge = math.inf if labels["le"] in ("+Inf", "Inf") else _number(where, "le", labels["le"])
        others = tuple(sorted((k, v) for k, v in labels.items() if k != "le"))
        buckets = series[metric, *others]
        if edge in buckets:
            _refuse(where, f"bucket le={labels['le']}", "a second one", "one for each edge")
        buckets[edge] = where, value
    if not series:
        _refuse(str(path), "metrics", "none of the histogram's buckets", f"{METRICS[0]}_bucket")
    parts = [part for buckets in series.values() for part in _differences(path, buckets)]
    return _made(path, _without_idle_steps(parts, sums), "calls")


def _differences(
    path: Path, buckets: Mapping[float, tuple[str, float]]
) -> Iterable[tuple[str, Edges, float]]:
    if math.inf not in buckets:
        _refuse(str(path), "buckets", "none with le=+Inf", "one that counts every call")
    low, below = 1, 0.0
    for edge, (where, value) in sorted(buckets.items()):
        if value < below:
            _refuse(where, f"bucket le={edge:g}", value, f"at least {below:g}, the one below it")
        high = None if edge == math.inf else min(math.floor(edge), MAX_TOKENS)
        if high is None or high >= low:
            yield where, (low, high), value - below
            low = low if high is None else high + 1
        elif value > below and high > 0:
            _refuse(where, f"bucket le={edge:g}", "an edge inside another", "whole token counts")
        below = value


def _without_idle_steps(
    parts: list[tuple[str, Edges, float]], sums: list[float]
) -> list[tuple[str, Edges, float]]:
    """Steps without a token stand in the lowest bucket; those the sum gives away are taken out.

    All calls of the lowest bucket cannot have a token if even the buckets' lower edges add up to
    more tokens than the histogram's own sum: what is missing were idle steps.
    """
    least = sum(edges[0] * calls for _, edges, calls in parts)
    idle = max(0.0, least - sum(sums)) if sums else 0.0
    out = []
    for where, edges, calls in parts:
        taken = min(calls, idle) if edges[0] == 1 else 0.0
        idle -= taken
        out.append((where, edges, calls - taken))
    return out
