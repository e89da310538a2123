"""One candidate on its way through the rounds of a race."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from autosel.core import Scalar
from autosel.failures import CAUGHT
from autosel.handlers import let_through
from autosel.racing_bounds import log_quantile
from autosel.racing_pace import PACE
from autosel.timing_types import Call, Sample, TimedSamples, Timer, TimingSettings

#: Rounds that everyone gets who is not eliminated before: the figure is reported and plotted, and
#: a limit is spread over as many.
LEAST_ROUNDS = 5
#: At most this many times the wanted samples are taken to find undisturbed ones.
EXTRA = 3
#: A sample that takes this many times the shortest one shows that the machine stood still (a
#: virtual machine or a process was stopped). The longest such one is not charged to the limit,
#: else an hour's pause would leave the fastest candidate with one sample.
STOOD_STILL = 20


def first_call_ms(call: Call, timer: Timer) -> float:
    """Milliseconds of one call, waited for; the first one includes compilation."""
    start = timer.now()
    timer.run(call)
    return (timer.now() - start) * 1e3


class Track:
    """A candidate's call, its samples and what they cost. What it raises is kept in ``error``."""

    def __init__(self, call: Call, settings: TimingSettings, timer: Timer) -> None:
        self.error: BaseException | None = None
        self.limited = False
        self.sample_s = 0.0  # wall time of the last sample, its flush included
        self._call: Call | None = call
        self._settings = settings
        self._timer = timer
        self._samples: list[Sample] = []
        self._no_time = 0  # samples for which the clock gave none
        self._longest_s, self._shortest_s = 0.0, math.inf  # samples, flushes included
        self._blocks: list[int] = []  # samples in each round, 0 where it did not run
        self._facts: dict[str, Scalar] = {}
        self._load: dict[str, float] = {}
        self._first_ms: float | None = None
        self._spent_s = 0.0
        self._repeats = 1

    def may_go_on(self) -> bool:
        """Whether it can take another sample; notes that the limit ended it where it did."""
        if self._call is None:
            return False
        within = self._spent_s - self._stood_s + self.sample_s <= self._settings.limit_s
        if self._samples and not within:
            self.limited = True
        return not self.limited or within

    def warm_up(self) -> None:
        """The first call, preparation and a few calls that do not count."""
        assert self._call is not None
        try:
            self._first_ms = first_call_ms(self._call, self._timer)
            with self._watch():
                self._prepare(self._call)
        except CAUGHT as error:
            self._failed(error)

    def _prepare(self, call: Call) -> None:
        prepared = self._timer.prepare(call, self._settings)
        self._call = prepared.call
        self._facts |= prepared.facts
        call_us = math.inf
        for _ in range(max(1, self._settings.warmup)):
            call_us = min(call_us, self._sample(prepared.call, 1).us)
            if self.sample_s * 4 > self._settings.limit_s:
                break
        if self._settings.cache == "hot" and call_us > 0:
            self._repeats = max(1, math.ceil(self._settings.burst_us / call_us))
            self.sample_s = max(self.sample_s, self._repeats * call_us / 1e6)

    def block(self, number: int, wanted: int) -> list[float]:
        """Round ``number``: until ``wanted`` samples are undisturbed, and these in microseconds.

        On a busy machine most are disturbed; some more give the low quantiles, which ranking
        reads, a chance to be clean ones.
        """
        before = len(self._samples)
        try:
            with self._watch():
                self._take(wanted, number)
        except CAUGHT as error:
            self._failed(error)
            return []
        taken = self._samples[before:]
        self._blocks += [0] * (number - len(self._blocks)) + [len(taken)]
        return [sample.us for sample in taken if not sample.disturbed]

    def _take(self, wanted: int, number: int) -> None:
        call, timer, settings = self._call, self._timer, self._settings
        assert call is not None
        start = timer.now() - self._stood_s
        rounds_left = min(LEAST_ROUNDS, settings.rounds) - number
        spent_s = self._spent_s - self._stood_s
        allowance = (settings.limit_s - spent_s) / max(1, rounds_left)
        if wanted > 1:
            # Another library ran before: threads sleep and code is cold. Blocks of one are for
            # calls that are long, or whose device knows no such state.
            timer.run(call)
        taken = clean = 0
        while clean < wanted and taken < EXTRA * wanted:
            spent_s = timer.now() - self._stood_s - start
            if spent_s + self.sample_s > allowance and (self._samples or self._no_time):
                self.limited = True
                return
            sample = self._sample(call, self._repeats)
            taken += 1
            if not sample.is_time:
                self._no_time += 1
                continue
            self._samples.append(sample)
            clean += not sample.disturbed
            if settings.stop_above_us is not None and sample.us > settings.stop_above_us:
                self._facts["stopped_above_us"] = settings.stop_above_us
                self._call = None
                return

    def _sample(self, call: Call, repeats: int) -> Sample:
        """One sample, and its wall time, its flush included, in ``sample_s``."""
        began = self._timer.now()
        sample = self._timer.sample(call, repeats)
        took = max(0.0, self._timer.now() - began)
        self._longest_s = max(self._longest_s, took)
        self._shortest_s = min(self._shortest_s, took)
        self.sample_s = self._shortest_s if took > STOOD_STILL * self._shortest_s else took
        return sample

    @property
    def _stood_s(self) -> float:
        """Seconds in which the machine seems to have stood still."""
        stood = self._longest_s > STOOD_STILL * self._shortest_s
        return self._longest_s - self._shortest_s if stood else 0.0

    def logs(self, rounds: int) -> list[float]:
        """Log of each round's figure, NaN where it took no undisturbed sample in that round."""
        found, samples = [math.nan] * rounds, iter(self._samples)
        for number, size in enumerate(self._blocks):
            clean = [sample.us for sample in islice(samples, size) if not sample.disturbed]
            if clean:
                found[number] = log_quantile(clean, self._timer.quantile)
        return found

    @property
    def rounds(self) -> int:
        """Rounds until its last one."""
        return len(self._blocks)

    def release(self) -> None:
        """No further samples: let go of the call, and of the graph and memory it may hold."""
        self._call = None

    def result(self, pace: Sequence[float] = (), **race: Scalar) -> TimedSamples:
        """What there is, with the facts of the ``race`` that all its candidates share."""
        if pace:
            race[PACE] = ",".join(f"{factor:.4f}" for factor in pace[: self.rounds])
        wall = max(self._spent_s, 1e-9)
        seen: dict[str, Scalar] = {
            **self._facts,
            **race,
            "blocks": ",".join(map(str, self._blocks)),
            "repeats": self._repeats,
            "limited": self.limited,
            "disturbed": sum(sample.disturbed for sample in self._samples),
            "wall_s": round(self._spent_s, 4),
            **{f"{name}_share": round(s / wall, 4) for name, s in self._load.items()},
        }
        if self._no_time:
            seen["no_time"] = self._no_time
        if self._stood_s > self._settings.limit_s:
            seen["stood_still_s"] = round(self._stood_s, 1)
        for name in self._samples[0].seen if self._samples else ():
            seen[name] = ",".join(
                f"{sample.seen.get(name, math.nan):g}" for sample in self._samples
            )
        facts = tuple(sorted({**self._timer.facts, **seen}.items()))
        times = tuple(sample.us for sample in self._samples)
        return TimedSamples(times, self._first_ms, facts, self.error)

    def _failed(self, error: BaseException) -> None:
        let_through(error)
        self.error = error
        # A block that ended in the middle is no round; its samples stay.
        self._blocks = []
        self.release()

    @contextmanager
    def _watch(self) -> Iterator[None]:
        """Add the body's wall time and what competed during it."""
        start, before = self._timer.now(), self._timer.load()
        try:
            yield
        finally:
            self._spent_s += max(0.0, self._timer.now() - start)
            for name, seconds in self._timer.load().items():
                self._load[name] = self._load.get(name, 0.0) + seconds - before.get(name, seconds)
