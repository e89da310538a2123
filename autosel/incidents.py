"""Failed attempts as database columns, and back: what :mod:`autosel.quarantine` decides from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import get_args

from autosel import records, rows
from autosel.core import Candidate, Device, Problem, Status
from autosel.errors import StoreError, field_error
from autosel.tables import Row

#: Steps that know no token count of the sweep.
_BEFORE_CALLS = ("pack", "verify", "prove")
#: Ends that more tokens make more likely.
_GROWING = ("timeout", "oom")


@dataclass(frozen=True, slots=True)
class Incident:
    """One attempt that failed, or one that went well after others had failed (status ``ok``).

    code        hash of the backend's and layout's own sources, which their versions may not tell
    step        that it failed in
    free_bytes  memory that was free then, where it is known
    created     when (UTC)
    """

    problem: Problem
    device: Device
    candidate: Candidate
    code: str
    num_tokens: int
    status: Status
    step: str
    reason: str
    free_bytes: int | None = None
    created: str = ""

    @property
    def tokens_text(self) -> str:
        """The token counts that it concerns: ``all``, ``16+`` or ``16``."""
        if self._everywhere:
            return "all"
        return f"{self.num_tokens}+" if self.status in _GROWING else str(self.num_tokens)

    @property
    def _everywhere(self) -> bool:
        return self.status == "crashed" or self.step in _BEFORE_CALLS

    def concerns(self, num_tokens: int) -> bool:
        """Whether it says something about calls of ``num_tokens`` tokens.

        Packing and verifying know no token count, and a kernel that took its process down is not
        tried at another one. What took too long or too much does so with more tokens as well.
        """
        if self._everywhere:
            return True
        if self.status in _GROWING:
            return num_tokens >= self.num_tokens
        return num_tokens == self.num_tokens


def columns(incident: Incident) -> Row:
    """Columns of an incident, without its row numbers. StoreError when it cannot be stored."""
    if incident.status not in get_args(Status):
        where = f"incident of {incident.candidate.key}"
        raise StoreError(field_error(where, "status", incident.status, get_args(Status)))
    return {
        "code": incident.code,
        "num_tokens": incident.num_tokens,
        "status": incident.status,
        "step": incident.step,
        "reason": incident.reason,
        "free_bytes": incident.free_bytes,
        "created": rows.now(),
    }


def stored(row: Row) -> Incident:
    """The incident of a row."""
    return Incident(
        problem=records.problem_from_text(row["problem_spec"]),
        device=records.device_from_texts(row["device_spec"], row["versions_spec"]),
        candidate=Candidate.of(row["backend"], json.loads(row["params"]), row["layout"]),
        code=row["code"],
        num_tokens=row["num_tokens"],
        status=row["status"],
        step=row["step"],
        reason=row["reason"],
        free_bytes=row["free_bytes"],
        created=row["created"],
    )
