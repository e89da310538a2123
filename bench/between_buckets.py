"""How wrong are times that were not measured: between token counts, and for unseen layers.

    python -m bench.between_buckets                      # results/*/
    python -m bench.between_buckets --table peers.csv    # and a further table of an H200

Two things are left out and predicted from the rest of each table. A token count: by the line in
log-log axes through its neighbours (:mod:`autosel.between`), which then span twice the gap of a
real query, so real errors are smaller. A layer: by the cost model (:mod:`autosel.cost_model`).
Regret is what choosing by the prediction would have cost: the time of the backend it puts first,
over that of the fastest, minus one. Deterministic; needs no device.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autosel.between import interpolate, left_out
from autosel.core import Problem
from autosel.cost_model import CostModel, Known
from autosel.errors import AutoselError
from autosel.predictions import Curves, curves_from
from bench.results_data import RESULTS, epyc_evidence, h200_evidence

COLUMNS = (
    "table", "left_out", "backend", "shapes", "predictions", "median_error", "p90_error",
    "worst_error", "within_interval", "median_interval",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One backend's errors, as shares of the time; a blank where there is no such figure."""

    table: str
    what: str
    backend: str
    shapes: int
    errors: tuple[float, ...]
    held: tuple[bool, ...] = ()
    widths: tuple[float, ...] = ()

    @property
    def cells(self) -> tuple[object, ...]:
        sizes = np.expm1(np.abs(self.errors))
        figures = [f"{np.quantile(sizes, q):.4f}" for q in (0.5, 0.9, 1.0)]
        held = f"{np.mean(self.held):.3f}" if self.held else ""
        width = f"{np.median(np.expm1(self.widths)):.4f}" if self.widths else ""
        return (
            self.table, self.what, self.backend, self.shapes, len(self.errors), *figures, held,
            width,
        )  # fmt: skip


def between(table: str, curves: dict[str, Curves]) -> Iterator[Line]:
    """Each inner token count left out."""
    for backend, found in sorted(curves.items()):
        errors = tuple(e for times in found.values() for e in left_out(times).values())
        if errors:
            yield Line(table, "token count", backend, len(found), errors)


def unseen(table: str, curves: dict[str, Curves]) -> Iterator[Line]:
    """Each layer left out."""
    for backend, found in sorted(curves.items()):
        errors, held, widths = [], [], []
        for shape, times in found.items():
            model = _without(found, shape)
            for count, us in times.items() if model else ():
                assert model is not None
                p = model.predict(shape, count)
                errors.append(math.log(p.us / us))
                held.append(p.low_us <= us <= p.high_us)
                widths.append(math.log(p.high_us / p.us))
        if errors:
            yield Line(
                table, "layer", backend, len(found), tuple(errors), tuple(held), tuple(widths)
            )


def _without(curves: Curves, shape: Problem) -> CostModel | None:
    rows = [Known(p, n, us) for p, times in curves.items() if p != shape for n, us in times.items()]
    try:
        return CostModel.fit(rows)
    except AutoselError:  # too few shapes are left
        return None


def regrets(curves: dict[str, Curves], what: str) -> list[float]:
    """What choosing by predictions alone would cost, where two backends or more are predicted."""
    truth: dict[tuple[Problem, int], dict[str, float]] = {}
    guess: dict[tuple[Problem, int], dict[str, float]] = {}
    for backend, found in curves.items():
        for shape, times in found.items():
            model = _without(found, shape) if what == "layer" else None
            for count, us in times.items():
                truth.setdefault((shape, count), {})[backend] = us
                if what == "layer" and model is not None:
                    us = model.predict(shape, count).us
                elif what == "token count" and min(times) < count < max(times):
                    us = interpolate({n: t for n, t in times.items() if n != count}, count)
                else:
                    continue
                guess.setdefault((shape, count), {})[backend] = us
    out = []
    for key, guesses in guess.items():
        if len(guesses) > 1:
            chosen = min(guesses, key=lambda name: guesses[name])
            out.append(truth[key][chosen] / min(truth[key][name] for name in guesses) - 1)
    return out


def tables(further: list[Path]) -> Iterator[tuple[str, dict[str, Curves]]]:
    """The tables by name, as curves of the exact backends."""
    found = [
        ("nvidia-h200/kernels.csv", h200_evidence(RESULTS / "nvidia-h200" / "kernels.csv")),
        ("amd-epyc-2-cores/cpu.csv", epyc_evidence(RESULTS / "amd-epyc-2-cores" / "cpu.csv")),
        *((path.name, h200_evidence(path)) for path in further),
    ]
    for name, evidence in found:
        yield name, curves_from([m for one in evidence for m in one.measurements], allow_a8=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="How wrong times are that were not measured.")
    parser.add_argument("--table", type=Path, action="append", default=[], help="a further table")
    parser.add_argument("-o", type=Path, default=RESULTS / "between_buckets.csv", help="CSV file")
    chosen = parser.parse_args()
    lines: list[Line] = []
    for name, curves in tables(chosen.table):
        for what, made in (("token count", between), ("layer", unseen)):
            lines += made(name, curves)
            costs = regrets(curves, what)
            if costs:
                worst, mean = max(costs), sum(costs) / len(costs)
                print(
                    f"{name}, {what} left out: choosing by predictions costs {100 * mean:.2f} % on "
                    f"average, {100 * worst:.1f} % at worst, in {len(costs)} cases"
                )
    with chosen.o.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(line.cells for line in lines)
    for line in lines:
        print("  ".join(map(str, line.cells)))
    print(f"written: {chosen.o}")


if __name__ == "__main__":
    main()
