"""A small call with a known answer, by which packed weights are proven before a model uses them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autosel.core import CanonicalExperts, Routing
from autosel.dtypes import torch_dtype
from autosel.error_scale import Judged, judge
from autosel.verify_cases import activation_size

#: Tokens of the call. Few, since the reference dequantises each expert that they visit.
NUM_TOKENS = 2


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """``x`` ``[2, H]`` in the act dtype, GLOBAL routing, and what is right."""

    x: torch.Tensor
    routing: Routing
    judged: Judged


def make_probe(experts: CanonicalExperts, expert_map: torch.Tensor | None) -> Probe:
    """The same probe for the same weights. Every slot is served here, as far as experts go."""
    problem, device = experts.problem, experts.w13.codes.device
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_TOKENS, problem.hidden_size, generator=generator)
    x = (x * activation_size(experts)).to(torch_dtype(problem.act_dtype)).to(device)  # [2, H]
    held = _held(problem.num_local_experts, expert_map)  # [L] global ids
    slots = min(problem.top_k, len(held))
    ids = torch.full((NUM_TOKENS, problem.top_k), -1, dtype=torch.int32)
    for token in range(NUM_TOKENS):
        order = torch.randperm(len(held), generator=generator)[:slots]
        ids[token, :slots] = held[order].to(torch.int32)
    weights = torch.rand(NUM_TOKENS, problem.top_k, generator=generator) + 0.5
    routing = Routing(ids.to(device), (weights / problem.top_k).to(device))
    dtype = torch.float64 if problem.act_dtype == "float32" else torch.float32
    judged = judge(x, experts, routing, expert_map=expert_map, dtype=dtype)
    return Probe(x, routing, judged)


def _held(num_local: int, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Global ids of the experts held here, int64 on the CPU."""
    if expert_map is None:
        return torch.arange(num_local)
    return (expert_map.cpu() >= 0).nonzero().flatten()
