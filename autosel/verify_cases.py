"""The inputs that a candidate is judged on, with their truth, made once for all candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from autosel.canonical import dequantize_expert
from autosel.core import AccuracyClass, CanonicalExperts, Problem, Routing
from autosel.dtypes import torch_dtype
from autosel.error_scale import Judged, judge
from autosel.expert_map import local_map
from autosel.routing_synthetic import NOWHERE, make_routing

#: Token counts around the borders where kernels change their path.
TOKEN_COUNTS = (1, 2, 17, 64)

#: Rows that each local expert gets in the case that visits them all.
ROWS_PER_EXPERT = 2


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One judged call: ``x`` ``[M, H]`` in the act dtype, GLOBAL routing and what is right.

    ``independent`` says that the tokens differ, so that their rounding errors do too.
    """

    name: str
    x: torch.Tensor
    routing: Routing
    expert_map: torch.Tensor | None
    judged: Judged
    independent: bool = True


def make_cases(
    experts: CanonicalExperts,
    *,
    token_counts: Sequence[int] = TOKEN_COUNTS,
    routings: Sequence[str] = ("uniform", "one_hot", "all_but_one"),
    rank: int = 0,
    seed: int = 0,
    accuracies: Sequence[AccuracyClass] = ("exact", "a8"),
    dtype: torch.dtype | None = None,
) -> list[Case]:
    """Judged inputs on the experts' device: every expert is hit, every kind of slot occurs.

    uniform at each of ``token_counts``; the other ``routings`` at the largest of them; and the
    cases of :data:`SPECIAL`. Activations are scaled so that the first GEMM gives numbers of
    order 1, with a few channels far larger, as in real models. ``dtype`` is that of the
    reference: float32 is a hundred times finer than 16-bit activations, which get it by
    default; float32 activations get float64. One pass over the experts judges all cases.
    """
    problem = experts.problem
    device = experts.w13.codes.device
    whole = problem.num_local_experts == problem.num_experts
    expert_map = None if whole else local_map(problem, rank, device=device)
    plan = _Plan(problem, seed, rank, max(token_counts, default=1))
    named = [(f"uniform M={m}", plan.made_up("uniform", m, m)) for m in token_counts]
    named += [
        (f"{kind} M={plan.num_tokens}", plan.made_up(kind, plan.num_tokens))
        for kind in routings
        if kind != "uniform"
    ]
    named += [(name, make(plan)) for name, make in SPECIAL.items()]
    size = activation_size(experts)
    xs = [
        plan.activations(r.num_tokens, size, name, index).to(device)
        for index, (name, r) in enumerate(named)
    ]
    routed = [Routing(r.topk_ids.to(device), r.topk_weights.to(device)) for _, r in named]
    if dtype is None:
        dtype = torch.float64 if problem.act_dtype == "float32" else torch.float32
    together = Routing(
        torch.cat([r.topk_ids for r in routed]), torch.cat([r.topk_weights for r in routed])
    )
    judged = judge(
        torch.cat(xs), experts, together, expert_map=expert_map, accuracies=accuracies, dtype=dtype
    )
    parts = judged.split(len(x) for x in xs)
    return [
        Case(name, x, routing, expert_map, part, independent=name != IDENTICAL)
        for (name, _), x, routing, part in zip(named, xs, routed, parts, strict=True)
    ]


@dataclass(slots=True)
class _Plan:
    """Makes the routings and activations of the cases, all from one seed."""

    problem: Problem
    seed: int
    rank: int
    num_tokens: int

    def made_up(self, kind: str, num_tokens: int, offset: int = 0) -> Routing:
        seed = self.seed + offset
        return make_routing(kind, num_tokens, self.problem, seed=seed, rank=self.rank)

    def activations(self, num_tokens: int, size: float, name: str, index: int) -> torch.Tensor:
        """Normal numbers times ``size``, ``[M, H]`` in the act dtype, others for each case."""
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        x = torch.randn(num_tokens, self.problem.hidden_size, generator=generator)
        if name == IDENTICAL:
            x = x[:1].expand_as(x).clone()
        if name == OUTLIERS:
            x[:, torch.randperm(x.shape[1], generator=generator)[: max(1, x.shape[1] // 128)]] *= 10
        return (x * size).to(torch_dtype(self.problem.act_dtype))


def _every_expert(plan: _Plan) -> Routing:
    """Each local expert gets :data:`ROWS_PER_EXPERT` rows; the experts of a token differ."""
    problem = plan.problem
    held = problem.num_local_experts
    slots = min(problem.top_k, held)
    rows = -(-ROWS_PER_EXPERT * held // slots)
    order = torch.randperm(held, generator=torch.Generator().manual_seed(plan.seed))
    local = order[torch.arange(rows * slots).remainder(held)].reshape(rows, slots)
    ids = torch.full((rows, problem.top_k), NOWHERE, dtype=torch.int32)
    ids[:, :slots] = (local + plan.rank * held).to(torch.int32)
    return Routing(ids, plan.made_up("uniform", rows).topk_weights)


def _each_alone(plan: _Plan) -> Routing:
    """One token for each local expert and no other slot: a small expert beside a large one in a
    token would be judged by the rounding of the large one."""
    problem = plan.problem
    ids = torch.full((problem.num_local_experts, problem.top_k), NOWHERE, dtype=torch.int32)
    ids[:, 0] = torch.arange(problem.num_local_experts) + plan.rank * problem.num_local_experts
    return Routing(ids, plan.made_up("uniform", len(ids)).topk_weights)


def _stray_slots(plan: _Plan) -> Routing:
    """Ids of -1, ids that are no expert, an expert twice in one token, a token with none."""
    routing = plan.made_up("uniform", max(8, plan.num_tokens))
    ids = routing.topk_ids.clone()
    ids[0::4, 0] = NOWHERE
    ids[1::8, -1] = plan.problem.num_experts
    ids[2::8, -1] = torch.iinfo(torch.int32).max
    ids[3::4] = ids[3::4, :1]
    ids[5] = -5
    return Routing(ids, routing.topk_weights)


def _nothing_here(plan: _Plan) -> Routing:
    routing = plan.made_up("uniform", 3)
    return Routing(torch.full_like(routing.topk_ids, NOWHERE), routing.topk_weights)


def _identical(plan: _Plan) -> Routing:
    one = _every_expert(plan)
    rows = max(16, plan.num_tokens)
    return Routing(
        one.topk_ids[:1].repeat(rows, 1).contiguous(),
        one.topk_weights[:1].repeat(rows, 1).contiguous(),
    )


IDENTICAL = "identical tokens"
OUTLIERS = "every expert, outlier channels"

#: Cases whose routing is built rather than drawn.
SPECIAL: dict[str, Callable[[_Plan], Routing]] = {
    "every expert": _every_expert,
    OUTLIERS: _every_expert,
    "each expert alone": _each_alone,
    "stray slots": _stray_slots,
    "nothing here": _nothing_here,
    IDENTICAL: _identical,
}


def activation_size(experts: CanonicalExperts) -> float:
    """The size of activations for which the first GEMM's outputs are of order 1.

    The experts may differ a lot; the largest of a few decides, so that float16 has room.
    """
    problem = experts.problem
    some = range(0, problem.num_local_experts, max(1, problem.num_local_experts // 4))
    size = max(float(dequantize_expert(experts.w13, e).square().mean().sqrt()) for e in some)
    if size == 0:
        return 1.0
    wanted: float = 1.0 / (size * problem.hidden_size**0.5)
    return min(max(wanted, 2.0**-12), 2.0**12)
