"""The table that a layer looks up in: right for every count, and nothing but a bisection."""

from __future__ import annotations

import sys
import tracemalloc

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from autosel.buckets import bucket_for, buckets
from autosel.core import TokenBucket
from autosel.errors import AutoselError
from autosel.layer_lookup import Lookup


def table(measured: list[int]) -> Lookup[TokenBucket]:
    return Lookup([(bucket, bucket) for bucket in buckets(measured)])


@pytest.mark.parametrize("measured", [[1], [16], [1, 2, 4, 8], [3, 5, 1000], [1, 10**6]])
def test_every_count_gets_its_bucket(measured: list[int]) -> None:
    found = buckets(measured)
    lookup = table(measured)
    edges = [e for b in found for e in (b.low - 1, b.low, b.low + 1, b.high or b.low + 7)]
    for count in [*range(1, 3000), *edges, 10**9, sys.maxsize]:
        if count >= 1:
            assert lookup.at(count) == bucket_for(found, count)
    assert lookup.at(0) == found[0]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([TokenBucket(2, None, 4)], "found one from 2, expected one from 1"),
        ([TokenBucket(1, 4, 4)], "found an upper end"),
        ([], "found an upper end"),
        ([TokenBucket(1, 4, 4), TokenBucket(6, None, 8)], "found one from 6, expected one from 5"),
        ([TokenBucket(1, 4, 4), TokenBucket(4, None, 8)], "found one from 4, expected one from 5"),
        ([TokenBucket(1, None, 4), TokenBucket(5, None, 8)], "found one from 5"),
    ],
)
def test_gaps_and_overlaps_are_refused(found: list[TokenBucket], words: str) -> None:
    with pytest.raises(AutoselError, match=words):
        Lookup([(bucket, bucket) for bucket in found])


class Counting(TorchDispatchMode):
    """Counts operators: an allocation on any device is one."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        return func(*args, **(kwargs or {}))


def test_a_lookup_runs_no_operator_and_keeps_no_memory() -> None:
    lookup = table([2**power for power in range(14)])
    with Counting() as counting:
        for count in range(1, 1000):
            lookup.at(count)
    assert counting.operators == 0
    counts = list(range(1, 1000))
    tracemalloc.start()
    try:
        for count in counts:
            lookup.at(count)
        before, _ = tracemalloc.get_traced_memory()
        for count in counts:
            lookup.at(count)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 100


def test_the_counter_sees_an_allocation() -> None:
    import torch

    with Counting() as counting:
        torch.empty(1)
    assert counting.operators == 1


def test_the_benchmark_looks_up_what_it_says() -> None:
    from bench.lookup import COUNTS, nanoseconds, table, tokens

    for size in COUNTS:
        lookup = table(size)
        assert len(lookup.entries) == size
        places = {lookup.at(count) for count in tokens(size)}
        assert len(places) > size // 8
    assert nanoseconds(4, 2) < float("inf")


def test_the_benchmark_of_calls_measures_calls_without_a_kernel() -> None:
    from bench.dispatch import forms, microseconds

    calls = forms()
    assert {"int32 ids", "int64 ids", "expert map, int32 ids"} <= calls.keys()
    for call in calls.values():
        assert call().shape == (8, 64)
        assert 0 < microseconds(call, 1) < float("inf")
