"""What timing is asked for, what a device's timer offers and what comes back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from autosel.core import Scalar
from autosel.errors import AutoselError, field_error
from autosel.racing import CONFIDENCE, EPSILON

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class TimingSettings:
    """How to time.

    cache              ``cold`` flushes the last-level cache before each sample, untimed; ``hot``
                       does not and times bursts of at least ``burst_us``
    graph              capture into a CUDA graph where the device has them
    race               stop sampling whoever is shown to be slower, and everyone once all that
                       remain are within ``epsilon``; otherwise every candidate gets ``rounds``
    rounds             the most times that a candidate gets a block of samples
    samples_per_round  undisturbed samples in a block (up to :data:`autosel.timing.EXTRA` times as
                       many in all); None: the timer's own, fewer where calls take long
    warmup             calls before the first sample
    limit_s            wall time a candidate may take after its first call, flushes and warm-up
                       included. It is kept to within one call and its flush, which cannot be
                       interrupted; one sample is always taken.
    budget_s           wall time that all candidates together may take; None: no such limit. Every
                       candidate gets one sample all the same.
    stop_above_us      a candidate whose sample is above this gets no further one (a search's)
    wait_quiet_s       the longest to wait for others to leave the processors before timing
    bind               bind the threads of a worker process while a sample is taken, if there is one
                       for each processor (:mod:`autosel.timing_threads`)
    flush_bytes        None: from the device
    epsilon            candidates within this ratio of each other need no further samples
    confidence         of the race's statements
    """

    cache: Literal["cold", "hot"] = "cold"
    graph: bool = True
    race: bool = True
    rounds: int = 200
    samples_per_round: int | None = None
    warmup: int = 2
    limit_s: float = 2.5
    budget_s: float | None = None
    stop_above_us: float | None = None
    wait_quiet_s: float = 0.0
    bind: bool = True
    burst_us: float = 200.0
    flush_bytes: int | None = None
    epsilon: float = EPSILON
    confidence: float = CONFIDENCE

    def __post_init__(self) -> None:
        if self.cache not in ("cold", "hot"):
            raise AutoselError(
                field_error("TimingSettings.cache", "value", repr(self.cache), "'cold' or 'hot'")
            )
        for name, least in (("rounds", 1), ("samples_per_round", 1), ("warmup", 0)):
            found = getattr(self, name)
            if found is not None and found < least:
                raise AutoselError(
                    field_error(f"TimingSettings.{name}", "value", found, f"at least {least}")
                )
        for name in ("limit_s", "budget_s", "stop_above_us", "burst_us", "epsilon"):
            found = getattr(self, name)
            if found is not None and not found > 0:
                raise AutoselError(
                    field_error(f"TimingSettings.{name}", "value", found, "more than 0")
                )
        for name in ("wait_quiet_s", "burst_us", "flush_bytes"):
            found = getattr(self, name)
            if found is not None and not 0 <= found < math.inf:
                expected = "0 or more, and finite"
                raise AutoselError(field_error(f"TimingSettings.{name}", "value", found, expected))
        if not 0 < self.confidence < 1:
            raise AutoselError(
                field_error("TimingSettings.confidence", "value", self.confidence, "in (0, 1)")
            )


@dataclass(frozen=True, slots=True)
class Sample:
    """Microseconds of one call, and what was seen beside it (switches, flush rate, clocks).

    ``disturbed``: something else took so much of it that it cannot rank. It is kept all the same,
    unless ``us`` is no time at all (0, negative, NaN): a clock that goes backwards says nothing.
    """

    us: float
    disturbed: bool = False
    seen: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_time(self) -> bool:
        return 0 < self.us < math.inf


@dataclass(frozen=True, slots=True)
class Prepared:
    """A candidate ready for repeated calls, and facts about how that was done."""

    call: Call
    facts: Mapping[str, Scalar] = field(default_factory=dict)


class Timer(Protocol):
    """What timing needs from a device."""

    @property
    def quantile(self) -> float:
        """The quantile of a block's samples that ranks on this kind of device."""

    @property
    def block(self) -> int:
        """Samples in a row of one candidate before it is the next one's turn."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""

    def run(self, call: Call) -> None:
        """Call once and wait until the device has finished; device errors surface here."""

    def prepare(self, call: Call, settings: TimingSettings) -> Prepared:
        """Make repeated calls cheap (a graph), after :meth:`run` has succeeded once."""

    def sample(self, call: Call, repeats: int) -> Sample:
        """Flush unless hot, then time ``repeats`` calls; microseconds of one."""

    def load(self) -> Mapping[str, float]:
        """Seconds, so far, of everything else that competes for the device."""

    @property
    def facts(self) -> Mapping[str, Scalar]:
        """How this timer measures: samples with equal facts may be compared."""


@dataclass(frozen=True, slots=True)
class TimedSamples:
    """One candidate's samples in the order taken.

    ``timing`` is what :class:`~autosel.core.Measurement` keeps of how they were taken: the timer's
    facts, the race and the size of the block in each of its rounds (for pairing), lists with one
    figure a sample as text, the share of the wall time in which others competed, ``limited`` where
    a limit cut samples, ``eliminated`` where the race did, ``no_time`` samples that the clock gave
    no time for and ``stood_still_s`` where the machine did. ``error`` is what the candidate raised,
    if it did.
    """

    times_us: tuple[float, ...]
    first_call_ms: float | None
    timing: tuple[tuple[str, Scalar], ...]
    error: BaseException | None = None
