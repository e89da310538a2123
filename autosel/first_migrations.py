"""The steps that build the database's first three schemas; :mod:`autosel.migrations` goes on.

A step that was ever released is never edited, and neither is this file.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from sqlite_utils import Database, Migrations

#: Name of this set in the ``_sqlite_migrations`` table.
NAME = "autosel"
#: "asel": marks the file as autosel's in its header.
APPLICATION_ID = 0x6173656C

MIGRATIONS = Migrations(NAME)


@MIGRATIONS(name="0001_tables")
def _tables(db: Database) -> None:
    db.executescript(f"""
        PRAGMA application_id = {APPLICATION_ID};

        -- Hardware: one row for each combination of the facts in spec.
        CREATE TABLE devices (
            id INTEGER PRIMARY KEY,
            kind TEXT NOT NULL,
            name TEXT NOT NULL,
            spec TEXT NOT NULL UNIQUE CHECK (json_valid(spec)),
            first_seen TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%SZ', 'now'))
        ) STRICT;

        -- Software: driver and package versions.
        CREATE TABLE versions (
            id INTEGER PRIMARY KEY,
            driver TEXT,
            spec TEXT NOT NULL UNIQUE CHECK (json_valid(spec)),
            first_seen TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%SZ', 'now'))
        ) STRICT;

        -- Layers. The generated columns only make spec easy to filter by.
        CREATE TABLE problems (
            id INTEGER PRIMARY KEY,
            key TEXT NOT NULL,
            spec TEXT NOT NULL UNIQUE CHECK (json_valid(spec)),
            num_experts INTEGER AS (json_extract(spec, '$.num_experts')),
            num_local_experts INTEGER AS (json_extract(spec, '$.num_local_experts')),
            top_k INTEGER AS (json_extract(spec, '$.top_k')),
            hidden_size INTEGER AS (json_extract(spec, '$.hidden_size')),
            intermediate_size INTEGER AS (json_extract(spec, '$.intermediate_size')),
            num_bits INTEGER AS (json_extract(spec, '$.w13.num_bits')),
            group_size INTEGER AS (json_extract(spec, '$.w13.group_size')),
            act_dtype TEXT AS (json_extract(spec, '$.act_dtype'))
        ) STRICT;

        CREATE TABLE candidates (
            id INTEGER PRIMARY KEY,
            backend TEXT NOT NULL,
            params TEXT NOT NULL CHECK (json_valid(params)),
            layout TEXT NOT NULL,
            UNIQUE (backend, params, layout)
        ) STRICT;

        CREATE TABLE sweeps (
            id INTEGER PRIMARY KEY,
            device_id INTEGER NOT NULL REFERENCES devices(id),
            versions_id INTEGER NOT NULL REFERENCES versions(id),
            label TEXT NOT NULL,
            settings TEXT NOT NULL CHECK (json_valid(settings)),
            ceilings TEXT CHECK (ceilings IS NULL OR json_valid(ceilings)),
            started TEXT NOT NULL,
            finished TEXT
        ) STRICT;

        CREATE TABLE measurements (
            id INTEGER PRIMARY KEY,
            sweep_id INTEGER REFERENCES sweeps(id),
            problem_id INTEGER NOT NULL REFERENCES problems(id),
            device_id INTEGER NOT NULL REFERENCES devices(id),
            versions_id INTEGER NOT NULL REFERENCES versions(id),
            candidate_id INTEGER NOT NULL REFERENCES candidates(id),
            num_tokens INTEGER NOT NULL CHECK (num_tokens >= 1),
            routing TEXT NOT NULL,
            mode TEXT NOT NULL CHECK (json_valid(mode)),      -- the settings in timing
            status TEXT NOT NULL,
            accuracy TEXT NOT NULL,
            reason TEXT NOT NULL,
            times_us TEXT NOT NULL CHECK (json_valid(times_us)),  -- raw samples, as measured
            timing TEXT NOT NULL CHECK (json_valid(timing)),
            errors TEXT CHECK (errors IS NULL OR json_valid(errors)),
            pack_ms REAL,
            first_call_ms REAL,
            weight_bytes INTEGER,
            created TEXT NOT NULL,
            CHECK (status <> 'ok' OR json_array_length(times_us) > 0),
            CHECK (status = 'ok' OR reason <> '')
        ) STRICT;

        CREATE INDEX measurements_key ON measurements
            (problem_id, device_id, versions_id, num_tokens, routing, candidate_id, mode);
        CREATE INDEX measurements_sweep ON measurements (sweep_id);

        CREATE TABLE decisions (
            id INTEGER PRIMARY KEY,
            sweep_id INTEGER REFERENCES sweeps(id),
            problem_id INTEGER NOT NULL REFERENCES problems(id),
            device_id INTEGER NOT NULL REFERENCES devices(id),
            versions_id INTEGER NOT NULL REFERENCES versions(id),
            routing TEXT NOT NULL,
            mode TEXT NOT NULL CHECK (json_valid(mode)),
            bucket_low INTEGER NOT NULL CHECK (bucket_low >= 1),
            bucket_high INTEGER CHECK (bucket_high IS NULL OR bucket_high >= bucket_low),
            bucket_measured INTEGER NOT NULL CHECK (bucket_measured >= 1),
            winner_id INTEGER NOT NULL REFERENCES candidates(id),
            winner_us REAL NOT NULL CHECK (winner_us > 0),
            runner_up_id INTEGER REFERENCES candidates(id),
            runner_up_us REAL,
            margin REAL,
            margin_low REAL,
            margin_high REAL,
            tie INTEGER NOT NULL CHECK (tie IN (0, 1)),
            accuracy TEXT NOT NULL,
            why TEXT NOT NULL,
            rejected TEXT NOT NULL CHECK (json_valid(rejected)),
            created TEXT NOT NULL
        ) STRICT;

        CREATE INDEX decisions_key ON decisions
            (problem_id, device_id, versions_id, routing, mode);
        CREATE INDEX decisions_sweep ON decisions (sweep_id);

        PRAGMA user_version = 1;
    """)


@MIGRATIONS(name="0002_views_and_guards")
def _views_and_guards(db: Database) -> None:
    db.executescript("""
        -- What counts today: a row without a newer one of the same key. A candidate that failed
        -- before it was timed has the mode '{}', which stands for every mode.
        CREATE VIEW latest_measurements AS
        SELECT * FROM measurements AS m WHERE NOT EXISTS (
            SELECT 1 FROM measurements AS n
            WHERE n.problem_id = m.problem_id AND n.device_id = m.device_id
              AND n.versions_id = m.versions_id AND n.num_tokens = m.num_tokens
              AND n.routing = m.routing AND n.candidate_id = m.candidate_id
              AND (n.mode = m.mode OR n.mode = '{}' OR m.mode = '{}')
              AND n.id > m.id
        );

        -- For people: names in place of numbers.
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
               m.pack_ms, m.first_call_ms, m.weight_bytes, m.reason, m.mode, v.spec AS versions,
               m.sweep_id, m.created
        FROM latest_measurements AS m
        JOIN devices AS d ON d.id = m.device_id
        JOIN versions AS v ON v.id = m.versions_id
        JOIN problems AS p ON p.id = m.problem_id
        JOIN candidates AS c ON c.id = m.candidate_id;

        CREATE VIEW failures AS
        SELECT device, problem, num_tokens, routing, backend, params, status, reason, created
        FROM results WHERE status <> 'ok';

        CREATE VIEW winners AS
        SELECT x.id, d.name AS device, p.key AS problem, x.routing,
               x.bucket_low, x.bucket_high, x.bucket_measured,
               w.backend AS winner, w.params AS winner_params, x.winner_us,
               r.backend AS runner_up, x.runner_up_us,
               100 * x.margin AS margin_percent, x.tie, x.accuracy, x.why,
               v.spec AS versions, x.sweep_id, x.created
        FROM decisions AS x
        JOIN devices AS d ON d.id = x.device_id
        JOIN versions AS v ON v.id = x.versions_id
        JOIN problems AS p ON p.id = x.problem_id
        JOIN candidates AS w ON w.id = x.winner_id
        LEFT JOIN candidates AS r ON r.id = x.runner_up_id;

        -- What was measured stays as it was measured.
        CREATE TRIGGER measurements_are_append_only BEFORE UPDATE ON measurements
        BEGIN SELECT RAISE(ABORT, 'measurements are append-only'); END;
        CREATE TRIGGER decisions_are_append_only BEFORE UPDATE ON decisions
        BEGIN SELECT RAISE(ABORT, 'decisions are append-only'); END;

        PRAGMA user_version = 2;
    """)


@MIGRATIONS(name="0003_merging_and_device_facts")
def _merging_and_device_facts(db: Database) -> None:
    # New facts of a device. What is stored was measured without asking: unknown, hence null.
    for number, spec in db.execute("SELECT id, spec FROM devices").fetchall():
        data = {**json.loads(spec), "max_clock_mhz": None, "mig_slice": None}
        db.execute("UPDATE devices SET spec = ? WHERE id = ?", (_canonical(data), number))

    # Numbers of rows mean nothing outside one file, so a sweep gets a name of its own. Copies of
    # one old file give their sweeps the same names.
    db.execute("ALTER TABLE sweeps ADD COLUMN uid TEXT")
    facts = (
        "SELECT s.id, d.spec, v.spec, s.label, s.settings, s.started FROM sweeps AS s"
        " JOIN devices AS d ON d.id = s.device_id JOIN versions AS v ON v.id = s.versions_id"
    )
    for number, *texts in db.execute(facts).fetchall():
        uid = hashlib.sha256("\0".join([str(number), *texts]).encode()).hexdigest()[:32]
        db.execute("UPDATE sweeps SET uid = ? WHERE id = ?", (uid, number))
    db.executescript("""
        CREATE UNIQUE INDEX sweeps_uid ON sweeps (uid);

        -- Rows merged from elsewhere come in any order: the newest by its time counts, and of one
        -- instant the one stored last.
        DROP VIEW failures;
        DROP VIEW results;
        DROP VIEW latest_measurements;
        CREATE VIEW latest_measurements AS
        SELECT * FROM measurements AS m WHERE NOT EXISTS (
            SELECT 1 FROM measurements AS n
            WHERE n.problem_id = m.problem_id AND n.device_id = m.device_id
              AND n.versions_id = m.versions_id AND n.num_tokens = m.num_tokens
              AND n.routing = m.routing AND n.candidate_id = m.candidate_id
              AND (n.mode = m.mode OR n.mode = '{}' OR m.mode = '{}')
              AND (n.created, n.id) > (m.created, m.id)
        );

        -- For people: names in place of numbers, units in the names of columns.
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
               m.pack_ms, m.first_call_ms, m.weight_bytes, m.reason, m.mode, v.spec AS versions,
               m.sweep_id, m.created
        FROM latest_measurements AS m
        JOIN devices AS d ON d.id = m.device_id
        JOIN versions AS v ON v.id = m.versions_id
        JOIN problems AS p ON p.id = m.problem_id
        JOIN candidates AS c ON c.id = m.candidate_id;

        CREATE VIEW failures AS
        SELECT device, problem, num_tokens, routing, backend, params, status, reason, created
        FROM results WHERE status <> 'ok';

        CREATE VIEW samples AS
        SELECT m.id AS measurement_id, d.name AS device, p.key AS problem, m.num_tokens,
               c.backend, c.params, s.key AS sample_number, s.value AS time_us, m.created
        FROM measurements AS m
        JOIN json_each(m.times_us) AS s
        JOIN devices AS d ON d.id = m.device_id
        JOIN problems AS p ON p.id = m.problem_id
        JOIN candidates AS c ON c.id = m.candidate_id;

        CREATE VIEW sweep_summary AS
        SELECT s.id, s.label, d.name AS device, s.started, s.finished,
               (julianday(s.finished) - julianday(s.started)) * 86400 AS duration_s,
               (SELECT count(*) FROM measurements AS m WHERE m.sweep_id = s.id) AS measurements,
               (SELECT count(*) FROM measurements AS m WHERE m.sweep_id = s.id
                AND m.status <> 'ok') AS failures,
               (SELECT count(*) FROM decisions AS x WHERE x.sweep_id = s.id) AS decisions
        FROM sweeps AS s JOIN devices AS d ON d.id = s.device_id;

        -- Raw samples and decisions are neither deleted nor replaced. `autosel db prune` takes
        -- these guards away for its own transaction, after it has copied what goes.
        CREATE TRIGGER measurements_are_not_deleted BEFORE DELETE ON measurements
        BEGIN SELECT RAISE(ABORT, 'measurements are append-only'); END;
        CREATE TRIGGER decisions_are_not_deleted BEFORE DELETE ON decisions
        BEGIN SELECT RAISE(ABORT, 'decisions are append-only'); END;
        CREATE TRIGGER measurements_are_not_replaced BEFORE INSERT ON measurements
        WHEN EXISTS (SELECT 1 FROM measurements WHERE id = NEW.id)
        BEGIN SELECT RAISE(ABORT, 'measurements are append-only'); END;
        CREATE TRIGGER decisions_are_not_replaced BEFORE INSERT ON decisions
        WHEN EXISTS (SELECT 1 FROM decisions WHERE id = NEW.id)
        BEGIN SELECT RAISE(ABORT, 'decisions are append-only'); END;

        PRAGMA user_version = 3;
    """)


def _canonical(data: dict[str, Any]) -> str:
    """As :func:`autosel.records.to_json` writes it at this step; a step never changes."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
