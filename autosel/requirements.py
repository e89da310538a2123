"""Decisions among candidates that are proven to have certain properties (``--require``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autosel.core import (
    Candidate,
    Certificate,
    Device,
    Measurement,
    Problem,
    Reason,
    check_properties,
)
from autosel.store import Store


@dataclass(frozen=True, slots=True)
class Required:
    """Properties that whoever is chosen must be certified for.

    names         of :data:`autosel.core.PROPERTIES`; without any, everybody passes
    certificates  what is proven, by candidate; who has none is "not checked" and does not pass
    """

    names: tuple[str, ...] = ()
    certificates: Mapping[Candidate, Certificate] = field(default_factory=dict)

    @staticmethod
    def of(names: Iterable[str], certificates: Iterable[Certificate] = ()) -> Required:
        """Raises AutoselError, listing the known properties, for an unknown name.

        Of several certificates of one candidate the last counts, but a quick one never replaces
        a full one that held.
        """
        held: dict[Candidate, Certificate] = {}
        for certificate in certificates:
            known = held.get(certificate.candidate)
            if not (known and known.level == "full" and certificate.level == "quick"):
                held[certificate.candidate] = certificate
        return Required(check_properties(names), held)

    @staticmethod
    def stored(names: Iterable[str], store: Store, problem: Problem, device: Device) -> Required:
        """With what the store has about this layer on this device."""
        wanted = check_properties(names)
        if not wanted or not device.name.strip():
            return Required(wanted)
        return Required.of(wanted, store.certificates(problem, device, history=True))

    def __bool__(self) -> bool:
        return bool(self.names)

    def lacks(self, candidate: Candidate) -> str:
        """Which required properties are not proven of ``candidate``, in words; "" when all are."""
        if not self.names:
            return ""
        certificate = self.certificates.get(candidate)
        if certificate is None:
            return "; ".join(f"{name}: not checked" for name in self.names)
        return certificate.missing(self.names)

    def __call__(self, m: Measurement) -> Reason | None:
        """As a requirement of :func:`autosel.decide.decide`."""
        lacking = self.lacks(m.candidate)
        return Reason("certificate", lacking, ", ".join(self.names)) if lacking else None
