"""A candidate that may be chosen, as a decision looks at it (:mod:`autosel.decide`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from autosel import samples, stats
from autosel.core import Candidate, Measurement
from autosel.racing import Eliminated
from autosel.racing_bounds import PairedRatio

Ratio = stats.LogRatio | PairedRatio


@dataclass(slots=True, eq=False)
class Entry:
    """A correct, timed candidate; ``out`` says who showed in their race that it is slower."""

    measurement: Measurement
    us: float
    out: Eliminated[Candidate] | None = None
    _estimate: stats.Estimate | None = field(default=None, repr=False)

    @property
    def candidate(self) -> Candidate:
        return self.measurement.candidate

    def over(self, other: Entry) -> Ratio:
        """How much slower this one is: round by round where they raced, else independently."""
        ratio = samples.paired(self.measurement, other.measurement)
        return ratio or self._estimated().over(other._estimated())

    def _estimated(self) -> stats.Estimate:
        if self._estimate is None:  # thousands of resamples; a race seldom asks for them
            self._estimate = samples.estimate(self.measurement)
        return self._estimate


def entry_of(m: Measurement) -> Entry:
    """The measurement with what it ranks by; AutoselError where its times are no times."""
    times_us = samples.ranking(m).times_us
    return Entry(m, stats.summarize(times_us, stats.ranking_quantile(m.device.kind)).estimate_us)
