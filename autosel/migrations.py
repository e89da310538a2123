"""Numbered steps that build the database. A step that was ever released is never edited.

Add a step at the end for a change; :data:`MIGRATIONS` applies the ones that a file lacks. Each
raises ``user_version`` to its number, so that SQLite's own shell shows the schema's version. When
a field is added to :class:`~autosel.core.Problem` or :class:`~autosel.core.Device`, a step must add
it to the ``spec`` texts here, or older rows would no longer be found.
"""

from __future__ import annotations

from functools import cache

from sqlite_utils import Database

from autosel.first_migrations import APPLICATION_ID, MIGRATIONS, NAME

__all__ = ["APPLICATION_ID", "MIGRATIONS", "NAME", "is_newer", "known"]


@MIGRATIONS(name="0004_plans")
def _plans(db: Database) -> None:
    db.executescript("""
        -- Which layouts stay resident and what each token bucket runs; the newest one of a layer,
        -- device, versions, routing and way of timing holds. spec is the whole plan.
        CREATE TABLE plans (
            id INTEGER PRIMARY KEY,
            problem_id INTEGER NOT NULL REFERENCES problems(id),
            device_id INTEGER NOT NULL REFERENCES devices(id),
            versions_id INTEGER NOT NULL REFERENCES versions(id),
            routing TEXT NOT NULL,
            mode TEXT NOT NULL CHECK (json_valid(mode)),
            spec TEXT NOT NULL CHECK (json_valid(spec)),
            created TEXT NOT NULL,
            workload TEXT AS (json_extract(spec, '$.workload.name')),
            budget TEXT AS (json_extract(spec, '$.budget')),
            time_us REAL AS (json_extract(spec, '$.time_us'))
        ) STRICT;
        CREATE INDEX plans_by_key ON plans (problem_id, device_id, versions_id, routing);

        CREATE TRIGGER plans_are_append_only BEFORE UPDATE ON plans
        BEGIN SELECT RAISE(ABORT, 'plans are append-only'); END;

        PRAGMA user_version = 4;
    """)


@MIGRATIONS(name="0005_incidents")
def _incidents(db: Database) -> None:
    db.executescript("""
        -- Attempts that failed, and those that went well after that (status 'ok'): what is in
        -- quarantine follows from them.
        CREATE TABLE incidents (
            id INTEGER PRIMARY KEY,
            problem_id INTEGER NOT NULL REFERENCES problems(id),
            device_id INTEGER NOT NULL REFERENCES devices(id),
            versions_id INTEGER NOT NULL REFERENCES versions(id),
            candidate_id INTEGER NOT NULL REFERENCES candidates(id),
            code TEXT NOT NULL,          -- hash of the backend's and layout's sources
            num_tokens INTEGER NOT NULL CHECK (num_tokens >= 1),
            status TEXT NOT NULL,
            step TEXT NOT NULL,
            reason TEXT NOT NULL,
            free_bytes INTEGER,
            created TEXT NOT NULL
        ) STRICT;
        CREATE INDEX incidents_by_key ON incidents (problem_id, device_id, versions_id);

        CREATE TRIGGER incidents_are_append_only BEFORE UPDATE ON incidents
        BEGIN SELECT RAISE(ABORT, 'incidents are append-only'); END;

        PRAGMA user_version = 5;
    """)


@MIGRATIONS(name="0006_certificates")
def _certificates(db: Database) -> None:
    db.executescript("""
        -- What was proven about a candidate on a layer, at every token count. The newest of a
        -- candidate holds; a failed one is there to say why.
        CREATE TABLE certificates (
            id INTEGER PRIMARY KEY,
            problem_id INTEGER NOT NULL REFERENCES problems(id),
            device_id INTEGER NOT NULL REFERENCES devices(id),
            versions_id INTEGER NOT NULL REFERENCES versions(id),
            candidate_id INTEGER NOT NULL REFERENCES candidates(id),
            level TEXT NOT NULL,
            status TEXT NOT NULL,
            code TEXT NOT NULL,          -- hash of the backend's and layout's sources
            spec TEXT NOT NULL CHECK (json_valid(spec)),
            created TEXT NOT NULL
        ) STRICT;
        CREATE INDEX certificates_by_key ON certificates (problem_id, device_id, versions_id);

        CREATE TRIGGER certificates_are_append_only BEFORE UPDATE ON certificates
        BEGIN SELECT RAISE(ABORT, 'certificates are append-only'); END;

        PRAGMA user_version = 6;
    """)


@MIGRATIONS(name="0007_verify_ms")
def _verify_ms(db: Database) -> None:
    # What judging a candidate took. Of what is stored nobody knows it: null.
    db.executescript("""
        ALTER TABLE measurements ADD COLUMN verify_ms REAL;

        DROP VIEW failures;
        DROP VIEW results;
        CREATE VIEW results AS
        SELECT m.id, d.name AS device, p.key AS problem, m.num_tokens, m.routing,
               c.backend, c.params, c.layout, m.status, m.accuracy,
               (SELECT min(value) FROM json_each(m.times_us)) AS min_us,
               (SELECT avg(value) FROM (
                    SELECT value, row_number() OVER (ORDER BY value) AS place,
                           count(*) OVER () AS number FROM json_each(m.times_us)
                ) WHERE place IN ((number + 1) / 2, (number + 2) / 2)) AS median_us,
               json_array_length(m.times_us) AS samples,
               json_extract(m.errors, '$.rel_rms') AS rel_rms,
               m.pack_ms, m.first_call_ms, m.verify_ms, m.weight_bytes, m.reason, m.mode,
               v.spec AS versions, m.sweep_id, m.created
        FROM latest_measurements AS m
        JOIN devices AS d ON d.id = m.device_id
        JOIN versions AS v ON v.id = m.versions_id
        JOIN problems AS p ON p.id = m.problem_id
        JOIN candidates AS c ON c.id = m.candidate_id;

        CREATE VIEW failures AS
        SELECT device, problem, num_tokens, routing, backend, params, status, reason, created
        FROM results WHERE status <> 'ok';

        PRAGMA user_version = 7;
    """)


def is_newer(applied: set[str]) -> bool:
    """Whether a file whose steps are ``applied`` was written by a newer autosel."""
    return bool(applied - known())


@cache
def known() -> frozenset[str]:
    """Names of the steps that this version has."""
    # An empty database has applied none, so every step is pending.
    return frozenset(step.name for step in MIGRATIONS.pending(Database(memory=True)))
