"""What is likely for a layer or token count that was not measured here, and what to measure next.

Two ways, both labelled: between measured token counts of the same layer a line in log-log axes
(:mod:`autosel.between`), elsewhere the cost model of each backend (:mod:`autosel.cost_model`). Only
measurements of this very device, driver and packages are used, and a prediction never decides.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from autosel import registry, samples
from autosel.between import MIN_COUNTS, interpolate, left_out
from autosel.core import Device, Measurement, Problem, Workload
from autosel.cost_model import CONFIDENCE, LEAST_SD, CostModel, Known, Prediction
from autosel.errors import AutoselError
from autosel.records import Timing
from autosel.store import Store
from autosel.tiers import COLD
from autosel.workload import DEFAULT, PRESETS

_NORMAL = 1.959964

#: Of one backend: the best time of each layer and token count.
Curves = Mapping[Problem, Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class Likely:
    """A backend's predicted time; never a measurement.

    how  ``between measured token counts`` or ``cost model``
    """

    backend: str
    num_tokens: int
    prediction: Prediction
    how: Literal["between measured token counts", "cost model"]

    def __str__(self) -> str:
        return f"{self.backend}: {self.prediction}; {self.how}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**asdict(self), "label": self.prediction.label, "confidence": CONFIDENCE}


@dataclass(frozen=True, slots=True)
class Proposal:
    """A measurement worth taking: ``saves_us`` is the expected time a call of the workload that
    knowing it would save, by choosing better."""

    backend: str
    num_tokens: int
    saves_us: float
    why: str


def predict(
    store: Store,
    problem: Problem,
    device: Device,
    num_tokens: int,
    *,
    routing: str = "uniform",
    timing: Timing = COLD,
    allow_a8: bool = False,
) -> tuple[Likely, ...]:
    """Predicted times of the backends that support the layer here, the fastest first.

    Empty where too little is stored to predict from; measured token counts are not predicted.
    """
    found = []
    for backend, curves in curves_of(store, device, routing, timing, allow_a8).items():
        if num_tokens not in curves.get(problem, {}) and _supported(backend, problem, device):
            likely = _likely(backend, curves, problem, num_tokens)
            if likely is not None:
                found.append(likely)
    return tuple(sorted(found, key=lambda item: (item.prediction.us, item.backend)))


def propose(
    store: Store,
    problem: Problem,
    device: Device,
    token_counts: Sequence[int],
    *,
    workload: Workload = PRESETS[DEFAULT],
    routing: str = "uniform",
    timing: Timing = COLD,
    allow_a8: bool = False,
) -> tuple[Proposal, ...]:
    """Backends and token counts to measure next, those that save most first.

    For each token count the backend with the lowest mean would be chosen now. Measuring one more
    tells its true time: if it is another's, the choice changes when that is lower; if it is the
    chosen one's, when that turns out higher than the next. The expected saving of either is that of
    a normal variable beyond a threshold (expected improvement), weighted by the workload's calls.
    """
    from autosel.buckets import buckets
    from autosel.workload import shares

    counts = sorted(set(token_counts))
    weights = shares(workload, buckets(counts)).calls
    curves = curves_of(store, device, routing, timing, allow_a8)
    found: list[Proposal] = []
    for count, weight in zip(counts, weights, strict=True):
        guesses: dict[str, tuple[float, float]] = {}
        for backend, known in curves.items():
            measured = known.get(problem, {}).get(count)
            if measured is not None:
                guesses[backend] = measured, 0.0
            elif _supported(backend, problem, device):
                likely = _likely(backend, known, problem, count)
                if likely is not None:
                    guesses[backend] = likely.prediction.us, likely.prediction.sd
        found += _savings(count, weight, guesses)
    return tuple(sorted(found, key=lambda p: (-p.saves_us, p.num_tokens, p.backend)))


def curves_of(
    store: Store, device: Device, routing: str, timing: Timing = COLD, allow_a8: bool = False
) -> dict[str, Curves]:
    """Each backend's best measured times on this device, by layer and token count."""
    if not device.name.strip():
        return {}
    return curves_from(store.measurements(device=device, routing=routing, timing=timing), allow_a8)


def curves_from(rows: Sequence[Measurement], allow_a8: bool = False) -> dict[str, Curves]:
    """The same from measurements of one device, routing and way of timing."""
    curves: dict[str, dict[Problem, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for m in rows:
        summary = samples.summary(m)
        if summary is None or (m.accuracy != "exact" and not allow_a8):
            continue
        times = curves[m.candidate.backend][m.problem]
        times[m.num_tokens] = min(summary.estimate_us, times.get(m.num_tokens, math.inf))
    return {name: dict(found) for name, found in curves.items()}


def _likely(backend: str, curves: Curves, problem: Problem, num_tokens: int) -> Likely | None:
    between = _between(curves, problem, num_tokens)
    if between is not None:
        return Likely(backend, num_tokens, between, "between measured token counts")
    rows = [Known(p, n, us) for p, times in curves.items() for n, us in times.items()]
    try:
        prediction = CostModel.fit(rows).predict(problem, num_tokens)
    except AutoselError:  # too few shapes
        return None
    return Likely(backend, num_tokens, prediction, "cost model")


def _between(curves: Curves, problem: Problem, num_tokens: int) -> Prediction | None:
    """By interpolation, where the layer was measured at enough counts on both sides."""
    times = curves.get(problem, {})
    if len(times) < MIN_COUNTS or not min(times) < num_tokens < max(times):
        return None
    us = interpolate(times, num_tokens)
    # A left-out count spans twice the gap that a new one lies in, so this errs on the wide side.
    errors = np.abs([e for found in curves.values() for e in left_out(found).values()])
    half = max(float(np.quantile(errors, CONFIDENCE, method="higher")), LEAST_SD)
    low, high = us * math.exp(-half), us * math.exp(half)
    return Prediction(us, low, high, half / _NORMAL, len(curves))


def _savings(
    count: int, weight: float, guesses: Mapping[str, tuple[float, float]]
) -> list[Proposal]:
    """What measuring each predicted backend at one token count would save."""
    ranked = sorted(guesses, key=lambda name: guesses[name][0])
    found = []
    for name in ranked:
        us, relative = guesses[name]
        if not relative or len(ranked) < 2:
            continue
        sd = us * relative
        chosen = name == ranked[0]
        rival = guesses[ranked[1] if chosen else ranked[0]][0]
        # Above the rival's time for the one chosen now, below the chosen one's for any other.
        gap = us - rival if chosen else rival - us
        saving = weight * _beyond(gap, sd)
        if saving > 0:
            doubt = "may be slower than the next" if chosen else "may be faster than the choice"
            found.append(Proposal(name, count, saving, f"predicted only; {doubt}"))
    return found


def _beyond(gap: float, sd: float) -> float:
    """Mean of ``max(0, gap + sd * z)`` for a standard normal ``z``."""
    z = gap / sd
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    below = (1 + math.erf(z / math.sqrt(2))) / 2
    return gap * below + sd * density


def _supported(backend: str, problem: Problem, device: Device) -> bool:
    try:
        return bool(registry.get(backend).supports(problem, device))
    except AutoselError:
        return False
