"""What was tried, what came of it and what was decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from autosel.core.device import Device
from autosel.core.problem import Problem

if TYPE_CHECKING:
    from autosel.core.certificate import Certificate

Scalar = bool | int | float | str | None
Params = Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run the layer: a backend, its parameters and the weight layout it reads."""

    backend: str
    params: tuple[tuple[str, Scalar], ...] = ()
    layout: str = ""

    @staticmethod
    def of(backend: str, params: Params | None = None, layout: str = "") -> Candidate:
        return Candidate(backend, tuple(sorted((params or {}).items())), layout)

    @property
    def params_dict(self) -> dict[str, Scalar]:
        return dict(self.params)

    @property
    def key(self) -> str:
        inner = ",".join(f"{name}={value}" for name, value in self.params)
        return f"{self.backend}[{inner}]" if inner else self.backend


#: ``exact`` keeps the checkpoint's weights and 16-bit (or wider) activations; ``a8`` quantises
#: activations to 8 bits inside and is never chosen unless the user allows it.
AccuracyClass = Literal["exact", "a8"]

#: ok         correct and timed
#: unsupported  refused before anything ran; reason says why
#: wrong      ran, and differs from the reference by more than its class allows
#: nonfinite  ran, and gave NaN or infinity where the reference is finite
#: failed     raised, or a conversion failed
#: oom        does not fit in memory
#: timeout    ran past its limit
#: crashed    took its process down
Status = Literal["ok", "unsupported", "wrong", "nonfinite", "failed", "oom", "timeout", "crashed"]


@dataclass(frozen=True, slots=True)
class ErrorFigures:
    """Distance from the reference, relative to the reference's own size.

    ``rel_rms`` is ``||out - ref|| / ||ref||`` over everything; ``rel_rms_worst_token`` the
    same for the worst row; ``rel_max`` the largest element error over the reference's RMS;
    ``bias`` the signed mean error over the reference's RMS. All are None when not finite.
    """

    rel_rms: float | None
    rel_rms_worst_token: float | None
    rel_max: float | None
    bias: float | None


@dataclass(frozen=True, slots=True)
class Measurement:
    """What happened to one candidate at one token count. Times are microseconds a call.

    ``verify_ms`` is what judging its results took, in milliseconds of wall time; None where it was
    judged before, or never.
    ``certificate`` is what was proven while this was measured; it is kept apart, since it speaks of
    the candidate at every token count.
    """

    problem: Problem
    num_tokens: int
    routing: str
    candidate: Candidate
    device: Device
    status: Status
    accuracy: AccuracyClass = "exact"
    reason: str = ""
    times_us: tuple[float, ...] = ()
    errors: ErrorFigures | None = None
    pack_ms: float | None = None
    first_call_ms: float | None = None
    verify_ms: float | None = None
    weight_bytes: int | None = None
    timing: tuple[tuple[str, Scalar], ...] = ()
    certificate: Certificate | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class TokenBucket:
    """Token counts ``low <= M <= high`` that share one decision; it was measured at ``measured``.

    ``high`` is None for the open last bucket.
    """

    low: int
    high: int | None
    measured: int

    def __contains__(self, num_tokens: int) -> bool:
        return self.low <= num_tokens and (self.high is None or num_tokens <= self.high)

    @property
    def label(self) -> str:
        if self.high is None:
            return f"{self.low}+"
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class Rejected:
    """A candidate that was not chosen, with the reason in words."""

    candidate: Candidate
    status: Status
    reason: str
    accuracy: AccuracyClass = "exact"
    time_us: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer for one token bucket.

    ``runner_up`` is the fastest candidate of another backend that may be chosen, by the figure
    that ranks; where there is none, the fastest other setting of the same.
    ``margin`` is how much longer it takes, as a ratio minus one: the median over the
    rounds in which both were timed, else ``runner_up_us / winner_us - 1``; ``margin_interval`` is
    its 95 % confidence interval; ``tie`` says that some rival could not be told apart from the
    winner with the samples there are. Among those close to the fastest a stated canonical order
    decided; ``why`` says so.
    """

    problem: Problem
    bucket: TokenBucket
    routing: str
    winner: Candidate
    winner_us: float
    runner_up: Candidate | None
    runner_up_us: float | None
    margin: float | None
    margin_interval: tuple[float, float] | None
    tie: bool
    why: str
    rejected: tuple[Rejected, ...] = ()
    accuracy: AccuracyClass = "exact"
