"""What trying a candidate starts from and leaves behind, in any process."""

from __future__ import annotations

from dataclasses import dataclass, field

from autosel.compare import Verdict
from autosel.core import Candidate, Device, Measurement, Problem, Status
from autosel.tune_types import SweepSettings
from autosel.verify_cases import Case

#: A judged call for each token count, and verification's own cases.
JudgedInputs = tuple[dict[int, Case], list[Case]]


def blank_row(
    problem: Problem,
    settings: SweepSettings,
    device: Device,
    candidate: Candidate,
    num_tokens: int,
    status: Status,
    why: str,
) -> Measurement:
    """A measurement without figures."""
    return Measurement(
        problem=problem,
        num_tokens=num_tokens,
        routing=settings.routing,
        candidate=candidate,
        device=device,
        status=status,
        reason=why,
    )


@dataclass(slots=True)
class Known:
    """What verification found; it holds for every token count, and for a fresh process as well.

    audited  evidence against the most suspicious weight of each layout, by its key
    """

    verdicts: dict[Candidate, Verdict] = field(default_factory=dict)
    audited: dict[str, float] = field(default_factory=dict)
