"""How far a correct kernel may be from the truth: rounding errors carried through the layer.

Every place where a correct kernel may round to the act dtype is a small error of known size. They
are independent, so their variances add (the probabilistic analysis of Higham and Mary, SIAM J.
Sci. Comput. 41(5), 2019); the worst case, where all point the same way, is ``sqrt(K)`` times
larger and would hide real faults. A derivative carries them through the activation.

Places counted, with u the unit roundoff: weights (and their scales or zero terms where those
change type), first GEMM's output, activation, second GEMM's output, router weight, the sum over
slots, the result; and float32 accumulation. Class ``a8`` adds the 8-bit rounding of each GEMM's
input, one scale a row: an error of an input is the same for all outputs and all experts of its
token, so where weights are alike (:mod:`autosel.coherence`) these add up by size, not by square.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from autosel.activations import activate
from autosel.canonical import expert_zeros, group_index
from autosel.coherence import Leading
from autosel.core import AccuracyClass, Activation, CanonicalExperts, QuantWeight, Routing
from autosel.dtypes import torch_dtype
from autosel.reference import checked_input, exact_arithmetic, routed_parts

#: Ways to round weights that repeat in every call: the weights themselves, their scales cast to
#: the act dtype, zero points times scales folded into one number.
SYSTEMATIC = ("weights", "scales", "zeros")

#: Variances below this are too close to the end of float32's range to be multiplied on.
FLOAT32_SAFE = 1e-24

#: Unit roundoffs below this are as small as those of the sums, which are in float32.
FINE = 1e-6

#: Largest code of a symmetric 8-bit activation.
INT8_MAX = 127.0


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounding to one dtype: relative ``unit``, and ``least`` where numbers turn subnormal.

    An error is uniform in +-unit * 2**e for a value in [2**e, 2**(e+1)), so its variance is at
    most ``(unit * value)**2 / 3``.
    """

    unit: float
    least: float

    @staticmethod
    def of(dtype: torch.dtype) -> Rounding:
        info = torch.finfo(dtype)
        # A float32 kernel may use the fast exponential, good to about two units.
        unit = info.eps if dtype == torch.float32 else info.eps / 2
        return Rounding(unit, info.tiny * info.eps / 2)

    def variance(self, values: torch.Tensor) -> torch.Tensor:
        return ((self.unit * values).square() + self.least**2) / 3


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """What is right for one input and how far from it a correct kernel may be.

    reference  ``[M, H]``, equal to :func:`autosel.reference.moe`
    scales     per accuracy class, ``[M, H]``: standard deviation of a correct kernel's output
    overflows  bool ``[M]``: some number on the way does not fit the act dtype, though the
               reference is finite
    shared     per accuracy class, ``[M]``: share of a token's error that all its outputs have in
               common, 0 to 1. Outputs that err together are one draw, not many
    shifts     each ``[M, H]``: the error that one way of rounding the weights has, always the same
    """

    reference: torch.Tensor
    scales: Mapping[AccuracyClass, torch.Tensor]
    overflows: torch.Tensor
    shared: Mapping[AccuracyClass, torch.Tensor]
    shifts: tuple[torch.Tensor, ...]

    def rows(self, index: slice | torch.Tensor) -> Judged:
        """What is right for some of the tokens."""
        return Judged(
            self.reference[index],
            {name: scale[index] for name, scale in self.scales.items()},
            self.overflows[index],
            {name: share[index] for name, share in self.shared.items()},
            tuple(shift[index] for shift in self.shifts),
        )

    def split(self, counts: Iterable[int]) -> Iterator[Judged]:
        """One for each run of ``counts`` tokens, for inputs that were judged together."""
        start = 0
        for count in counts:
            yield self.rows(slice(start, start + count))
            start += count


