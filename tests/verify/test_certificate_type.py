"""The certificate itself: it checks what it is made of and survives a round trip through JSON."""

import json
from dataclasses import replace

import pytest

from autosel.core import (
    PROPERTIES,
    Activation,
    Candidate,
    Certificate,
    CertifiedCase,
    Device,
    ErrorFigures,
    Limits,
    Problem,
    QuantScheme,
    WeightsAudit,
    check_properties,
)
from autosel.errors import AutoselError

SCHEME = QuantScheme(4, 32, True)
GOOD = Certificate(
    problem=Problem(8, 8, 2, 128, 64, SCHEME, SCHEME),
    candidate=Candidate.of("emulation", {"matmul": "linear"}, "dense"),
    device=Device("cpu", "a machine", threads=2, versions=(("torch", "2.13.0"),)),
    status="ok",
    level="full",
    limits=Limits(2.0, 3.0, 8.0, 0.5),
    created="2026-01-31T12:00:00Z",
    autosel_version="0.1.0",
    code="0123456789abcdef0123",
    cases=(CertifiedCase("uniform M=1", 1, "uniform", 0.25, True),),
    errors=ErrorFigures(0.002, 0.003, 0.01, -1e-5),
    score=0.25,
    bias=-0.01,
    properties=tuple((name, None if name == "graph_equals_eager" else True) for name in PROPERTIES),
    audit=WeightsAudit(True, 8, "dense", 2.5, None),
    runs=32,
)


def test_round_trip_through_json():
    text = json.dumps(GOOD.to_dict(), allow_nan=False)
    assert Certificate.from_dict(json.loads(text)) == GOOD
    assert eval(repr(GOOD)) == GOOD, Activation
    assert bool(GOOD)
    assert GOOD.to_dict()["problem_key"] == GOOD.problem.key


def test_what_is_required():
    assert GOOD.missing(["deterministic", "batch_invariant"]) == ""
    assert GOOD.missing(["graph_equals_eager"]) == "graph_equals_eager: not checked"
    changed = tuple((n, v if n != "deterministic" else False) for n, v in GOOD.properties)
    moody = replace(GOOD, properties=changed)
    assert moody.missing(["deterministic"]).startswith("not deterministic: it does not hold that")
    wrong = replace(GOOD, status="wrong", reason="off")
    assert not wrong
    assert "not certified, wrong" in wrong.missing(["deterministic"])
    with pytest.raises(AutoselError, match="require: property: found 'fast', expected one of det"):
        GOOD.missing(["fast"])
    assert check_properties(["deterministic", "deterministic"]) == ("deterministic",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "fine"}, "Certificate.status: value: found 'fine'"),
        ({"status": "wrong"}, "Certificate.reason: text: found nothing"),
        ({"level": "some"}, "Certificate.level"),
        ({"accuracy": "a4"}, "Certificate.accuracy"),
        ({"cases": ()}, "Certificate.cases: number: found 0"),
        ({"cases": (CertifiedCase("x", 1, "uniform", 2.0, False),)}, "Certificate.status"),
        ({"audit": WeightsAudit(False)}, "Certificate.audit: passed"),
        ({"properties": ()}, "Certificate.properties: names"),
        ({"score": float("nan")}, "Certificate.score"),
        ({"bias": float("inf")}, "Certificate.bias"),
        ({"code": "xyz"}, "Certificate.code"),
        ({"created": "yesterday"}, "Certificate.created"),
        ({"errors": ErrorFigures(float("inf"), 0.0, 0.0, 0.0)}, "Certificate.errors.rel_rms"),
    ],
)
def test_it_refuses_what_misleads(change, message):
    with pytest.raises(AutoselError) as caught:
        replace(GOOD, **change)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_passed_case_is_within_its_limit():
    with pytest.raises(AutoselError, match="score of a passed case"):
        CertifiedCase("x", 1, "uniform", 1.5, True)
    with pytest.raises(AutoselError, match="num_tokens"):
        CertifiedCase("x", -1, "uniform", 0.5, True)


def test_damage_from_outside_is_one_line():
    whole = GOOD.to_dict()
    whole["properties"]["batch_invariant"] = False
    with pytest.raises(AutoselError, match=r"Certificate\.sha256: checksum"):
        Certificate.from_dict(whole)
    for name in GOOD.to_dict():
        part = {key: value for key, value in GOOD.to_dict().items() if key != name}
        with pytest.raises(AutoselError, match="Certificate"):
            Certificate.from_dict(part)
    for odd in ({}, {"version": 2}, [], None, {"version": 1, "sha256": ""}):
        with pytest.raises(AutoselError, match="Certificate"):
            Certificate.from_dict(odd)
