"""Cells to replay: from stored measurements, and from a CSV of recorded samples.

A recording has one row a sample. Reruns draw whole rounds from it with replacement, the same for
all candidates that ran in equally many, so that what a round did to all of them stays common.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from autosel import samples, stats
from autosel.core import Candidate, Measurement
from autosel.errors import AutoselError, field_error
from autosel.racing_bounds import Floats
from autosel.records import timing_mode, to_json
from autosel.replay import Cell, Draw, in_order

#: More rows than a recording of this kind has; a wrong file ends here and not in the memory.
MAX_ROWS = 5_000_000

Rounds = Sequence[Sequence[float]]


def cells_from_measurements(measurements: Iterable[Measurement]) -> list[Cell]:
    """One cell for each layer, token count, routing, device and way of timing with two or more."""
    groups: dict[object, list[Measurement]] = {}
    for m in measurements:
        if m.status == "ok" and m.times_us:
            mode = to_json({**timing_mode(m.timing), "graph": None})
            key = (m.problem, m.num_tokens, m.routing, m.device, mode)
            groups.setdefault(key, []).append(m)
    cells = []
    for rows in groups.values():
        latest = in_order(list({m.candidate: m for m in rows}.values()))
        if len(latest) < 2:
            continue
        first = latest[0]
        quantile = stats.ranking_quantile(first.device.kind)
        recorded = [_rounds(m) for m in latest]
        cells.append(
            cell(
                f"{first.problem.key} at {first.num_tokens} tokens, {first.routing}",
                {m.candidate: rounds for m, rounds in zip(latest, recorded, strict=True)},
                quantile,
                first.device.kind,
            )
        )
    return cells


def _rounds(m: Measurement) -> Rounds:
    """The rounds that have undisturbed samples; else each sample that ranks as one."""
    found = [block for block in samples.rounds(m) if block]
    return found or [(time,) for time in samples.ranking(m).times_us]


def cells_from_csv(
    path: str | Path,
    *,
    by: Sequence[str] = (),
    candidate: str = "candidate",
    time_us: str = "us",
    round_column: str = "round",
    kind: str = "cuda",
) -> list[Cell]:
    """Cells of a CSV with one row a sample.

    by            columns whose values together name the cell; none: all rows are one cell
    candidate     column that names the candidate (its text up to ``[`` is the backend)
    time_us       column of microseconds
    round_column  column that numbers the rounds, when there is one; else every row is a round
    Raises AutoselError, in one line, for a file, column or number that will not do.
    """
    tables: dict[str, dict[str, dict[str, list[float]]]] = {}
    where = f"recording {path}"
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            for name in (*by, candidate, time_us):
                if name not in columns:
                    there = ", ".join(columns) or "none"
                    raise AutoselError(field_error(where, "columns", there, f"one named {name}"))
            for number, row in enumerate(reader, 2):
                if number > MAX_ROWS:
                    raise AutoselError(
                        field_error(where, "rows", f"over {MAX_ROWS}", f"at most {MAX_ROWS}")
                    )
                us = _time(row[time_us], f"{where}, line {number}")
                name = ", ".join(f"{column} {row[column]}" for column in by) or Path(path).name
                rounds = tables.setdefault(name, {}).setdefault(str(row[candidate]), {})
                rounds.setdefault(row.get(round_column) or str(number), []).append(us)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise AutoselError(field_error(where, "file", reason, "a CSV in UTF-8")) from None
    if not tables:
        raise AutoselError(field_error(where, "rows", "none", "one for each sample"))
    quantile = stats.ranking_quantile(kind)
    cells = []
    for name, table in tables.items():
        recorded = {
            Candidate(key.partition("[")[0], (("label", key),)): list(table[key].values())
            for key in sorted(table)
        }
        cells.append(cell(name, recorded, quantile, kind))
    return cells


def cell(
    name: str, recorded: Mapping[Candidate, Rounds], quantile: float, kind: str = "cuda"
) -> Cell:
    """A cell that draws from recorded rounds; the truth is the ranking quantile of them all."""
    rounds = [[tuple(block) for block in blocks if block] for blocks in recorded.values()]
    if not rounds or not all(rounds):
        raise AutoselError(field_error(name, "rounds", "none", "at least one of each candidate"))
    pooled = [[time for block in blocks for time in block] for blocks in rounds]
    truth = tuple(float(np.quantile(times, quantile)) for times in pooled)
    size = max(1, min(int(np.median([len(block) for block in blocks])) for blocks in rounds))
    return Cell(name, tuple(recorded), truth, _resampled(rounds, size), kind, quantile)


def _resampled(rounds: Sequence[Sequence[tuple[float, ...]]], size: int) -> Draw:
    def draw(rng: np.random.Generator, count: int) -> Floats:
        times = np.empty((count, len(rounds), size))
        places = rng.random(count)  # [R] shared, so that equal counts draw the same rounds
        for column, blocks in enumerate(rounds):
            for row, place in enumerate(places):
                block = blocks[int(place * len(blocks))]
                times[row, column] = [block[i % len(block)] for i in range(size)]
        return times

    return draw


def _time(text: str | None, where: str) -> float:
    try:
        us = float(text or "")
    except ValueError:
        us = math.nan
    if not 0 < us < math.inf:
        raise AutoselError(field_error(where, "time", repr(text), "finite and above 0"))
    return us
