"""Everything that was measured and decided, in one SQLite file.

Rows are only ever added. Reading gives, for each key, the newest row; ``history=True`` gives all.
The key of a measurement is the layer (logical sizes), the token count, the routing, the
candidate, the device with its driver and package versions, and how it was timed
(:data:`autosel.records.MODE_NAMES`). Nothing that differs in one of them is ever answered for.

Many processes may write at once: each write is one short transaction that waits its turn.
"""

from __future__ import annotations

import uuid
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict, Unpack

from autosel import certificate_rows, identity, incidents, plan_rows, records, rows
from autosel.buckets import newest_cover
from autosel.core import Candidate, Certificate, Decision, Device, Measurement, Plan, Problem
from autosel.errors import StoreError, field_error
from autosel.incidents import Incident
from autosel.plan_rows import StoredPlan
from autosel.records import Timing
from autosel.rows import StoredDecision, StoreWarning, Sweep
from autosel.store_merge import Counts
from autosel.storefile import Opened, contents, open_database
from autosel.tables import Row, Tables

__all__ = ["Store", "StoreWarning", "StoredDecision", "Sweep"]

#: Rows merged from another file have later numbers than older ones.
_BY_TIME = "x.created, x.id"


class DecisionFilters(TypedDict, total=False):
    """What :meth:`Store.decisions` lets pass, with :meth:`Store.stored_decisions`'s defaults."""

    timing: Timing | None
    sweep_id: int | None
    allow_a8: bool
    history: bool


