"""Measurements in, a plan out: which layouts stay resident and what each token bucket runs.

Pure, like :mod:`autosel.decide`. Every call of the workload counts with the time that its bucket's
candidate was measured to take at the bucket's token count. Bytes are those of the packed weights;
scratch memory of a call is not recorded and does not count.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from autosel.core import (
    BreakEven,
    Candidate,
    Decision,
    Measurement,
    NextCopy,
    Plan,
    PlannedBucket,
    ResidentLayout,
    SingleLayout,
    TokenBucket,
    Workload,
)
from autosel.decide import Requirement
from autosel.errors import AutoselError, NothingUsableError, field_error
from autosel.plan_options import Gains, Options, Rules, options
from autosel.plan_solve import Chosen, Set, by_copies, smallest, solve
from autosel.plan_traffic import beyond, break_even, split
from autosel.records import timing_mode
from autosel.weight_budget import WeightBudget
from autosel.workload import DEFAULT, PRESETS, shares


def plan(
    measurements: Sequence[Measurement],
    *,
    workload: Workload = PRESETS[DEFAULT],
    budget: WeightBudget | None = None,
    layers: int = 1,
    defaults: Collection[Candidate] = (),
    allow_a8: bool = False,
    require: Sequence[Requirement] = (),
    requirements: Sequence[str] = (),
    epsilon: float = 0.01,
    confidence: float = 0.95,
) -> Plan:
    """Plan one layer from what was measured on one device with one routing and way of timing.

    measurements  of any token counts and candidates; the later entry counts
    budget        bytes for packed weights (default: one copy)
    layers        alike layers in the model; a budget in bytes is shared by them
    requirements  ``require`` in words, kept in the plan
    others        as :func:`autosel.decide.decide` has them

    Raises NothingUsableError when no candidate may be chosen, or no set of layouts that fits serves
    every bucket that some layout serves; AutoselError for measurements of several kinds.
    """
    _check_alike(measurements)
    rules = Rules(defaults, allow_a8, require, epsilon, confidence)
    table = options(measurements, rules)
    first = measurements[0]
    if not table.buckets:
        raise NothingUsableError(f"nothing to plan with: {_nothing(measurements, rules)}")
    return _Planner(first, table, rules, workload, budget or WeightBudget(), layers).plan(
        tuple(requirements)
    )


class _Planner:
    def __init__(
        self,
        first: Measurement,
        table: Options,
        rules: Rules,
        workload: Workload,
        budget: WeightBudget,
        layers: int,
    ) -> None:
        self.first, self.table, self.rules = first, table, rules
        self.workload, self.budget, self.layers = workload, budget, layers
        self.copy_bytes = min(table.sizes.values())
        self.budget_bytes = budget.bytes(self.copy_bytes, layers)
        self.shares = shares(workload, table.buckets)
        self.instance = table.instance(self.shares.calls)
        self.gains = Gains(table, self.instance, rules)

    def plan(self, requirements: tuple[str, ...]) -> Plan:
        chosen = solve(self.instance, self.budget_bytes, self.gains.clears)
        if chosen is None:
            raise NothingUsableError(self._too_small())
        buckets = tuple(self._buckets(chosen.layouts))
        made = Plan(
            problem=self.first.problem,
            device=self.first.device,
            routing=self.first.routing,
            workload=self.workload,
            budget=str(self.budget),
            budget_bytes=self.budget_bytes,
            copy_bytes=self.copy_bytes,
            layers=self.layers,
            resident=self._resident(chosen.layouts),
            buckets=buckets,
            time_us=sum(item.calls * item.time_us for item in buckets),
            best_us=sum(item.calls * item.best_us for item in buckets),
            next_copy=self._next(chosen),
            break_even=self._break_even(chosen.layouts),
            single=tuple(self._singles()),
            timing=tuple(sorted(timing_mode(self._timing()).items())),
            requirements=requirements,
            why="",
        )
        return replace(made, why=self._why(made))

    def _timing(self) -> tuple[tuple[str, bool | int | float | str | None], ...]:
        return next(iter(self.table.best[0].values())).timing

    def _resident(self, layouts: Set) -> tuple[ResidentLayout, ...]:
        return tuple(ResidentLayout(name, self.table.sizes[name]) for name in sorted(layouts))

    def _buckets(self, layouts: Set) -> Iterator[PlannedBucket]:
        """Each bucket's decision among what is resident, beside the one among everything.

        The same rules decide as without a plan, so that with every layout resident the plan is the
        decisions.
        """
        for place, bucket in enumerate(self.table.buckets):
            rows = self.table.rows[place]
            here = self.rules.decide([m for m in rows if m.candidate.layout in layouts], bucket)
            sized = [m for m in rows if m.status != "ok" or m.candidate.layout in self.table.sizes]
            best = self.rules.decide(sized, bucket)
            assert isinstance(here, Decision)
            assert isinstance(best, Decision)
            yield PlannedBucket(
                bucket=bucket,
                candidate=here.winner,
                time_us=here.winner_us,
                best=best.winner,
                best_us=best.winner_us,
                calls=self.shares.calls[place],
                tokens=self.shares.tokens[place],
                tie=here.tie,
                accuracy=here.accuracy,
            )

    def _next(self, chosen: Chosen) -> NextCopy | None:
        """The fastest set with one more copy, whether or not it fits."""
        count = len(chosen.layouts) + 1
        more = next((s for s in by_copies(self.instance) if len(s.layouts) == count), None)
        if more is None:
            return None
        gain = self.gains.gain(chosen.layouts, more.layouts)
        if gain.us <= 0:
            return None
        added = [name for name in more.layouts if name not in chosen.layouts]
        packing = [self.table.pack_ms.get(name, math.nan) for name in added]
        calls = 1e3 * sum(packing) / gain.us
        return NextCopy(
            resident=self._resident(more.layouts),
            extra_bytes=more.nbytes - chosen.nbytes,
            gain_us=gain.us,
            gain_interval=gain.interval(self.rules.confidence),
            fits=more.nbytes <= self.budget_bytes,
            worth=self.gains.clears(chosen.layouts, more.layouts),
            break_even_calls=calls if math.isfinite(calls) else None,
        )

    def _break_even(self, layouts: Set) -> BreakEven | None:
        """The other single layout whose break-even traffic is nearest to this workload."""
        if len(layouts) != 1:
            return None
        found = [
            even
            for name in self.instance.sizes
            if name != layouts[0]
            and self.instance.sizes[name] <= self.budget_bytes
            and self.instance.serves((name,))
            and (even := break_even(self.instance, self.table.buckets, layouts[0], name))
        ]
        return min(found, key=lambda e: (e.break_even - e.share, e.layout), default=None)

    def _singles(self) -> Iterator[SingleLayout]:
        """The best single layout for the calls of each kind of server."""
        for server, part in split(self.workload).items():
            try:
                weights = shares(part, self.table.buckets).calls
            except AutoselError:  # nothing was measured at its token counts
                continue
            table = self.table.only([place for place, weight in enumerate(weights) if weight])
            instance = table.instance([weight for weight in weights if weight])
            clears = Gains(table, instance, self.rules).clears
            # What is left of the budget must not buy a second copy here.
            best = solve(instance, self.budget_bytes, clears, copies=1)
            if best is not None:
                yield SingleLayout(
                    server=server,
                    workload=part.name,
                    layout=best.layouts[0],
                    nbytes=best.nbytes,
                    time_us=best.time_us,
                    best_us=instance.time(tuple(instance.sizes)),
                )

    def _too_small(self) -> str:
        """What was too little, and the least that would do."""
        text = field_error("weight budget", "bytes a layer", self.budget_bytes, "a set that fits")
        least = smallest(self.instance)
        if least is None:
            return text
        copies = math.ceil(100 * least.nbytes / self.copy_bytes) / 100
        return (
            f"{text}; the smallest set of layouts that serves every bucket is "
            f"{' + '.join(least.layouts)} with {least.nbytes} bytes a layer "
            f"({copies:g}x, {least.nbytes * self.layers} bytes in all)"
        )

    def _why(self, made: Plan) -> str:
        names = " + ".join(item.layout for item in made.resident)
        copies = len(made.resident)
        loss = 100 * (made.time_us / made.best_us - 1)
        wanted = len({item.best.layout for item in made.buckets if item.calls})
        words = [
            f"{copies} cop{'y' if copies == 1 else 'ies'} resident ({names}, "
            f"{made.resident_bytes} of {made.budget_bytes} bytes)",
            f"{made.time_us:.4g} us a call of {made.workload.name} traffic, {loss:.3g} % above "
            f"every bucket's winner, which would take {wanted} cop{'y' if wanted == 1 else 'ies'}",
        ]
        if made.next_copy is not None and not made.next_copy.worth:
            known = made.next_copy.gain_interval is not None
            words.append(
                "one more copy would gain nothing that clears the noise"
                if known
                else "whether one more copy gains is not settled: too few undisturbed samples"
            )
        if self.shares.uncovered > 0.0005:
            words.append(f"{100 * self.shares.uncovered:.3g} % of calls are in no planned bucket")
        far = beyond(made)
        if far > 0.0005:
            words.append(
                f"{100 * far:.3g} % of calls have more than twice the "
                f"{made.buckets[-1].bucket.measured} tokens that were measured at most"
            )
        return "; ".join([*words, *self.table.left_out])


def _nothing(measurements: Sequence[Measurement], rules: Rules) -> str:
    """Why no candidate may be chosen, at the smallest token count."""
    count = min(m.num_tokens for m in measurements)
    found = rules.decide(
        [m for m in measurements if m.num_tokens == count], TokenBucket(count, count, count)
    )
    return "no packed size is known" if found is None else found.why


def _check_alike(measurements: Sequence[Measurement]) -> None:
    if not measurements:
        raise NothingUsableError("nothing to plan with: nothing was measured")
    first = measurements[0]
    for m in measurements:
        for name in ("problem", "routing", "device"):
            if getattr(m, name) != getattr(first, name):
                found = f"{getattr(first, name)!r} and {getattr(m, name)!r}"
                raise AutoselError(field_error("plan", name, found, "one value in all"))
