"""Measures a random part of what ships in ``results/DEVICE/`` again and says how much of it agrees.

``python -m bench.remeasure results/DEVICE --share 0.1 --seed 1 -o remeasured.csv``

A cell is a layer at one token count. Its winner and its runner-up are packed, verified and raced
anew, on the same made-up weights and routing, as a sweep would (candidates run in a worker
process). A cell agrees where the 95 % interval of "the runner-up takes so much longer" overlaps the
one that ships, and is ``unknown`` where the new samples give no interval or one of the two cannot
run here. Every cell is a line of the file as soon as it is there; the same command with the same
file goes on where it was stopped and tries again what is unknown (a cell's last line counts).
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from statistics import geometric_mean

from autosel import evidence_files, registry
from autosel.core import Candidate, Decision, Device, Measurement
from autosel.decide import NothingUsable, decide
from autosel.device import detect
from autosel.errors import AutoselError, field_error
from autosel.sources import WeightSource
from autosel.timing import TimingSettings, timer_for
from autosel.tune_types import Observer, SweepSettings
from autosel.worker_bench import bench_for
from bench.device_results_export import read_environment
from bench.device_results_lines import layer_sources
from bench.interrupts import INTERRUPTED, end_cleanly

#: Seconds to wait for others to leave the processors, where calls run on them.
QUIET_S = 60.0
#: Seconds of a candidate: 20 rounds, where a sweep's 2.5 are a handful of long calls.
LIMIT_S = 20.0


@dataclass(frozen=True)
class Cell:
    """What ships for one layer at one token count, and the words that measure the layer."""

    layer: str
    tokens: int
    decision: Decision
    rival: Candidate
    margin: float
    interval: tuple[float, float]
    device: Device
    seed: int
    command: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """A line of the file. Times in microseconds; margins: how much longer the runner-up takes."""

    layer: str
    tokens: int
    winner: str
    runner_up: str
    agrees: str
    shipped_us: float
    found_us: float
    shipped_margin: float
    shipped_low: float
    shipped_high: float
    found_margin: float
    found_low: float
    found_high: float
    note: str = ""


def cells(folder: Path) -> list[Cell]:
    """Every shipped cell with a runner-up, in a stable order; AutoselError where there is none."""
    layers = read_environment(folder).get("layers", {})
    found = []
    for path in sorted((folder / "packs").glob("*.json")):
        facts = layers.get(path.stem)
        if not isinstance(facts, Mapping) or not str(facts.get("command", "")):
            raise AutoselError(
                field_error(str(folder), path.stem, "no command", "environment.json")
            )
        words = tuple(shlex.split(str(facts["command"]))[2:])  # without "autosel sweep"
        for one in evidence_files.read(path):
            for d in one.decisions:
                if d.runner_up is None or d.margin is None or d.margin_interval is None:
                    continue  # nobody to race
                found.append(
                    Cell(
                        path.stem, d.bucket.measured, d, d.runner_up, d.margin, d.margin_interval,
                        one.device, int(facts.get("seed", 0)), words,
                    )
                )  # fmt: skip
    if not found:
        raise AutoselError(field_error(str(folder), "packs", "no decisions", "at least one"))
    return sorted(found, key=lambda cell: (cell.layer, cell.tokens))


def sample(found: Sequence[Cell], share: float, seed: int) -> list[Cell]:
    """A random ``share`` of the cells, at least one, in the order they have."""
    count = max(1, math.ceil(share * len(found)))
    chosen = set(random.Random(seed).sample(range(len(found)), count))
    return [cell for i, cell in enumerate(found) if i in chosen]


def measure(layer: Sequence[Cell], source: WeightSource, device: Device) -> Iterator[Result]:
    """Measure cells of one layer again, one after the other."""
    first = layer[0]
    counts = tuple(cell.tokens for cell in layer)
    settings = SweepSettings(
        token_counts=counts, routing=first.decision.routing, seed=first.seed,
        timing=TimingSettings(race=False, rounds=20, limit_s=LIMIT_S, wait_quiet_s=QUIET_S),
    )  # fmt: skip
    timer = timer_for(device, settings.timing)
    bench = bench_for(source, settings, device, counts, timer, Observer(), isolate=True)
    try:
        for cell in layer:
            rows = []
            try:
                for known in (cell.decision.winner, cell.rival):
                    made = bench.candidate(registry.get(known.backend), known.params_dict)
                    rows.append(bench.attempt(made, cell.tokens))
            except AutoselError as error:  # a backend that is not installed here
                yield _result(cell, "unknown", (math.nan,) * 4, " ".join(str(error).split()))
                continue
            if all(row.status == "ok" for row in rows):
                rows = bench.time(rows, settings.timing, cell.tokens)
            yield judged(cell, rows)
    finally:
        bench.close()


def judged(cell: Cell, rows: Sequence[Measurement]) -> Result:
    """The shipped margin beside that of ``rows``: winner and runner-up measured again."""
    shipped = cell.decision
    failed = next((row for row in rows if row.status != "ok"), None)
    if failed is not None:
        note = f"{failed.candidate.key}: {failed.status}: {failed.reason}"
        return _result(cell, "no", (math.nan,) * 4, note)
    # Only the two are here: whoever wins, the other one is the runner-up.
    found = decide(rows, defaults=(shipped.winner,), allow_a8=True)
    if isinstance(found, NothingUsable) or not found.margin_interval or found.margin is None:
        why = found.why if isinstance(found, NothingUsable) else "too few samples for an interval"
        return _result(cell, "unknown", (math.nan,) * 4, why)
    low, high = found.margin_interval
    figures = found.winner_us, found.margin, low, high
    if found.winner != shipped.winner:  # the same ratio the other way round
        margin, low, high = (1 / (1 + part) - 1 for part in (found.margin, high, low))
        figures = found.runner_up_us or math.nan, margin, low, high
    overlap = low <= cell.interval[1] and cell.interval[0] <= high
    return _result(cell, "yes" if overlap else "no", figures, "")


def _result(cell: Cell, agrees: str, found: tuple[float, ...], note: str) -> Result:
    us, *margins = found
    winner = cell.decision.winner
    return Result(
        cell.layer, cell.tokens, winner.key, cell.rival.key, agrees, cell.decision.winner_us, us,
        cell.margin, *cell.interval, *margins, note,
    )  # fmt: skip


def read(path: Path) -> list[Result]:
    """What a file of an earlier run has; empty where there is none."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.reader(lines))
    names = [item.name for item in fields(Result)]
    if not rows or rows[0] != names:
        raise AutoselError(field_error(str(path), "columns", rows[:1], names))
    kinds = {"str": str, "int": int, "float": float}
    types = [kinds[str(item.type)] for item in fields(Result)]
    return [
        Result(*(kind(text) for kind, text in zip(types, row, strict=True))) for row in rows[1:]
    ]


