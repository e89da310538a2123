"""Which candidates of one layer are proven on the full set, in the store or in this sweep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autosel.core import Candidate, Certificate, Device, Measurement, Problem
from autosel.requirements import Required
from autosel.store import Store

#: What a proof may end with without having found a fault: the full set did not fit, or took long.
UNDECIDED = ("oom", "timeout")


class Proofs:
    """Keeps certificates; a full one is not replaced by a quick one of the same code."""

    def __init__(self, store: Store | None, problem: Problem, device: Device) -> None:
        self._store = store
        known = store.certificates(problem, device, history=True) if store else []
        # A device without a name is unknown, so nothing stored is about it.
        here = known if device.name.strip() else []
        self._full = {(c.candidate, c.code) for c in here if _is_proof(c)}
        self._tried: set[tuple[Candidate, str]] = set()
        self._certificates = [c for c in here if c.level == "full"]

    def required(
        self, names: tuple[str, ...], code: Callable[[Candidate], str], *, final: bool
    ) -> Required:
        """The properties that a winner must have. Who may still be proven passes, until ``final``:
        the proof then decides."""
        proven = Required.of(names, self._certificates)
        if not names or final:
            return proven
        return _Open(proven.names, proven.certificates, lambda c: self.needs(c, code(c)))

    def needs(self, candidate: Candidate, code: str) -> bool:
        """Whether the full set should run for ``candidate``, which is about to be chosen."""
        return (candidate, code) not in self._full | self._tried

    def keep(self, row: Measurement) -> None:
        """Store the certificate of a row, if it has one."""
        certificate = row.certificate
        if certificate is None:
            return
        key = (certificate.candidate, certificate.code)
        if certificate.level == "full":
            self._tried.add(key)
            self._certificates.append(certificate)
        if _is_proof(certificate):
            self._full.add(key)
        elif certificate.level == "quick" and certificate.status == "ok" and key in self._full:
            return
        if self._store:
            self._store.add_certificate(certificate)

    def give_up(self, candidate: Candidate, code: str) -> None:
        """Do not try again in this sweep."""
        self._tried.add((candidate, code))


@dataclass(frozen=True, slots=True)
class _Open(Required):
    """While a sweep runs: ``provable`` says who can still be proven."""

    provable: Callable[[Candidate], bool] = lambda candidate: False

    def lacks(self, candidate: Candidate) -> str:
        return "" if self.provable(candidate) else Required.lacks(self, candidate)


def _is_proof(certificate: Certificate) -> bool:
    return certificate.level == "full" and certificate.status == "ok"
