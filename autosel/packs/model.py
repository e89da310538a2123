"""What a pack holds, as frozen objects. :mod:`autosel.packs.codec` reads and writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autosel.core import (
    Candidate,
    Certificate,
    Decision,
    Device,
    Measurement,
    Plan,
    Problem,
    Scalar,
    TokenBucket,
)
from autosel.stats import Summary

FORMAT = "autosel-pack"
#: Raised whenever an older reader would misunderstand what is written.
VERSION = 1
#: Name of the pack that belongs to the model in whose folder it lies.
FILE_NAME = "autosel-pack.json"


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """MoE layers of a model that share one problem; no numbers for a preset."""

    problem: Problem
    indices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Model:
    """Which model's layers the decisions are about.

    quantization_sha256  of the canonical JSON of the checkpoint's quantisation settings; None
                         for a preset, which has none
    shapes_sha256        of the canonical JSON of the layers' problems and numbers
    """

    name: str
    kind: str
    model_type: str | None
    quantization_sha256: str | None
    shapes_sha256: str
    layers: tuple[ModelLayers, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """Where results come from: the machine with its software, and how the pack was made.

    ``commit`` is the checkout's, None outside one; ``created`` UTC, ``2026-01-31T12:00:00Z``.
    """

    device: Device
    autosel_version: str
    commit: str | None
    created: str
    command: str


@dataclass(frozen=True, slots=True)
class Undecided:
    """Token counts without a winner, and why."""

    bucket: TokenBucket
    why: str


@dataclass(frozen=True, slots=True)
class Measured:
    """One candidate at one token count. ``row.times_us`` is empty where a pack keeps no samples;
    ``summary`` then still has their number and quantiles."""

    row: Measurement
    summary: Summary | None


@dataclass(frozen=True, slots=True)
class Entry:
    """Everything about one layer, machine, routing and way of timing.

    ``decisions`` and ``undecided`` together cover every token count from 1 on once. ``decided`` is
    when the newest decision was made (UTC).
    """

    problem: Problem
    source: Source
    routing: str
    timing: Mapping[str, Scalar]
    decided: str
    decisions: tuple[Decision, ...]
    undecided: tuple[Undecided, ...] = ()
    measured: tuple[Measured, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    plan: Plan | None = None

    @property
    def device(self) -> Device:
        return self.source.device

    @property
    def outcomes(self) -> tuple[Decision | Undecided, ...]:
        return (*self.decisions, *self.undecided)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Those that were chosen or came next, each once."""
        found: dict[Candidate, None] = {}
        for decision in self.decisions:
            found[decision.winner] = None
            if decision.runner_up is not None:
                found[decision.runner_up] = None
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Signature:
    """An Ed25519 signature of the content; ``key_id`` is the SHA-256 of the public key's DER."""

    key_id: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Pack:
    """A whole pack. ``sha256`` is that of its content; "" until it is written."""

    models: tuple[Model, ...]
    entries: tuple[Entry, ...]
    sha256: str = ""
    signature: Signature | None = None

    @property
    def sources(self) -> tuple[Source, ...]:
        """Each once, in the entries' order."""
        return tuple(dict.fromkeys(entry.source for entry in self.entries))

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Each once: those of the models' layers, then those of the entries."""
        layers = (layer.problem for model in self.models for layer in model.layers)
        return tuple(dict.fromkeys((*layers, *(entry.problem for entry in self.entries))))
