"""Writes the tables of ``docs/findings.md`` from ``results/``: ``python -m bench.findings``.

The page's words are written by hand; each table stands between two comments that name it and is
made here, so that it follows the data. ``--check`` writes nothing and fails when a table is stale.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from autosel.plots.crossover import crossing_tokens
from bench import findings_sweeps
from bench.findings_table import ratio_row, ratio_text, table
from bench.results_data import RESULTS, ROOT, rows

PAGE = ROOT / "docs" / "findings.md"
H200 = RESULTS / "nvidia-h200" / "kernels.csv"
EPYC = RESULTS / "amd-epyc-2-cores" / "cpu.csv"
MARK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Times = dict[tuple[str, int], dict[str, float]]


def h200_times() -> Times:
    """Microseconds by (model, tokens) and system."""
    found: Times = {}
    for row in rows(H200):
        found.setdefault((row["model"], int(row["tokens"])), {})[row["system"]] = float(row["us"])
    return found


def epyc_times() -> tuple[Times, dict[str, str]]:
    """Microseconds by (shape, tokens) and backend, and each backend's accuracy class."""
    found: Times = {}
    accuracy: dict[str, str] = {}
    for row in rows(EPYC):
        found.setdefault((row["shape"], int(row["tokens"])), {})[row["backend"]] = float(row["us"])
        accuracy[row["backend"]] = row["accuracy"]
    return found, accuracy


def h200_order() -> str:
    """One run: the fixed order's two candidates and ours, where all were measured together."""
    lines = []
    for (model, tokens), us in h200_times().items():
        humming = [us[name] for name in ("humming_indexed", "humming_grouped") if name in us]
        if "marlin" not in us or len(humming) < 2:
            continue
        best, ours = min(humming), us["autosel"]
        gemm = "indexed" if best == us["humming_indexed"] else "grouped"
        lines.append(
            (model, tokens, _us(us["marlin"]), f"{_us(best)} ({gemm})", _us(ours),
             ratio_text(us["marlin"] / best), ratio_text(max(humming) / best),
             ratio_text(best / ours))
        )  # fmt: skip
    head = ("model", "tokens", "Marlin, µs", "Humming, µs", "ours, µs", "Marlin / Humming",
            "Humming's other GEMM / its best", "Humming / ours")  # fmt: skip
    return table(head, lines)


def h200_roofline() -> str:
    """Our kernels' share of the roofline, models by tokens."""
    share: dict[str, dict[int, float]] = {}
    for row in rows(H200):
        if row["system"] == "autosel":
            model = share.setdefault(row["model"], {})
            model[int(row["tokens"])] = float(row["share_of_roofline"])
    counts = sorted({count for known in share.values() for count in known})
    lines = [
        (model, *(f"{known[count]:.0%}" if count in known else "" for count in counts))
        for model, known in share.items()
    ]
    return table(("model", *(f"{count:,}" for count in counts)), lines)


def summary() -> str:
    """What the two tables come to: geometric means over cells, with the least and the most."""
    h200 = [us for us in h200_times().values() if "marlin" in us and "humming_indexed" in us]
    best = [min(us["humming_indexed"], us["humming_grouped"]) for us in h200]
    peers = [min(us["marlin"], humming) for us, humming in zip(h200, best, strict=True)]
    swept = [us["autosel_start"] / us["autosel"] for us in h200]
    times, accuracy = epyc_times()
    epyc = list(times.values())
    others = [
        min(t for name, t in us.items() if accuracy[name] == "exact" and name != "cpu_native")
        for us in epyc
    ]
    few = [us for (_, count), us in times.items() if count <= 4]
    many = [us for (_, count), us in times.items() if count >= 64]
    lines = [
        ratio_row("H200", "Marlin over Humming's better GEMM",
                  [us["marlin"] / t for us, t in zip(h200, best, strict=True)]),
        ratio_row("H200", "Humming indexed over its better GEMM",
                  [us["humming_indexed"] / t for us, t in zip(h200, best, strict=True)]),
        ratio_row("H200", "Humming grouped over its better GEMM",
                  [us["humming_grouped"] / t for us, t in zip(h200, best, strict=True)]),
        ratio_row("H200", "best of Marlin and Humming over ours",
                  [t / us["autosel"] for us, t in zip(h200, peers, strict=True)]),
        ratio_row("H200", "our built-in settings over our swept ones", swept),
        *findings_sweeps.summary(),
        ratio_row("EPYC", "best other exact backend over ours",
                  [t / us["cpu_native"] for us, t in zip(epyc, others, strict=True)]),
        ratio_row("EPYC", "`zen_cpu` (a8) over ours, 1 and 4 tokens",
                  [us["zen_cpu"] / us["cpu_native"] for us in few]),
        ratio_row("EPYC", "`zen_cpu` (a8) over ours, 64 tokens and more",
                  [us["zen_cpu"] / us["cpu_native"] for us in many]),
        ratio_row("EPYC", "`cpu` (a8) over `zen_cpu` (a8)",
                  [us["cpu"] / us["zen_cpu"] for us in epyc]),
    ]  # fmt: skip
    head = ("device", "time of one over the other", "cells", "geometric mean", "least", "most",
            "cells above 1.02", "cells below 0.98")  # fmt: skip
    return table(head, lines)


