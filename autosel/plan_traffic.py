"""What a plan says about other traffic: where its choice would change, and split servers."""

from __future__ import annotations

from collections.abc import Sequence

from autosel.core import BreakEven, Plan, TokenBin, TokenBucket, Workload
from autosel.core.plan import Server
from autosel.errors import AutoselError
from autosel.plan_solve import Instance
from autosel.workload import PRESETS, shares

#: Calls of at most this many tokens are decode steps, larger ones prefill, when the traffic is
#: split over two kinds of servers: engines batch a few hundred sequences at most.
DECODE_TOKENS = 256


def break_even(
    instance: Instance, buckets: Sequence[TokenBucket], one: str, other: str
) -> BreakEven | None:
    """The share of calls in the buckets where ``other`` is faster at which both serve equally well.

    Within both kinds of buckets the mix stays the workload's; where it has no calls, all count the
    same. None where one of the two is nowhere faster.
    """
    gains = [row[one] - row[other] for row in instance.times]
    total = sum(instance.weights)
    where = [place for place, gain in enumerate(gains) if gain > 0]
    rest = [place for place, gain in enumerate(gains) if gain <= 0]
    gained = _mean([gains[p] for p in where], [instance.weights[p] for p in where])
    lost = -_mean([gains[p] for p in rest], [instance.weights[p] for p in rest])
    if gained <= 0 or lost <= 0:
        return None
    share = sum(instance.weights[p] for p in where) / total
    labels = tuple(buckets[p].label for p in where)
    return BreakEven(other, labels, share, lost / (gained + lost))


def split(workload: Workload) -> dict[Server, Workload]:
    """The calls of a decode and of a prefill server: up to ``DECODE_TOKENS`` tokens, and above.

    Where the workload has none of a kind, that of the preset of that name.
    """
    parts: dict[Server, Workload] = {}
    ranges: dict[Server, tuple[int, int | None]] = {
        "decode": (1, DECODE_TOKENS),
        "prefill": (DECODE_TOKENS + 1, None),
    }
    for server, (low, high) in ranges.items():
        bins = tuple(
            piece for item in workload.bins if (piece := _cut(item, low, high)) is not None
        )
        if sum(item.calls for item in bins) > 0:
            parts[server] = Workload(f"{server} part of {workload.name}", bins)
        else:
            parts[server] = PRESETS[f"{server}-only"]
    return parts


def _cut(item: TokenBin, low: int, high: int | None) -> TokenBin | None:
    """The part of a bin inside ``low..high``, with its share of the calls."""
    start = max(item.low, low)
    if item.high is None:
        inside = start == item.low and (high is None or item.low <= high)
        return item if inside else None
    end = item.high if high is None else min(item.high, high)
    if start > end:
        return None
    if (start, end) == (item.low, item.high):
        return item
    part = shares(Workload("bin", (item,)), (TokenBucket(start, end, start),)).uncovered
    return TokenBin(start, end, item.calls * (1 - part))


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    if not values:
        return 0.0
    if not sum(weights):
        weights = [1.0] * len(values)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


def beyond(made: Plan) -> float:
    """Share of calls with more than twice the largest measured token count."""
    limit = 2 * made.buckets[-1].bucket.measured
    high = TokenBucket(limit + 1, None, limit + 1)
    try:
        return 1 - shares(made.workload, (high,)).uncovered
    except AutoselError:
        return 0.0
