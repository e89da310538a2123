"""Tells what a backend's run raises from a mistake of whoever called the layer."""

from __future__ import annotations

from typing import ClassVar

import torch

from autosel.core import Device, Params, Problem, Routing, Support
from autosel.handlers import let_through
from autosel.interfaces import Backend, Layout, PackedExperts


class RunFailedError(Exception):
    """The backend itself raised, and not a check of what it was handed."""


class Watched(Backend):
    """Marks what a backend's run raises, to tell it from a caller's mistake."""

    name: ClassVar[str] = "watched"
    summary: ClassVar[str] = ""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._run = backend, backend.run
        self.reads_any_ids = backend.reads_any_ids
        self.label = backend.name

    def supports(self, problem: Problem, device: Device) -> Support:
        return self._backend.supports(problem, device)

    def layout(self, problem: Problem, params: Params) -> Layout:
        return self._backend.layout(problem, params)

    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        try:
            return self._run(packed, x, routing, params, out)
        except Exception as error:
            let_through(error)
            raise RunFailedError from error
