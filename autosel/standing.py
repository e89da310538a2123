"""What was measured before and is not part of this sweep: it competes all the same.

A sweep of a few backends, or of fewer settings, says nothing against the others. Where it decided
among its own candidates alone, its decision, being the newest, would replace one that knew more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from autosel import registry
from autosel.core import Candidate, Device, Measurement
from autosel.failures import CAUGHT
from autosel.handlers import let_through
from autosel.records import Timing, timing_mode
from autosel.rows import same_mode

#: Settings of timing that a user chooses; the others are the clock's and this program's own.
CHOSEN = ("cache", "graph", "huge_pages")


def timed_alike(row: Measurement, timing: Timing) -> bool:
    """Whether a stored row may be compared with what is timed as ``timing`` says.

    One that failed has fewer settings, or none; an older autosel may have recorded fewer as well.
    """
    if row.status == "ok":
        return timing_mode(row.timing) == timing_mode(timing)
    return same_mode(timing, dict(row.timing))


def timed_otherwise(stored: Iterable[Measurement], timing: Timing) -> tuple[str, ...]:
    """How correct rows were timed that are not comparable for reasons that nobody chose."""
    now, found = timing_mode(timing), []
    for then in (timing_mode(row.timing) for row in stored if row.status == "ok"):
        if then != now and all(then.get(name, now.get(name)) == now.get(name) for name in CHOSEN):
            names = [name for name in now if then.get(name) != now[name]]
            found.append(", ".join(f"{name} {then.get(name, 'unknown')}" for name in names))
    return tuple(found)


def standing(
    stored: Iterable[Measurement], rows: Collection[Measurement], device: Device
) -> tuple[list[Measurement], set[Candidate]]:
    """Stored measurements of one token count that ``rows``, this sweep's, say nothing about.

    Correct ones, as long as their backend would run them here today: a package or a compiler may be
    gone. Failed ones, for their reasons, of backends of which there is no row at all. With
    them the own settings of their backends, as candidates.
    """
    tried = {row.candidate for row in rows}
    backends = {candidate.backend for candidate in tried}
    kept: list[Measurement] = []
    defaults: set[Candidate] = set()
    for row in stored:
        if row.candidate in tried:
            continue
        if row.status == "ok":
            own = _own_setting(row, device)
            if own is not None:
                kept.append(row)
                defaults.add(own)
        elif row.candidate.backend not in backends:
            kept.append(row)
    return kept, defaults


def _own_setting(row: Measurement, device: Device) -> Candidate | None:
    """The built-in setting of the row's backend; None where it would not run the row's here."""
    name, params = row.candidate.backend, row.candidate.params_dict
    try:
        backend = registry.get(name)
        if not backend.supports(row.problem, device):
            return None
        space = backend.space(row.problem, row.num_tokens, device)
        if space.design_of(params).constraint(params) is not None:
            return None
        if backend.layout(row.problem, params).key != row.candidate.layout:
            return None
        return Candidate.of(name, space.default, backend.layout(row.problem, space.default).key)
    except CAUGHT as error:  # a plugin may raise anything; what cannot say that does not run
        let_through(error)
        return None
