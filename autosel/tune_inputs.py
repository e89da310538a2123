"""The calls that a sweep times: made-up tokens and routing, each judged before it is timed."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autosel.core import CanonicalExperts, Routing
from autosel.dtypes import torch_dtype
from autosel.error_scale import judge
from autosel.expert_map import local_map
from autosel.routing_synthetic import make_routing
from autosel.verify_cases import Case, activation_size


def timed_cases(
    experts: CanonicalExperts, routing: str, token_counts: Iterable[int], *, seed: int = 0
) -> dict[int, Case]:
    """One judged call for each token count, on the experts' device.

    The activations ``[M, H]`` are normal numbers of the size for which the first GEMM gives
    numbers of order 1. One pass over the experts judges all of them. Raises RoutingError for an
    unknown kind of routing.
    """
    problem = experts.problem
    device = experts.w13.codes.device
    counts = sorted(set(token_counts))
    generator = torch.Generator().manual_seed(seed)
    size = activation_size(experts)
    xs = [
        (torch.randn(count, problem.hidden_size, generator=generator) * size)
        .to(torch_dtype(problem.act_dtype))
        .to(device)
        for count in counts
    ]
    routings = [make_routing(routing, count, problem, seed=seed, device=device) for count in counts]
    whole = problem.num_local_experts == problem.num_experts
    expert_map = None if whole else local_map(problem, device=device)
    judged = judge(
        torch.cat(xs),
        experts,
        Routing(
            torch.cat([r.topk_ids for r in routings]), torch.cat([r.topk_weights for r in routings])
        ),
        expert_map=expert_map,
        # As fine as verification's own cases: float32 is enough for 16-bit activations.
        dtype=torch.float64 if problem.act_dtype == "float32" else torch.float32,
    )
    parts = judged.split(len(x) for x in xs)
    return {
        count: Case(f"{routing} M={count}", x, routed, expert_map, part)
        for count, x, routed, part in zip(counts, xs, routings, parts, strict=True)
    }
