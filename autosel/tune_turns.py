"""What there is to try of each backend at one token count, and which backend comes first."""

from __future__ import annotations

from dataclasses import dataclass, field

from autosel.core import Candidate, Device, Measurement, Params, Status
from autosel.interfaces import Backend, Space
from autosel.tune_search import Rows
from autosel.tune_searched import Searched
from autosel.vllm_names import priority


@dataclass(slots=True)
class Turn:
    """What of one backend is to be tried at one token count.

    own       its own setting
    before    how far earlier sweeps searched it
    known     its rows where that was as far as this one would
    refusal   status and reason where it, or its own setting (``refused``), is not tried
    others    its further settings, where they are few; else the space to search
    """

    backend: Backend
    own: Candidate | None = None
    before: Searched = field(default_factory=Searched)
    known: Rows | None = None
    refusal: tuple[Status, str] | None = None
    refused: Params = field(default_factory=dict)
    others: list[Params] = field(default_factory=list)
    searched: Space | None = None

    @property
    def to_try(self) -> Candidate | None:
        """Its own setting, where that is not known yet."""
        return None if self.known else self.own

    @property
    def own_points(self) -> list[Params]:
        """What is tried before any search: its own setting, or those of a race to be run again."""
        if self.known:
            return [row.candidate.params_dict for row in self.known if not is_whole(row)]
        return [] if self.own is None else [self.own.params_dict]


def is_whole(row: Measurement) -> bool:
    """Whether a stored row needs no new race: it failed, or has its times."""
    return row.status != "ok" or bool(row.times_us)


def first_guess(backends: tuple[Backend, ...], device: Device) -> tuple[Backend, ...]:
    """Our own kernels and what vLLM would take before the others; only an order of trying."""
    order = (*(b.name for b in backends if b.ours), *priority(device))
    place = {name: at for at, name in enumerate(order)}
    return tuple(sorted(backends, key=lambda backend: place.get(backend.name, len(place))))
