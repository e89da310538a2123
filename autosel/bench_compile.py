"""What a bench says about compilation when candidates run in the sweep's own process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autosel.core import Candidate, Params
from autosel.interfaces import Backend


class FirstCallCompiles:
    """Nothing is compiled ahead. :class:`~autosel.worker_bench.WorkerBench` has helpers for it."""

    def prepare(self) -> None:
        """Nothing has to start."""

    def compile_ahead(
        self, backend: Backend, points: Sequence[Params], num_tokens: int, *, verify: bool = True
    ) -> None:
        """Nothing: the first call compiles."""

    def compile_proof(self, candidate: Candidate, num_tokens: int) -> None:
        """Nothing: a proof's calls compile."""

    def compiled(
        self,
        candidates: Sequence[Candidate],
        num_tokens: int,
        give_up: Callable[[], bool] = lambda: False,
    ) -> Candidate | None:
        """The first of ``candidates``: there is nothing to wait for."""
        return next(iter(candidates), None)

    def drop_compilations(self, num_tokens: int) -> None:
        """There are none."""
