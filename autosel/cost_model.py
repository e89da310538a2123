"""Predicts the time of a backend on a layer or token count that was not measured.

**Model.** A physical part and a residual, for each backend on one device. The physical part is a
sum with coefficients of at least 0, fitted to relative errors::

    time = launch + weight bytes / B + activation bytes / A + operations / P

with the bytes of the experts that uniform routing is expected to hit (:mod:`autosel.roofline`). The
residual is a Gaussian process on the logarithm of measured over physical time, in doublings of the
sizes; its length, amplitude and noise are those that predict a shape left out best.

**Interval.** Every shape is left out in turn and predicted from the others; the errors found, in
predicted standard deviations, say how wide the interval must be to hold 95 % of them (conformal
prediction: Lei et al., "Distribution-Free Predictive Inference for Regression", 2018). Errors at
several token counts of one shape are much alike, so the quantile is taken within each shape and the
largest counts: of all errors together, 83 % instead of 95 % were held in the worst case of a table
of five shapes. With one shape only there is nothing to leave out, so no other shape is predicted.

A prediction is never a measurement: it has a type of its own, is labelled, and no decision, plan or
table reads one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from autosel.core import Problem
from autosel.errors import AutoselError, field_error
from autosel.roofline import (
    activation_bytes,
    expected_experts_hit,
    expert_bytes,
    slot_flops,
)

Floats = npt.NDArray[np.float64]

#: Figures of fewer shapes, or fewer in all, are not predicted from.
MIN_SHAPES, MIN_ROWS = 2, 6
#: Hyperparameters tried: length in doublings, amplitude and noise as shares of the time.
LENGTHS, AMPLITUDES, NOISES = (1.5, 3.0, 6.0), (0.1, 0.3), (0.01, 0.05)
CONFIDENCE = 0.95
#: No interval is narrower than this, however well the shapes that there are predict each other.
LEAST_SD = 0.02


@dataclass(frozen=True, slots=True)
class Known:
    """A measured time: the best of one backend at one token count, in microseconds."""

    problem: Problem
    num_tokens: int
    us: float

    def __post_init__(self) -> None:
        if not (self.us > 0 and math.isfinite(self.us) and self.num_tokens >= 1):
            found = f"{self.us} us at {self.num_tokens} tokens"
            raise AutoselError(field_error("Known", "time", found, "above 0, at 1 token or more"))


@dataclass(frozen=True, slots=True)
class Prediction:
    """A time that was NOT measured, with the interval that holds 95 % of such predictions.

    ``shapes`` says how many layers' shapes stand behind it; ``sd`` is that of the logarithm.
    """

    us: float
    low_us: float
    high_us: float
    sd: float
    shapes: int
    label: str = "predicted"

    def __str__(self) -> str:
        return (
            f"predicted {self.us:.4g} us ({CONFIDENCE:.0%} interval {self.low_us:.4g} to "
            f"{self.high_us:.4g} us, from {self.shapes} measured shapes)"
        )


class CostModel:
    """Fitted to one backend on one device; make one with :meth:`fit`."""

    def __init__(self, rows: Sequence[Known], hyper: tuple[float, float, float]) -> None:
        self._rows, self._hyper = rows, hyper
        self._physical = np.array([_physical(r.problem, r.num_tokens) for r in rows])
        self._times = np.array([r.us for r in rows])
        self._scale = self._physical.max(axis=0)
        self._scale[self._scale == 0] = 1.0
        self._coefficients = _nonnegative(self._physical / self._scale / self._times[:, None])
        self._places = np.array([_sizes(r.problem, r.num_tokens) for r in rows])
        self._residual = np.log(self._times) - np.log(self._base(self._physical))
        length, amplitude, noise = hyper
        kernel = _kernel(self._places, self._places, length, amplitude)
        self._solved = np.linalg.cholesky(kernel + noise**2 * np.eye(len(rows)))
        self._weights = _solve(self._solved, self._residual)
        self.shapes = len({r.problem for r in rows})
        self.widening = math.inf

    @classmethod
    def fit(cls, rows: Iterable[Known]) -> CostModel:
        """Fit to measured times; AutoselError for fewer than two shapes or six times."""
        known = sorted(rows, key=lambda r: (r.problem.key, r.num_tokens))
        shapes = list(dict.fromkeys(r.problem for r in known))
        if len(shapes) < MIN_SHAPES or len(known) < MIN_ROWS:
            found = f"{len(known)} times of {len(shapes)} shapes"
            expected = f"at least {MIN_ROWS} of {MIN_SHAPES}"
            raise AutoselError(field_error("cost model", "measurements", found, expected))
        best: tuple[float, tuple[float, float, float], Floats] | None = None
        for hyper in itertools.product(LENGTHS, AMPLITUDES, NOISES):
            scores = _left_out(cls, known, shapes, hyper)
            loss = float(np.mean(np.abs(scores[:, 0])))
            if best is None or loss < best[0]:
                best = loss, hyper, scores
        assert best is not None
        _, hyper, scores = best
        model = cls(known, hyper)
        ratios = np.abs(scores[:, 0]) / scores[:, 1]
        owner = np.array([shapes.index(r.problem) for r in _by_shape(known, shapes)])
        model.widening = max(_quantile(ratios[owner == place]) for place in range(len(shapes)))
        return model

    def predict(self, problem: Problem, num_tokens: int) -> Prediction:
        """The time of a call; AutoselError for less than one token."""
        if num_tokens < 1:
            raise AutoselError(field_error("predict", "tokens", num_tokens, "at least 1"))
        log, sd = self._log(problem, num_tokens)
        half = self.widening * sd
        return Prediction(
            us=math.exp(log),
            low_us=math.exp(log - half),
            high_us=math.exp(log + half),
            sd=half / _NORMAL,
            shapes=self.shapes,
        )

    def _log(self, problem: Problem, num_tokens: int) -> tuple[float, float]:
        """Mean and standard deviation of the logarithm of the time, as the process has it."""
        physical = np.array([_physical(problem, num_tokens)])
        place = np.array([_sizes(problem, num_tokens)])
        length, amplitude, noise = self._hyper
        cross = _kernel(place, self._places, length, amplitude)[0]
        log = float(np.log(self._base(physical))[0] + cross @ self._weights)
        variance = amplitude**2 - float(cross @ _solve(self._solved, cross)) + noise**2
        return log, max(math.sqrt(max(variance, 0.0)), LEAST_SD)

    def _base(self, physical: Floats) -> Floats:
        base: Floats = (physical / self._scale) @ self._coefficients
        return np.maximum(base, 1e-6)


#: Half-width of a 95 % interval in standard deviations of a normal distribution.
_NORMAL = 1.959964


def _left_out(
    cls: type[CostModel],
    rows: Sequence[Known],
    shapes: Sequence[Problem],
    hyper: tuple[float, float, float],
) -> Floats:
    """Errors of the logarithm and their predicted deviations ``[rows, 2]``, each shape left out."""
    found: list[tuple[float, float]] = []
    for shape in shapes:
        model = cls([r for r in rows if r.problem != shape], hyper)
        for r in _by_shape(rows, [shape]):
            log, sd = model._log(r.problem, r.num_tokens)
            found.append((math.log(r.us) - log, sd))
    return np.array(found)


def _by_shape(rows: Sequence[Known], shapes: Sequence[Problem]) -> list[Known]:
    """The times of these shapes, shape by shape."""
    return [r for shape in shapes for r in rows if r.problem == shape]


def _quantile(scores: Floats) -> float:
    """The score that holds 95 % of what comes next, and the largest where there are too few."""
    place = math.ceil(CONFIDENCE * (len(scores) + 1))
    return float(np.sort(scores)[min(place, len(scores)) - 1])


def _physical(problem: Problem, num_tokens: int) -> list[float]:
    """A launch, bytes of weights, bytes of activations, operations."""
    slots = num_tokens * problem.top_k * problem.num_local_experts / problem.num_experts
    between = slots * problem.intermediate_size * (problem.num_shards + 1) * 2
    return [
        1.0,
        expected_experts_hit(problem, num_tokens) * expert_bytes(problem),
        activation_bytes(problem, num_tokens) * (1 + problem.top_k) / 2 + between,
        slots * slot_flops(problem),
    ]


def _sizes(problem: Problem, num_tokens: int) -> list[float]:
    """Where a case lies, in doublings: tokens, tokens an expert, sizes."""
    hit = expected_experts_hit(problem, num_tokens)
    slots = num_tokens * problem.top_k * problem.num_local_experts / problem.num_experts
    return [
        math.log2(num_tokens),
        math.log2(max(slots, 1e-9) / max(hit, 1e-9)),
        math.log2(hit),
        math.log2(problem.hidden_size),
        math.log2(problem.intermediate_size),
        math.log2(problem.num_local_experts),
        math.log2(problem.w13.num_bits),
        math.log2(problem.w13.num_groups(problem.hidden_size)),
    ]


def _kernel(one: Floats, other: Floats, length: float, amplitude: float) -> Floats:
    """Squared-exponential covariance ``[n, m]``."""
    square = ((one[:, None, :] - other[None, :, :]) ** 2).sum(axis=2)
    covariance: Floats = amplitude**2 * np.exp(-square / (2 * length**2))
    return covariance


def _solve(lower: npt.NDArray[Any], right: Floats) -> Floats:
    """``(L L^T)^-1 right`` for a lower triangle."""
    solved: Any = np.linalg.solve(lower.T, np.linalg.solve(lower, right))
    return solved  # type: ignore[no-any-return]


def _nonnegative(design: Floats) -> Floats:
    """Coefficients of at least 0 of least squares against ones: exact, by trying each subset of
    the four columns (Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23)."""
    count = design.shape[1]
    ones = np.ones(len(design))
    best, best_loss = np.zeros(count), math.inf
    for size in range(1, count + 1):
        for columns in itertools.combinations(range(count), size):
            found, *_ = np.linalg.lstsq(design[:, columns], ones, rcond=None)
            loss = float(((design[:, columns] @ found - 1) ** 2).sum())
            if (found >= 0).all() and loss < best_loss - 1e-12:
                best = np.zeros(count)
                best[list(columns)] = found
                best_loss = loss
    return best
