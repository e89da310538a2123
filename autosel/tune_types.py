"""What a sweep is asked for, what it tells while it runs and what it answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from autosel import routing_file
from autosel.buckets import bucket_for
from autosel.core import (
    Candidate,
    Decision,
    Device,
    Measurement,
    Problem,
    Rejected,
    check_properties,
)
from autosel.decide import NothingUsable
from autosel.errors import AutoselError, field_error
from autosel.roofline import Ceilings
from autosel.timing import TimingSettings
from autosel.worker_limits import StepLimits

#: Powers of four on a CPU, where a call is long; of two on a GPU, up to a prefill chunk.
CPU_TOKEN_COUNTS = (1, 4, 16, 64, 256, 1024)
GPU_TOKEN_COUNTS = tuple(1 << power for power in range(14))


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """What to sweep and how.

    token_counts  tokens a call; empty: the device kind's default. 0 is dropped, since a call
                  without tokens runs nothing.
    routing       kind of routing (:func:`autosel.routing_synthetic.make_routing`); part of every
                  stored key. ``file:PATH`` becomes the recording's key, and ``routing_file`` its
                  path.
    backends      names; empty: all
    allow_a8      may a backend that quantises activations to 8 bits win
    trials        the most parameter settings tried for each backend and token count
    search_within a backend's settings are searched where its own one takes at most this many times
                  the fastest backend's own; infinite: always
    budget_s      wall time of the sweep, shared among the token counts; None: as long as it takes
    seed          of activations, routing and search
    resume        skip what the store already has for this device, software and way of timing
    retry_failed  try again what is in quarantine (:mod:`autosel.quarantine`)
    isolate       run candidates in a worker process, where they can harm nothing; without it one
                  that crashes or hangs ends the sweep
    limits        on each step of a candidate in a worker process
    require       properties that the winner must be certified for (:data:`autosel.core.PROPERTIES`)
    start_from    tuned file of an engine (:func:`autosel.engine_export.read_tuned`): settings that
                  a search tries first; they are verified and timed like any other
    """

    token_counts: tuple[int, ...] = ()
    routing: str = "uniform"
    timing: TimingSettings = field(default_factory=TimingSettings)
    backends: tuple[str, ...] = ()
    allow_a8: bool = False
    trials: int = 32
    search_within: float = 1.5
    budget_s: float | None = None
    seed: int = 0
    resume: bool = True
    routing_file: str = ""
    retry_failed: bool = False
    isolate: bool = True
    limits: StepLimits = field(default_factory=StepLimits)
    require: tuple[str, ...] = ()
    start_from: str = ""

    def __post_init__(self) -> None:
        key, path = routing_file.resolve(self.routing)
        object.__setattr__(self, "routing", key)
        object.__setattr__(self, "routing_file", path or self.routing_file)
        object.__setattr__(self, "require", check_properties(self.require))
        for count in self.token_counts:
            if count < 0:
                raise AutoselError(
                    field_error("SweepSettings.token_counts", "value", count, "0 or more")
                )
        if self.trials < 1:
            raise AutoselError(
                field_error("SweepSettings.trials", "value", self.trials, "at least 1")
            )
        if not self.search_within >= 1:
            raise AutoselError(
                field_error("SweepSettings.search_within", "value", self.search_within, "1 or more")
            )
        if self.budget_s is not None and not self.budget_s > 0:
            raise AutoselError(
                field_error("SweepSettings.budget_s", "value", self.budget_s, "more than 0")
            )

    def tokens(self, device: Device) -> tuple[int, ...]:
        """The token counts to measure, ascending, each once."""
        default = CPU_TOKEN_COUNTS if device.kind == "cpu" else GPU_TOKEN_COUNTS
        return tuple(sorted({count for count in self.token_counts or default if count > 0}))


class Observer:
    """Told what a sweep does, from the thread that called it. Override what you want to show."""

    def started(
        self, problem: Problem, device: Device, tokens: tuple[int, ...], backends: int
    ) -> None:
        """Before anything runs."""

    def step(self, what: str, num_tokens: int, candidate: Candidate | None = None) -> None:
        """A step begins: ``load``, ``compile`` (waiting for it), ``pack``, ``first call``,
        ``verify``, ``search``, ``time`` or ``prove``."""

    def timed(self, num_tokens: int, done: int, total: int) -> None:
        """``done`` of ``total`` blocks of this token count are timed."""

    def measured(self, measurement: Measurement, resumed: bool) -> None:
        """A measurement is there; ``resumed`` when it came out of the store."""

    def decided(self, decision: Decision) -> None:
        """A token count's decision is there."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What a sweep's time budget left out at one token count.

    ``untried``: candidates that were never packed, and searches that ended early; ``unsettled``:
    timing stopped before the race was decided, so the decision is the best one so far.
    """

    num_tokens: int
    untried: tuple[str, ...]
    unsettled: bool

    @property
    def text(self) -> str:
        parts = []
        if self.untried:
            parts.append(f"not tried: {', '.join(self.untried)}")
        if self.unsettled:
            parts.append("timing ended before it was settled")
        return f"out of time at {self.num_tokens} tokens: {'; '.join(parts)}"


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What a sweep measured and decided for one layer.

    ``measurements`` are all that were decided upon, taken or out of the store, in order.
    ``outcomes`` has one answer for each token count, sorted: a Decision, or a NothingUsable with
    every reason.
    """

    problem: Problem
    device: Device
    label: str
    routing: str
    measurements: tuple[Measurement, ...]
    outcomes: tuple[Decision | NothingUsable, ...]
    ceilings: Ceilings | None = None
    cuts: tuple[Cut, ...] = ()
    #: Correct candidates that only earlier sweeps tried and that competed, by token count.
    standing: tuple[tuple[int, tuple[Candidate, ...]], ...] = ()
    #: Backends of which only the own setting was tried, by token count.
    unsearched: tuple[tuple[int, tuple[str, ...]], ...] = ()
    #: Stored rows that were timed in another way, each with how, by token count.
    aside: tuple[tuple[int, tuple[str, ...]], ...] = ()

    @property
    def aside_text(self) -> str:
        """How many stored measurements took no part since they are not comparable; "" for none."""
        how = Counter(words for _, found in self.aside for words in found)
        said = [f"{number} with {words}" for words, number in sorted(how.items())]
        return f"stored, timed in another way and left aside: {'; '.join(said)}" if said else ""

    @property
    def unsearched_text(self) -> str:
        """Which backends were not searched, and where; "" where all were."""
        counts: dict[str, list[int]] = {}
        for count, names in self.unsearched:
            for name in names:
                counts.setdefault(name, []).append(count)
        everywhere = len(self.outcomes)
        said = [
            name if len(at) == everywhere else f"{name} (at {', '.join(map(str, at))} tokens)"
            for name, at in sorted(counts.items())
        ]
        return (
            f"own setting only, since too slow, wrong or not allowed to win: {', '.join(said)}"
            if said
            else ""
        )

    @property
    def standing_text(self) -> str:
        """How many candidates of earlier sweeps competed, and whose; "" where none did."""
        at: dict[str, list[int]] = {}
        for count, candidates in self.standing:
            settings = Counter(candidate.backend for candidate in candidates)
            whose = ", ".join(
                name if number == 1 else f"{name} with {number} settings"
                for name, number in sorted(settings.items())
            )
            at.setdefault(f"{len(candidates)} ({whose})", []).append(count)
        said = [
            text
            if len(counts) == len(self.outcomes)
            else f"{text} at {', '.join(map(str, counts))} tokens"
            for text, counts in at.items()
        ]
        return f"not tried now, in the running as stored: {'; '.join(said)}" if said else ""

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The token counts that have a winner."""
        return tuple(found for found in self.outcomes if isinstance(found, Decision))

    def decision(self, tokens: int) -> Decision:
        """The decision for calls of ``tokens`` tokens; 0 tokens run nothing and get the smallest's.

        Raises NothingUsableError, with the reasons, where no candidate may be chosen.
        """
        bucket = bucket_for([found.bucket for found in self.outcomes], max(tokens, 1))
        found = next(outcome for outcome in self.outcomes if outcome.bucket == bucket)
        if isinstance(found, NothingUsable):
            raise found.error()
        return found

    def rejected(self, tokens: int) -> tuple[Rejected, ...]:
        """Every candidate that was not chosen for ``tokens``, with its reason."""
        bucket = bucket_for([found.bucket for found in self.outcomes], max(tokens, 1))
        return next(found.rejected for found in self.outcomes if found.bucket == bucket)
