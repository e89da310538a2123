"""Which candidate serves a layer at which token counts: what the tiers decide, made whole.

Decisions of the tiers (:mod:`autosel.tiers`) count first; where one was withdrawn, or a sweep was
stopped, its tier's measurements are decided again; what then is left open is served by a default
of :data:`autosel.fallback.DEFAULTS`.
Nothing is timed here, except that compatible packs are checked once by whoever is asked to.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from autosel import registry
from autosel.buckets import buckets, newest_cover
from autosel.core import (
    Candidate,
    Certificate,
    Decision,
    Device,
    Measurement,
    Plan,
    PlannedBucket,
    Problem,
    Status,
    TokenBucket,
)
from autosel.errors import AutoselError, NothingUsableError, StoreError, field_error
from autosel.explanation import explain
from autosel.fallback import DEFAULTS
from autosel.identity import hardware_differences, version_differences
from autosel.interfaces import Backend
from autosel.layer_layouts import by_plan, one_copy
from autosel.next_best import again, instead
from autosel.planning import held
from autosel.requirements import Required
from autosel.store import Database, Store, opened_database
from autosel.tiers import Answer, Answers, Tiers, open_tiers
from autosel.tune_types import SweepSettings

#: ``one``  the copies of the plan, one where there is none; ``all``  that of every bucket's winner
Layouts = Literal["one", "all"]
#: Checks a compatible answer on this machine and keeps what it finds.
Prove = Callable[[Tiers, Answer], None]


class WithdrawnWarning(UserWarning):
    """A stored winner failed where it was to be used; the message names it and what follows it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidate of one token bucket. ``tuned`` is False for a default; ``why`` is words."""

    bucket: TokenBucket
    candidate: Candidate
    tuned: bool
    why: str


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a choice cannot serve, as status and reason of a measurement.

    ``tell``: the database is told, so that nobody tries it again.
    """

    choice: Choice
    status: Status
    reason: str
    tell: bool = True


