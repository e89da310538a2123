-- A database as schema 1 wrote it. A record: it is never changed.
PRAGMA application_id = 1634952556;
BEGIN TRANSACTION;
CREATE TABLE "_sqlite_migrations" (
   "id" INTEGER PRIMARY KEY,
   "migration_set" TEXT,
   "name" TEXT,
   "applied_at" TEXT
);
INSERT INTO "_sqlite_migrations" VALUES(1,'autosel','0001_tables','2026-11-29 18:13:42.871321+00:00');
CREATE TABLE candidates (
            id INTEGER PRIMARY KEY,
            backend TEXT NOT NULL,
            params TEXT NOT NULL CHECK (json_valid(params)),
            layout TEXT NOT NULL,
            UNIQUE (backend, params, layout)
        ) STRICT;
INSERT INTO "candidates" VALUES(1,'fast','{"block":64,"on":true,"ratio":0.5,"split":null}','tiled');
INSERT INTO "candidates" VALUES(2,'fast','{}','');
INSERT INTO "candidates" VALUES(3,'second','{"x":1}','plain');
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
INSERT INTO "decisions" VALUES(1,1,1,1,1,'uniform','{"cache":"cold","graph":true}',9,32,9,2,10.25,3,12.5,0.2195,0.1,0.3,0,'exact','because','[{"accuracy":"a8","candidate":{"backend":"third","key":"third","layout":"","params":{}},"reason":"needs 9 GiB","status":"oom","time_us":null}]','2026-11-29T18:13:42.872594Z');
CREATE TABLE devices (
            id INTEGER PRIMARY KEY,
            kind TEXT NOT NULL,
            name TEXT NOT NULL,
            spec TEXT NOT NULL UNIQUE CHECK (json_valid(spec)),
            first_seen TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%SZ', 'now'))
        ) STRICT;
INSERT INTO "devices" VALUES(1,'cuda','Test GPU','{"cache_bytes":52428800,"capability":[9,0],"flags":[],"kind":"cuda","memory_bytes":137438953472,"multiprocessors":132,"name":"Test GPU","shared_memory_bytes":232448,"threads":null}','2026-11-29T18:13:42Z');
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
INSERT INTO "measurements" VALUES(1,1,1,1,1,1,16,'uniform','{"cache":"cold","graph":true}','ok','exact','','[10.5,11.25,12.0]','{"cache":"cold","graph":true,"wall_s":1.5}','{"bias":-1e-05,"rel_max":0.01,"rel_rms":0.001,"rel_rms_worst_token":0.002}',3.25,812.0,123,'2026-11-29T18:13:42.872114Z');
INSERT INTO "measurements" VALUES(2,1,1,1,1,1,64,'uniform','{}','oom','exact','was oom','[]','{}',NULL,3.25,812.0,123,'2026-11-29T18:13:42.872150Z');
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
INSERT INTO "problems" VALUES(1,'E8-L8-k2-H256-I128-silu-bf16-w4g128sym-bf16','{"act_dtype":"bfloat16","activation":{"alpha":null,"beta":null,"limit":null,"linear_beta":null,"name":"silu"},"has_bias":false,"hidden_size":256,"intermediate_size":128,"num_experts":8,"num_local_experts":8,"router_weight_on_input":false,"top_k":2,"w13":{"group_size":128,"has_g_idx":false,"num_bits":4,"scale_dtype":"bfloat16","symmetric":true},"w2":{"group_size":128,"has_g_idx":false,"num_bits":4,"scale_dtype":"bfloat16","symmetric":true}}');
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
INSERT INTO "sweeps" VALUES(1,1,1,'made by schema 1','{"seed":0}',NULL,'2026-11-29T18:13:42.871659Z',NULL);
CREATE TABLE versions (
            id INTEGER PRIMARY KEY,
            driver TEXT,
            spec TEXT NOT NULL UNIQUE CHECK (json_valid(spec)),
            first_seen TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%SZ', 'now'))
        ) STRICT;
INSERT INTO "versions" VALUES(1,'580.1','{"driver":"580.1","packages":{"torch":"2.13.0","triton":"3.7.1"}}','2026-11-29T18:13:42Z');
CREATE UNIQUE INDEX "idx__sqlite_migrations_migration_set_name"
    ON "_sqlite_migrations" ("migration_set", "name");
CREATE INDEX measurements_key ON measurements
            (problem_id, device_id, versions_id, num_tokens, routing, candidate_id, mode);
CREATE INDEX measurements_sweep ON measurements (sweep_id);
CREATE INDEX decisions_key ON decisions
            (problem_id, device_id, versions_id, routing, mode);
CREATE INDEX decisions_sweep ON decisions (sweep_id);
PRAGMA user_version = 1;
COMMIT;
