"""What one rank's part of a layer looks like, worked out without its weights."""

from __future__ import annotations

import math
from dataclasses import replace

from autosel.core import Problem, QuantScheme
from autosel.sharding import expert_range, tp_share


def rank_problem(
    problem: Problem, *, tp_rank: int = 0, tp_size: int = 1, ep_rank: int = 0, ep_size: int = 1
) -> Problem:
    """The problem that :mod:`autosel.sharding` gives for the same split of the weights.

    Raises UnsupportedError, with both numbers, for a split that does not divide.
    """
    intermediate = tp_share(problem.intermediate_size, tp_rank, tp_size)
    return replace(
        problem,
        num_local_experts=len(expert_range(problem.num_local_experts, ep_rank, ep_size)),
        intermediate_size=intermediate,
        w2=problem.w2 if tp_size == 1 else _cut_inputs(problem.w2, intermediate),
    )


def _cut_inputs(scheme: QuantScheme, inputs: int) -> QuantScheme:
    """w2's scheme: a finer group where a border cuts one; act-order keeps its groups."""
    if scheme.group_size == -1 or scheme.has_g_idx:
        return scheme
    return replace(scheme, group_size=math.gcd(scheme.group_size, inputs))
