"""Plans as database columns, and back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from autosel import records, rows
from autosel.core import Plan
from autosel.tables import Row


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """A plan and when it was stored (UTC)."""

    plan: Plan
    created: str


def columns(plan: Plan) -> Row:
    """Columns of a plan, without its row numbers."""
    data: dict[str, Any] = plan.to_dict()
    # They stand in rows of their own and are put back below.
    del data["problem"], data["device"]
    return {
        "routing": plan.routing,
        "mode": records.to_json(records.timing_mode(plan.timing)),
        "spec": records.to_json(data),
        "created": rows.now(),
    }


def stored(row: Row) -> StoredPlan:
    """The plan of a row; AutoselError and the like for one that is no plan."""
    device = records.device_from_texts(row["device_spec"], row["versions_spec"])
    data = json.loads(row["spec"])
    data["problem"] = json.loads(row["problem_spec"])
    data["device"] = device.to_dict()
    return StoredPlan(Plan.from_dict(data), row["created"])
