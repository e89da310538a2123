"""Callables in, microseconds out.

What is timed is one call of an operator whose weights are cold, since between two MoE layers of a
model the other layers' weights pass through the caches. Samples are single calls (hot: short
bursts), taken in short blocks, one block a candidate, over several rounds whose order rotates: a
drift of the machine then hits every candidate, while libraries do not take turns call by call,
which makes them evict each other's data. Raw samples are kept; nothing is averaged here.

The device's part (clock, flush, graphs) is a :class:`Timer`: :mod:`autosel.timing_cpu` and
:mod:`autosel.timing_gpu`.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from autosel.core import Device, Scalar
from autosel.errors import AutoselError, field_error
from autosel.failures import CAUGHT

#: At most this many times the wanted samples are taken to find undisturbed ones.
EXTRA = 3

Call = Callable[[], object]
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class TimingSettings:
    """How to time.

    cache              ``cold`` flushes the last-level cache before each sample, untimed; ``hot``
                       does not and times bursts of at least ``burst_us``
    graph              capture into a CUDA graph where the device has them
    rounds             times that every candidate gets a block of samples
    samples_per_round  undisturbed samples in a block; up to :data:`EXTRA` times as many in all
    warmup             calls before the first sample
    limit_s            wall time a candidate may take after its first call, flushes and warm-up
                       included. It is kept to within one call and its flush, which cannot be
                       interrupted; one sample is always taken.
    flush_bytes        None: from the device
    """

    cache: Literal["cold", "hot"] = "cold"
    graph: bool = True
    rounds: int = 5
    samples_per_round: int = 5
    warmup: int = 2
    limit_s: float = 2.5
    burst_us: float = 200.0
    flush_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.cache not in ("cold", "hot"):
            raise AutoselError(
                field_error("TimingSettings.cache", "value", repr(self.cache), "'cold' or 'hot'")
            )
        for name, least in (("rounds", 1), ("samples_per_round", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise AutoselError(
                    field_error(
                        f"TimingSettings.{name}", "value", getattr(self, name), f"at least {least}"
                    )
                )
        if not self.limit_s > 0:
            raise AutoselError(
                field_error("TimingSettings.limit_s", "value", self.limit_s, "more than 0")
            )


@dataclass(frozen=True, slots=True)
class Sample:
    """Microseconds of one call, and what was seen beside it (switches, flush rate).

    ``disturbed``: something else certainly ran in its middle. It is kept all the same.
    """

    us: float
    disturbed: bool = False
    seen: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A candidate ready for repeated calls, and facts about how that was done."""

    call: Call
    facts: Mapping[str, Scalar] = field(default_factory=dict)


class Timer(Protocol):
    """What timing needs from a device."""

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
    facts, the sizes of the blocks (for pairing), lists with one figure a sample as text, the share
    of the wall time in which others competed, and ``limited`` where the limit cut samples.
    ``error`` is what the candidate raised, if it did.
    """

    times_us: tuple[float, ...]
    first_call_ms: float | None
    timing: tuple[tuple[str, Scalar], ...]
    error: BaseException | None = None


def timer_for(device: Device, settings: TimingSettings) -> Timer:
    """The timer of a device's kind, with its flush buffer allocated."""
    if device.torch_device == "cpu":
        from autosel.timing_cpu import CpuTimer

        return CpuTimer(device, settings)
    from autosel.timing_gpu import GpuTimer

    return GpuTimer(device, settings)


def first_call_ms(call: Call, timer: Timer) -> float:
    """Milliseconds of one call, waited for; the first one includes compilation."""
    start = timer.now()
    timer.run(call)
    return (timer.now() - start) * 1e3


def time_candidates(
    calls: Mapping[K, Call],
    settings: TimingSettings,
    timer: Timer,
    progress: Callable[[K, int], None] | None = None,
) -> dict[K, TimedSamples]:
    """Time every candidate, interleaved in blocks; ``progress(key, round)`` follows each block.

    A candidate that raises keeps its samples so far and the exception; the others go on.
    """
    tracks = {key: _Track(call, settings, timer) for key, call in calls.items()}
    order = list(tracks)
    with _no_garbage_collection():
        for track in tracks.values():
            track.warm_up()
        for number in range(settings.rounds):
            turn = number % len(order) if order else 0
            for key in order[turn:] + order[:turn]:
                tracks[key].block(settings.rounds - number)
                if progress:
                    progress(key, number)
    return {key: track.result() for key, track in tracks.items()}


