"""What binding the threads of a measurement changes, on a quiet and on a busy machine.

    python -m bench.binding --shape A --tokens 4 --busy 0,1,2 --decisions 12 -o binding.csv

One decision is 10 rounds of 3 cold samples of each exact CPU backend that is here, as a sweep takes
them; decisions with free and with bound threads alternate. Beside them run ``busy`` processes that
do nothing but count. A backend's lowest ranking figure over all decisions with the fewest
competitors is taken for the truth: regret is that of the backend that a decision ranks first,
``spread`` the standard deviation of the logarithm of a backend's ranking figure over decisions,
``slower`` how far its median figure lies above the truth.
"""

from __future__ import annotations

import csv
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import numpy as np
import torch

from autosel import registry, samples
from autosel.core import Candidate, Measurement
from autosel.device import detect
from autosel.sources import RandomSource
from autosel.timing import Call, TimingSettings, time_candidates, timer_for
from autosel.trial_call import Call as LayerCall
from autosel.tune_inputs import judged_inputs
from bench.cpu import problem

BACKENDS = ("cpu_native", "torch_int4", "emulation", "cpu_dense")
FIELDS = ("busy", "threads_are", "decision", "backend", "figure_us", "clean", "taken")


@contextmanager
def competitors(count: int) -> Iterator[None]:
    """So many processes that keep a processor busy each."""
    code = "while True: pass"
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def layer_calls(shape: str, tokens: int) -> dict[str, Call]:
    layer = problem(shape, 128)
    device = detect("cpu")
    experts = RandomSource(layer).load("cpu")
    case = judged_inputs(experts, "uniform", [tokens], seed=0)[0][tokens]
    calls: dict[str, Call] = {}
    for name in BACKENDS:
        backend = registry.get(name)
        if not backend.supports(layer, device):
            continue
        params = backend.space(layer, tokens, device).default
        packed = backend.layout(layer, params).pack(experts)
        calls[name] = LayerCall(backend, packed, params, case)
        calls[name]()
    return calls


@click.command(help=__doc__)
@click.option("--shape", default="A")
@click.option("--tokens", default=4)
@click.option("--busy", default="0,1,2", help="processes beside it, one figure a run")
@click.option("--decisions", default=12)
@click.option("--threads", type=int)
@click.option("-o", "--output", type=click.Path(path_type=Path))
def main(
    shape: str, tokens: int, busy: str, decisions: int, threads: int | None, output: Path | None
) -> None:
    if threads:
        torch.set_num_threads(threads)
    calls = layer_calls(shape, tokens)
    device = detect("cpu")
    rows: list[dict[str, object]] = []
    ways = {}
    for bound in (False, True):
        settings = TimingSettings(rounds=10, samples_per_round=3, race=False, bind=bound)
        ways[bound] = (settings, timer_for(device, settings, owns_process=True))
    for count in map(int, busy.split(",")):
        with competitors(count):
            for number in range(decisions):
                for bound, (settings, timer) in ways.items():
                    for name, found in time_candidates(calls, settings, timer).items():
                        row = Measurement(
                            problem(shape, 128), tokens, "uniform", Candidate.of(name), device,
                            "ok", times_us=found.times_us, timing=found.timing,
                        )  # fmt: skip
                        kept = samples.ranking(row)
                        values = (
                            count, "bound" if bound else "free", number, name,
                            float(np.quantile(kept.times_us, timer.quantile)),
                            len(kept.times_us) if kept.clean else 0, len(found.times_us),
                        )  # fmt: skip
                        rows.append(dict(zip(FIELDS, values, strict=True)))
    if output:
        with output.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    for line in table(rows):
        click.echo(line)


def table(rows: list[dict[str, object]]) -> Iterator[str]:
    quiet = min(int(str(row["busy"])) for row in rows)
    truth: dict[str, float] = {}
    for row in rows:
        name, us = str(row["backend"]), float(str(row["figure_us"]))
        if row["busy"] == quiet:
            truth[name] = min(truth.get(name, math.inf), us)
    yield "truth: " + ", ".join(f"{name} {us:.0f} us" for name, us in truth.items())
    yield "busy threads  right  mean regret  worst  spread  slower  preempted"
    for count in dict.fromkeys(row["busy"] for row in rows):
        for way in ("free", "bound"):
            mine = [row for row in rows if row["busy"] == count and row["threads_are"] == way]
            yield f"{count:>4} {way:>7}  " + _line(mine, truth)


def _line(rows: list[dict[str, object]], truth: dict[str, float]) -> str:
    figures: dict[str, list[float]] = {name: [] for name in truth}
    by_decision: dict[object, dict[str, float]] = {}
    for row in rows:
        us = float(str(row["figure_us"]))
        figures[str(row["backend"])].append(us)
        by_decision.setdefault(row["decision"], {})[str(row["backend"])] = us
    best = min(truth.values())
    chosen = [min(found, key=found.__getitem__) for found in by_decision.values()]
    regrets = [truth[name] / best - 1 for name in chosen]
    spread = statistics.mean(statistics.stdev(map(math.log, us)) for us in figures.values())
    slower = statistics.mean(statistics.median(us) / truth[n] - 1 for n, us in figures.items())
    clean = sum(int(str(row["clean"])) for row in rows) / sum(int(str(r["taken"])) for r in rows)
    return (
        f"{regrets.count(0.0):>2} of {len(regrets)}  {statistics.mean(regrets):>10.1%}"
        f"  {max(regrets):>5.0%}  {spread:>6.1%}  {slower:>6.0%}  {1 - clean:>9.0%}"
    )


if __name__ == "__main__":
    main()