def append(path: Path, result: Result) -> None:
    """One more line, with the names of the columns in front of the first."""
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        if new:
            writer.writerow([item.name for item in fields(Result)])
        writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in astuple(result)])


def summary(results: Sequence[Result]) -> str:
    """How much agrees, in words."""
    known = [result for result in results if result.agrees != "unknown"]
    agree = sum(result.agrees == "yes" for result in known)
    kept = sum(result.found_high >= 0 for result in known)
    ratios = [r.found_us / r.shipped_us for r in results if not math.isnan(r.found_us)]
    lines = [
        f"{agree} of {len(known)} cells: the interval of the margin overlaps the one that ships",
        f"{kept} of {len(known)}: the winner is not shown to be slower than the runner-up",
    ]
    if len(known) < len(results):
        lines.append(f"{len(results) - len(known)} cells: not known (see the notes)")
    if ratios:
        lines.append(
            f"the winner's time over what ships: {geometric_mean(ratios):.3f} in the geometric "
            f"mean, {min(ratios):.3f} to {max(ratios):.3f}"
        )
    return "\n".join(lines)


def _line(result: Result) -> str:
    where = f"{result.layer} at {result.tokens}: {result.agrees}"
    if result.note:
        return f"{where}; {result.note}"
    found, ships = (
        f"{margin:+.1%} ({low:+.1%} to {high:+.1%}), {us:.1f} us"
        for margin, low, high, us in (
            (result.found_margin, result.found_low, result.found_high, result.found_us),
            (result.shipped_margin, result.shipped_low, result.shipped_high, result.shipped_us),
        )
    )
    return f"{where}; {found}; ships {ships}"


def run(folder: Path, out: Path, share: float, seed: int, deadline_s: float | None) -> int:
    """Measure what is not in ``out`` yet; 0 when all of the sample is there, else 1."""
    began = time.monotonic()
    wanted = sample(cells(folder), share, seed)
    done = {(result.layer, result.tokens): result for result in read(out)}
    device = detect()
    for name in dict.fromkeys(cell.layer for cell in wanted):
        known = {key for key, result in done.items() if result.agrees != "unknown"}
        left = [c for c in wanted if c.layer == name and (c.layer, c.tokens) not in known]
        if not left or (deadline_s and time.monotonic() - began > deadline_s):
            continue
        if left[0].device.name != device.name:
            raise AutoselError(field_error(name, "device", device.name, left[0].device.name))
        (source,) = layer_sources(left[0].command, name)
        for result in measure(left, source, device):
            append(out, result)
            done[result.layer, result.tokens] = result
            print(_line(result), flush=True)
            if deadline_s and time.monotonic() - began > deadline_s:
                break
    found = [done[key] for c in wanted if (key := (c.layer, c.tokens)) in done]
    print(summary(found) if found else "nothing measured")
    if len(found) < len(wanted):
        print(f"{len(wanted) - len(found)} cells are left; the same command goes on")
    return int(len(found) < len(wanted))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.remeasure")
    parser.add_argument("folder", type=Path, help="results/DEVICE")
    parser.add_argument("--share", type=float, default=0.1, help="part of the cells (default 0.1)")
    parser.add_argument("--seed", type=int, default=0, help="which part (default 0)")
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="start no cell later")
    parser.add_argument("-o", "--output", type=Path, required=True, help="CSV file")
    options = parser.parse_args(argv)
    if not 0 < options.share <= 1:
        parser.error(f"--share: found {options.share}, expected more than 0 and at most 1")
    try:
        return run(options.folder, options.output, options.share, options.seed, options.deadline)
    except AutoselError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    end_cleanly()
    sys.exit(main())
