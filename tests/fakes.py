"""Backends, layouts and a clock whose behaviour a test scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch

from autosel import registry, trial, tune_inputs
from autosel.core import (
    AccuracyClass,
    CanonicalExperts,
    Certificate,
    Device,
    Level,
    Params,
    Problem,
    QuantScheme,
    QuantWeight,
    Routing,
    Scalar,
    Support,
)
from autosel.interfaces import Backend, Layout, PackedExperts, Space
from autosel.reference import moe
from autosel.timing import Call, Prepared, Sample, TimingSettings

SCHEME = QuantScheme(4, 16, True, scale_dtype="bfloat16")
PROBLEM = Problem(
    num_experts=4,
    num_local_experts=4,
    top_k=2,
    hidden_size=32,
    intermediate_size=16,
    w13=SCHEME,
    w2=SCHEME,
)
CPU = Device(kind="cpu", name="scripted machine", threads=1)


class Clock:
    """A timer whose time passes only when a scripted call says so."""

    quantile = 0.2
    block = 5

    def __init__(self) -> None:
        self.seconds = 0.0
        self.timing = False

    @property
    def facts(self) -> Mapping[str, Scalar]:
        return {"cache": "cold", "clock": "scripted"}

    def now(self) -> float:
        return self.seconds

    def run(self, call: Call) -> None:
        call()

    def prepare(self, call: Call, settings: TimingSettings) -> Prepared:
        return Prepared(call)

    def sample(self, call: Call, repeats: int) -> Sample:
        start = self.seconds
        self.timing = True
        try:
            for _ in range(repeats):
                call()
        finally:
            self.timing = False
        return Sample((self.seconds - start) * 1e6 / repeats)

    def load(self) -> Mapping[str, float]:
        return {}


@dataclass(frozen=True)
class PlainLayout(Layout):
    """The canonical tensors as they are; ``label`` makes layouts differ."""

    name: ClassVar[str] = "plain"
    label: str = "plain"
    log: list[str] = field(default_factory=list, compare=False, hash=False)
    fault: Callable[[], None] = field(default=lambda: None, compare=False, hash=False)
    size: int | None = field(default=None, compare=False, hash=False)

    @property
    def key(self) -> str:
        return self.label

    def pack(self, experts: CanonicalExperts) -> PackedExperts:
        self.log.append(self.label)
        self.fault()
        tensors = {
            f"{which}.{name}": tensor.clone()
            for which, weight in (("w13", experts.w13), ("w2", experts.w2))
            for name, tensor in weight.tensors.items()
        }
        return PackedExperts(self.key, experts.problem, tensors)

    def unpack(self, packed: PackedExperts) -> CanonicalExperts:
        problem = packed.problem

        def weight(which: str, scheme: QuantScheme, inputs: int) -> QuantWeight:
            parts = {
                name.partition(".")[2]: tensor
                for name, tensor in packed.tensors.items()
                if name.startswith(which + ".")
            }
            fields: dict[str, Any] = dict(parts)
            return QuantWeight(scheme=scheme, num_inputs=inputs, **fields)

        return CanonicalExperts(
            problem,
            weight("w13", problem.w13, problem.hidden_size),
            weight("w2", problem.w2, problem.intermediate_size),
        )

    def nbytes(self, problem: Problem) -> int:
        return 1000 if self.size is None else self.size


class FakeBackend(Backend):
    """Right by construction (it calls the reference) unless a hook spoils it."""

    name: ClassVar[str]
    summary: ClassVar[str] = "for tests"

    def __init__(
        self,
        clock: Clock,
        us: float | Callable[[Routing, Params], float] = 100.0,
        *,
        layout: PlainLayout | None = None,
        space: Space | None = None,
        spoil: Callable[[torch.Tensor, torch.Tensor, PackedExperts], None] = lambda *_: None,
        before: Callable[[Params], None] = lambda params: None,
        supports: Callable[[], Support] = Support.yes,
        accuracy: AccuracyClass = "exact",
    ) -> None:
        self.clock = clock
        self.us = us
        self.plain = layout or PlainLayout()
        self.points = space or Space()
        self.spoil = spoil
        self.before = before
        self.support = supports
        self.accuracy_class = accuracy
        self.calls = 0
        self.timed_calls = 0

    def supports(self, problem: Problem, device: Device) -> Support:
        return self.support()

    def layout(self, problem: Problem, params: Params) -> Layout:
        return self.plain

    def space(self, problem: Problem, num_tokens: int, device: Device) -> Space:
        return self.points

    def accuracy(self, params: Params) -> AccuracyClass:
        return self.accuracy_class

    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        self.calls += 1
        self.timed_calls += self.clock.timing
        self.before(params)
        us = self.us if isinstance(self.us, int | float) else self.us(routing, params)
        self.clock.seconds += us * 1e-6
        if not (self.clock.timing and self.timed_calls > 40):  # enough to see a late fault
            out.copy_(moe(x, self.plain.unpack(packed), routing, dtype=torch.float32))
        self.spoil(x, out, packed)
        return out


def judge_one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """One verification case beside the sweep's own calls, in place of all."""
    make_cases = tune_inputs.make_cases

    def one(*args: Any, beside: Sequence[Any] = (), **more: Any) -> list[Any]:
        return make_cases(*args, beside=beside, **more)[: len(beside) + 1]

    monkeypatch.setattr(tune_inputs, "make_cases", one)


def prove_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Winners of sweeps in this process are proven by the quick set, which passes for the full one:
    tests/test_proofs.py runs that."""
    certify = trial.certify

    def quickly(*args: Any, level: Level, **more: Any) -> Certificate:
        return replace(certify(*args, level="quick", **more), level=level)

    monkeypatch.setattr(trial, "certify", quickly)


@contextmanager
def registered(**backends: FakeBackend) -> Iterator[None]:
    """The fakes in the registry under these names, in this order."""
    with ExitStack() as stack:
        for name, backend in backends.items():
            # A backend's name belongs to its class, so each fake gets a class of its own.
            backend.__class__ = type(name.title(), (type(backend),), {"name": name})
            stack.enter_context(registry.register(backend))
        yield
