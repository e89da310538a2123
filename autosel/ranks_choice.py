"""One choice of candidates for all ranks that hold a part of a layer.

The leader (the group's first rank) looks its database up and makes the table; the others get it as
bytes. Each rank then says what it cannot run, first by the backends' own rules, then after it has
packed its weights, run each candidate once and compared the result. What one rank cannot run is
withdrawn for all, and the leader offers the next verified candidate, until all agree. Databases of
the other ranks are neither read nor written, so it does not matter what they hold.

What must be equal on all ranks is the candidate of each token range: backend, parameters and
layout. The parts may differ where splits do not divide evenly: the number of local experts, the
intermediate size, and w2's group size, which follows from it. The leader's part is looked up.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar

from autosel import registry
from autosel.core import Candidate, Device, Problem, TokenBucket
from autosel.errors import RankError, field_error
from autosel.failures import failed, is_passing
from autosel.identity import problem_differences
from autosel.layer_choice import Choice, Chooser, Fault, WithdrawnWarning
from autosel.ranks import Ranks
from autosel.records import candidate_dict, candidate_from_dict

#: Fields in which the parts of one layer may differ.
UNEVEN = ("num_local_experts", "intermediate_size", "w2.group_size")


class SharedChooser:
    """Stands in for :class:`~autosel.layer_choice.Chooser` on every rank of a group.

    All ranks make one for the same layer at the same time and call the same methods. ``make`` gives
    the leader's own chooser and is called on the leader alone. Raises RankError, the same line on
    every rank, when the ranks' layers are not parts of one.
    """

    shared: ClassVar[bool] = True

    def __init__(
        self, ranks: Ranks, make: Callable[[], Chooser], problem: Problem, device: Device
    ) -> None:
        self.problem, self.device = problem, device
        self._ranks, self._make = ranks, make
        self._chooser: Chooser | None = None
        self._table: tuple[Choice, ...] = ()
        meet(ranks, problem)

    def table(self) -> tuple[Choice, ...]:
        """The leader's table, once no rank refuses a candidate in it."""
        while True:
            told = self._ranks.lead(self._lead)
            self._table = tuple(map(_choice, told))
            if self._agreed(self._refusals()):
                return self._table

    def settle(self, fault: Fault | None) -> bool:
        """Whether no rank met a fault; else what failed is withdrawn on all of them."""
        return self._agreed([] if fault is None else [_fault_dict(fault)])

    def abort(self, error: Exception) -> None:
        """Tell the others that this rank cannot go on, where they wait to settle."""
        exchange(self._ranks, [], error)

    # inside ----------------------------------------------------------------------------------

    def _lead(self) -> list[dict[str, Any]]:
        if self._chooser is None:
            self._chooser = self._make()
        return [
            {
                "bucket": asdict(choice.bucket),
                "candidate": candidate_dict(choice.candidate),
                "tuned": choice.tuned,
                "why": choice.why,
            }
            for choice in self._chooser.table()
        ]

    def _refusals(self) -> list[dict[str, Any]]:
        """What this rank's backends refuse, before anything is packed."""
        found = []
        for choice in {choice.candidate: choice for choice in self._table}.values():
            name = choice.candidate.backend
            try:
                support = registry.get(name).supports(self.problem, self.device)
                fault = None if support else Fault(choice, "unsupported", str(support))
            except Exception as error:
                outcome = failed(error, f"{name} supports")
                fault = Fault(choice, *outcome, tell=not is_passing(error))
            if fault is not None:
                found.append(_fault_dict(fault))
        return found

    def _agreed(self, own: list[dict[str, Any]]) -> bool:
        """Exchange what failed; True when nothing did anywhere."""
        everywhere = exchange(self._ranks, own)
        gone: dict[Candidate, tuple[int, Mapping[str, Any]]] = {}
        for rank, faults in enumerate(everywhere):  # the leader's own reason counts first
            for fault in faults:
                gone.setdefault(candidate_from_dict(fault["candidate"]), (rank, fault))
        for candidate, (rank, fault) in gone.items():
            self._withdraw(candidate, rank, fault)
        return not gone

    def _withdraw(self, candidate: Candidate, rank: int, fault: Mapping[str, Any]) -> None:
        reason = fault["reason"] if rank == 0 else f"rank {rank}: {fault['reason']}"
        if self._chooser is None:
            if rank == self._ranks.rank:
                warnings.warn(
                    f"{candidate.key} is withdrawn on all ranks for {self.problem.key}: {reason}",
                    WithdrawnWarning,
                    stacklevel=2,
                )
            return
        choice = next(choice for choice in self._table if choice.candidate == candidate)
        # The leader's database is about its own machine: what fails elsewhere is not stored there.
        tell = rank == 0 and fault["tell"]
        self._chooser.withdraw(choice, fault["status"], reason, tell_database=tell)


def meet(ranks: Ranks, problem: Problem) -> None:
    """Make sure that all ranks are here with a part of one layer; RankError on all when not."""
    parts = [Problem.from_dict(part) for part in exchange(ranks, problem.to_dict())]
    for rank, part in enumerate(parts):
        for difference in problem_differences(parts[0], part):
            if difference.field not in UNEVEN:
                found = f"{difference.stored!r} on rank {rank}"
                expected = f"{difference.wanted!r} as on rank 0"
                raise RankError(field_error("ranks", difference.field, found, expected))


def exchange(ranks: Ranks, own: Any, error: Exception | None = None) -> list[Any]:
    """Every rank's answer; RankError on all of them when one has an error instead."""
    line = None if error is None else " ".join(str(error).split()) or type(error).__name__
    answers = ranks.gather({"answer": own, "error": line})
    for rank, answer in enumerate(answers):
        if answer["error"] is not None:
            raise RankError(f"rank {rank} failed: {answer['error']}") from error
    return [answer["answer"] for answer in answers]


def _choice(data: Mapping[str, Any]) -> Choice:
    candidate = candidate_from_dict(data["candidate"])
    return Choice(TokenBucket(**data["bucket"]), candidate, data["tuned"], data["why"])


def _fault_dict(fault: Fault) -> dict[str, Any]:
    return {
        "candidate": candidate_dict(fault.choice.candidate),
        "status": fault.status,
        "reason": fault.reason,
        "tell": fault.tell,
    }
