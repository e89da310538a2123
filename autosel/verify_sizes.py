"""With how many tokens verification calls a candidate, known without weights.

A compiler that makes a kernel for each token count can then be asked for all of them beforehand.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from autosel.core import Problem
from autosel.verify_cases import ROUTINGS, TOKEN_COUNTS, full_token_counts
from autosel.verify_recipes import SPECIAL, Plan, Recipe, drawn, uniform
from autosel.verify_suite import EXTREME_COUNTS, extreme_problem


@functools.lru_cache(maxsize=64)
def quick_counts(problem: Problem) -> tuple[int, ...]:
    """Token counts of the quick set's calls, in order; one that launches nothing is left out."""
    plan = Plan(problem, 0, 0, max(TOKEN_COUNTS))
    recipes = [uniform(m) for m in TOKEN_COUNTS]
    recipes += [drawn(kind, plan.num_tokens) for kind in ROUTINGS if kind != "uniform"]
    return _counts(plan, (*recipes, *SPECIAL))


def verified_counts(problem: Problem, num_tokens: int) -> tuple[int, ...]:
    """What is called of a candidate at a token count: that first, then the quick set's others."""
    return (num_tokens, *(m for m in quick_counts(problem) if m != num_tokens))


def full_counts(problem: Problem, edges: Sequence[int] = ()) -> tuple[int, ...]:
    """Token counts that the full set adds; ``edges`` as :class:`~autosel.verify_suite.Suite`'s."""
    known = set(quick_counts(problem))
    return tuple(m for m in full_token_counts(edges) if m not in known)


def extreme_counts(problem: Problem) -> tuple[int, ...]:
    """Token counts of the full set's cases on :func:`~autosel.verify_suite.extreme_problem`."""
    plan = Plan(extreme_problem(problem), 0, 0, max(EXTREME_COUNTS))
    built = [recipe for recipe in SPECIAL if recipe.independent]
    return _counts(plan, (*map(uniform, EXTREME_COUNTS), *built))


def _counts(plan: Plan, recipes: Sequence[Recipe]) -> tuple[int, ...]:
    return tuple(sorted({recipe.routing(plan).num_tokens for recipe in recipes} - {0}))
