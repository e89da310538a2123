"""What one rank's part of a layer looks like, worked out without its weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from autosel.core import Problem, QuantScheme
from autosel.errors import UnsupportedError, field_error


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


def expert_range(num_experts: int, rank: int, size: int) -> range:
    """Global ids of a rank's experts; the first ``num_experts % size`` ranks hold one more."""
    _check_rank(rank, size)
    if size > num_experts:
        raise UnsupportedError(
            field_error("expert parallelism", "ranks", size, f"at most {num_experts} (experts)")
        )
    base, more = divmod(num_experts, size)
    start = rank * base + min(rank, more)
    return range(start, start + base + (rank < more))


def named_experts(num_experts: int, ids: Sequence[int]) -> tuple[int, ...]:
    """Global ids that a caller names, as they are; UnsupportedError unless each is an expert of
    the layer, once."""
    for place, expert in enumerate(ids):
        if not 0 <= expert < num_experts:
            expected = f"at least 0 and below {num_experts} (experts)"
            raise UnsupportedError(field_error("held experts", f"entry {place}", expert, expected))
    twice = [expert for expert, count in Counter(ids).items() if count > 1]
    if twice:
        raise UnsupportedError(field_error("held experts", f"expert {twice[0]}", "twice", "once"))
    if not ids:
        raise UnsupportedError(field_error("held experts", "list", "empty", "at least one"))
    return tuple(ids)


def tp_share(total: int, rank: int, size: int) -> int:
    """A rank's intermediate size; UnsupportedError, with both numbers, if it does not divide."""
    _check_rank(rank, size)
    if total % size:
        raise UnsupportedError(
            field_error("tensor parallelism", "intermediate size", total, f"a multiple of {size}")
        )
    return total // size


def _check_rank(rank: int, size: int) -> None:
    if size < 1 or not 0 <= rank < size:
        raise UnsupportedError(
            field_error("parallel split", "rank", f"{rank} of {size}", "a rank below the size")
        )