def error_scale(
    x: torch.Tensor,
    experts: CanonicalExperts,
    routing: Routing,
    *,
    expert_map: torch.Tensor | None = None,
    accuracy: AccuracyClass = "exact",
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Standard deviation that the rounding of a correct kernel gives each output: ``[M, H]``.

    Arguments as for :func:`autosel.reference.moe`. It is 0 exactly where nothing can round: a
    token that no expert here serves.
    """
    judged = judge(x, experts, routing, expert_map=expert_map, accuracies=(accuracy,), dtype=dtype)
    return judged.scales[accuracy]


def judge(
    x: torch.Tensor,
    experts: CanonicalExperts,
    routing: Routing,
    *,
    expert_map: torch.Tensor | None = None,
    accuracies: Sequence[AccuracyClass] = ("exact", "a8"),
    dtype: torch.dtype = torch.float64,
) -> Judged:
    """Reference and error scales in one pass over the experts, each dequantised once.

    With float32 the answer still comes in float64, from a second pass, where a square of the
    numbers met would leave float32's range.
    """
    problem = experts.problem
    act_dtype = torch_dtype(problem.act_dtype)
    rounding = Rounding.of(act_dtype)
    largest = torch.finfo(act_dtype).max
    x = checked_input(x, problem.hidden_size, dtype)
    total = torch.zeros(x.shape, dtype=dtype, device=x.device)  # [M, H] sum of slots
    sums = {accuracy: _Sums.zero(total) for accuracy in accuracies}
    shifts = [torch.zeros_like(total) for _ in SYSTEMATIC]
    overflows = torch.zeros(len(x), dtype=torch.bool, device=x.device)  # [M]
    smallest = torch.full((), torch.inf, dtype=dtype, device=x.device)
    with exact_arithmetic(x.device):
        for part in routed_parts(x, experts, routing, expert_map):
            first = NoisyGemm(
                experts.w13, part.expert, part.w13(dtype), problem.act_dtype, rounding
            )
            second = NoisyGemm(experts.w2, part.expert, part.w2(dtype), problem.act_dtype, rounding)
            together = {gemm: Leading.of(gemm.weight) for gemm in (first, second)}
            for tokens, weights in part.rows():
                weight = weights.to(dtype).unsqueeze(1)  # [R, 1]
                rows, entering = x[tokens], torch.zeros_like(x[tokens])  # [R, H]
                if problem.router_weight_on_input:
                    rows = rows * weight
                    entering = rounding.variance(rows)
                h = first.outputs(rows)  # [R, s*I]
                a, slope = activation_slope(h, problem.activation)  # [R, I], [R, s*I]
                y = second.outputs(a)  # [R, H]
                peak = torch.stack([t.abs().amax(dim=-1) for t in (h, a, y)]).amax(dim=0)  # [R]
                overflows[tokens] |= peak > largest
                factor = torch.ones_like(weight) if problem.router_weight_on_input else weight
                total.index_add_(0, tokens, y * factor)
                # Once for the router weight's own type and once for a 16-bit sum over slots.
                leaving = 2 * rounding.variance(y * factor)
                h_own, y_own = first.variance(rows, h), second.variance(a, y)
                # An input of nothing but zeros has no error that could be too small.
                least = torch.minimum(h_own.amin(dim=1), y_own.amin(dim=1))  # [R]
                dead = ~rows.any(dim=1)
                smallest = smallest.minimum(least.masked_fill(dead, torch.inf).min())

                def onto_activation(
                    at_h: torch.Tensor, shards: int = problem.num_shards
                ) -> torch.Tensor:
                    """``[..., s*I]`` to ``[..., I]``: gate and up meet in one activation."""
                    return torch.stack(at_h.chunk(shards, dim=-1)).sum(dim=0)

                for shift, kind in zip(shifts, SYSTEMATIC, strict=True):
                    at_h, at_y = first.systematic(kind, rows), second.systematic(kind, a)
                    if at_h is not None:
                        moved = onto_activation(slope * at_h) @ second.weight.T
                        shift.index_add_(0, tokens, factor * moved)
                    if at_y is not None:
                        shift.index_add_(0, tokens, factor * at_y)
                for accuracy, sum_ in sums.items():
                    coming = first.incoming(rows, entering, accuracy)  # [R, H]
                    at_h_variance = h_own + coming @ first.square.T  # [R, s*I]
                    steep = secant_slope(h, a, slope, at_h_variance.sqrt(), problem.activation)
                    carried = steep.square() * at_h_variance
                    inner = onto_activation(carried) + rounding.variance(a)  # [R, I]
                    inner = inner + evaluation_variance(h, problem.activation)
                    inner = second.incoming(a, inner, accuracy)
                    sum_.variance.index_add_(
                        0, tokens, factor.square() * (y_own + inner @ second.square.T) + leaving
                    )
                    common = together[second].variances(inner).sum(dim=1)  # [R]
                    sum_.common.index_add_(0, tokens, factor.square().squeeze(1) * common)
                    if accuracy == "a8" or problem.router_weight_on_input or rounding.unit < FINE:
                        size = together[first].variances(coming)  # [R, r]
                        leaning = torch.where(slope < 0, -steep, steep)
                        reach = torch.zeros_like(rows)  # [R, H] variance
                        for place, direction in enumerate(together[first].directions.T):
                            moved = onto_activation(leaning * direction) @ second.weight.T
                            reach += size[:, place : place + 1] * moved.square()
                        sum_.amplitude.index_add_(0, tokens, factor.abs() * reach.sqrt())
        last = rounding.variance(total)
        found = {accuracy: sum_.finished(last) for accuracy, sum_ in sums.items()}
    finite = all(bool(scale.isfinite().all()) for scale, _ in found.values())
    if dtype == torch.float32 and (smallest < FLOAT32_SAFE or not finite):
        return judge(
            x,
            experts,
            routing,
            expert_map=expert_map,
            accuracies=accuracies,
            dtype=torch.float64,
        )
    overflows |= (total.abs() > largest).any(dim=-1)
    return Judged(
        total,
        {accuracy: scale for accuracy, (scale, _) in found.items()},
        overflows,
        {accuracy: shared for accuracy, (_, shared) in found.items()},
        tuple(shifts),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """Over the slots of each token: variance ``[M, H]`` of independent errors, amplitude ``[M, H]``
    of those that all slots and outputs share, common ``[M]`` of the variance that outputs share."""

    variance: torch.Tensor
    amplitude: torch.Tensor
    common: torch.Tensor

    @staticmethod
    def zero(like: torch.Tensor) -> _Sums:
        return _Sums(torch.zeros_like(like), torch.zeros_like(like), torch.zeros_like(like[:, 0]))

    def finished(self, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale ``[M, H]`` and shared part ``[M]``, with the variance of the last rounding."""
        together = self.amplitude.square()
        variance = self.variance + together
        variance = variance + (variance > 0) * last
        whole = variance.sum(dim=1)  # [M]
        common = self.common + together.sum(dim=1)
        shared = torch.where(whole > 0, common / whole, 0.0).clamp(max=1.0)
        return variance.sqrt(), shared


class NoisyGemm:
    """One expert's GEMM on values that carry a variance, with the rounding of its own."""

    def __init__(
        self,
        source: QuantWeight,
        expert: int,
        weight: torch.Tensor,
        act_dtype: str,
        rounding: Rounding,
    ) -> None:
        self.rounding = rounding
        self.weight = weight  # [N, K]
        self.square = weight.square()  # [N, K]
        dtype = weight.dtype
        self.bias = None if source.bias is None else source.bias[expert].to(dtype)  # [N]
        act = torch_dtype(act_dtype)
        scales = source.scales[expert].to(dtype)  # [N, G]
        self.groups = group_index(source, expert)  # [K]
        # Codes take 16 or 256 values only, so roundings of weights repeat along a row and do not
        # average out when the inputs share a sign: their effect is taken as it is.
        self.weight_error = _rounding_error(weight, act)  # [N, K]
        self.scale_error: torch.Tensor | None = None
        if source.scheme.scale_dtype != act_dtype:
            cast = _rounding_error(scales, act) / torch.where(scales == 0, 1.0, scales)
            self.scale_error = weight * cast[:, self.groups]  # [N, K]
        self.zero_terms: torch.Tensor | None = None
        if source.zero_points is not None:
            # A kernel may fold ``z * S`` into one rounded number a group.
            distance = expert_zeros(source, expert).to(dtype) - source.scheme.implicit_zero
            self.zero_terms = distance * scales  # [N, G]
            self.zero_error = _rounding_error(self.zero_terms, act)  # [N, G]

    def systematic(self, kind: str, rows: torch.Tensor) -> torch.Tensor | None:
        """Error ``[R, N]`` that one way of rounding weights has on ``rows``, the same every time.

        ``kind`` is one of :data:`SYSTEMATIC`; None where these weights have nothing of it.
        """
        if kind == "weights":
            return rows @ self.weight_error.T
        if kind == "scales":
            return None if self.scale_error is None else rows @ self.scale_error.T
        return None if self.zero_terms is None else self._grouped(rows) @ self.zero_error.T

    def _grouped(self, rows: torch.Tensor) -> torch.Tensor:
        """Sum of the inputs of each group: ``[R, G]``."""
        count = int(self.zero_terms.shape[1]) if self.zero_terms is not None else 0
        grouped = torch.zeros(len(rows), count, dtype=rows.dtype, device=rows.device)
        return grouped.index_add_(1, self.groups, rows)

    @property
    def _inside(self) -> float:
        """Relative variance that summing in float32 adds to each term.

        A running sum of K terms has on average half of them in it; twice, since a value may be
        dequantised, or partial sums joined, by further roundings.
        """
        return float(self.weight.shape[1]) * torch.finfo(torch.float32).eps ** 2 / 12

    def outputs(self, rows: torch.Tensor) -> torch.Tensor:
        """``[R, K]`` to ``[R, N]``, with the bias."""
        y = rows @ self.weight.T
        return y if self.bias is None else y + self.bias

    def incoming(
        self, rows: torch.Tensor, variance: torch.Tensor, accuracy: AccuracyClass
    ) -> torch.Tensor:
        """Variance ``[R, K]`` of the inputs ``rows`` as this GEMM sees them."""
        if accuracy == "a8":
            step = rows.abs().amax(dim=-1, keepdim=True) / INT8_MAX  # [R, 1]
            variance = variance + step.square() / 12
        if self.rounding.unit < FINE:
            # What summing adds is as large here as anything, and the same for all outputs whose
            # weights are alike: as if the inputs were off by as much.
            variance = variance + (self.rounding.unit**2 / 3 + self._inside) * rows.square()
        return variance

    def carried(
        self, rows: torch.Tensor, variance: torch.Tensor, accuracy: AccuracyClass
    ) -> torch.Tensor:
        """Variance ``[R, N]`` that inputs ``rows`` ``[R, K]`` with theirs bring along."""
        return self.incoming(rows, variance, accuracy) @ self.square.T

    def variance(self, rows: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Variance ``[R, N]`` that this GEMM's own rounding adds to its outputs ``y``."""
        unit = self.rounding.unit**2 / 3
        spread = rows.square() @ self.square.T  # [R, N] sum of (x w)**2
        own = (unit + self._inside) * spread + (rows @ self.weight_error.T).square()
        if self.scale_error is not None:
            own = own + unit * (spread + y.square())
        if self.zero_terms is not None:
            own = own + unit * self._grouped(rows).square() @ self.zero_terms.square().T
        return own + self.rounding.variance(y)


def _rounding_error(values: torch.Tensor, act_dtype: torch.dtype) -> torch.Tensor:
    """What rounding to the act dtype does; 0 where it would overflow, which is no rounding."""
    rounded = values.to(act_dtype).to(values.dtype)
    return torch.where(rounded.isfinite(), rounded - values, 0.0)


def activation_slope(h: torch.Tensor, activation: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    """``act(h)`` ``[R, I]`` and the slope of its one output by each element of h ``[R, s*I]``."""
    with torch.enable_grad():
        h = h.detach().requires_grad_()
        a = activate(h, activation)
        (slope,) = torch.autograd.grad(a.sum(), h)
    return a.detach(), slope


def secant_slope(
    h: torch.Tensor,
    a: torch.Tensor,
    slope: torch.Tensor,
    deviation: torch.Tensor,
    activation: Activation,
) -> torch.Tensor:
    """The steepest slope ``[R, s*I]`` that three standard deviations of ``h`` may meet.

    Next to a clamp the derivative is 0 and an error may still reach the slope beside it; where the
    function bends within the error, 8 bits at large numbers say, the derivative is another one.
    """
    steepest = slope.abs()
    step = 3 * deviation
    width = a.shape[-1]
    for start in range(0, h.shape[-1], width):
        shard = slice(start, start + width)
        for sign in (-1.0, 1.0):
            moved = h.clone()
            moved[:, shard] += sign * step[:, shard]
            secant = (activate(moved, activation) - a).abs() / step[:, shard]
            secant = torch.where(step[:, shard] > 0, secant, 0.0)
            steepest[:, shard] = steepest[:, shard].maximum(secant)
    return steepest


def evaluation_variance(h: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Variance ``[R, I]`` of computing gelu in float32: 1 + erf cancels far below zero."""
    gate, *up = h.chunk(2 if activation.gated else 1, dim=-1)
    if not activation.name.startswith("gelu"):
        return torch.zeros_like(gate)
    size = gate * up[0] if up else gate
    return (torch.finfo(torch.float32).eps * size).square() / 3