class Store:
    """An open database; a context manager. Get one from :meth:`open`.

    ``path`` is None for a store in memory and ``notice`` says why it is one ("" when asked for);
    it is a folder when ``segments`` (:mod:`autosel.segments`).
    Not to be used in a forked child: open another one there.
    """

    def __init__(self, opened: Opened) -> None:
        self.path = opened.path
        self.notice = opened.notice
        self.segments = opened.segments
        self._tables = opened.tables

    @property
    def tables(self) -> Tables:
        """The database underneath, for maintenance."""
        return self._tables

    @classmethod
    def open(
        cls,
        path: str | Path | None = None,
        *,
        strict: bool = False,
        segments: bool | None = None,
    ) -> Store:
        """Open ``path``, else ``$AUTOSEL_DB``, else the user's cache folder's ``autosel.db``.

        On a file system that machines share, the folder ``PATH.segments`` stands in for the file;
        ``segments`` says so, or not, whatever the file system is.

        A place that cannot be used gives a store in memory and one StoreWarning, or StoreError
        when ``strict``; a damaged file is set aside and a new one begun, with one StoreWarning.
        """
        opened = open_database(path, strict=strict, segments=segments)
        if opened.notice:
            warnings.warn(opened.notice, StoreWarning, stacklevel=2)
        return cls(opened)

    def close(self) -> None:
        self._tables.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # writing ---------------------------------------------------------------------------------

    def add_measurement(self, measurement: Measurement, sweep_id: int | None = None) -> int:
        """Append one measurement; StoreError, and nothing written, when it cannot be stored."""
        return self.add_measurements([measurement], sweep_id)[0]

    def add_measurements(
        self, measurements: Iterable[Measurement], sweep_id: int | None = None
    ) -> list[int]:
        """Append all of them or, when one cannot be stored, none. Returns their row numbers."""
        prepared = [(m, rows.measurement_columns(m)) for m in measurements]
        with self._tables.write():
            return [
                self._tables.insert(
                    "measurements",
                    {
                        "sweep_id": sweep_id,
                        **self._owner(m.problem, m.device),
                        "candidate_id": self._candidate(m.candidate),
                        **columns,
                    },
                )
                for m, columns in prepared
            ]

    def add_decision(
        self,
        decision: Decision,
        device: Device,
        timing: Timing = (),
        sweep_id: int | None = None,
    ) -> int:
        """Append a decision for ``device``; ``timing`` is that of its measurements."""
        columns = rows.decision_columns(decision, timing)
        runner_up = decision.runner_up
        with self._tables.write():
            return self._tables.insert(
                "decisions",
                {
                    "sweep_id": sweep_id,
                    **self._owner(decision.problem, device),
                    "winner_id": self._candidate(decision.winner),
                    "runner_up_id": self._candidate(runner_up) if runner_up else None,
                    **columns,
                },
            )

    def add_plan(self, plan: Plan) -> int:
        """Append a plan: from now on it holds for its layer, device, routing and timing mode."""
        columns = plan_rows.columns(plan)
        with self._tables.write():
            return self._tables.insert(
                "plans", {**self._owner(plan.problem, plan.device), **columns}
            )

    def add_incident(self, incident: Incident) -> int:
        """Append a failed attempt, or one that ends the quarantine of earlier ones."""
        columns = incidents.columns(incident)
        with self._tables.write():
            return self._tables.insert(
                "incidents",
                {
                    **self._owner(incident.problem, incident.device),
                    "candidate_id": self._candidate(incident.candidate),
                    **columns,
                },
            )

    def add_certificate(self, certificate: Certificate) -> int:
        """Append what was proven about a candidate, or what was found against it."""
        columns = certificate_rows.columns(certificate)
        with self._tables.write():
            return self._tables.insert(
                "certificates",
                {
                    **self._owner(certificate.problem, certificate.device),
                    "candidate_id": self._candidate(certificate.candidate),
                    **columns,
                },
            )

    def begin_sweep(
        self,
        device: Device,
        settings: Mapping[str, Any] | None = None,
        *,
        label: str = "",
        ceilings: Mapping[str, Any] | None = None,
    ) -> int:
        """Note that a sweep starts; ``settings`` and measured ``ceilings`` are plain JSON."""
        columns = {
            "label": label,
            "settings": records.to_json(dict(settings or {})),
            "ceilings": None if ceilings is None else records.to_json(dict(ceilings)),
            "started": rows.now(),
            "uid": uuid.uuid4().hex,
        }
        with self._tables.write():
            return self._tables.insert("sweeps", {**self._device(device), **columns})

    def finish_sweep(self, sweep_id: int, *, ceilings: Mapping[str, Any] | None = None) -> None:
        """Note that a sweep ended by itself. StoreError when it is unknown or already ended."""
        text = None if ceilings is None else records.to_json(dict(ceilings))
        with self._tables.write():
            changed = self._tables.execute(
                "UPDATE sweeps SET finished = ?, ceilings = coalesce(?, ceilings)"
                " WHERE id = ? AND finished IS NULL",
                (rows.now(), text, sweep_id),
            )
            if not changed:
                raise StoreError(field_error("sweeps", "id", sweep_id, "a sweep that is running"))

    def merge(self, path: str | Path) -> Counts:
        """Copy in what the database or the folder of segments at ``path`` has and this store lacks.

        Rows that are here already are not doubled, so merging twice changes nothing; sweeps stay
        apart; ``path`` stays as it is. Raises StoreError, and changes nothing, for what is missing,
        damaged, another program's or a newer autosel's.
        """
        with contents(path) as source:
            return self._tables.merge(source)

    # reading ---------------------------------------------------------------------------------

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
        found = rows.parsed(table, self._tables.select(sql, where, _BY_TIME), rows.measurement)
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

        Where buckets overlap the newer decision counts. One whose winner has since failed inside
        its bucket is withdrawn: storing that failure is how a winner is given up. ``history`` gives
        all as stored. Without ``allow_a8`` it is as if no 8-bit-activation winner were stored.
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
        found = rows.parsed("plans", self._tables.select(sql, where, "x.id"), plan_rows.stored)
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
        return rows.parsed(
            "incidents", self._tables.select(sql, where, "x.created, x.id"), incidents.stored
        )

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
        found = self._tables.select(sql, where, "x.created, x.id")
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
            "x.id",
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
                "decisions", self._tables.select(sql, where, _BY_TIME), rows.decision
            )
            if timing is None or rows.same_mode(timing, stored.mode)
        ]
        if history:
            return found
        found = [stored for stored in found if not stored.withdrawn]
        groups: dict[object, list[StoredDecision]] = defaultdict(list)
        for s in found:
            key = (s.decision.problem, s.device, s.decision.routing, records.to_json(s.mode))
            groups[key].append(s)
        return [
            replace(group[-1], decision=decision)
            for group in groups.values()
            for decision in newest_cover(s.decision for s in reversed(group))
        ]

    # inside ----------------------------------------------------------------------------------

    def _owner(self, problem: Problem, device: Device) -> Row:
        spec = {"spec": records.problem_text(problem)}
        found = self._tables.id_of("problems", spec, {"key": problem.key})
        return {"problem_id": found, **self._device(device)}

    def _device(self, device: Device) -> Row:
        hardware, software = records.device_text(device), records.versions_text(device)
        facts = {"kind": device.kind, "name": device.name}
        driver = {"driver": device.driver}
        return {
            "device_id": self._tables.id_of("devices", {"spec": hardware}, facts),
            "versions_id": self._tables.id_of("versions", {"spec": software}, driver),
        }

    def _candidate(self, candidate: Candidate) -> int:
        return self._tables.id_of("candidates", rows.candidate_columns(candidate), {})
