"""The inputs that a candidate is judged on, with their truth, made once for all candidates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from autosel.canonical import dequantize_expert
from autosel.core import AccuracyClass, Activation, CanonicalExperts, Routing
from autosel.dtypes import torch_dtype
from autosel.error_scale import Judged, judge
from autosel.expert_map import local_map
from autosel.reference import moe
from autosel.verify_recipes import LARGE_NUMBERS, SPECIAL, Plan, Recipe, drawn, uniform

#: Token counts around the borders where kernels change their path.
TOKEN_COUNTS = (1, 2, 17, 64)

#: What who may win is judged on besides: block edges and their neighbours, primes.
FULL_TOKEN_COUNTS = (
    *(1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 31, 32, 33),
    *(63, 64, 65, 97, 127, 128, 129),
)

#: The largest bucket edge that joins them; above, the timed call itself is what is judged.
LARGEST_EDGE = 512

#: Kinds of routing judged beside the uniform one.
ROUTINGS = ("uniform", "zipf", "one_hot", "all_but_one")

#: Another activation that a kernel may have taken for this one, too near to it for any limit.
RIVALS = {
    "gelu": "gelu_tanh",
    "gelu_tanh": "gelu",
    "gelu_no_mul": "gelu_tanh_no_mul",
    "gelu_tanh_no_mul": "gelu_no_mul",
}


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One judged call: ``x`` ``[M, H]`` in the act dtype, GLOBAL routing and what is right.

    independent  the tokens differ and are of usual size, so that what they say about single
                 weights and about the sign of errors may be added up
    kind         how tokens are routed, in a word
    proves       property (:data:`autosel.core.PROPERTIES`) that needs this case to be right
    optional     being wrong here costs that property and is no verdict
    rival        what another activation (:data:`RIVALS`) would add to the reference, ``[M, H]``
    """

    name: str
    x: torch.Tensor
    routing: Routing
    expert_map: torch.Tensor | None
    judged: Judged
    independent: bool = True
    kind: str = "uniform"
    proves: str = ""
    optional: bool = False
    rival: torch.Tensor | None = None

    def rows(self, index: torch.Tensor) -> Case:
        """The same for some of the tokens, int64 ``[R]``, as a call of its own."""
        routing = Routing(self.routing.topk_ids[index], self.routing.topk_weights[index])
        return replace(self, x=self.x[index], routing=routing, judged=self.judged.rows(index))


#: A call to judge: its name, GLOBAL routing and x ``[M, H]`` in the act dtype.
Call = tuple[str, Routing, torch.Tensor]


def full_token_counts(edges: Iterable[int] = ()) -> tuple[int, ...]:
    """:data:`FULL_TOKEN_COUNTS` and the ``edges`` of a sweep's buckets that are not too large."""
    return tuple(sorted({*FULL_TOKEN_COUNTS, *(m for m in edges if 0 < m <= LARGEST_EDGE)}))


def make_cases(
    experts: CanonicalExperts,
    *,
    token_counts: Sequence[int] = TOKEN_COUNTS,
    routings: Sequence[str] = ROUTINGS,
    rank: int = 0,
    seed: int = 0,
    accuracies: Sequence[AccuracyClass] = ("exact", "a8"),
    dtype: torch.dtype | None = None,
    beside: Sequence[Call] = (),
) -> list[Case]:
    """Judged inputs on the experts' device: every expert is hit, every kind of slot occurs.

    uniform at each of ``token_counts``; the other ``routings`` at up to 64 tokens; and the
    cases of :data:`SPECIAL`. Activations are scaled so that the first GEMM gives numbers of
    order 1, with a few channels far larger, as in real models. ``dtype`` is that of the
    reference: float32 is a hundred times finer than 16-bit activations, which get it by
    default; float32 activations get float64. One pass over the experts judges all cases, and
    ``beside`` the caller's own, which come first.
    """
    problem, device = experts.problem, experts.w13.codes.device
    plan = Plan(problem, seed, rank, min(max(token_counts, default=1), max(TOKEN_COUNTS)))
    recipes = [uniform(m) for m in token_counts]
    recipes += [drawn(kind, plan.num_tokens) for kind in routings if kind != "uniform"]
    recipes += SPECIAL
    size = activation_size(experts)
    act_dtype = torch_dtype(problem.act_dtype)
    kept: list[tuple[Recipe, Routing, torch.Tensor]] = []
    for index, recipe in enumerate(recipes):
        routing = recipe.routing(plan)
        x = (plan.activations(recipe, routing.num_tokens, index) * size).to(act_dtype)
        if x.isfinite().all():  # large numbers may not even fit the input
            ids, weights = routing.topk_ids.to(device), routing.topk_weights.to(device)
            kept.append((recipe, Routing(ids, weights), x.to(device)))
    return _judged(experts, plan, kept, accuracies, dtype, beside)


