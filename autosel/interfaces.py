"""What a weight layout and a backend must offer; both are found by :mod:`autosel.registry`.

A third party registers a backend through the entry-point group ``autosel.backends`` (a
:class:`Backend` subclass or instance) or, inside one process, ``autosel.registry.register``.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeGuard

import torch

from autosel.core import (
    AccuracyClass,
    CanonicalExperts,
    Device,
    Params,
    Problem,
    Reason,
    Routing,
    Scalar,
    Support,
)
from autosel.errors import AutoselError, field_error


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PackedExperts:
    """A layer's weights in one kernel layout: named tensors and the facts needed to read them."""

    layout: str
    problem: Problem
    tensors: Mapping[str, torch.Tensor]
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


class Layout(ABC):
    """One way to lay out a layer's weights in memory.

    Subclasses are frozen dataclasses of their options, so that equal options compare equal and
    backends that read the same layout share one packed copy.
    """

    #: File name of the layout; ``key`` adds the options.
    name: ClassVar[str]
    #: False when packing loses information (dense 16-bit weights), so ``unpack`` is not offered.
    invertible: ClassVar[bool] = True

    @property
    def key(self) -> str:
        """Short text naming the layout and its options."""
        return self.name

    @abstractmethod
    def pack(self, experts: CanonicalExperts) -> PackedExperts:
        """Pack without touching ``experts``; raise UnsupportedError if values do not fit."""

    @abstractmethod
    def unpack(self, packed: PackedExperts) -> CanonicalExperts:
        """Exact inverse of :meth:`pack`, bit for bit."""

    @abstractmethod
    def nbytes(self, problem: Problem) -> int:
        """Bytes of the packed weights, known without packing."""


@dataclass(frozen=True, slots=True)
class Space:
    """A backend's tunable parameters for one problem, token count and device.

    ``choices`` maps a parameter to its values in a stable order, ``default`` is the built-in
    starting point, and ``constraint`` gives the reason why a combination is illegal (or None);
    it is asked before anything is launched. ``blocks``, where given, are parameters that belong
    together, as those of one of several kernels: a search then varies one block at a time around
    the best point, and so compiles one kernel for a point. ``rivals`` are the spaces of other
    designs that the backend has for the call: a search tries a point of each and goes on with the
    design whose point was fastest. Designs have different parameters, or one in their defaults by
    whose value they are told apart; a point is judged by its own design's constraint. ``relative``
    names parameters whose numbers grow with the call: a good one is so many times the default's,
    and :meth:`carried` takes it over in that proportion.
    """

    default: Params = field(default_factory=dict)
    choices: Mapping[str, tuple[Scalar, ...]] = field(default_factory=dict)
    constraint: Callable[[Params], Reason | None] = lambda params: None
    blocks: tuple[tuple[str, ...], ...] = ()
    rivals: tuple[Space, ...] = ()
    relative: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if any(rival.rivals for rival in self.rivals):
            raise AutoselError(field_error("Space", "rivals", "rivals of a rival", "one list"))

    @property
    def designs(self) -> tuple[Space, ...]:
        """This space without its rivals, and each of them."""
        return (replace(self, rivals=()), *self.rivals) if self.rivals else (self,)

    def unknown(self, params: Params) -> list[str]:
        """Parameters that are none of this design's, and those with a value they never take.

        A parameter is compared with its kind: 1 is not True.
        """
        found = []
        for name, value in params.items():
            known = [*self.choices.get(name, ())]
            known += [self.default[name]] if name in self.default else []
            if not any(
                value == v and isinstance(value, bool) == isinstance(v, bool) for v in known
            ):
                found.append(f"{name}={value}" if known else name)
        return found

    def design_of(self, params: Params) -> Space:
        """The design that a point is of: the one to which the fewest of its parameters are
        unknown."""
        if not self.rivals:
            return self
        return min(self.designs, key=lambda design: len(design.unknown(params)))

    def carried(self, params: Params, origin: Space) -> dict[str, Scalar]:
        """A point of ``origin``, the same backend's space for another call, as it would be here.

        Parameters of the design's ``relative`` keep their proportion to the default's, at the
        nearest of the choices; the others stay as they are.
        """
        point = dict(params)
        here = self.design_of(params)
        there = origin.design_of(params)
        for name in here.relative:
            old, own, new = params.get(name), there.default.get(name), here.default.get(name)
            if _is_size(old) and _is_size(own) and _is_size(new):
                wanted = math.log(old * new / own)
                among = filter(_is_size, (new, *here.choices.get(name, ())))
                point[name] = min(among, key=lambda value: abs(math.log(value) - wanted))
        return point

    def __iter__(self) -> Iterator[dict[str, Scalar]]:
        """Every legal point, the default first and those of rivals last."""
        default = dict(self.default)
        if self.constraint(default) is None:
            yield default
        for values in itertools.product(*self.choices.values()):
            point = {**default, **dict(zip(self.choices, values, strict=True))}
            if point != default and self.constraint(point) is None:
                yield point
        for rival in self.rivals:
            yield from rival


