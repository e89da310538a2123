"""What each layout offers at each token count, from measurements; and which gains are real."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from autosel import samples, stats
from autosel.buckets import buckets
from autosel.core import Candidate, Decision, Measurement, TokenBucket
from autosel.decide import TIE_LIMIT, NothingUsable, Requirement, decide
from autosel.plan_solve import Instance, Set
from autosel.racing import RERUNS


@dataclass(frozen=True, slots=True)
class Rules:
    """Who may be chosen and when a difference counts, as :func:`autosel.decide.decide` has it."""

    defaults: Collection[Candidate] = ()
    allow_a8: bool = False
    require: Sequence[Requirement] = ()
    epsilon: float = 0.01
    confidence: float = 0.95

    def decide(
        self, rows: Sequence[Measurement], bucket: TokenBucket
    ) -> Decision | NothingUsable | None:
        """The decision among ``rows``; None when there are none."""
        if not rows:
            return None
        return decide(
            rows,
            bucket=bucket,
            defaults=self.defaults,
            allow_a8=self.allow_a8,
            require=self.require,
            epsilon=self.epsilon,
            confidence=self.confidence,
        )


@dataclass(frozen=True, slots=True)
class Options:
    """The table to choose from: buckets that some layout serves, and each layout's best in each.

    sizes    bytes of each layout's packed copy
    pack_ms  the least time that packing it took, where it is known
    best     for each bucket, the winner of each layout
    left_out what was not considered, in words
    """

    buckets: tuple[TokenBucket, ...]
    rows: tuple[tuple[Measurement, ...], ...]
    best: tuple[dict[str, Measurement], ...]
    sizes: dict[str, int]
    pack_ms: dict[str, float]
    left_out: tuple[str, ...]
    unserved: tuple[TokenBucket, ...]
    _estimates: dict[int, stats.Estimate] = field(default_factory=dict, repr=False)

    def estimate(self, m: Measurement) -> stats.Estimate:
        found = self._estimates.get(id(m))
        if found is None:
            found = self._estimates[id(m)] = samples.estimate(m)
        return found

    def only(self, places: Sequence[int]) -> Options:
        """The same table without the other buckets."""
        return replace(
            self,
            buckets=tuple(self.buckets[place] for place in places),
            rows=tuple(self.rows[place] for place in places),
            best=tuple(self.best[place] for place in places),
        )

    def instance(self, weights: Sequence[float]) -> Instance:
        """The table as times alone, for :mod:`autosel.plan_solve`."""
        times = [{name: self.estimate(m).us for name, m in row.items()} for row in self.best]
        return Instance(self.sizes, times, weights)


def options(measurements: Sequence[Measurement], rules: Rules) -> Options:
    """Sort what was measured by layout and token count.

    A token count at which not every layout was tried cannot compare them. Of such layouts and
    token counts the one with the most holes is left out, until none has any; a layout that was
    tried and failed somewhere has no hole there, it just does not serve that bucket.
    """
    newest = {(m.num_tokens, m.candidate): m for m in measurements}
    usable = [m for m in newest.values() if m.status == "ok" and m.weight_bytes]
    layouts = {m.candidate.layout for m in usable}
    tried = {
        (m.candidate.layout, m.num_tokens)
        for m in newest.values()
        if m.candidate.layout in layouts and (m.status != "ok" or m.weight_bytes)
    }
    counts = {count for _, count in tried}
    left_out = _close_holes(layouts, counts, tried)
    rows = {
        count: tuple(m for m in newest.values() if m.num_tokens == count)
        for count in sorted(counts)
    }
    served, unserved, best, kept = [], [], [], []
    for bucket in buckets(counts) if counts else ():
        here: dict[str, Measurement] = {}
        for layout in sorted(layouts):
            of_layout = [m for m in rows[bucket.measured] if m.candidate.layout == layout]
            decision = rules.decide(of_layout, bucket)
            if isinstance(decision, Decision):
                here[layout] = next(m for m in of_layout if m.candidate == decision.winner)
        if here:
            served.append(bucket)
            best.append(here)
            kept.append(rows[bucket.measured])
        else:
            unserved.append(bucket)
    sizes: dict[str, int] = defaultdict(int)
    pack_ms: dict[str, float] = {}
    for m in usable:
        layout = m.candidate.layout
        if any(layout in row for row in best):
            sizes[layout] = max(sizes[layout], m.weight_bytes or 0)
            if m.pack_ms is not None:
                pack_ms[layout] = min(m.pack_ms, pack_ms.get(layout, math.inf))
    return Options(
        tuple(served), tuple(kept), tuple(best), dict(sizes), pack_ms, left_out, tuple(unserved)
    )  # fmt: skip


def _close_holes(
    layouts: set[str], counts: set[int], tried: set[tuple[str, int]]
) -> tuple[str, ...]:
    """Take out layouts and counts, here in place, until every layout was tried at every count."""
    words = []
    while holes := [(x, n) for x in sorted(layouts) for n in sorted(counts) if (x, n) not in tried]:
        by_layout = {x: sum(x == y for y, _ in holes) / len(counts) for x, _ in holes}
        by_count = {n: sum(n == k for _, k in holes) / len(layouts) for _, n in holes}
        layout = max(sorted(by_layout), key=lambda x: by_layout[x])
        count = max(sorted(by_count), key=lambda n: by_count[n])
        if by_layout[layout] >= by_count[count]:
            layouts.discard(layout)
            words.append(f"layout {layout} was not tried at every token count")
        else:
            counts.discard(count)
            words.append(f"{count} tokens were not tried with every layout")
    return tuple(words)


@dataclass(frozen=True, slots=True)
class Gain:
    """Time that a set of layouts saves a call against another one; ``half_us`` is half of its
    interval, infinite where there are too few samples for one."""

    us: float
    stderr_us: float
    dof: float

    def half_us(self, confidence: float) -> float:
        if self.stderr_us == 0:
            return 0.0
        if self.dof < 1:
            return math.inf
        return self.stderr_us * stats.student_t(0.5 + confidence / 2, int(self.dof))

    def interval(self, confidence: float) -> tuple[float, float] | None:
        half = self.half_us(confidence)
        return None if math.isinf(half) else (self.us - half, self.us + half)


class Gains:
    """Compares sets of layouts of one table under one workload.

    The gain is a weighted sum of differences; each one's standard error is that of the ratio of the
    two candidates' times (:meth:`autosel.stats.Estimate.over`, which knows that they were measured
    in turns), times the time. Different buckets were measured apart, so variances add up; degrees
    of freedom are those of Satterthwaite (1946).
    """

    def __init__(self, table: Options, instance: Instance, rules: Rules) -> None:
        self._table, self._instance, self._rules = table, instance, rules
        self._differences: dict[tuple[int, str, str], stats.LogRatio] = {}

    def gain(self, one: Set, other: Set) -> Gain:
        """What ``other`` saves against ``one``."""
        total = variance = below = 0.0
        starved = False
        for place, weight in enumerate(self._instance.weights):
            slow, slow_us = self._instance.fastest(place, one)
            fast, fast_us = self._instance.fastest(place, other)
            if slow == fast or not weight:
                continue
            total += weight * (slow_us - fast_us)
            ratio = self._ratio(place, slow, fast)
            starved |= ratio.dof < 1
            part = (weight * slow_us * ratio.stderr) ** 2
            variance += part
            below += part**2 / max(ratio.dof, 1)
        dof = 0.0 if starved else variance**2 / below if below else math.inf
        stderr = math.sqrt(variance) if not starved else math.inf
        return Gain(total, stderr, dof if dof < 1e9 else 1e9)

    def clears(self, one: Set, other: Set) -> bool:
        """Whether ``other`` is really faster than ``one``: by more than epsilon, noise aside.

        Judged as strictly as ties are (see :mod:`autosel.decide`), so that twenty tunings agree.
        Among equally many copies, what looks slower by more than ``TIE_LIMIT`` is no tie.
        """
        least = self._rules.epsilon * self._instance.time(other)
        gain = self.gain(one, other)
        limit = (1 + TIE_LIMIT) * self._instance.time(other)
        if len(one) == len(other) and self._instance.time(one) > limit:
            return True
        strict = 1 - (1 - self._rules.confidence) / RERUNS
        return gain.us - gain.half_us(strict) > least

    def _ratio(self, place: int, slow: str, fast: str) -> stats.LogRatio:
        key = place, slow, fast
        if key not in self._differences:
            row = self._table.best[place]
            first, second = self._table.estimate(row[slow]), self._table.estimate(row[fast])
            self._differences[key] = first.over(second)
        return self._differences[key]
