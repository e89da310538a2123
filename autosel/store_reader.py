"""Reading what the store holds: measurements, decisions and what belongs to them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TypedDict, Unpack

from autosel import certificate_rows, identity, incidents, plan_rows, records, rows
from autosel.buckets import nearest_cover
from autosel.core import Candidate, Certificate, Decision, Device, Measurement, Problem
from autosel.incidents import Incident
from autosel.plan_rows import StoredPlan
from autosel.records import Timing
from autosel.rows import StoredDecision, Sweep
from autosel.tables import Tables

#: Rows merged from another file have later numbers than older ones.
BY_TIME = "x.created, x.id"


class DecisionFilters(TypedDict, total=False):
    """What :meth:`Store.decisions` lets pass, with :meth:`Store.stored_decisions`'s defaults."""

    timing: Timing | None
    sweep_id: int | None
    allow_a8: bool
    history: bool


class StoreReader:
    """The queries of :class:`autosel.store.Store`."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def measurements(
        self,
        problem: Problem | None = None,
        device: Device | None = None,
        routing: str | None = None,
        *,
        num_tokens: int | None = None,
        candidate: Candidate | None = None,
        timing: Timing | None = None,
        sweep_id: int | None = None,
        history: bool = False,
    ) -> list[Measurement]:
        """Measurements in the order they were stored; a filter left out lets everything pass.

        ``device`` matches with its driver and versions. ``timing`` compares only the settings
        that both sides have: what failed before it was timed belongs to every mode.
        """
        table = "measurements" if history else "latest_measurements"
        where = rows.identity(problem, device, routing)
        where |= {"x.num_tokens": num_tokens, "x.sweep_id": sweep_id}
        if candidate is not None:
            where |= {f"c.{name}": v for name, v in rows.candidate_columns(candidate).items()}
        sql = (
            f"SELECT x.*, {rows.NAMES}, c.backend, c.params, c.layout"
            f" FROM {table} AS x {rows.JOINS} JOIN candidates AS c ON c.id = x.candidate_id"
        )
        found = rows.parsed(table, self._tables.select(sql, where, BY_TIME), rows.measurement)
        return [m for m in found if timing is None or rows.same_mode(timing, dict(m.timing))]

    def done(
        self,
        problem: Problem,
        num_tokens: int,
        routing: str,
        candidate: Candidate,
        device: Device,
        timing: Timing | None = None,
    ) -> Measurement | None:
        """The newest measurement of exactly this, whatever its status; None when there is none.

        A device without a name is unknown, so nothing stored is taken to be about it.
        """
        if not device.name.strip():
            return None
        found = self.measurements(
            problem, device, routing, num_tokens=num_tokens, candidate=candidate, timing=timing
        )
        return found[-1] if found else None

    def decisions(
        self,
        problem: Problem | None = None,
        device: Device | None = None,
        routing: str | None = None,
        **filters: Unpack[DecisionFilters],
    ) -> list[Decision]:
        """Decisions for each layer, device, routing and timing mode, sorted by their buckets.

        Where buckets overlap, a token count belongs to the decision measured nearest to it, then
        to the newest. Of several timing modes the one decided last comes first. One whose winner
        has since failed inside its bucket is withdrawn: storing that failure is how a winner is
        given up. ``history`` gives all as stored. Without ``allow_a8`` it is as if no
        8-bit-activation winner were stored.
        Decisions for several devices look alike, so name the device to act on one.
        """
        found = self.stored_decisions(problem, device, routing, **filters)
        return [stored.decision for stored in found]

    def entries(self) -> list[identity.Entry]:
        """What the store holds: one entry for each layer, device, versions and routing."""
        found = self._tables.select(
            f"SELECT {rows.NAMES}, x.routing, count(x.decided) AS decisions,"
            " max(x.created) AS newest, json_group_array(DISTINCT x.tokens) AS tokens FROM ("
            "  SELECT problem_id, device_id, versions_id, routing, created,"
            "         num_tokens AS tokens, NULL AS decided FROM measurements"
            "  UNION ALL SELECT problem_id, device_id, versions_id, routing, created,"
            "         bucket_measured, 1 FROM decisions"
            f") AS x {rows.JOINS}"
            " GROUP BY x.problem_id, x.device_id, x.versions_id, x.routing",
            {},
            "x.problem_id",
        )
        return rows.parsed("entries", found, rows.entry)

    def nearest(
        self, problem: Problem, device: Device, routing: str | None = None
    ) -> identity.Nearest | None:
        """The stored entry nearest to a wish and each field that differs; None in an empty store.

        ``.exact`` says whether it may be used. Anything else is for explaining only.
        """
        return identity.nearest(problem, device, self.entries(), routing)

    def stale(self, device: Device) -> tuple[identity.Nearest, ...]:
        """Entries of this hardware that another driver or other packages made."""
        return identity.stale(device, self.entries())

    def plans(
        self,
        problem: Problem | None = None,
        device: Device | None = None,
        routing: str | None = None,
        *,
        timing: Timing | None = None,
    ) -> list[StoredPlan]:
        """Plans, oldest first: the last one of a layer, device, routing and timing mode holds."""
        sql = f"SELECT x.*, {rows.NAMES} FROM plans AS x {rows.JOINS}"
        where = rows.identity(problem, device, routing)
        found = rows.parsed("plans", self._tables.select(sql, where, BY_TIME), plan_rows.stored)
        return [s for s in found if timing is None or rows.same_mode(timing, dict(s.plan.timing))]

    def incidents(
        self, problem: Problem | None = None, device: Device | None = None
    ) -> list[Incident]:
        """Failed attempts, oldest first (:mod:`autosel.quarantine`)."""
        sql = (
            f"SELECT x.*, {rows.NAMES}, c.backend, c.params, c.layout FROM incidents AS x"
            f" {rows.JOINS} JOIN candidates AS c ON c.id = x.candidate_id"
        )
        where = rows.identity(problem, device, None)
        return rows.parsed("incidents", self._tables.select(sql, where, BY_TIME), incidents.stored)

    def certificates(
        self,
        problem: Problem | None = None,
        device: Device | None = None,
        candidate: Candidate | None = None,
        *,
        history: bool = False,
    ) -> list[Certificate]:
        """What was proven about candidates, oldest first; for each layer, device and candidate the
        newest. ``history`` gives all. ``device`` matches with its driver and versions."""
        where = rows.identity(problem, device, None)
        if candidate is not None:
            where |= {f"c.{name}": v for name, v in rows.candidate_columns(candidate).items()}
        sql = (
            f"SELECT x.*, {rows.NAMES}, c.backend, c.params, c.layout FROM certificates AS x"
            f" {rows.JOINS} JOIN candidates AS c ON c.id = x.candidate_id"
        )
        found = self._tables.select(sql, where, BY_TIME)
        if not history:
            names = ("problem_id", "device_id", "versions_id", "candidate_id")
            found = list({tuple(row[name] for name in names): row for row in found}.values())
        return rows.parsed("certificates", found, certificate_rows.stored)

    def sweeps(self) -> list[Sweep]:
        """All sweeps, oldest first."""
        found = self._tables.select(
            "SELECT x.*, d.spec AS device_spec, v.spec AS versions_spec FROM sweeps AS x"
            " JOIN devices AS d ON d.id = x.device_id JOIN versions AS v ON v.id = x.versions_id",
            {},
            "x.started, x.id",
        )
        return rows.parsed("sweeps", found, rows.sweep)

    def export_json(
        self,
        problem: Problem | None = None,
        device: Device | None = None,
        routing: str | None = None,
        *,
        history: bool = False,
    ) -> str:
        """Measurements and decisions as strict JSON: no NaN, null where nothing was timed."""
        measured = self.measurements(problem, device, routing, history=history)
        decided = self.stored_decisions(problem, device, routing, history=history)
        return records.to_json(
            {
                "format": "autosel-export",
                "version": 1,
                "measurements": [records.measurement_dict(m) for m in measured],
                "decisions": [
                    {
                        **records.decision_dict(stored.decision),
                        "device": stored.device.to_dict(),
                        "timing": stored.mode,
                    }
                    for stored in decided
                ],
            }
        )

    def decision(
        self,
        problem: Problem,
        device: Device,
        num_tokens: int,
        routing: str,
        timing: Timing | None = None,
        *,
        allow_a8: bool = False,
    ) -> Decision | None:
        """The decision for a token count under exactly this key, or None.

        Like :meth:`done`, nothing is known about a device without a name. A winner that quantises
        activations to 8 bits is passed over unless ``allow_a8``, whoever allowed it when tuning.
        """
        if not device.name.strip():
            return None
        found = self.decisions(problem, device, routing, timing=timing, allow_a8=allow_a8)
        return next((d for d in found if num_tokens in d.bucket), None)

    def stored_decisions(
        self,
        problem: Problem | None = None,
        device: Device | None = None,
        routing: str | None = None,
        *,
        timing: Timing | None = None,
        sweep_id: int | None = None,
        allow_a8: bool = True,
        history: bool = False,
    ) -> list[StoredDecision]:
        """:meth:`decisions`, each with its device and timing mode."""
        where = rows.identity(problem, device, routing) | {"x.sweep_id": sweep_id}
        where["x.accuracy"] = None if allow_a8 else "exact"
        sql = (
            f"SELECT x.*, {rows.NAMES}, w.backend, w.params, w.layout, r.backend AS r_backend,"
            " r.params AS r_params, r.layout AS r_layout, EXISTS (SELECT 1"
            "  FROM latest_measurements AS m WHERE m.problem_id = x.problem_id"
            "  AND m.device_id = x.device_id AND m.versions_id = x.versions_id"
            "  AND m.routing = x.routing AND m.candidate_id = x.winner_id"
            "  AND (m.mode = x.mode OR m.mode = '{}' OR x.mode = '{}')"
            "  AND m.num_tokens BETWEEN x.bucket_low AND coalesce(x.bucket_high, m.num_tokens)"
            "  AND m.status <> 'ok' AND m.created > x.created) AS withdrawn"
            f" FROM decisions AS x {rows.JOINS}"
            " JOIN candidates AS w ON w.id = x.winner_id"
            " LEFT JOIN candidates AS r ON r.id = x.runner_up_id"
        )
        found = [
            stored
            for stored in rows.parsed(
                "decisions", self._tables.select(sql, where, BY_TIME), rows.decision
            )
            if timing is None or rows.same_mode(timing, stored.mode)
        ]
        if history:
            return found
        found = [stored for stored in found if not stored.withdrawn]
        modes: dict[object, dict[str, list[StoredDecision]]] = defaultdict(dict)
        for s in found:
            groups = modes[s.decision.problem, s.device, s.decision.routing]
            mode = records.to_json(s.mode)
            groups[mode] = [*groups.pop(mode, []), s]  # the one decided last comes last
        return [
            replace(group[-1], decision=decision)
            for groups in modes.values()
            for group in reversed(groups.values())
            for decision in nearest_cover(s.decision for s in reversed(group))
        ]
