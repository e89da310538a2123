"""Which candidate serves a layer at which token counts: the stored decisions made whole.

Stored decisions count first; where one was withdrawn, or a sweep was stopped, its stored
measurements are decided again; what then is left open is served by a default of
:data:`autosel.fallback.DEFAULTS`.
Nothing is timed here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from autosel import registry
from autosel.buckets import buckets, newest_cover
from autosel.core import (
    Candidate,
    Decision,
    Device,
    Measurement,
    Problem,
    Reason,
    Status,
    TokenBucket,
)
from autosel.decide import decide
from autosel.errors import AutoselError, NothingUsableError, StoreError, field_error
from autosel.explanation import COLD, explain
from autosel.fallback import DEFAULTS
from autosel.interfaces import Backend
from autosel.store import Store
from autosel.tune_types import SweepSettings

#: ``one``  one packed copy of the weights; ``all``  that of every bucket's winner
Layouts = Literal["one", "all"]
Database = str | Path | Store | None


class WithdrawnWarning(UserWarning):
    """A stored winner failed where it was to be used; the message names it and what follows it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidate of one token bucket. ``tuned`` is False for a default; ``why`` is words."""

    bucket: TokenBucket
    candidate: Candidate
    tuned: bool
    why: str


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
    ) -> None:
        if layouts not in get_args(Layouts):
            wanted = " or ".join(map(repr, get_args(Layouts)))
            raise AutoselError(field_error("FusedMoE", "layouts", repr(layouts), wanted))
        self.problem, self.device = problem, device
        self._db, self._routing, self._allow_a8, self._layouts = db, routing, allow_a8, layouts
        self._failed: dict[Candidate, str] = {}
        timing = tuple(sorted(COLD.items()))
        with opened_database(db) as store:
            try:
                self._untuned = explain(store, problem, device, 1, routing=routing).why
            except AutoselError as error:  # rows that do not go together: words are all it costs
                self._untuned = str(error)
            known = bool(device.name.strip())  # nothing stored is about an unknown device
            self._rows = (
                store.measurements(problem, device, routing, timing=timing) if known else []
            )
            self._decisions = (
                store.decisions(problem, device, routing, timing=timing, allow_a8=allow_a8)
                if known
                else []
            )

    def table(self) -> tuple[Choice, ...]:
        """One choice for every M >= 1, sorted, neighbours with one candidate joined.

        Raises NothingUsableError, with every reason, when not even a default is left.
        """
        decided = self._decided()
        if self._layouts == "one":
            decided = self._one_layout(decided)
        choices = [Choice(d.bucket, d.winner, True, d.why) for d in decided]
        choices += self._gaps([d.bucket for d in decided])
        return _joined(sorted(choices, key=lambda choice: choice.bucket.low))

    def withdraw(
        self, choice: Choice, status: Status, reason: str, *, tell_database: bool = True
    ) -> None:
        """Never choose that candidate again, here and in the database, and warn.

        Where only this layer's values are the reason the database is not told: other layers of
        the same key keep the winner. Otherwise the failure is stored for each token count at
        which it is stored as correct: that is how a winner is given up. A default that the
        weights do not suit is no failure, so the next one is taken without a warning; its reason
        stands in :attr:`Choice.why`.
        """
        candidate = choice.candidate
        self._failed[candidate] = f"{status}: {reason}"
        if status == "unsupported" and not choice.tuned:
            return
        gone = [m for m in self._rows if m.candidate == candidate and m.status == "ok"]
        gone = [
            replace(m, status=status, reason=reason, times_us=(), errors=None, timing=())
            for m in gone
        ]
        won = [d for d in self._decisions if d.winner == candidate]
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
        if gone and tell_database:
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

    def _decided(self) -> list[Decision]:
        """Decisions that hold, then those that stored measurements give for what is open."""
        kept = [d for d in self._decisions if d.winner not in self._failed]
        counts = {m.num_tokens for m in self._rows}
        again = [self._decide(bucket) for bucket in buckets(counts)] if counts else []
        return list(newest_cover([*kept, *(d for d in again if d is not None)]))

    def _decide(self, bucket: TokenBucket, layout: str | None = None) -> Decision | None:
        rows = [
            m
            for m in self._rows
            if m.num_tokens == bucket.measured and m.candidate not in self._failed
        ]

        def of_layout(m: Measurement) -> Reason | None:
            same = layout is None or m.candidate.layout == layout
            return None if same else Reason("layout", m.candidate.layout, str(layout))

        try:
            found = decide(rows, bucket=bucket, allow_a8=self._allow_a8, require=[of_layout])
        except AutoselError:  # no rows, or rows of several ways of timing: nothing to go by
            return None
        return found if isinstance(found, Decision) else None

    def _one_layout(self, decided: list[Decision]) -> list[Decision]:
        """The same buckets, served from one layout: the one that loses least time.

        The loss is the geometric mean over the buckets of its time against the winner's. Where no
        layout has a verified candidate for every bucket, the winners stay and more are resident.
        """
        layouts = sorted({d.winner.layout for d in decided})
        if len(layouts) < 2:
            return decided
        best: tuple[float, list[Decision]] | None = None
        for layout in layouts:
            found = [
                d if d.winner.layout == layout else self._decide(d.bucket, layout) for d in decided
            ]
            whole = [d for d in found if d is not None]
            if len(whole) < len(decided):
                continue
            loss = sum(
                math.log(d.winner_us / w.winner_us) for d, w in zip(whole, decided, strict=True)
            )
            if best is None or loss < best[0]:
                best = loss, whole
        if best is None:
            return decided
        return [_compared(d, w) for d, w in zip(best[1], decided, strict=True)]

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


def layouts_of(choices: Collection[Choice]) -> tuple[str, ...]:
    """Keys of the layouts that a table needs, each once."""
    return tuple(dict.fromkeys(choice.candidate.layout for choice in choices))


def _compared(decision: Decision, winner: Decision) -> Decision:
    if decision.winner == winner.winner:
        return decision
    loss = 100 * (decision.winner_us / winner.winner_us - 1)
    why = (
        f"{decision.why}; {winner.winner.key} is {loss:.3g} % faster and reads another layout, "
        "of which one is resident"
    )
    return replace(decision, why=why)


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


@contextmanager
def opened_database(db: Database) -> Iterator[Store]:
    """The caller's own store left open, or one opened here and closed again."""
    if isinstance(db, Store):
        yield db
        return
    with Store.open(db) as store:
        yield store
