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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from autosel import certificate_rows, incidents, plan_rows, records, rows
from autosel.core import Candidate, Certificate, Decision, Device, Measurement, Plan, Problem
from autosel.errors import StoreError, field_error
from autosel.incidents import Incident
from autosel.records import Timing
from autosel.rows import StoredDecision, StoreWarning, Sweep
from autosel.store_merge import Counts
from autosel.store_reader import StoreReader
from autosel.storefile import Opened, contents, open_database
from autosel.tables import Row, Tables

__all__ = ["Store", "StoreWarning", "StoredDecision", "Sweep"]


class Store(StoreReader):
    """An open database; a context manager. Get one from :meth:`open`.

    ``path`` is None for a store in memory and ``notice`` says why it is one ("" when asked for);
    it is a folder when ``segments`` (:mod:`autosel.segments`).
    Not to be used in a forked child: open another one there.
    """

    def __init__(self, opened: Opened) -> None:
        self.path = opened.path
        self.notice = opened.notice
        self.segments = opened.segments
        super().__init__(opened.tables)

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
                # The start may be later than this clock, as for every row (Tables.insert).
                "UPDATE sweeps SET finished = max(?, started), ceilings = coalesce(?, ceilings)"
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


@contextmanager
def snapshot(db: str | Path) -> Iterator[Store]:
    """What a database or a folder of segments holds now, in memory; it stays as it is.

    Raises as :func:`autosel.storefile.contents` does.
    """
    with contents(db) as connection:
        yield Store(Opened(Tables(connection, None), None))


#: A store, the path of one, or None for the user's.
Database = str | Path | Store | None


@contextmanager
def opened_database(db: Database) -> Iterator[Store]:
    """The caller's own store left open, or one opened here and closed again."""
    if isinstance(db, Store):
        yield db
        return
    with Store.open(db) as store:
        yield store
