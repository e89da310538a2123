"""Which weight is wrong? Finds single faults that are too small for any one output.

One wrong code changes one of thousands of terms and drowns in the rounding of the others, but it
does so for every token in the same direction. The derivative of the squared error by each weight
adds that up: for weight w it is ``sum over tokens of error * d(out)/dw``, and its size relative to
what rounding gives it (:mod:`autosel.error_scale`) is a score for every weight of the layer. For
a correct kernel the scores are a little below a standard normal, whatever the layer.

This is the score (Lagrange multiplier) test of statistics, one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from autosel.compare import AUDIT_LIMIT
from autosel.core import AccuracyClass, CanonicalExperts, Routing
from autosel.dtypes import torch_dtype
from autosel.error_scale import SYSTEMATIC, NoisyGemm, Rounding, activation_slope
from autosel.reference import checked_input, exact_arithmetic, routed_parts


@dataclass(frozen=True, slots=True)
class Suspect:
    """The weight that the errors point at most: local expert, GEMM, output and input.

    An input of None is the bias of that output. A single wrong weight is named exactly; where
    many are wrong at once, the expert is sure and the rest says where to begin.
    """

    expert: int
    gemm: str
    output: int
    input: int | None
    score: float

    @property
    def guilty(self) -> bool:
        return not self.score <= AUDIT_LIMIT

    def __str__(self) -> str:
        place = "bias" if self.input is None else f"input {self.input}"
        return f"local expert {self.expert} {self.gemm} output {self.output} {place}"


def audit(
    x: torch.Tensor,
    experts: CanonicalExperts,
    routing: Routing,
    error: torch.Tensor,
    scale: torch.Tensor,
    *,
    expert_map: torch.Tensor | None = None,
    accuracy: AccuracyClass = "exact",
    dtype: torch.dtype = torch.float32,
    shared: torch.Tensor | None = None,
) -> Suspect | None:
    """The most suspicious weight of the experts that ``routing`` visits, None without any.

    x, routing  as for :func:`autosel.reference.moe`; tokens must be independent of each other
    error       ``[M, H]``: output minus reference
    scale       ``[M, H]``: its error scale in the same accuracy class
    shared      ``[M]``: share of a token's error that all its outputs have in common, where that
                is large (8-bit activations on weights of one sign)
    """
    # A token without a scale has no error either, or compare() has refused it.
    precision = torch.where(scale > 0, scale.to(dtype).square().reciprocal(), 0.0)  # [M, H]
    # A kernel that is noisier than the scale but within its limits is noisier here as well.
    noisiness = (error.to(dtype).square() * precision).mean().sqrt().clamp(min=1.0)
    found: list[Suspect] = []
    with exact_arithmetic(x.device):
        common = torch.zeros_like(precision[:, 0]) if shared is None else shared.to(dtype)
        for expert, scores in _scores(
            x, experts, routing, error.to(dtype), precision, expert_map, accuracy, dtype, common
        ):
            for gemm, raw in scores.items():
                score = raw / noisiness
                place = int(score.abs().nan_to_num(torch.inf).argmax())
                output, column = divmod(place, score.shape[1])
                value = float(score[output, column].abs().nan_to_num(torch.inf))
                weight = experts.w13 if gemm == "w13" else experts.w2
                where = column if column < weight.num_inputs else None
                found.append(Suspect(expert, gemm, output, where, value))
    return max(found, key=lambda suspect: suspect.score, default=None)


def _scores(
    x: torch.Tensor,
    experts: CanonicalExperts,
    routing: Routing,
    error: torch.Tensor,
    precision: torch.Tensor,
    expert_map: torch.Tensor | None,
    accuracy: AccuracyClass,
    dtype: torch.dtype,
    common: torch.Tensor,
) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """For each visited expert the scores of w13 ``[s*I, H]`` and w2 ``[H, I]``.

    Where there is a bias, it is one more input that is always 1.
    """
    problem = experts.problem
    act_dtype, activation = problem.act_dtype, problem.activation
    rounding = Rounding.of(torch_dtype(act_dtype))
    x = checked_input(x, problem.hidden_size, dtype)
    for part in routed_parts(x, experts, routing, expert_map):
        first = NoisyGemm(experts.w13, part.expert, part.w13(dtype), act_dtype, rounding)
        second = NoisyGemm(experts.w2, part.expert, part.w2(dtype), act_dtype, rounding)
        overlap = (second.weight.T @ second.weight).square()  # [I, I]
        sums = _Sums()
        for tokens, weights in part.rows():
            weight = weights.to(dtype).unsqueeze(1)  # [R, 1]
            on_input = problem.router_weight_on_input
            rows = x[tokens] * weight if on_input else x[tokens]  # [R, H]
            entering = rounding.variance(rows) if on_input else torch.zeros_like(rows)
            h = first.outputs(rows)  # [R, s*I]
            a, slope = activation_slope(h, activation)  # [R, I], [R, s*I]
            carried = first.variance(rows, h) + first.carried(rows, entering, accuracy)
            noise = _onto_activation(slope.square() * carried, problem.num_shards)
            lever = _Lever(
                _with_one(rows, first),
                slope,
                _with_one(a, second),
                torch.ones_like(weight) if on_input else weight,
                precision[tokens],
                common[tokens].unsqueeze(1),
                second,
                overlap,
            )
            sums.add(lever, error[tokens], noise + rounding.variance(a))
            for kind in SYSTEMATIC:
                at_h, at_y = first.systematic(kind, rows), second.systematic(kind, a)
                shift = torch.zeros_like(error[tokens])  # [R, H] of this slot alone
                if at_h is not None:
                    shift += _onto_activation(slope * at_h, problem.num_shards) @ second.weight.T
                if at_y is not None:
                    shift += at_y
                if at_h is not None or at_y is not None:
                    sums.add_systematic(kind, lever, lever.factor * shift)
        yield part.expert, sums.scores()


def _onto_activation(values: torch.Tensor, shards: int) -> torch.Tensor:
    """Sum of what gate and up do to the activation: ``[R, s*I]`` to ``[R, I]``."""
    return torch.stack(values.chunk(shards, dim=-1)).sum(dim=0)


def _with_one(values: torch.Tensor, gemm: NoisyGemm) -> torch.Tensor:
    """``[R, K]`` with a column of ones for the bias, if there is one."""
    return values if gemm.bias is None else torch.cat([values, torch.ones_like(values[:, :1])], 1)


@dataclass(frozen=True, slots=True)
class _Lever:
    """How the weights move the outputs of some routed rows.

    rows ``[R, H]`` and a ``[R, I]`` are the inputs of both GEMMs (with a 1 for a bias), slope
    ``[R, s*I]``, factor ``[R, 1]`` (router weight on the output), precision ``[R, H]`` (1 / error
    scale squared), common ``[R, 1]`` (share of the error that all outputs have in common),
    overlap ``[I, I]`` (squared products of the columns of w2).
    """

    rows: torch.Tensor
    slope: torch.Tensor
    a: torch.Tensor
    factor: torch.Tensor
    precision: torch.Tensor
    common: torch.Tensor
    second: NoisyGemm
    overlap: torch.Tensor

    def derivatives(self, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum over rows of error times d(out)/dw, weighed by precision, for w13 and w2."""
        weighted = error * self.precision  # [R, H]
        pull = self.factor * (weighted @ self.second.weight)  # [R, I]
        w13 = (self.slope * self.on_h(pull)).T @ self.rows  # [s*I, H]
        return w13, weighted.T @ (self.factor * self.a)  # [H, I]

    def variances(self, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Variance of the above under rounding; ``noise`` ``[R, I]`` is the activation's."""
        apart = self.precision @ self.second.square  # [R, I]
        # What outputs have in common adds up by size over a column of w2.
        together = (self.precision.sqrt() @ self.second.weight.abs()).square()
        reach = self.factor.square() * (apart + self.common * (together - apart))
        # An error of one activation is seen by every weight whose column of w2 is like its own.
        even = self.precision.square().mean(dim=1, keepdim=True)  # [R, 1]
        like = even * self.factor.square().square() * (noise @ self.overlap)  # [R, I]
        spread = self.slope.square() * self.on_h(reach + like)
        w2 = self.precision.T @ (self.factor * self.a).square()
        return spread.T @ self.rows.square(), w2

    def on_h(self, values: torch.Tensor) -> torch.Tensor:
        return values.repeat(1, self.slope.shape[1] // values.shape[1])


_Pair = tuple[torch.Tensor, torch.Tensor]


class _Sums:
    """Derivatives of one expert's weights, with what rounding alone would make of them."""

    def __init__(self) -> None:
        self.total: _Pair | None = None
        self.variance: _Pair | None = None
        self.systematic: dict[str, _Pair | None] = dict.fromkeys(SYSTEMATIC)

    def add(self, lever: _Lever, error: torch.Tensor, noise: torch.Tensor) -> None:
        self.total = _added(self.total, lever.derivatives(error))
        self.variance = _added(self.variance, lever.variances(noise))

    def add_systematic(self, kind: str, lever: _Lever, shift: torch.Tensor) -> None:
        self.systematic[kind] = _added(self.systematic[kind], lever.derivatives(shift))

    def scores(self) -> dict[str, torch.Tensor]:
        assert self.total is not None
        variance = self.variance
        for sums in self.systematic.values():
            if sums is not None:
                variance = _added(variance, (sums[0].square(), sums[1].square()))
        assert variance is not None
        return {
            # A weight that no token uses has neither a sum nor a variance.
            name: torch.where(total == 0, 0.0, total / spread.sqrt())
            for name, total, spread in zip(("w13", "w2"), self.total, variance, strict=True)
        }


def _added(sums: _Pair | None, more: _Pair) -> _Pair:
    return more if sums is None else (sums[0] + more[0], sums[1] + more[1])
