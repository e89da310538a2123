"""Times between measured token counts, on straight lines in log-log axes, and how wrong that is.

Latency curves bend slowly: flat while a launch bounds them, then along the number of experts hit,
then along the operations. ``python -m bench.between_buckets`` measures the error on shipped tables.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping

from autosel.errors import AutoselError, field_error

#: Fewer measured counts say nothing about the error of a line between two of them.
MIN_COUNTS = 4


def interpolate(times_us: Mapping[int, float], num_tokens: int) -> float:
    """Microseconds at ``num_tokens`` from times by token count.

    AutoselError outside the measured counts: a line says nothing there.
    """
    counts = sorted(times_us)
    if not counts or not counts[0] <= num_tokens <= counts[-1]:
        known = f"{counts[0]} to {counts[-1]}" if counts else "nothing"
        raise AutoselError(field_error("interpolate", "tokens", num_tokens, f"in {known}"))
    place = bisect_left(counts, num_tokens)
    high = counts[place]
    if high == num_tokens:
        return times_us[high]
    low = counts[place - 1]
    part = math.log(num_tokens / low) / math.log(high / low)
    return math.exp((1 - part) * math.log(times_us[low]) + part * math.log(times_us[high]))


def left_out(times_us: Mapping[int, float]) -> dict[int, float]:
    """For each inner count, log(interpolated / measured) when it alone is left out."""
    errors = {}
    for count in sorted(times_us)[1:-1]:
        others = {n: us for n, us in times_us.items() if n != count}
        errors[count] = math.log(interpolate(others, count) / times_us[count])
    return errors
