"""Callables in, microseconds out.

What is timed is one call of an operator whose weights are cold, since between two MoE layers of a
model the other layers' weights pass through the caches. Samples are single calls (hot: short
bursts). Every round gives each candidate one block of samples, in an order drawn anew: a drift of
the machine then hits every candidate, and none always follows the same other one. A block is one
sample on a GPU; on a CPU a few, since libraries that take turns call by call evict each other's
data. Who is shown to be slower drops out, and the rounds end when all that remain are as good as
each other (:mod:`autosel.racing`). Raw samples are kept; nothing is averaged here.

The device's part (clock, flush, graphs) is a :class:`Timer`: :mod:`autosel.timing_cpu` and
:mod:`autosel.timing_gpu`.
"""

from __future__ import annotations

import gc
import math
import time
import uuid
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from autosel.core import Device, Scalar
from autosel.racing import Race
from autosel.racing_pace import pace
from autosel.stats import MEDIAN
from autosel.timing_track import EXTRA, LEAST_ROUNDS, Track, first_call_ms
from autosel.timing_types import Call, Prepared, Sample, TimedSamples, Timer, TimingSettings

__all__ = [
    "EXTRA",
    "Call",
    "Prepared",
    "Sample",
    "TimedSamples",
    "Timer",
    "TimingSettings",
    "first_call_ms",
    "time_candidates",
    "timer_for",
]

#: A block takes no longer than this where the samples of the fastest candidate allow it.
BLOCK_S = 0.1
#: Others count as gone when they wait for a processor less than this share of a quarter second.
QUIET_PRESSURE = 0.05
_QUIET_STEP_S = 0.25

K = TypeVar("K", bound=Hashable)


def timer_for(device: Device, settings: TimingSettings, *, owns_process: bool = False) -> Timer:
    """The timer of a device's kind, with its flush buffer allocated.

    ``owns_process``: nobody else uses this process, so its threads may be bound.
    """
    if device.torch_device == "cpu":
        from autosel.timing_cpu import CpuTimer

        return CpuTimer(device, settings, owns_process=owns_process)
    from autosel.timing_gpu import GpuTimer

    return GpuTimer(device, settings)


def time_candidates(
    calls: Mapping[K, Call],
    settings: TimingSettings,
    timer: Timer,
    progress: Callable[[K, int], None] | None = None,
    classes: Mapping[K, Hashable] | None = None,
) -> dict[K, TimedSamples]:
    """Time every candidate against the others; ``progress(key, round)`` follows each block.

    A candidate that raises keeps its samples so far and the exception; the others go on. Only
    candidates of one class eliminate each other (all, when ``classes`` is left out).
    """
    tracks = {key: Track(call, settings, timer) for key, call in calls.items()}
    waited_s = _wait_until_quiet(timer, settings.wait_quiet_s)
    began = timer.now()
    with _no_garbage_collection():
        for track in tracks.values():
            track.warm_up()
        race = Race(
            [key for key, track in tracks.items() if track.error is None],
            timer.quantile,
            classes=classes,
            epsilon=settings.epsilon,
            confidence=settings.confidence,
        )
        cut = _rounds(race, tracks, settings, timer, began, progress)
    facts: dict[str, Scalar] = {"race": uuid.uuid4().hex[:16], "cut": cut}
    if settings.wait_quiet_s:
        facts["waited_s"] = round(waited_s, 2)
    found = _pace(tracks.values(), timer)
    return {
        key: track.result(found, **facts, eliminated=key in race.eliminated)
        for key, track in tracks.items()
    }


def _pace(tracks: Collection[Track], timer: Timer) -> tuple[float, ...]:
    """How the device's pace changed, where medians rank; low quantiles are of its best moments."""
    rounds = max((track.rounds for track in tracks), default=0)
    return pace([track.logs(rounds) for track in tracks]) if timer.quantile == MEDIAN else ()


def _rounds(
    race: Race[K],
    tracks: Mapping[K, Track],
    settings: TimingSettings,
    timer: Timer,
    began: float,
    progress: Callable[[K, int], None] | None,
) -> bool:
    """Run the race; whether ``budget_s`` ended it before it was settled."""
    wanted = _block_size(race.keys, tracks, settings, timer)
    for number in range(settings.rounds):
        running = [key for key in race.alive if tracks[key].may_go_on()]
        if settings.race and number >= LEAST_ROUNDS:
            running = race.contested(running)
        if not running:
            return False
        order = np.random.default_rng((number, len(running))).permutation(len(running))
        blocks: dict[K, list[float]] = {}
        for place in order:
            key = running[place]
            if number and _spent(settings, timer, began):
                race.add(blocks)
                return True
            blocks[key] = tracks[key].block(number, wanted)
            if tracks[key].error is not None:
                race.withdraw(key)
                del blocks[key]
            if progress:
                progress(key, number)
        for key in race.add(blocks, eliminate=settings.race):
            tracks[key].release()
    return False


def _block_size(
    keys: list[K], tracks: Mapping[K, Track], settings: TimingSettings, timer: Timer
) -> int:
    """Samples in a block, the same for all: a low quantile of more samples is lower."""
    if settings.samples_per_round is not None:
        return settings.samples_per_round
    fastest = min((tracks[key].sample_s for key in keys), default=0.0)
    most = int(BLOCK_S / fastest) if fastest > 0 else timer.block
    if settings.budget_s is not None and settings.budget_s < math.inf:
        a_round_of_one = sum(tracks[key].sample_s for key in keys)
        most = min(most, int(settings.budget_s / LEAST_ROUNDS / max(a_round_of_one, 1e-9)))
    return max(1, min(timer.block, most))


def _spent(settings: TimingSettings, timer: Timer, began: float) -> bool:
    return settings.budget_s is not None and timer.now() - began >= settings.budget_s


def _wait_until_quiet(timer: Timer, longest_s: float) -> float:
    """Seconds waited until nothing else presses on the processors, or until it was too long."""
    for step in range(int(longest_s / _QUIET_STEP_S)):
        before = timer.load().get("pressure", 0.0)
        time.sleep(_QUIET_STEP_S)
        waited = timer.load().get("pressure", 0.0) - before
        if waited < QUIET_PRESSURE * _QUIET_STEP_S:
            return (step + 1) * _QUIET_STEP_S
    return longest_s


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    # No collection before: it takes tenths of a second, once for every setting that is searched.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
