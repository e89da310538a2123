"""What a sweep is asked for, what it tells while it runs and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from autosel.core import Candidate, Decision, Device, Measurement, Problem
from autosel.errors import AutoselError, field_error
from autosel.timing import TimingSettings

#: Powers of four on a CPU, where a call is long; of two on a GPU, up to a prefill chunk.
CPU_TOKEN_COUNTS = (1, 4, 16, 64, 256, 1024)
GPU_TOKEN_COUNTS = tuple(1 << power for power in range(14))


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """What to sweep and how.

    token_counts  tokens a call; empty: the device kind's default. 0 is dropped, since a call
                  without tokens runs nothing.
    routing       kind of made-up routing (:func:`autosel.routing_synthetic.make_routing`); part of
                  every stored key
    backends      names; empty: all
    allow_a8      may a backend that quantises activations to 8 bits win
    budget        parameter settings tried for each backend and token count
    seed          of activations, routing and search
    resume        skip what the store already has for this device, software and way of timing
    """

    token_counts: tuple[int, ...] = ()
    routing: str = "uniform"
    timing: TimingSettings = field(default_factory=TimingSettings)
    backends: tuple[str, ...] = ()
    allow_a8: bool = False
    budget: int = 32
    seed: int = 0
    resume: bool = True

    def __post_init__(self) -> None:
        for count in self.token_counts:
            if count < 0:
                raise AutoselError(
                    field_error("SweepSettings.token_counts", "value", count, "0 or more")
                )
        if self.budget < 1:
            raise AutoselError(
                field_error("SweepSettings.budget", "value", self.budget, "at least 1")
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
        """A step begins: ``load``, ``pack``, ``verify``, ``search`` or ``time``."""

    def timed(self, num_tokens: int, done: int, total: int) -> None:
        """``done`` of ``total`` blocks of this token count are timed."""

    def measured(self, measurement: Measurement, resumed: bool) -> None:
        """A measurement is there; ``resumed`` when it came out of the store."""

    def decided(self, decision: Decision) -> None:
        """A token count's decision is there."""
