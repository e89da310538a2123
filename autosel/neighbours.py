"""Good starting points for a search: what was fastest in the nearest cases that are stored.

The nearest case of a layer and token count is the one whose sizes differ least in proportion: the
sum of absolute logarithms (base 2) of the ratios of token counts, hidden and intermediate sizes,
experts and top_k, plus :data:`OTHER` doublings for each thing that is not a size and differs
(scheme, activation type, hardware, routing). Points of a layout that this layer's backend would not
read here are left out, and parameters that grow with the call keep their proportion to it
(:meth:`Space.carried`). A starting point is only tried first; it never stands for a measurement.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass

from autosel import records
from autosel.core import Device, Problem, Scalar
from autosel.errors import AutoselError
from autosel.interfaces import Backend, Space
from autosel.rows import JOINS, NAMES
from autosel.store import Store
from autosel.tables import Row
from autosel.tiers import open_tiers

#: Doublings of a size that count as much as another scheme, activation type, device or routing.
OTHER = 2.0
#: Cases whose best points are taken, and points of each.
CASES, POINTS = 3, 2
#: Rows looked at, the newest first, so that a store of years costs no more than one of weeks.
ROWS = 5000

Point = dict[str, Scalar]


@dataclass(frozen=True, slots=True)
class Case:
    """One layer, device, routing and token count with its correct points, the fastest first."""

    problem: Problem
    device: Device
    routing: str
    num_tokens: int
    points: tuple[tuple[float, Point, str], ...]


def starting_points(
    store: Store,
    backend: Backend,
    problem: Problem,
    device: Device,
    num_tokens: int,
    routing: str = "uniform",
) -> list[Point]:
    """At most ``CASES * POINTS`` parameter sets of ``backend`` for a search, the nearest first."""
    found = cases(store, backend.name)
    found.sort(key=lambda case: distance(case, problem, device, num_tokens, routing))
    points: dict[str, Point] = {}
    used = 0
    here = backend.space(problem, num_tokens, device)
    for case in found:
        fit = [point for _, point, layout in case.points if _reads(backend, problem, point, layout)]
        where = (case.problem, case.num_tokens, case.device)
        for point in fit[:POINTS]:
            moved = _carried(backend, here, point, *where)
            points.setdefault(records.to_json(moved), moved)
        used += bool(fit)
        if used == CASES:
            break
    return list(points.values())


def known_good(
    store: Store,
    backend: Backend,
    problem: Problem,
    device: Device,
    num_tokens: int,
    routing: str = "uniform",
) -> list[Point]:
    """What won for this layer elsewhere (packs and site results), then the nearest stored cases;
    each point once, since a search takes only the first few."""
    with open_tiers(store) as tiers:
        answers = tiers.answers(problem, device, routing=routing)
    here = backend.space(problem, num_tokens, device)
    won = [
        _carried(backend, here, params, problem, measured, device)
        for params, measured in answers.seeds(backend.name, num_tokens)
    ]
    near = starting_points(store, backend, problem, device, num_tokens, routing)
    return list({records.to_json(point): point for point in (*won, *near)}.values())


def _carried(
    backend: Backend, here: Space, point: Point, problem: Problem, num_tokens: int, device: Device
) -> Point:
    """A point that was good for ``problem`` at ``num_tokens``, as it would be ``here``."""
    if not any(design.relative for design in here.designs):  # then the other space needs no making
        return point
    return here.carried(point, backend.space(problem, num_tokens, device))


def distance(case: Case, problem: Problem, device: Device, num_tokens: int, routing: str) -> float:
    """How far a stored case is from the one asked for, in doublings."""
    pairs = [
        (case.num_tokens, num_tokens),
        *(
            (getattr(case.problem, name), getattr(problem, name))
            for name in ("hidden_size", "intermediate_size", "num_local_experts", "top_k")
        ),
    ]
    sizes = sum(abs(math.log2(one / other)) for one, other in pairs)
    others = (
        case.problem.w13 != problem.w13 or case.problem.w2 != problem.w2,
        case.problem.act_dtype != problem.act_dtype,
        records.device_text(case.device) != records.device_text(device),
        case.routing != routing,
    )
    return sizes + OTHER * sum(others)


def cases(store: Store, backend: str) -> list[Case]:
    """What is stored of one backend with settings, by layer, device, routing and token count."""
    rows = store.tables.select(
        f"SELECT x.num_tokens, x.routing, {NAMES}, c.params, c.layout,"
        " (SELECT min(value) FROM json_each(x.times_us)) AS us"
        f" FROM (SELECT * FROM latest_measurements ORDER BY id DESC LIMIT {ROWS}) AS x {JOINS}"
        " JOIN candidates AS c ON c.id = x.candidate_id",
        {"c.backend": backend, "x.status": "ok"},
        "x.id",
    )
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        names = ("problem_spec", "device_spec", "versions_spec", "routing", "num_tokens")
        if row["params"] != "{}" and row["us"] is not None:
            groups[tuple(row[name] for name in names)].append(row)
    return [_case(group) for group in groups.values()]


def _case(group: list[Row]) -> Case:
    first = group[0]
    points = sorted((float(r["us"]), r["params"], r["layout"]) for r in group)
    return Case(
        records.problem_from_text(first["problem_spec"]),
        records.device_from_texts(first["device_spec"], first["versions_spec"]),
        first["routing"],
        first["num_tokens"],
        tuple((us, json.loads(params), layout) for us, params, layout in points),
    )


def _reads(backend: Backend, problem: Problem, point: Point, layout: str) -> bool:
    """Whether the backend would read the same kind of layout with that point here."""
    try:
        return backend.layout(problem, point).key == layout
    except (AutoselError, KeyError, TypeError, ValueError):  # a point of another version
        return False