def _is_size(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


class Requirements:
    """Collects every reason why something is not supported, each with found and required."""

    def __init__(self) -> None:
        self._reasons: list[Reason] = []

    def need(self, ok: bool, what: str, found: object, required: object) -> bool:
        """Record a reason unless ``ok``; returns ``ok`` so that dependent checks can be skipped.

        The same reason found by two rules is recorded once.
        """
        reason = Reason(what, str(found), str(required))
        if not ok and reason not in self._reasons:
            self._reasons.append(reason)
        return ok

    def one_of(self, what: str, found: object, allowed: tuple[object, ...]) -> bool:
        required = (
            str(allowed[0]) if len(allowed) == 1 else "one of " + ", ".join(map(str, allowed))
        )
        return self.need(found in allowed, what, found, required)

    def multiple(self, what: str, found: int, of: int) -> bool:
        return self.need(found % of == 0, what, found, f"a multiple of {of}")

    @property
    def support(self) -> Support:
        return Support(tuple(self._reasons))


class Backend(ABC):
    """One way to run a quantised MoE layer. One file in ``autosel/backends``, one instance."""

    #: File name of the backend, in lower case.
    name: ClassVar[str]
    #: One sentence for ``autosel backends``.
    summary: ClassVar[str]
    #: Distributions whose versions belong to the key of a stored decision.
    distributions: ClassVar[tuple[str, ...]] = ()
    #: One of autosel's own kernels; those are tried first where time is short.
    ours: ClassVar[bool] = False
    #: :meth:`run` leaves out every id that is no local expert, whatever int32 it is, and never
    #: reads its weight; calls that fit otherwise then go to it as they are.
    reads_any_ids: bool = False
    #: Extra to install when the operator is missing, for the reason.
    extra: ClassVar[str | None] = None

    def available(self, device: Device) -> Support:
        """Whether this machine can run the backend at all, whatever the layer. No device work."""
        return Support.yes()

    @abstractmethod
    def supports(self, problem: Problem, device: Device) -> Support:
        """Every reason why this layer cannot run here, :meth:`available`'s included."""

    @abstractmethod
    def layout(self, problem: Problem, params: Params) -> Layout:
        """The weight layout that these parameters read."""

    def space(self, problem: Problem, num_tokens: int, device: Device) -> Space:
        """Tunable parameters at this token count; by default there is nothing to tune."""
        return Space()

    def accuracy(self, params: Params) -> AccuracyClass:
        return "exact"

    def compile_ahead(  # noqa: B027 - a hook
        self, problem: Problem, params: Params, num_tokens: int, device: Device
    ) -> None:
        """Compile what :meth:`run` will call into the compiler's cache on disk; by default nothing.

        Called in helper processes, several at once, that have neither weights nor the device. What
        it raises is ignored: the candidate's own first call compiles what is missing.
        """

    def compiled_counts(
        self, problem: Problem, params: Params, token_counts: Sequence[int], device: Device
    ) -> Sequence[int]:
        """Those of ``token_counts`` that :meth:`compile_ahead` should be called for.

        A candidate is called with all of them: the one to be timed, which comes first, and those of
        verification. Each that is given back is compiled by itself, so that kernels which two of
        them share should be named once. By default the first alone. No device work.
        """
        return token_counts[:1]

    def unpackaged(self) -> Mapping[str, str]:
        """What it would run here that no installed distribution has (a library or folder that a
        variable or the path names): the content's hash by the name of the distribution that it
        stands for. They belong to the key like :attr:`distributions`, and are asked for where one
        of these is not installed. No device work.
        """
        return {}

    @abstractmethod
    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the layer into ``out`` and return it.

        x        ``[M, H]`` in the problem's act dtype, contiguous, M > 0
        routing  ids int32 ``[M, top_k]``, LOCAL (0 .. num_local_experts - 1) or -1 for a slot
                 served elsewhere (any other number too, with :attr:`reads_any_ids`); weights
                 float32 ``[M, top_k]``; both contiguous
        out      ``[M, H]`` like x; every element must be written

        ``x``, ``routing`` and ``packed`` must not change. Call it through
        :func:`autosel.dispatch.apply`, which establishes all of the above.
        """
