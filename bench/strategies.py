"""Strategies of choosing compared on recorded and made-up timings: no GPU is needed.

    python -m bench.strategies -o results/strategies --anchors PEERS.csv

Three kinds of tables. `synthetic`: known truth, six kinds of machine, gaps of 0.1 to 3 % between
the best two among ten. `equal`: two or eight candidates of the same true time, where every winner
that is not called a tie is a false one. `recorded`: a CSV with a row a candidate (`us`, `us_min`,
`us_p90` of real runs); samples are drawn from a two-sided normal distribution of the logarithm
that has this median, 90 % quantile and minimum, so the order and the noise are real ones and the
samples are not.

Regret is the chosen candidate's true time over the best one's, minus one. Exhaustive takes 200
samples of every candidate. Writes `strategies.csv` (a row a cell and strategy) and `strategies.md`.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from autosel.core import Candidate
from autosel.replay import STRATEGIES, Cell, Score, Strategy, fixed_list, replay, summary
from bench.synthetic_timings import MACHINES, cell, near_tie

GAPS = (0.001, 0.003, 0.005, 0.01, 0.015, 0.02, 0.03)
NOISES = (0.007, 0.02, 0.035)
#: The order in which vLLM tries backends for WNA16 experts on a Hopper GPU; peers' names.
PRIORITY = ("marlin", "humming_indexed", "bf16_triton")


def synthetic(per_kind: int = 1) -> list[Cell]:
    rng = np.random.default_rng(5)
    return [
        cell(f"{name}, gap {gap:.1%}, noise {noise:.1%}", near_tie(gap, 8, rng, 100.0), machine,
             noise)
        for name, machine in MACHINES.items()
        for gap in GAPS
        for noise in NOISES
        for _ in range(per_kind)
    ]  # fmt: skip


def equal() -> list[Cell]:
    return [
        cell(f"{name}, {count} equal, noise {noise:.1%}", [100.0] * count, machine, noise)
        for name, machine in MACHINES.items()
        for count in (2, 8)
        for noise in (*NOISES, 0.05)
    ]


def recorded(path: Path) -> list[Cell]:
    """Cells of a table of real runs; see the head of this file."""
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            tokens = row.get("M") or row["tokens"]
            groups.setdefault((row["model"], tokens), []).append(row)
    cells = []
    for (model, tokens), rows in groups.items():
        best: dict[str, dict[str, str]] = {}
        for number, row in enumerate(rows):
            name = row.get("peer") or row.get("system") or f"ours[{number}]"
            best[name] = row
        names = sorted(best)
        if len(names) < 2:
            continue
        us = [float(best[name]["us"]) for name in names]
        low = [_spread(float(best[n]["us_min"]), t, 2.0) for n, t in zip(names, us, strict=True)]
        high = [
            _spread(t, float(best[n].get("us_p90") or t * 1.01), 1.2816)
            for n, t in zip(names, us, strict=True)
        ]
        candidates = tuple(Candidate(n.partition("[")[0], (("label", n),)) for n in names)
        draw = _two_sided(np.array(us), np.array(low), np.array(high))
        cells.append(Cell(f"{model} at {tokens}", candidates, tuple(us), draw))
    return cells


def _spread(lower: float, upper: float, sigmas: float) -> float:
    return max(math.log(upper / lower), 0.0) / sigmas


def _two_sided(us, low, high):  # type: ignore[no-untyped-def]
    def draw(rng, rounds):  # type: ignore[no-untyped-def]
        z = rng.standard_normal((rounds, len(us)))
        return (us * np.exp(np.where(z < 0, z * low, z * high)))[:, :, None]

    return draw


def table(scores: Sequence[Score]) -> str:
    """Markdown: a row a strategy."""
    names = list(dict.fromkeys(score.strategy for score in scores))
    full = summary(scores, "exhaustive")["device_s"]
    lines = [
        "| strategy | within 1 % | mean regret | worst | cells never over 1 % | ties "
        "| reruns that differ | without ties | samples | device time |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in names:
        s = summary(scores, name)
        lines.append(
            f"| {name} | {s['within_1_percent']:.1%} | {s['regret_mean']:.2%} "
            f"| {s['regret_max']:.1%} | {s['cells_always_within_1_percent']:.1%} "
            f"| {s['ties']:.0%} | {s['flips']:.1%} | {s['settled_flips']:.1%} "
            f"| {s['samples']:,.0f} | {s['device_s'] / full:.1%} |"
        )
    return "\n".join(lines)


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--anchors", type=click.Path(exists=True, path_type=Path), multiple=True)
@click.option("--reruns", type=click.IntRange(2), default=20, show_default=True)
@click.option("--only", type=click.Choice(["synthetic", "equal", "recorded"]), multiple=True)
def main(output: Path, anchors: tuple[Path, ...], reruns: int, only: tuple[str, ...]) -> None:
    """Write strategies.csv and strategies.md."""
    tables: dict[str, list[Cell]] = {"synthetic": synthetic(), "equal": equal()}
    tables |= {f"recorded {path.stem}": recorded(path) for path in anchors}
    strategies: dict[str, Strategy] = dict(STRATEGIES)
    parts, rows = [], []
    for name, cells in tables.items():
        if only and not name.startswith(only):
            continue
        backends = {candidate.backend for cell in cells for candidate in cell.candidates}
        more = {"fixed list": fixed_list(PRIORITY)} if backends & set(PRIORITY) else {}
        scores = replay(cells, {**strategies, **more}, reruns)
        parts.append(f"## {name}: {len(cells)} cells, {reruns} reruns each\n\n{table(scores)}")
        rows += [(name, score) for score in scores]
        click.echo(parts[-1] + "\n")
    output.mkdir(parents=True, exist_ok=True)
    (output / "strategies.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    with (output / "strategies.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ["table", "cell", "strategy", "regret_mean", "regret_max", "ties", "flips",
             "settled_flips", "samples", "device_us"]
        )  # fmt: skip
        for name, score in rows:
            writer.writerow(
                [name, score.cell, score.strategy, f"{np.mean(score.regrets):.5f}",
                 f"{max(score.regrets):.5f}", f"{np.mean(score.ties):.3f}", f"{score.flips:.3f}",
                 f"{score.settled_flips:.3f}", f"{score.samples:.1f}", f"{score.us:.1f}"]
            )  # fmt: skip


if __name__ == "__main__":
    main()
