"""Figures of what the store holds: gathers the tables of :mod:`autosel.plots` and captions them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np

import autosel
from autosel import plots
from autosel.core import Device, Measurement, Problem
from autosel.errors import AutoselError, field_error
from autosel.expert_map import local_range
from autosel.explanation import COLD
from autosel.plot_style import Caption
from autosel.roofline import Ceilings
from autosel.routing_synthetic import make_routing
from autosel.stats import ranking_quantile
from autosel.store import Store, Sweep
from autosel.words import device_text, problem_text, versions_text

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

WIDE = (9.0, 5.6)


def latency(
    store: Store,
    problem: Problem,
    device: Device,
    *,
    routing: str = "uniform",
    title: str = "Latency of one MoE layer",
    timing: Mapping[str, Any] | None = None,
    size: tuple[float, float] = WIDE,
) -> Figure:
    """Latency against tokens from what is stored for this layer on this device.

    ``timing`` picks a way of timing (default: cold caches). ``size`` is in inches. Raises
    AutoselError when no correct candidate was timed, naming the nearest entry, and
    MissingPackageError without matplotlib.
    """
    mode = tuple(sorted((timing or COLD).items()))
    measurements = store.measurements(problem, device, routing, timing=mode)
    table = plots.latency_data(measurements)
    if table.empty:
        nearest = store.nearest(problem, device, routing)
        way = ", ".join(f"{name}={value}" for name, value in mode)
        if nearest is None:
            found = "an empty database"
        elif nearest.exact:
            found = f"none that was correct and timed with {way}"
        else:
            found = f"none; the nearest entry differs: {nearest}"
        raise AutoselError(
            field_error("plot", "timed candidates of this layer here", found, "a sweep first")
        )
    winners = plots.winner_data(store.decisions(problem, device, routing, timing=mode))
    sweep = _newest_with_ceilings(store, device, problem.act_dtype)
    bound = None
    if sweep is not None:
        counts = sorted({int(count) for count in table["num_tokens"]})
        seed = int(sweep[0].settings.get("seed", 0))
        bound = plots.roofline_data(
            problem, counts, sweep[1], lambda tokens: experts_hit(problem, routing, tokens, seed)
        )
    nearest = store.nearest(problem, device, routing)
    when = nearest.entry.newest if nearest and nearest.exact else ""
    caption = Caption(
        title,
        f"{problem_text(problem)}; {routing} routing",
        _footer(device, table, measurements, when, sweep[1] if sweep else None),
    )
    return plots.plot_latency(table, winners, bound, caption, size)


def experts_hit(problem: Problem, routing: str, num_tokens: int, seed: int) -> tuple[int, int]:
    """Local experts that the made-up routing of a sweep really hit, and slots they serve."""
    ids = make_routing(routing, num_tokens, problem, seed=seed).topk_ids.numpy()  # [M, top_k]
    held = local_range(problem, 0)
    here = ids[(ids >= held.start) & (ids < held.stop)]
    return len(np.unique(here)), here.size


def _newest_with_ceilings(
    store: Store, device: Device, act_dtype: str
) -> tuple[Sweep, Ceilings] | None:
    for sweep in reversed(store.sweeps()):
        if sweep.device == device and sweep.ceilings:
            known = sweep.ceilings.get(act_dtype, sweep.ceilings)
            if isinstance(known, Mapping) and {"read_gbps", "matmul_tflops"} <= set(known):
                ceilings = Ceilings(float(known["read_gbps"]), float(known["matmul_tflops"]))
                return sweep, ceilings
    return None


def _footer(
    device: Device,
    table: pd.DataFrame,
    measurements: list[Measurement],
    when: str,
    ceilings: Ceilings | None,
) -> tuple[str, ...]:
    least, most = int(table["samples"].min()), int(table["samples"].max())
    count = f"{least}" if least == most else f"{least} to {most}"
    cache = next((v for m in measurements for n, v in m.timing if n == "cache"), "cold")
    machine = f"{device_text(device)}; {versions_text(device)}; autosel {autosel.__version__}"
    quantile = ranking_quantile(device.kind)
    if quantile == 0.5:
        shown = f"Lines: median of {count} samples, {cache} caches; bars: the middle half of them."
    else:
        shown = (
            f"Lines: {quantile:.0%} quantile, which is what decisions compare here, of {count} "
            f"samples without preemption, {cache} caches; bars: to the 75% quantile; dash: median."
        )
    lines = [
        f"{machine}; measured {_day(when)}",
        f"{shown} Ahead by: how much longer the runner-up takes; "
        "tie or ?: not settled by the samples.",
    ]
    if any(m.accuracy == "a8" and m.status == "ok" for m in measurements):
        lines.append("a8: quantises activations to 8 bits inside; chosen only where allowed.")
    if ceilings is not None:
        lines.append(
            f"Roofline: bytes of the experts hit and of the activations at "
            f"{ceilings.read_gbps:.3g} GB/s, or multiplications at "
            f"{ceilings.matmul_tflops:.3g} TFLOP/s, as torch reads and multiplies here."
        )
    return tuple(lines)


def _day(when: str) -> str:
    try:
        return datetime.fromisoformat(when).date().isoformat()
    except ValueError:
        return when or "at an unknown time"