def _judged(
    experts: CanonicalExperts,
    plan: Plan,
    kept: Sequence[tuple[Recipe, Routing, torch.Tensor]],
    accuracies: Sequence[AccuracyClass],
    dtype: torch.dtype | None,
    beside: Sequence[Call],
) -> list[Case]:
    problem, device = experts.problem, experts.w13.codes.device
    whole = problem.num_local_experts == problem.num_experts
    expert_map = None if whole else local_map(problem, plan.rank, device=device)
    if dtype is None:
        dtype = torch.float64 if problem.act_dtype == "float32" else torch.float32
    calls = [*beside, *((recipe.name, routing, x) for recipe, routing, x in kept)]
    together = Routing(
        torch.cat([routing.topk_ids for _, routing, _ in calls]),
        torch.cat([routing.topk_weights for _, routing, _ in calls]),
    )
    xs = torch.cat([x for _, _, x in calls])
    judged = judge(xs, experts, together, expert_map=expert_map, accuracies=accuracies, dtype=dtype)
    counts = [len(x) for _, _, x in calls]
    rivals: Iterable[torch.Tensor | None] = [None] * len(calls)
    if problem.activation.name in RIVALS:
        other = replace(problem, activation=Activation(RIVALS[problem.activation.name]))
        wrong = moe(
            xs, replace(experts, problem=other), together, expert_map=expert_map, dtype=dtype
        )
        rivals = torch.split(wrong - judged.reference, counts)
    parts = list(zip(judged.split(counts), rivals, strict=True))
    cases = [
        Case(name, x, routing, expert_map, part)
        for (name, routing, x), (part, _) in zip(beside, parts, strict=False)
    ]
    for (recipe, routing, x), (part, rival) in zip(kept, parts[len(beside) :], strict=True):
        large = recipe.name == LARGE_NUMBERS
        if recipe.is_large and not large and bool(part.overflows.any()):
            continue  # what we made too large for the type says nothing about a kernel
        shown, shown_map = routing, expert_map
        if recipe.mapped:
            shown, shown_map = _behind_another_map(plan, routing, device)
        cases.append(
            Case(
                recipe.name,
                x,
                shown,
                shown_map,
                part,
                independent=recipe.independent,
                kind=recipe.kind,
                proves=recipe.proves,
                # What overflows half precision is a fault of the type, not of the kernel.
                optional=large and problem.act_dtype == "float16",
                rival=rival,
            )
        )
    return cases


def _behind_another_map(
    plan: Plan, routing: Routing, device: torch.device
) -> tuple[Routing, torch.Tensor]:
    """The same call with the experts' global ids shuffled, and the map that undoes it."""
    problem = plan.problem
    before = local_map(problem, plan.rank)  # [num_experts]
    order = torch.randperm(
        problem.num_experts, generator=torch.Generator().manual_seed(plan.seed + 1)
    )
    after = torch.empty_like(before)
    after[order] = before
    ids = routing.topk_ids
    known = (ids >= 0) & (ids < problem.num_experts)
    renamed = order.to(device)[torch.where(known, ids, 0).long()].to(torch.int32)
    shown = torch.where(known, renamed, ids)
    return Routing(shown.contiguous(), routing.topk_weights), after.to(device)


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
