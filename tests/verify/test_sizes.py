"""The token counts that are compiled for beforehand are those that verification calls with."""

from __future__ import annotations

import pytest

from autosel.core import Problem, QuantScheme
from autosel.sources import RandomSource
from autosel.verify_cases import make_cases
from autosel.verify_sizes import extreme_counts, full_counts, quick_counts
from autosel.verify_suite import Suite, extreme_problem

S = QuantScheme(4, 16, True, scale_dtype="bfloat16")


@pytest.mark.parametrize(
    "problem",
    [Problem(4, 4, 2, 32, 16, S, S), Problem(24, 12, 4, 32, 16, S, S)],
    ids=["whole", "half of the experts"],
)
def test_counts_are_those_of_the_cases(problem: Problem) -> None:
    experts = RandomSource(problem).load()
    quick = {len(case.x) for case in make_cases(experts)} - {0}
    assert set(quick_counts(problem)) == quick
    edges = (5, 48, 4096)
    full = {len(case.x) for case in Suite(experts, edges=edges).more} - {0}
    assert set(full_counts(problem, edges)) == full - quick
    small, cases = Suite(experts).extreme
    assert small.problem == extreme_problem(problem)
    assert set(extreme_counts(problem)) == {len(case.x) for case in cases} - {0}
