"""Candidates that failed here and are not tried again until something changes.

The same kernel on the same weights' layout, device, driver and packages fails again, and a crash or
a hang costs minutes. What changes the key of a measurement ends the quarantine, and so does an edit
of the backend's or layout's source. Too little memory counts only while no more is free, and what
was the machine's fault (:func:`autosel.failures.is_machine_fault`) never counts.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import marshal
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autosel import registry
from autosel.core import Candidate, Device, Measurement, Problem
from autosel.device import free_memory_bytes
from autosel.failures import CAUGHT, is_machine_fault
from autosel.handlers import let_through
from autosel.incidents import Incident
from autosel.interfaces import Backend, Layout
from autosel.store import Store

#: Ends of an attempt that are the candidate's own doing.
KINDS = ("wrong", "nonfinite", "failed", "oom", "timeout", "crashed")

#: Memory is freer when this much more of it is free: less may be anybody's.
FREER = 1.1


@dataclass(frozen=True, slots=True)
class Held:
    """A candidate in quarantine: its last incident, the date of the first one, and their number."""

    incident: Incident
    since: str
    count: int

    @property
    def reason(self) -> str:
        """Why it is not tried: one line for a report."""
        last = self.incident
        times = "once" if self.count == 1 else f"{self.count} times"
        when = f"on {last.created[:10]}" if last.created else "in this sweep"
        return (
            f"not tried again (--retry-failed does): failed {times}, last {when} at "
            f"{last.num_tokens} tokens: {last.reason}"
        )


class Quarantine:
    """What failed of one layer on one device, in earlier sweeps and in this one.

    ``retry``: what earlier sweeps found holds nobody back, what this one finds does.
    """

    def __init__(
        self, store: Store | None, problem: Problem, device: Device, *, retry: bool = False
    ) -> None:
        # A device without a name is unknown, so nothing stored is about it.
        self._store = store if device.name.strip() else None
        self._problem, self._device, self._retry = problem, device, retry
        self._past = self._store.incidents(problem, device) if self._store else []
        self._now: list[Incident] = []

    def find(self, candidate: Candidate, code: str, num_tokens: int) -> Held | None:
        """Why ``candidate`` is not to be tried at ``num_tokens``; None when it may be."""
        known = self._now if self._retry else [*self._past, *self._now]
        mine = [i for i in known if i.candidate == candidate and i.code == code]
        held = next((h for h in held_back(mine) if h.incident.concerns(num_tokens)), None)
        if held and held.incident.status == "oom" and self._freer(held.incident):
            return None
        return held

    def note(self, row: Measurement, code: str, step: str) -> None:
        """Remember how an attempt ended, where it is the candidate's doing."""
        if row.status == "ok":
            if not any(self._about(row.candidate, code, row.num_tokens)):
                return
        elif row.status not in KINDS or is_machine_fault(row.reason):
            return
        incident = Incident(
            self._problem,
            self._device,
            row.candidate,
            code,
            row.num_tokens,
            row.status,
            step,
            row.reason,
            free_memory_bytes(self._device) if row.status == "oom" else None,
        )
        self._now.append(incident)
        if self._store:
            self._store.add_incident(incident)

    def _about(self, candidate: Candidate, code: str, num_tokens: int) -> Iterable[bool]:
        mine = [i for i in (*self._past, *self._now) if (i.candidate, i.code) == (candidate, code)]
        return (held.incident.concerns(num_tokens) for held in held_back(mine))

    def _freer(self, incident: Incident) -> bool:
        free = free_memory_bytes(self._device)
        if free is None or incident.free_bytes is None:
            return True
        return free > incident.free_bytes * FREER


def held_back(incidents: Iterable[Incident]) -> list[Held]:
    """The incidents that still count, oldest first, those that say the same as one.

    An attempt that went well ends what it speaks against.
    """
    found: dict[tuple[object, ...], Held] = {}
    for incident in incidents:
        if incident.status == "ok":
            found = {
                key: held
                for key, held in found.items()
                if (held.incident.candidate, held.incident.code)
                != (incident.candidate, incident.code)
                or not held.incident.concerns(incident.num_tokens)
            }
            continue
        key = (
            incident.problem,
            incident.candidate,
            incident.code,
            incident.status,
            incident.step,
            incident.num_tokens,
        )
        before = found.pop(key, None)
        first = Held(incident, incident.created, 1)
        found[key] = replace(first, since=before.since, count=before.count + 1) if before else first
    return list(found.values())


def is_current(incident: Incident) -> bool:
    """Whether the backend and layout here are those that failed; a backend that is gone is not."""
    try:
        backend = registry.get(incident.candidate.backend)
        layout = backend.layout(incident.problem, incident.candidate.params_dict)
        return code_hash(backend, layout) == incident.code
    except CAUGHT as error:
        let_through(error)
        return False


def code_hash(backend: Backend, layout: Layout) -> str:
    """20 hexadecimal digits that change with the source of the backend or of its layout."""
    inner: Any = getattr(backend, "wrapped", backend)
    classes: tuple[Any, Any] = (type(inner), type(layout))
    return _code_hash(*classes)


@functools.lru_cache(maxsize=512)
def _code_hash(*classes: type) -> str:
    state = hashlib.sha256()
    for cls in classes:
        for base in inspect.getmro(cls):
            if base.__module__ in ("builtins", "abc", "typing", "autosel.interfaces"):
                continue
            state.update(f"{base.__module__}.{base.__qualname__}".encode())
            state.update(_source(base))
    return state.hexdigest()[:20]


def _source(cls: type) -> bytes:
    """The file that defines ``cls``; its compiled methods where there is none."""
    try:
        return Path(inspect.getfile(cls)).read_bytes()
    except (OSError, TypeError):
        codes = (getattr(member, "__code__", None) for member in vars(cls).values())
        return b"".join(marshal.dumps(code) for code in codes if code is not None)
