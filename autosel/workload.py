"""Traffic: presets, and how a histogram of tokens a call weighs token buckets.

Everything is weighted by CALLS: a plan minimises the mean time of a call of this traffic, which for
given traffic is the same as minimising its total time or its time per token. A histogram that
counted TOKENS instead (tokens processed in calls of a size) is turned into calls when it is read.

Inside a bin, such as the 257 to 512 of a Prometheus histogram, calls are spread evenly on a
logarithmic axis. A bin without an upper edge counts as calls of exactly its lower edge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autosel.core import TokenBin, TokenBucket, Workload
from autosel.errors import AutoselError, field_error


def _preset(name: str, *bins: tuple[int, int, float]) -> Workload:
    return Workload(name, tuple(TokenBin(low, high, calls) for low, high, calls in bins))


#: Assumed traffic, not measured: shares of calls of an engine that batches decode steps of up to
#: 256 sequences and prefills in chunks of 512 to 8192 tokens. Use a histogram of your server's
#: where there is one.
PRESETS: dict[str, Workload] = {
    preset.name: preset
    for preset in (
        _preset("decode-heavy", (1, 256, 0.95), (512, 8192, 0.05)),
        _preset("mixed", (1, 256, 0.8), (512, 8192, 0.2)),
        _preset("prefill-heavy", (1, 256, 0.4), (512, 8192, 0.6)),
        _preset("decode-only", (1, 256, 1.0)),
        _preset("prefill-only", (512, 8192, 1.0)),
    )
}
DEFAULT = "mixed"


def load(text: str | Path | Workload) -> Workload:
    """A preset by its name, else the histogram file at that path.

    Raises AutoselError in one line when it is neither, or the file cannot be read.
    """
    if isinstance(text, Workload):
        return text
    if isinstance(text, str) and text in PRESETS:
        return PRESETS[text]
    path = Path(text)
    if not path.is_file():
        names = ", ".join(PRESETS)
        raise AutoselError(
            field_error("histogram", "value", repr(str(text)), f"a file, or one of {names}")
        )
    from autosel.workload_file import read

    return read(path)


@dataclass(frozen=True, slots=True)
class Shares:
    """How a workload falls on token buckets.

    ``calls`` and ``tokens`` are each bucket's share of what the buckets answer for; both add up to
    1. ``uncovered`` is the share of all calls whose token count is in no bucket.
    """

    calls: tuple[float, ...]
    tokens: tuple[float, ...]
    uncovered: float


def shares(workload: Workload, buckets: Sequence[TokenBucket]) -> Shares:
    """Spread ``workload`` over sorted ``buckets``; AutoselError when no call is in one of them."""
    calls = [0.0] * len(buckets)
    tokens = [0.0] * len(buckets)
    for item in workload.bins:
        low, high = item.low, item.low if item.high is None else item.high
        for place, bucket in enumerate(buckets):
            start = max(low, bucket.low)
            end = high if bucket.high is None else min(high, bucket.high)
            if start <= end:
                part = item.calls * _logs(start, end) / _logs(low, high)
                calls[place] += part
                tokens[place] += part * _mean_tokens(start, end)
    total = sum(item.calls for item in workload.bins)
    covered = sum(calls)
    if not covered > 0:
        known = ", ".join(bucket.label for bucket in buckets) or "none"
        raise AutoselError(
            field_error(f"workload {workload.name}", "token counts", "none", f"some in {known}")
        )
    return Shares(
        tuple(value / covered for value in calls),
        tuple(value / sum(tokens) for value in tokens),
        max(0.0, 1 - covered / total),
    )


def mean_tokens(workload: Workload) -> float:
    """Tokens a call."""
    total = sum(item.calls for item in workload.bins)
    return sum(b.calls * _mean_tokens(b.low, b.high or b.low) for b in workload.bins) / total


def _logs(low: int, high: int) -> float:
    """Weight of the token counts ``low..high``: M weighs ``log((M + 1/2) / (M - 1/2))``."""
    return math.log((high + 0.5) / (low - 0.5))


def _mean_tokens(low: int, high: int) -> float:
    """Mean of M over ``low..high`` with those weights, summed by parts."""
    if low == high:
        return float(low)
    edges = high * math.log(high + 0.5) - low * math.log(low - 0.5)
    inner = math.lgamma(high + 0.5) - math.lgamma(low + 0.5)
    return (edges - inner) / _logs(low, high)
