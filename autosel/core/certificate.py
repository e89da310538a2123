"""What was proven about one candidate on one layer, and on which device and software."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any, Literal, get_args

from autosel.core.device import Device
from autosel.core.outcome import AccuracyClass, Candidate, ErrorFigures, Status
from autosel.core.problem import Problem
from autosel.errors import AutoselError, field_error

#: Version of the dictionary form.
VERSION = 1

#: How much was run: the ``quick`` set for every candidate, the ``full`` set for who may win.
Level = Literal["quick", "full"]

#: What :attr:`Certificate.properties` says, by name; the names are those of ``--require``.
PROPERTIES: dict[str, str] = {
    "deterministic": "the same call gives the same bits every time",
    "batch_invariant": "a row's bits do not depend on the other rows of the call",
    "graph_equals_eager": "replays of a captured graph give the bits of the plain call",
    "input_untouched": "activations and routing are unchanged, bit for bit",
    "weights_untouched": "the packed weights are unchanged, bit for bit",
    "output_fully_written": "every element of the output is written",
    "writes_in_bounds": "nothing is written outside the output",
    "handles_missing_ids": "slots with id -1 add nothing",
    "handles_duplicate_ids": "an expert named twice by a token counts twice",
    "handles_expert_maps": "the right experts are used behind an expert map",
    "no_overflow": "numbers on the way beyond 65504 leave a finite result finite and right",
    "handles_extreme_weights": "scales of 0 and far apart, codes and zero points at their ends",
}


def _need(ok: bool, where: str, what: str, found: object, expected: object) -> None:
    if not ok:
        raise AutoselError(field_error(f"Certificate.{where}", what, found, expected))


def _number(where: str, value: object, *, least: float = 0.0) -> None:
    """``value`` is None or a finite number of at least ``least``."""
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    ok = number and math.isfinite(value) and value >= least  # type: ignore[operator,arg-type]
    _need(ok, where, "value", repr(value), f"finite and at least {least:g}, or nothing")


def check_properties(names: Iterable[str]) -> tuple[str, ...]:
    """``names`` of properties, each once; AutoselError, listing the known ones, for another."""
    wanted = tuple(dict.fromkeys(names))
    for name in wanted:
        if name not in PROPERTIES:
            known = ", ".join(PROPERTIES)
            raise AutoselError(field_error("require", "property", repr(name), f"one of {known}"))
    return wanted


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that an error may be, in units of the error scale (:mod:`autosel.error_scale`).

    rms      root mean square over a whole output
    token    root mean square over the worst token
    element  the largest single element
    bias     signed mean error, towards zero or to one side
    """

    rms: float
    token: float
    element: float
    bias: float

    def __post_init__(self) -> None:
        for item in fields(self):
            _number(f"limits.{item.name}", getattr(self, item.name))
            _need(getattr(self, item.name) is not None, "limits", item.name, "nothing", "a number")


@dataclass(frozen=True, slots=True)
class CertifiedCase:
    """One judged input: how it was routed and the share of its limit that the error used.

    ``score`` above 1 is wrong; None when nothing could be compared (NaN, an exception). Not passing
    an ``optional`` case costs a property and not the certificate.
    """

    name: str
    num_tokens: int
    routing: str
    score: float | None
    passed: bool
    optional: bool = False

    def __post_init__(self) -> None:
        where = f"cases[{self.name}]"
        whole = isinstance(self.num_tokens, int) and not isinstance(self.num_tokens, bool)
        _need(whole and self.num_tokens >= 0, where, "num_tokens", repr(self.num_tokens), "0 or up")
        _number(f"{where}.score", self.score)
        _need(isinstance(self.passed, bool), where, "passed", repr(self.passed), "true or false")
        within = self.score is not None and self.score <= 1
        _need(within or not self.passed, where, "score of a passed case", self.score, "at most 1")


@dataclass(frozen=True, slots=True)
class WeightsAudit:
    """Whether every weight of the packed copy is the checkpoint's.

    passed   the verdict; None when it was not done
    experts  local experts that were checked
    layout   key of the packed layout
    score    evidence against the most suspicious weight (:mod:`autosel.audit`)
    exact    the layout unpacks to the very bits that were packed; None where it cannot unpack
    """

    passed: bool | None = None
    experts: int = 0
    layout: str = ""
    score: float | None = None
    exact: bool | None = None

    def __post_init__(self) -> None:
        _number("audit.score", self.score)
        for name in ("passed", "exact"):
            value = getattr(self, name)
            _need(value in (True, False, None), "audit", name, repr(value), "true, false, nothing")