class _Track:
    """One candidate on its way through the rounds."""

    def __init__(self, call: Call, settings: TimingSettings, timer: Timer) -> None:
        self.call = call
        self.settings = settings
        self.timer = timer
        self.samples: list[Sample] = []
        self.blocks: list[int] = []
        self.facts: dict[str, Scalar] = {}
        self.load: dict[str, float] = {}
        self.first_ms: float | None = None
        self.error: BaseException | None = None
        self.spent_s = 0.0
        self.sample_s = 0.0  # wall time of the last sample, its flush included
        self.repeats = 1
        self.limited = False

    def warm_up(self) -> None:
        """The first call, preparation and a few calls that do not count."""
        try:
            self.first_ms = first_call_ms(self.call, self.timer)
            with self._watch():
                self._prepare()
        except CAUGHT as error:
            self.error = error

    def _prepare(self) -> None:
        prepared = self.timer.prepare(self.call, self.settings)
        self.call = prepared.call
        self.facts |= prepared.facts
        call_us = math.inf
        for _ in range(max(1, self.settings.warmup)):
            began = self.timer.now()
            call_us = min(call_us, self.timer.sample(self.call, 1).us)
            self.sample_s = self.timer.now() - began
            if self.sample_s * 4 > self.settings.limit_s:
                break
        if self.settings.cache == "hot" and call_us > 0:
            self.repeats = max(1, math.ceil(self.settings.burst_us / call_us))
            self.sample_s = max(self.sample_s, self.repeats * call_us / 1e6)

    def block(self, rounds_left: int) -> None:
        """One round's samples, within an equal share of what is left of the limit."""
        if self.error is not None:
            return
        allowance = (self.settings.limit_s - self.spent_s) / rounds_left
        before = len(self.samples)
        try:
            with self._watch():
                self._take(allowance)
        except CAUGHT as error:
            self.error = error
        if len(self.samples) > before:
            self.blocks.append(len(self.samples) - before)

    def _take(self, allowance: float) -> None:
        """Samples until enough of them are undisturbed or one more would pass the allowance.

        On a busy machine most are disturbed; some more give the low quantiles, which ranking
        reads, a chance to be clean ones.
        """
        start = self.timer.now()
        wanted = self.settings.samples_per_round
        if allowance > 4 * self.sample_s:
            # Another library ran before: threads sleep and code is cold. A slow call that the
            # limit allows few samples of needs no such care.
            self.timer.run(self.call)
        taken = clean = 0
        while clean < wanted and taken < EXTRA * wanted:
            began = self.timer.now()
            if began - start + self.sample_s > allowance and self.samples:
                self.limited = True
                return
            sample = self.timer.sample(self.call, self.repeats)
            self.sample_s = self.timer.now() - began
            self.samples.append(sample)
            taken += 1
            clean += not sample.disturbed

    def result(self) -> TimedSamples:
        wall = max(self.spent_s, 1e-9)
        seen: dict[str, Scalar] = {
            **self.facts,
            "blocks": ",".join(map(str, self.blocks)),
            "repeats": self.repeats,
            "limited": self.limited,
            "disturbed": sum(sample.disturbed for sample in self.samples),
            "wall_s": round(self.spent_s, 4),
            **{f"{name}_share": round(s / wall, 4) for name, s in self.load.items()},
        }
        for name in self.samples[0].seen if self.samples else ():
            seen[name] = ",".join(f"{sample.seen[name]:g}" for sample in self.samples)
        facts = tuple(sorted({**self.timer.facts, **seen}.items()))
        times = tuple(sample.us for sample in self.samples)
        return TimedSamples(times, self.first_ms, facts, self.error)

    @contextmanager
    def _watch(self) -> Iterator[None]:
        """Add the body's wall time and what competed during it."""
        start, before = self.timer.now(), self.timer.load()
        try:
            yield
        finally:
            self.spent_s += self.timer.now() - start
            for name, seconds in self.timer.load().items():
                self.load[name] = self.load.get(name, 0.0) + seconds - before[name]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
