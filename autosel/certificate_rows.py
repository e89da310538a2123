"""Certificates as database columns, and back."""

from __future__ import annotations

import json
from typing import Any

from autosel import records, rows
from autosel.core import Certificate
from autosel.core.certificate import sealed
from autosel.tables import Row

#: Parts that stand in rows of their own, or follow from them, and are put back by :func:`stored`.
_ELSEWHERE = ("problem", "problem_key", "device", "candidate", "sha256")


def columns(certificate: Certificate) -> Row:
    """Columns of a certificate, without its row numbers."""
    data = certificate.to_dict()
    for name in _ELSEWHERE:
        del data[name]
    return {
        "level": certificate.level,
        "status": certificate.status,
        "code": certificate.code,
        "spec": records.to_json(data),
        "created": rows.now(),
    }


def stored(row: Row) -> Certificate:
    """The certificate of a row; AutoselError and the like for one that is none."""
    problem = records.problem_from_text(row["problem_spec"])
    device = records.device_from_texts(row["device_spec"], row["versions_spec"])
    data: dict[str, Any] = json.loads(row["spec"])
    data |= {
        "problem": problem.to_dict(),
        "problem_key": problem.key,
        "device": device.to_dict(),
        "candidate": {
            "backend": row["backend"],
            "params": json.loads(row["params"]),
            "layout": row["layout"],
        },
    }
    return Certificate.from_dict(sealed(data))
