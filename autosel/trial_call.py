"""A candidate's code, called so that whatever it raises or changes stays its own affair."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from autosel.compare import Verdict, compare_judged
from autosel.core import AccuracyClass, Params, Routing
from autosel.expert_map import localize
from autosel.failures import call_tamed, tamed
from autosel.interfaces import Backend, PackedExperts
from autosel.verify_cases import Case


class Tame:
    """A backend whose exceptions are :func:`~autosel.failures.tamed`; else the backend itself."""

    def __init__(self, backend: Backend, *, interruptible: bool = True) -> None:
        self.wrapped = backend
        self._interruptible = interruptible

    @classmethod
    def of(cls, backend: Backend, *, interruptible: bool = True) -> Backend:
        return cast(Backend, cls(backend, interruptible=interruptible))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        try:
            return self.wrapped.run(packed, x, routing, params, out)
        except BaseException as error:
            raise tamed(error, interruptible=self._interruptible) from None

    def accuracy(self, params: Params) -> AccuracyClass:
        return call_tamed(lambda: self.wrapped.accuracy(params), interruptible=self._interruptible)


class Call:
    """A backend on one case, with an input and an output of its own, as a layer would call it."""

    def __init__(self, backend: Backend, packed: PackedExperts, params: Params, case: Case) -> None:
        # What autosel.dispatch.apply establishes, once: its checks are no part of the kernel.
        self.backend, self.packed, self.params, self.case = backend, packed, params, case
        self.x = case.x.clone()
        self.routing = localize(case.routing, packed.problem, case.expert_map, device=case.x.device)
        self.out = torch.full_like(case.x, torch.nan)

    def __call__(self) -> None:
        self.backend.run(self.packed, self.x, self.routing, self.params, self.out)

    def verdict(self) -> Verdict:
        """Judge what the last call left in the output."""
        if not torch.equal(self.x, self.case.x):
            return Verdict("wrong", f"{self.case.name}: it changed its input x")
        verdict = compare_judged(
            self.out,
            self.case.judged,
            accuracy=self.backend.accuracy(self.params),
            act_dtype=self.packed.problem.act_dtype,
        )
        return (
            verdict if verdict else replace(verdict, reason=f"{self.case.name}: {verdict.reason}")
        )
