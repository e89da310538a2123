"""The choice of resident layouts against a brute force that shares no code with it."""

from __future__ import annotations

import math
import random
from itertools import chain, combinations

import pytest

from autosel import plan_solve
from autosel.errors import AutoselError
from autosel.plan_solve import Instance, by_copies, solve, undominated


def random_instance(seed: int) -> tuple[Instance, int]:
    rng = random.Random(seed)
    names = [f"layout{i}" for i in range(rng.randint(1, 7))]
    # Few distinct values, so that equal sizes and equal times occur.
    sizes = {name: rng.choice([10, 10, 11, 15, 20, 40]) for name in names}
    rows = []
    for _ in range(rng.randint(1, 8)):
        row = {name: float(rng.choice([5, 6, 7, 8, 10, 20])) for name in names}
        for name in names:
            if len(row) > 1 and rng.random() < 0.15:
                del row[name]
        rows.append(row)
    weights = [rng.choice([0.0, 1.0, 2.0, 5.0]) for _ in rows]
    weights[rng.randrange(len(rows))] = 1.0
    return Instance(sizes, rows, weights), rng.choice([10, 11, 20, 21, 25, 30, 45, 100])


def brute_force(instance: Instance, budget: int) -> set[tuple[str, ...]]:
    """Every subset of every layout; those that are best in time, then copies, then bytes."""
    scores: dict[tuple[str, ...], tuple[float, int, int]] = {}
    names = sorted(instance.sizes)
    for chosen in chain.from_iterable(combinations(names, n) for n in range(1, len(names) + 1)):
        size = sum(instance.sizes[name] for name in chosen)
        total = 0.0
        for row, weight in zip(instance.times, instance.weights, strict=True):
            if not set(chosen) & set(row):
                total = math.inf
                break
            total += weight * min(row[n] for n in chosen if n in row)
        if size <= budget and total < math.inf:
            scores[chosen] = (total, len(chosen), size)
    best = min(scores.values(), default=None)
    return {chosen for chosen, score in scores.items() if score == best}


def test_equals_brute_force_on_1000_random_instances() -> None:
    copies: list[int] = []
    unique = 0
    for seed in range(1000):
        instance, budget = random_instance(seed)
        found = solve(instance, budget)
        expected = brute_force(instance, budget)
        assert (found is None) == (not expected), seed
        if found:
            assert found.layouts in expected, seed
            unique += len(expected) == 1
            copies.append(len(found.layouts))
            assert found.nbytes == instance.bytes(found.layouts) <= budget
            assert found.time_us == instance.time(found.layouts)
    # The instances are of every kind: one copy, several, and none at all.
    assert {1, 2, 3} <= set(copies)
    assert len(copies) < 1000
    assert unique > 500


def test_the_comparison_sees_a_greedy_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_solve, "_fastest_first", lambda found: (found.nbytes, found.layouts))
    with pytest.raises(AssertionError):
        test_equals_brute_force_on_1000_random_instances()


def test_dominated_layouts_are_dropped_and_nothing_else() -> None:
    times = [{"a": 1.0, "b": 1.0, "c": 2.0, "d": 3.0}, {"a": 5.0, "b": 5.0, "c": 4.0, "d": 9.0}]
    sizes = {"a": 10, "b": 10, "c": 10, "d": 9}
    # b equals a; c is faster in one bucket; d is slower everywhere but smaller.
    assert undominated(Instance(sizes, times, [1, 1])) == ("a", "c", "d")


def test_a_layout_that_alone_serves_a_bucket_stays() -> None:
    instance = Instance({"a": 10, "big": 40}, [{"a": 1.0}, {"big": 9.0}], [1, 0])
    assert solve(instance, 49) is None
    found = solve(instance, 50)
    assert found is not None
    assert found.layouts == ("a", "big")


def test_more_copies_are_not_bought_for_a_gain_within_the_noise() -> None:
    times = [{"a": 100.0, "b": 100.5}, {"a": 200.0, "b": 199.0}]
    instance = Instance({"a": 10, "b": 9}, times, [1, 1])

    def one_percent(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
        return instance.time(one) > 1.01 * instance.time(other)

    exact = solve(instance, 100)
    assert exact is not None
    assert exact.layouts == ("a", "b")
    noisy = solve(instance, 100, one_percent)
    # Tied single layouts: the smaller one, although the other looks a little faster.
    assert noisy is not None
    assert noisy.layouts == ("b",)


def test_three_copies_can_pay_where_two_do_not() -> None:
    """Each copy alone gains 0.7 %, both together 1.4 %."""
    times = [{"a": 100.0, "b": 98.6}, {"a": 100.0, "c": 98.6}]
    instance = Instance({"a": 10, "b": 10, "c": 10}, times, [1, 1])
    found = solve(instance, 30, lambda one, other: instance.time(one) > 1.01 * instance.time(other))
    # b and c serve one bucket each, so that two copies are enough for the whole gain.
    assert found is not None
    assert found.layouts == ("b", "c")


@pytest.mark.parametrize("seed", range(20))
def test_noise_never_costs_more_than_it_allows(seed: int) -> None:
    instance, budget = random_instance(seed)
    tolerance = 1.2

    def clears(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
        return instance.time(one) > tolerance * instance.time(other)

    exact, found = solve(instance, budget), solve(instance, budget, clears)
    assert (exact is None) == (found is None)
    if exact and found:
        # Once for the tie among sets of equally many copies, once for the copy not bought.
        assert found.time_us <= tolerance**2 * exact.time_us + 1e-9
        assert len(found.layouts) <= len(exact.layouts) or found.time_us < exact.time_us * 1.2


def test_by_copies_gives_the_price_of_each_further_copy() -> None:
    times = [{"a": 4.0, "b": 1.0, "c": 9.0}, {"a": 4.0, "b": 9.0, "c": 1.0}]
    found = list(by_copies(Instance({"a": 1, "b": 2, "c": 3}, times, [1, 1]), None))
    assert [(c.layouts, c.nbytes, c.time_us) for c in found] == [
        (("a",), 1, 8.0),
        (("b", "c"), 5, 2.0),
        (("a", "b", "c"), 6, 2.0),
    ]


def test_too_many_sets_are_refused_in_one_line() -> None:
    names = [f"l{i:02}" for i in range(40)]
    sizes = {name: 100 - i for i, name in enumerate(names)}
    times = [{name: float(i + 1) for i, name in enumerate(names)}]
    with pytest.raises(AutoselError, match="40 layouts, expected at most 1000000 sets"):
        solve(Instance(sizes, times, [1]), None)