class Chooser:
    """Makes the table of :class:`Choice` for one layer, and makes it again without what failed."""

    def __init__(
        self,
        problem: Problem,
        device: Device,
        db: Database = None,
        *,
        routing: str = "uniform",
        allow_a8: bool = False,
        layouts: Layouts = "one",
        plan: Plan | None = None,
        model: str | Path | None = None,
        prove: Prove | None = None,
        require: Sequence[str] = (),
    ) -> None:
        """``plan`` counts before the one that is stored; ``model`` is the folder of the layer's
        model, where a pack may lie; ``prove`` checks a compatible pack's entry on this machine
        (left out, such packs are not used); ``require`` names properties that whoever serves must
        be certified for, defaults included (AutoselError for an unknown one)."""
        if layouts not in get_args(Layouts):
            wanted = " or ".join(map(repr, get_args(Layouts)))
            raise AutoselError(field_error("FusedMoE", "layouts", repr(layouts), wanted))
        self.problem, self.device = problem, device
        self._db, self._routing, self._allow_a8, self._layouts = db, routing, allow_a8, layouts
        self._failed: dict[Candidate, str] = {}
        with open_tiers(db, model) as tiers:
            self._answers = self._ask(tiers)
            for answer in self._answers.unproven:
                if prove is not None and self._wanted(answer):
                    prove(tiers, answer)
                    self._answers = self._ask(tiers)
            self._required = Required.of(require, self._certificates(tiers.store))
            self._plan = _checked(plan, problem, device) or self._plan_of(tiers)
            try:
                self._untuned = explain(tiers, problem, device, 1, routing=routing).why
            except AutoselError as error:  # rows that do not go together: words are all it costs
                self._untuned = str(error)

    def table(self) -> tuple[Choice, ...]:
        """One choice for every M >= 1, sorted, neighbours with one candidate joined.

        Raises NothingUsableError, with every reason, when not even a default is left.
        """
        decided = self._decided()
        if self._layouts == "one":
            decided = self._resident(decided)
        choices = [Choice(d.bucket, d.winner, True, d.why) for d in decided]
        choices += self._gaps([d.bucket for d in decided])
        return _joined(sorted(choices, key=lambda choice: choice.bucket.low))

    def settle(self, fault: Fault | None) -> bool:
        """Whether the table stands; a fault is withdrawn, and the next table is without it."""
        if fault is None:
            return True
        self.withdraw(fault.choice, fault.status, fault.reason, tell_database=fault.tell)
        return False

    def withdraw(
        self, choice: Choice, status: Status, reason: str, *, tell_database: bool = True
    ) -> None:
        """Never choose that candidate again, here and in the database, and warn.

        Where only this layer's values are the reason the database is not told: other layers of
        the same key keep the winner. Nor is it told where the next start may find more memory, or
        the machine well again. Otherwise the failure is stored for each token count at
        which it is stored as correct: that is how a winner is given up. A default that the
        weights do not suit is no failure, so the next one is taken without a warning; its reason
        stands in :attr:`Choice.why`.
        """
        candidate = choice.candidate
        self._failed[candidate] = f"{status}: {reason}"
        if status == "unsupported" and not choice.tuned:
            return
        gone = [
            replace(m, status=status, reason=reason, times_us=(), errors=None, timing=())
            for answer in self._answers.usable
            for m in answer.measurements
            if m.candidate == candidate and m.status == "ok" and m.device == self.device
        ]
        won = [
            d for answer in self._answers.usable for d in answer.decisions if d.winner == candidate
        ]
        known = {m.num_tokens for m in gone}
        gone += [
            Measurement(
                problem=self.problem,
                num_tokens=d.bucket.measured,
                routing=self._routing,
                candidate=candidate,
                device=self.device,
                status=status,
                reason=reason,
                accuracy=d.accuracy,
            )
            for d in won
            if d.bucket.measured not in known
        ]
        note = ""
        if gone and tell_database and status != "oom":
            try:
                with opened_database(self._db) as store:
                    store.add_measurements(gone)
            except StoreError as error:
                note = f" (and the database could not be told: {error})"
        warnings.warn(
            f"{candidate.key} is withdrawn for {self.problem.key}: {reason}; the next verified "
            f"candidate serves{note}",
            WithdrawnWarning,
            stacklevel=2,
        )

    # inside ----------------------------------------------------------------------------------

    def _ask(self, tiers: Tiers) -> Answers:
        return tiers.answers(
            self.problem, self.device, routing=self._routing, allow_a8=self._allow_a8
        )

    def _wanted(self, answer: Answer) -> bool:
        """Whether an answer that is not proven yet says something about tokens left open."""
        covered = self._answers.decisions()
        return len(newest_cover([*covered, *answer.decisions])) > len(covered)

    def _decided(self) -> list[Decision]:
        """Each tier's decisions that hold, then those that its measurements give for the rest."""
        found: list[Decision] = []
        for answer in self._answers.usable:
            found += [d for d in answer.decisions if not self._banned(d.winner)]
            counts = {m.num_tokens for m in answer.measurements}
            # A pack's own buckets say where it has no answer.
            own = buckets(counts) if counts and answer.entry is None else ()
            rows = answer.measurements
            next_ones = [again(rows, b, self._banned, allow_a8=self._allow_a8) for b in own]
            next_ones += [self._instead(answer, d) for d in answer.decisions]
            found += [d for d in next_ones if d is not None]
        return list(newest_cover(found))

    def _decide(self, bucket: TokenBucket, layout: str) -> Decision | None:
        """The best in one layout, by the first tier that knows about the bucket."""
        for answer in self._answers.usable:
            rows = answer.measurements
            found = again(rows, bucket, self._banned, allow_a8=self._allow_a8, layout=layout)
            decision = answer.at(bucket.low)
            if found is None and decision is not None:
                found = self._instead(answer, decision, layout)
            if found is not None and not self._illegal(answer, found.winner, found.bucket):
                return replace(found, bucket=bucket)
        return None

    def _banned(self, candidate: Candidate) -> bool:
        return candidate in self._failed or bool(self._required.lacks(candidate))

    def _certificates(self, store: Store) -> list[Certificate]:
        """What packs that may decide say is proven, then what the database says."""
        packed = [c for a in self._answers.usable if a.entry for c in a.entry.certificates]
        known = self.device.name.strip()
        mine = store.certificates(self.problem, self.device, history=True) if known else []
        return [*packed, *mine]

    def _illegal(self, answer: Answer, candidate: Candidate, bucket: TokenBucket) -> bool:
        return answer.illegal(candidate, self.device, bucket.measured)

    def _instead(
        self, answer: Answer, decision: Decision, layout: str | None = None
    ) -> Decision | None:
        def banned(candidate: Candidate) -> bool:
            return self._banned(candidate) or self._illegal(answer, candidate, decision.bucket)

        rows = answer.measurements
        return instead(decision, rows, banned, allow_a8=self._allow_a8, layout=layout)

    def _resident(self, decided: list[Decision]) -> list[Decision]:
        """The same tokens, served from the copies that the plan keeps resident, or from one."""
        if self._plan is not None:
            return by_plan(decided, self._plan, self._decide, self._plannable)
        rows = [m for answer in self._answers.usable for m in answer.measurements]
        return one_copy(decided, self._decide, rows)

    def _plannable(self, item: PlannedBucket) -> bool:
        """Whether a planned candidate may serve: allowed, and not known to fail here."""
        failed = self._banned(item.candidate) or any(
            m.candidate == item.candidate and m.status != "ok" and m.num_tokens in item.bucket
            for answer in self._answers.usable
            for m in answer.measurements
        )
        return not failed and (item.accuracy == "exact" or self._allow_a8)

    def _plan_of(self, tiers: Tiers) -> Plan | None:
        """The plan stored last, else that of the first pack that may decide."""
        stored = held(tiers.store, self.problem, self.device, self._routing)
        packed = [a.entry.plan for a in self._answers.usable if a.entry and a.entry.plan]
        return stored or next(iter(packed), None)

    def _gaps(self, covered: list[TokenBucket]) -> Iterator[Choice]:
        """Defaults for the token counts that nothing stored answers for."""
        if not covered:
            yield from self._default(1, None)
            return
        low = 1
        for bucket in covered:
            if bucket.low > low:
                yield from self._default(low, bucket.low - 1)
            if bucket.high is None:
                return
            low = bucket.high + 1
        yield from self._default(low, None)

    def _default(self, low: int, high: int | None) -> Iterator[Choice]:
        backend, others = self._default_backend()
        why = "; ".join([f"not tuned ({self._untuned})", *others, f"{backend.name} is the default"])
        for bucket in buckets(SweepSettings().tokens(self.device)):
            start = max(low, bucket.low)
            ends = [end for end in (high, bucket.high) if end is not None]
            end = min(ends) if ends else None
            if end is not None and end < start:
                continue
            part = TokenBucket(start, end, bucket.measured)
            candidate = self._default_candidate(backend, bucket.measured)
            lacking = self._required.lacks(candidate)
            if lacking:
                tokens = f"{start} tokens" if end == start else f"{start} tokens and more"
                raise NothingUsableError(
                    f"nothing usable for {self.problem.key} at {tokens}: no tuned candidate is "
                    f"certified for {', '.join(self._required.names)}, nor the default "
                    f"{candidate.key} ({lacking}); to certify: autosel sweep --require"
                )
            yield Choice(part, candidate, False, why)

    def _default_candidate(self, backend: Backend, num_tokens: int) -> Candidate:
        params = backend.space(self.problem, num_tokens, self.device).default
        return Candidate.of(backend.name, params, backend.layout(self.problem, params).key)

    def _default_backend(self) -> tuple[Backend, list[str]]:
        """The first default that will do, and why those before it will not."""
        reasons: list[str] = []
        for name in DEFAULTS:
            backend = registry.get(name)
            reason = self._why_not(backend)
            if reason is None:
                return backend, reasons
            reasons.append(f"{name} {reason}")
        raise NothingUsableError(
            f"nothing usable for {self.problem.key} on {self.device.name}: {'; '.join(reasons)}"
        )

    def _why_not(self, backend: Backend) -> str | None:
        """Why a backend cannot be the default, or None when it can."""
        failed = [why for c, why in self._failed.items() if c.backend == backend.name]
        if failed:
            return failed[0]
        support = backend.supports(self.problem, self.device)
        if not support:
            return f"not supported: {support}"
        for num_tokens in SweepSettings().tokens(self.device):
            space = backend.space(self.problem, num_tokens, self.device)
            illegal = space.constraint(space.default)
            if illegal is not None:
                return f"default setting at {num_tokens} tokens: {illegal}"
        return None


def _checked(plan: Plan | None, problem: Problem, device: Device) -> Plan | None:
    """A caller's plan; AutoselError when it is about another layer or another machine."""
    if plan is not None and plan.problem != problem:
        raise AutoselError(field_error("FusedMoE.plan", "layer", plan.problem.key, problem.key))
    if plan is not None and plan.device != device:
        differences = (
            *hardware_differences(device, plan.device),
            *version_differences(device, plan.device),
        )
        found = "; ".join(map(str, differences)) or plan.device.name
        raise AutoselError(field_error("FusedMoE.plan", "device", found, "this machine"))
    return plan


def _joined(choices: list[Choice]) -> tuple[Choice, ...]:
    """Neighbouring defaults of one candidate as one; decisions keep their own words."""
    out: list[Choice] = []
    for choice in choices:
        last = out[-1] if out else None
        if last and not choice.tuned and not last.tuned and last.candidate == choice.candidate:
            out[-1] = replace(last, bucket=replace(last.bucket, high=choice.bucket.high))
        else:
            out.append(choice)
    return tuple(out)