@dataclass(frozen=True, slots=True)
class Certificate:
    """What one candidate did on one layer, and under which conditions that was found.

    It speaks of exactly this layer (the weights' values included only as far as ``audit`` says),
    candidate, device with driver and package versions, autosel version and kernel code.

    status       ``ok``, or what was found as for a :class:`~autosel.core.Measurement`, with reason
    cases        judged inputs in the order they ran; after a fault the rest did not run
    errors       worst figures over the cases, relative to the reference
    score        worst share of a limit
    bias         worst signed mean error towards zero, in units of the error scale: positive is
                 too small, as truncation is
    properties   (name, True, False or None for not checked), in the order of :data:`PROPERTIES`
    runs         calls made
    code         20 hexadecimal digits: content of the backend's and the layout's sources; those of
                 our kernels are among the device's versions
    created      UTC, ``2026-01-31T12:00:00Z``
    """

    problem: Problem
    candidate: Candidate
    device: Device
    status: Status
    level: Level
    limits: Limits
    created: str
    autosel_version: str
    code: str
    accuracy: AccuracyClass = "exact"
    reason: str = ""
    cases: tuple[CertifiedCase, ...] = ()
    errors: ErrorFigures | None = None
    score: float | None = None
    bias: float | None = None
    properties: tuple[tuple[str, bool | None], ...] = ()
    audit: WeightsAudit = WeightsAudit()
    runs: int = 0

    def __post_init__(self) -> None:
        for name, kind in (("status", Status), ("level", Level), ("accuracy", AccuracyClass)):
            value, allowed = getattr(self, name), get_args(kind)
            _need(value in allowed, name, "value", repr(value), "one of " + ", ".join(allowed))
        _need(self.status == "ok" or bool(self.reason), "reason", "text", "nothing", "why not ok")
        _need(bool(self.cases) or self.status != "ok", "cases", "number", 0, "at least 1 when ok")
        failed = [case.name for case in self.cases if not (case.passed or case.optional)]
        _need(not failed or self.status != "ok", "status", "value", "ok", f"not with {failed}")
        _need(self.audit.passed is not False or self.status != "ok", "audit", "passed", False, True)
        names = tuple(name for name, _ in self.properties)
        _need(names == tuple(PROPERTIES), "properties", "names", names, tuple(PROPERTIES))
        for name, value in self.properties:
            known = value is None or isinstance(value, bool)
            _need(known, "properties", name, repr(value), "true, false or nothing")
        _number("score", self.score)
        _number("bias", self.bias, least=-math.inf)
        for item in fields(ErrorFigures) if self.errors else ():
            _number(f"errors.{item.name}", getattr(self.errors, item.name), least=-math.inf)
        digits = isinstance(self.code, str) and re.fullmatch("[0-9a-f]{20}", self.code)
        _need(bool(digits), "code", "digits", repr(self.code), "20 hexadecimal digits")
        try:
            datetime.strptime(self.created, "%Y-%m-%dT%H:%M:%SZ")
        except ValueError:
            _need(False, "created", "time", repr(self.created), "2026-01-31T12:00:00Z")

    def __bool__(self) -> bool:
        return self.status == "ok"

    def holds(self, name: str) -> bool | None:
        """Whether a property holds; None where it was not checked. AutoselError for no such one."""
        (name,) = check_properties([name])
        return dict(self.properties)[name]

    def missing(self, required: Iterable[str]) -> str:
        """Why this does not prove ``required`` properties, in words; "" when it does."""
        reasons = []
        for name in check_properties(required):
            value = self.holds(name) if self else False
            if not self:
                reasons.append(f"{name}: not certified, {self.status}")
            elif value is None:
                reasons.append(f"{name}: not checked")
            elif not value:
                reasons.append(f"not {name}: it does not hold that {PROPERTIES[name]}")
        return "; ".join(reasons)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form with a checksum; :meth:`from_dict` is the inverse."""
        data: dict[str, Any] = {
            "version": VERSION,
            "problem": self.problem.to_dict(),
            "problem_key": self.problem.key,
            "candidate": {
                "backend": self.candidate.backend,
                "params": self.candidate.params_dict,
                "layout": self.candidate.layout,
                "key": self.candidate.key,
            },
            "device": self.device.to_dict(),
            "properties": dict(self.properties),
            "cases": [asdict(case) for case in self.cases],
            "errors": asdict(self.errors) if self.errors else None,
            "limits": asdict(self.limits),
            "audit": asdict(self.audit),
        }
        data |= {name: getattr(self, name) for name in _PLAIN}
        return sealed(data)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Certificate:
        """The certificate that :meth:`to_dict` wrote; AutoselError, naming the field, else.

        Text from outside may be handed here as it came out of a JSON reader. The checksum finds
        damage and careless edits; it is no signature.
        """
        try:
            _need(data["version"] == VERSION, "version", "value", repr(data["version"]), VERSION)
            body = {name: value for name, value in data.items() if name != "sha256"}
            found, expected = data["sha256"], _checksum(body)
            _need(found == expected, "sha256", "checksum", found, f"{expected} of the content")
            candidate = data["candidate"]
            return Certificate(
                problem=Problem.from_dict(data["problem"]),
                candidate=Candidate.of(
                    str(candidate["backend"]), dict(candidate["params"]), str(candidate["layout"])
                ),
                device=Device.from_dict(data["device"]),
                properties=tuple((name, data["properties"][name]) for name in PROPERTIES),
                cases=tuple(CertifiedCase(**case) for case in data["cases"]),
                errors=ErrorFigures(**data["errors"]) if data["errors"] else None,
                limits=Limits(**data["limits"]),
                audit=WeightsAudit(**data["audit"]),
                **{name: data[name] for name in _PLAIN},
            )
        except KeyError as error:
            raise AutoselError(field_error("Certificate", "field", "nothing", error)) from None
        except (TypeError, ValueError, AttributeError) as error:
            text = " ".join(str(error).split())
            expected = "a certificate's fields"
            raise AutoselError(field_error("Certificate", "record", text, expected)) from None


#: Fields that are the same in the dictionary form.
_PLAIN = (
    "status",
    "level",
    "created",
    "autosel_version",
    "code",
    "accuracy",
    "reason",
    "score",
    "bias",
    "runs",
)


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """A certificate's content with its checksum."""
    return {**data, "sha256": _checksum(data)}


def _checksum(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