def epyc_order() -> str:
    """vLLM's order on a CPU (zen_cpu, then cpu: both 8-bit) beside the exact backends."""
    times, accuracy = epyc_times()
    lines = []
    for (shape, tokens), us in times.items():
        exact = {
            name: t for name, t in us.items() if accuracy[name] == "exact" and name != "cpu_native"
        }
        other = min(exact, key=lambda name: exact[name])
        ours = us["cpu_native"]
        lines.append(
            (shape, f"{tokens:,}", _ms(us["zen_cpu"]), _ms(us["cpu"]),
             f"{_ms(exact[other])} (`{other}`)", _ms(ours), ratio_text(exact[other] / ours),
             ratio_text(us["zen_cpu"] / ours))
        )  # fmt: skip
    head = ("shape", "tokens", "`zen_cpu` (a8), ms", "`cpu` (a8), ms", "best other exact, ms",
            "ours, ms", "best other exact / ours", "`zen_cpu` / ours")  # fmt: skip
    return table(head, lines)


def crossovers() -> str:
    """Where one backend overtakes another, between measured token counts."""
    lines = []
    h200, (epyc, _) = h200_times(), epyc_times()
    for where, times, pairs in (
        ("H200", h200, (("humming_indexed", "humming_grouped"), ("autosel", "humming_indexed"))),
        ("EPYC", epyc, (("cpu_native", "zen_cpu"), ("torch_int4", "emulation"),
                        ("cpu_native", "cpu"))),
    ):  # fmt: skip
        for layer in dict.fromkeys(layer for layer, _ in times):
            counts = sorted(count for name, count in times if name == layer)
            flat = {(name, c): us for c in counts for name, us in times[layer, c].items()}
            for before, after in pairs:
                lines += _crossings(where, layer, counts, flat, before, after)
    return table(("device", "layer", "from", "to", "at about, tokens"), lines)


def _crossings(
    where: str,
    layer: str,
    counts: Sequence[int],
    times: dict[tuple[str, int], float],
    before: str,
    after: str,
) -> Iterable[tuple[object, ...]]:
    for left, right in itertools.pairwise(counts):
        for one, two in ((before, after), (after, before)):
            at = crossing_tokens(times, one, two, left, right)
            if at is not None:
                yield where, layer, f"`{one}`", f"`{two}`", f"{at:,.0f}"


TABLES: dict[str, Callable[[], str]] = {
    "summary": summary,
    **findings_sweeps.TABLES,
    "h200-order": h200_order,
    "h200-roofline": h200_roofline,
    "epyc-order": epyc_order,
    "crossovers": crossovers,
}


def _us(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _ms(value: float) -> str:
    return f"{value / 1e3:.2f}"


def render(text: str) -> str:
    """The page with every table made anew; SystemExit for a mark that no table goes by."""

    def made(mark: re.Match[str]) -> str:
        if mark[2] not in TABLES:
            sys.exit(f"{PAGE}: found table {mark[2]}, expected one of {', '.join(TABLES)}")
        return f"{mark[1]}{TABLES[mark[2]]()}{mark[3]}"

    return MARK.sub(made, text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.findings")
    parser.add_argument("--check", action="store_true", help="fail when a table is stale")
    options = parser.parse_args(argv)
    text = PAGE.read_text(encoding="utf-8")
    fresh = render(text)
    if options.check:
        if fresh != text:
            print(f"{PAGE} is stale: scripts/findings", file=sys.stderr)
        return int(fresh != text)
    Path(PAGE).write_text(fresh, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
