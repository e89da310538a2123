"""The calls that a sweep times: made-up tokens and routing, each judged before it is timed."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autosel.core import CanonicalExperts
from autosel.dtypes import torch_dtype
from autosel.routing_synthetic import make_routing
from autosel.verify_cases import Case, activation_size, make_cases


def judged_inputs(
    experts: CanonicalExperts, routing: str, token_counts: Iterable[int], *, seed: int = 0
) -> tuple[dict[int, Case], list[Case]]:
    """One judged call for each token count, and verification's own cases, on the experts' device.

    The activations ``[M, H]`` are normal numbers of the size for which the first GEMM gives
    numbers of order 1. One pass over the experts judges all of both: on a GPU a pass costs as
    much for one token as for ten thousand. Raises RoutingError for an unknown kind of routing.
    """
    problem = experts.problem
    device = experts.w13.codes.device
    counts = sorted(set(token_counts))
    generator = torch.Generator().manual_seed(seed)
    size = activation_size(experts)
    calls = []
    for count in counts:
        x = torch.randn(count, problem.hidden_size, generator=generator) * size
        routed = make_routing(routing, count, problem, seed=seed, device=device)
        calls.append(
            (f"{routing} M={count}", routed, x.to(torch_dtype(problem.act_dtype)).to(device))
        )
    cases = make_cases(experts, seed=seed, beside=calls)
    return dict(zip(counts, cases, strict=False)), cases[len(counts) :]
