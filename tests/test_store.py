"""The store: keys, history, places it opens, processes that share it."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from sqlite_utils import Database

from autosel import records, sqlite_file, storefile
from autosel.core import (
    Activation,
    Candidate,
    Decision,
    Device,
    ErrorFigures,
    Measurement,
    Problem,
    QuantScheme,
    Rejected,
    TokenBucket,
)
from autosel.errors import StoreError
from autosel.migrations import MIGRATIONS
from autosel.store import Store, StoreWarning

SCHEME = QuantScheme(4, 128, True)
PROBLEM = Problem(8, 8, 2, 256, 128, SCHEME, SCHEME)
VERSIONS = (("torch", "2.13.0"), ("triton", "3.7.1"))
DEVICE = Device(
    "cuda", "Test GPU", (9, 0), 132, 1 << 37, 50 << 20, 227 << 10, (), None, "580.1", VERSIONS
)
FAST = Candidate.of("fast", {"block": 64, "split": None, "ratio": 0.5, "on": True}, "tiled")
COLD = (("cache", "cold"), ("graph", True), ("wall_s", 1.5))
HERE = Path(__file__).resolve().parent.parent


def measured(**changes) -> Measurement:
    values = {
        "problem": PROBLEM,
        "num_tokens": 16,
        "routing": "uniform",
        "candidate": FAST,
        "device": DEVICE,
        "status": "ok",
        "times_us": (10.5, 1 / 3, 1e-3, 123456.789),
        "errors": ErrorFigures(1e-3, 2e-3, 1e-2, -1e-5),
        "pack_ms": 3.25,
        "first_call_ms": 812.0,
        "verify_ms": 45.5,
        "weight_bytes": 123,
        "timing": COLD,
    }
    return Measurement(**{**values, **changes})


def failed(status="failed", **changes) -> Measurement:
    blank = {"times_us": (), "errors": None, "timing": (), "reason": f"was {status}"}
    return measured(status=status, **{**blank, **changes})


def decided(low=9, high: int | None = 32, name="fast", **changes) -> Decision:
    values = {
        "problem": PROBLEM,
        "bucket": TokenBucket(low, high, low),
        "routing": "uniform",
        "winner": Candidate.of(name),
        "winner_us": 10.25,
        "runner_up": Candidate.of("second", {"x": 1}, "plain"),
        "runner_up_us": 12.5,
        "margin": 0.2195,
        "margin_interval": (0.1, 0.3),
        "tie": False,
        "why": "because",
        "rejected": (Rejected(Candidate.of("third"), "oom", "needs 9 GiB", "a8", None),),
    }
    return Decision(**{**values, **changes})


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "autosel.db") as opened:
        yield opened


@pytest.fixture(autouse=True)
def _no_warnings():
    """A store that opens well says nothing; tests that expect a warning catch it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", StoreWarning)
        yield


def integrity(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        return connection.execute("PRAGMA integrity_check").fetchone()[0]


# round trips -------------------------------------------------------------------------------


def test_a_measurement_comes_back_as_it_was(store):
    m = measured()
    store.add_measurement(m)
    (back,) = store.measurements()
    assert back == m
    assert repr(back.candidate) == repr(m.candidate)  # 0.5, True and None stay themselves
    assert back.times_us == m.times_us


@pytest.mark.parametrize(
    "status", ["unsupported", "wrong", "nonfinite", "failed", "oom", "timeout", "crashed"]
)
def test_failures_come_back_with_their_reason(store, status):
    m = failed(status)
    store.add_measurement(m)
    assert store.measurements() == [m]


def test_a_decision_comes_back_as_it_was(store):
    for d in (
        decided(),
        decided(low=40, high=None, runner_up=None, runner_up_us=None, margin=None,
                margin_interval=None, rejected=(), tie=True, accuracy="a8"),
    ):  # fmt: skip
        store.add_decision(d, DEVICE, COLD)
        assert d in store.decisions(PROBLEM, DEVICE, "uniform")


def test_a_sweep_is_noted_from_beginning_to_end(store):
    settings = {"token_counts": [1, 16], "seed": 0}
    number = store.begin_sweep(DEVICE, settings, label="some model", ceilings={"read_gbps": 4300.5})
    store.add_measurement(measured(), number)
    store.add_measurement(measured(num_tokens=17))
    (sweep,) = store.sweeps()
    assert (sweep.device, sweep.label, sweep.settings) == (DEVICE, "some model", settings)
    assert (sweep.ceilings, sweep.finished) == ({"read_gbps": 4300.5}, None)
    store.finish_sweep(number)
    assert store.sweeps()[0].finished >= store.sweeps()[0].started
    assert store.sweeps()[0].ceilings == {"read_gbps": 4300.5}
    assert [m.num_tokens for m in store.measurements(sweep_id=number)] == [16]
    for unknown in (number, 99):
        with pytest.raises(StoreError, match="a sweep that is running"):
            store.finish_sweep(unknown)


# keys --------------------------------------------------------------------------------------

CHANGES = {
    "bits": {"w13": replace(SCHEME, num_bits=8), "w2": replace(SCHEME, num_bits=8)},
    "bits of w2 only": {"w2": replace(SCHEME, num_bits=8)},
    "group size": {"w13": replace(SCHEME, group_size=64), "w2": replace(SCHEME, group_size=64)},
    "zero points": {"w13": replace(SCHEME, symmetric=False)},
    "act-order": {"w13": replace(SCHEME, has_g_idx=True)},
    "scale type": {"w13": replace(SCHEME, scale_dtype="float16")},
    "activation type": {"act_dtype": "float16"},
    "activation function": {"activation": Activation("gelu")},
    "clamp": {"activation": Activation("silu", limit=7.0)},
    "clamp, little different": {"activation": Activation("silu", limit=7.0000001)},
    "alpha": {"activation": Activation("silu", limit=7.0, alpha=1.702)},
    "slots": {"top_k": 1},
    "router weight on input": {"top_k": 1, "router_weight_on_input": True},
    "local experts": {"num_local_experts": 4},
    "experts": {"num_experts": 16},
    "hidden size": {"hidden_size": 512},
    "intermediate size": {"intermediate_size": 256},
    "bias": {"has_bias": True},
}


def test_layers_that_differ_in_one_property_never_share_an_entry(store):
    problems = [PROBLEM, *(replace(PROBLEM, **change) for change in CHANGES.values())]
    for number, problem in enumerate(problems):
        store.add_measurement(measured(problem=problem, times_us=(number + 1.0,)))
        store.add_decision(decided(problem=problem, winner_us=number + 1.0), DEVICE)
    for number, problem in enumerate(problems):
        (m,) = store.measurements(problem, DEVICE, "uniform")
        (d,) = store.decisions(problem, DEVICE, "uniform")
        assert (m.times_us, d.winner_us) == ((number + 1.0,), number + 1.0)
        assert store.done(problem, 16, "uniform", FAST, DEVICE) == m


def test_the_short_keys_of_those_layers_differ_as_well():
    problems = [PROBLEM, *(replace(PROBLEM, **change) for change in CHANGES.values())]
    assert len({problem.key for problem in problems}) == len(problems)
    whole, real = (replace(PROBLEM, activation=Activation("silu", limit=n)) for n in (7, 7.0))
    assert whole.key == real.key


def test_equal_layers_share_an_entry_however_their_numbers_were_written(store):
    whole, real = (replace(PROBLEM, activation=Activation("silu", limit=n)) for n in (7, 7.0))
    store.add_measurement(measured(problem=whole))
    assert store.done(real, 16, "uniform", FAST, DEVICE) is not None


def test_the_text_that_identifies_a_layer_stays_what_it_is(store):
    """Old files are found by this text: when a field is added, a migration must rewrite it."""
    store.add_measurement(measured())
    with closing(sqlite3.connect(store.path)) as connection:
        ((spec,),) = connection.execute("SELECT spec FROM problems").fetchall()
        ((device, versions),) = connection.execute(
            "SELECT d.spec, v.spec FROM devices d, versions v"
        ).fetchall()
    scheme = (
        '{"group_size":128,"has_g_idx":false,"num_bits":4,"scale_dtype":"bfloat16",'
        '"symmetric":true}'
    )
    assert spec == (
        '{"act_dtype":"bfloat16","activation":{"alpha":null,"beta":null,"limit":null,'
        '"linear_beta":null,"name":"silu"},"has_bias":false,"hidden_size":256,'
        '"intermediate_size":128,"num_experts":8,"num_local_experts":8,'
        f'"router_weight_on_input":false,"top_k":2,"w13":{scheme},"w2":{scheme}}}'
    )
    assert device == (
        '{"cache_bytes":52428800,"capability":[9,0],"flags":[],"kind":"cuda",'
        '"max_clock_mhz":null,"memory_bytes":137438953472,"mig_slice":null,'
        '"multiprocessors":132,"name":"Test GPU",'
        '"shared_memory_bytes":232448,"threads":null}'
    )
    assert versions == '{"driver":"580.1","packages":{"torch":"2.13.0","triton":"3.7.1"}}'


DEVICE_CHANGES = {
    "kind": {"kind": "rocm"},
    "name": {"name": "Test GPU PCIe"},
    "capability": {"capability": None},
    "multiprocessors": {"multiprocessors": 66},
    "memory": {"memory_bytes": 1},
    "cache": {"cache_bytes": None},
    "shared memory": {"shared_memory_bytes": 101376},
    "flags": {"flags": ("amx_tile",)},
    "threads": {"threads": 2},
    "driver": {"driver": "581.0"},
    "unknown driver": {"driver": None},
    "newer package": {"versions": (("torch", "2.13.0"), ("triton", "3.8.0"))},
    "package gone": {"versions": (("torch", "2.13.0"),)},
    "package more": {"versions": (*VERSIONS, ("zz", "1"))},
}


@pytest.mark.parametrize("change", DEVICE_CHANGES.values(), ids=DEVICE_CHANGES)
def test_another_device_or_version_is_never_used_and_is_explained(store, change):
    other = replace(DEVICE, **change)
    store.add_measurement(measured())
    store.add_decision(decided(), DEVICE)
    assert store.done(PROBLEM, 16, "uniform", FAST, other) is None
    assert store.decision(PROBLEM, other, 16, "uniform") is None
    assert store.decisions(PROBLEM, other) == []
    assert store.measurements(PROBLEM, other) == []
    near = store.nearest(PROBLEM, other, "uniform")
    (name,) = change
    assert not near.exact
    assert all(name in d.field for d in near.differences)
    assert len(near.differences) == 1
    assert store.decision(PROBLEM, DEVICE, 16, "uniform") == decided()
    assert store.nearest(PROBLEM, DEVICE, "uniform").exact


def test_stale_entries_are_listed_with_what_changed(store):
    store.add_measurement(measured())
    newer = replace(DEVICE, driver="600", versions=(("torch", "2.14.0"), ("triton", "3.7.1")))
    (entry,) = store.stale(newer)
    assert {d.field: (d.stored, d.wanted) for d in entry.differences} == {
        "versions.driver": ("580.1", "600"),
        "versions.torch": ("2.13.0", "2.14.0"),
    }
    assert "versions.torch: wanted '2.14.0', stored '2.13.0'" in str(entry)
    assert store.stale(DEVICE) == ()
    assert store.stale(replace(newer, name="another machine")) == ()


@pytest.mark.parametrize(
    "name",
    ["two words", "Intel(R) Xeon(R) @ 2.1", "A/B..\\C", "карта 日本", "a'b\"c;--", "x" * 500],
)
def test_odd_device_names_are_found_again(store, name):
    odd = replace(DEVICE, name=name)
    store.add_measurement(measured(device=odd))
    store.add_decision(decided(), odd)
    assert store.done(PROBLEM, 16, "uniform", FAST, odd).device == odd
    assert store.decision(PROBLEM, odd, 16, "uniform") == decided()
    assert store.done(PROBLEM, 16, "uniform", FAST, DEVICE) is None
    assert {p.name for p in store.path.parent.iterdir()} <= {
        "autosel.db", "autosel.db-wal", "autosel.db-shm"
    }  # fmt: skip


@pytest.mark.parametrize("name", ["", "  "])
def test_a_device_without_a_name_is_kept_and_matches_nothing(store, name):
    unknown = replace(DEVICE, name=name)
    store.add_measurement(measured(device=unknown))
    store.add_decision(decided(), unknown)
    assert store.measurements(device=unknown) != []
    assert store.measurements(device=DEVICE) == []
    assert store.done(PROBLEM, 16, "uniform", FAST, unknown) is None
    assert store.decision(PROBLEM, unknown, 16, "uniform") is None
    assert not store.nearest(PROBLEM, unknown).exact
    assert not store.nearest(PROBLEM, DEVICE).exact


def test_decisions_for_different_routings_stand_side_by_side(store):
    for routing in ("uniform", "zipf:1.2", "one_hot"):
        store.add_decision(decided(name=routing, routing=routing), DEVICE)
    for routing in ("uniform", "zipf:1.2", "one_hot"):
        (found,) = store.decisions(PROBLEM, DEVICE, routing)
        assert found.winner.backend == routing
    assert store.nearest(PROBLEM, DEVICE, "recorded").differences[0].field == "routing"


def test_nearest_prefers_the_same_layer_then_the_same_machine(store):
    assert store.nearest(PROBLEM, DEVICE) is None
    elsewhere = replace(DEVICE, name="other", multiprocessors=1, cache_bytes=1, driver="1")
    store.add_measurement(measured(problem=replace(PROBLEM, hidden_size=512)))
    near = store.nearest(PROBLEM, DEVICE)
    assert [str(d) for d in near.differences] == ["hidden_size: wanted 256, stored 512"]
    store.add_measurement(measured(device=elsewhere, num_tokens=4))
    store.add_measurement(measured(device=elsewhere, num_tokens=64))
    near = store.nearest(PROBLEM, DEVICE)
    assert near.entry.device == elsewhere
    assert near.entry.token_counts == (4, 64)
    assert {d.field for d in near.differences} == {
        "device.name", "device.multiprocessors", "device.cache_bytes", "versions.driver"
    }  # fmt: skip


def test_nearest_names_nested_fields(store):
    store.add_measurement(measured(problem=replace(PROBLEM, w2=replace(SCHEME, num_bits=8))))
    (difference,) = store.nearest(PROBLEM, DEVICE).differences
    assert (difference.field, difference.wanted, difference.stored) == ("w2.num_bits", 4, 8)


# history -----------------------------------------------------------------------------------


def test_the_newest_measurement_counts_and_the_older_is_kept(store):
    old, new = measured(times_us=(1.0,)), measured(times_us=(2.0,))
    store.add_measurement(old)
    store.add_measurement(new)
    assert store.measurements() == [new]
    assert store.measurements(history=True) == [old, new]
    assert store.done(PROBLEM, 16, "uniform", FAST, DEVICE) == new


def test_a_later_failure_counts_for_every_timing_mode(store):
    hot = (("cache", "hot"), ("graph", True))
    store.add_measurements([measured(), measured(timing=hot)])
    assert len(store.measurements()) == 2
    crash = failed("crashed")
    store.add_measurement(crash)
    assert store.measurements() == [crash]
    again = measured(timing=hot)
    store.add_measurement(again)
    assert store.measurements() == [again]


def test_timing_modes_stand_side_by_side_and_observations_do_not(store):
    first = measured(timing=(("cache", "cold"), ("wall_s", 1.0)))
    again = measured(timing=(("cache", "cold"), ("wall_s", 2.0)))
    hot = measured(timing=(("cache", "hot"), ("wall_s", 3.0)))
    store.add_measurements([first, again, hot])
    assert store.measurements() == [again, hot]
    assert store.measurements(timing=(("cache", "hot"),)) == [hot]
    assert store.done(PROBLEM, 16, "uniform", FAST, DEVICE, (("cache", "cold"),)) == again
    assert store.done(PROBLEM, 16, "uniform", FAST, DEVICE, (("cache", "x"),)) is None


def test_what_failed_before_timing_is_done_in_every_mode(store):
    store.add_measurement(failed("unsupported"))
    found = store.done(PROBLEM, 16, "uniform", FAST, DEVICE, COLD)
    assert found.status == "unsupported"


def test_done_wants_every_part_of_the_key(store):
    store.add_measurement(measured())
    assert store.done(PROBLEM, 17, "uniform", FAST, DEVICE) is None
    assert store.done(PROBLEM, 16, "zipf", FAST, DEVICE) is None
    assert store.done(PROBLEM, 16, "uniform", Candidate.of("fast"), DEVICE) is None
    assert store.done(PROBLEM, 16, "uniform", replace(FAST, layout="x"), DEVICE) is None


def test_newer_decisions_replace_the_tokens_they_cover(store):
    store.add_decision(decided(1, None, "old"), DEVICE)
    store.add_decision(decided(9, 16, "new"), DEVICE)
    found = {d.bucket.label: d.winner.backend for d in store.decisions(PROBLEM, DEVICE)}
    assert found == {"1-8": "old", "9-16": "new", "17+": "old"}
    assert store.decision(PROBLEM, DEVICE, 12, "uniform").winner.backend == "new"
    assert store.decision(PROBLEM, DEVICE, 17, "uniform").winner.backend == "old"
    assert len(store.decisions(history=True)) == 2


def test_a_winner_that_failed_since_is_given_up_and_the_next_decision_counts(store):
    old = decided(9, 32, "steady")
    for d in (old, decided(9, 32, "fast", winner=FAST)):
        store.add_decision(d, DEVICE, COLD)
    store.add_measurement(failed("crashed", candidate=FAST, num_tokens=33))  # another bucket
    store.add_measurement(failed("crashed", candidate=FAST, routing="zipf"))
    store.add_measurement(failed("crashed", candidate=FAST, device=replace(DEVICE, driver="0")))
    assert store.decision(PROBLEM, DEVICE, 16, "uniform").winner == FAST
    store.add_measurement(failed("crashed", candidate=FAST, num_tokens=20))
    assert store.decision(PROBLEM, DEVICE, 16, "uniform") == old
    assert [s.withdrawn for s in store.stored_decisions(history=True)] == [False, True]
    # A decision made after the failure stands.
    store.add_decision(decided(9, 32, "fast", winner=FAST), DEVICE, COLD)
    assert store.decision(PROBLEM, DEVICE, 16, "uniform").winner == FAST


def test_a_winner_with_8_bit_activations_is_not_used_unless_allowed(store):
    exact, a8 = decided(9, 32, "exact"), decided(9, 32, "quick", accuracy="a8")
    store.add_decision(exact, DEVICE)
    store.add_decision(a8, DEVICE)
    assert store.decision(PROBLEM, DEVICE, 16, "uniform") == exact
    assert store.decision(PROBLEM, DEVICE, 16, "uniform", allow_a8=True) == a8
    assert store.decisions(PROBLEM, DEVICE) == [a8]
    assert store.decisions(PROBLEM, DEVICE, allow_a8=False) == [exact]


def test_stored_rows_cannot_be_changed(store):
    store.add_measurement(measured())
    store.add_decision(decided(), DEVICE)
    with closing(sqlite3.connect(store.path)) as connection:
        for table in ("measurements", "decisions"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                connection.execute(f"UPDATE {table} SET routing = 'x'")


# bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        measured(times_us=(1.0, math.nan)),
        measured(times_us=(math.inf,)),
        measured(times_us=(0.0,)),
        measured(times_us=(-1.0,)),
        measured(times_us=()),
        measured(num_tokens=0),
        measured(status="splendid"),
        failed(reason=""),
        measured(pack_ms=math.nan),
        measured(verify_ms=math.inf),
        measured(errors=ErrorFigures(math.nan, 0.0, 0.0, 0.0)),
        measured(candidate=Candidate.of("a", {"x": math.inf})),
        measured(candidate=Candidate.of("a", {"x": object()})),
        measured(device=replace(DEVICE, name="half a \ud800 pair")),
        measured(weight_bytes=1 << 70),
    ],
)
def test_what_cannot_be_stored_is_refused_whole_in_one_line(store, bad):
    with pytest.raises(StoreError) as caught:
        store.add_measurements([measured(), bad])
    assert "\n" not in str(caught.value)
    assert store.measurements(history=True) == []
    store.add_measurement(measured())
    assert store.measurements() == [measured()]


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["winner_us", "margin", "runner_up_us"])
def test_a_decision_with_a_number_that_is_none_is_refused(store, name, number):
    with pytest.raises(StoreError, match=name):
        store.add_decision(decided(**{name: number}), DEVICE)
    assert store.decisions() == []


def test_an_unknown_sweep_is_refused_and_writing_goes_on(store):
    with pytest.raises(StoreError, match="FOREIGN KEY"):
        store.add_measurement(measured(), sweep_id=99)
    store.add_measurement(measured())
    assert store.measurements() == [measured()]


def test_a_damaged_row_is_left_out_with_a_warning(store):
    store.add_measurements([measured(num_tokens=1), measured(num_tokens=2)])
    with closing(sqlite3.connect(store.path)) as connection:
        connection.execute("DROP TRIGGER measurements_are_append_only")
        connection.execute("UPDATE measurements SET times_us = '[\"x\"]' WHERE num_tokens = 1")
        connection.commit()
    with pytest.warns(StoreWarning, match=r"row .*measurements 1 ignored"):
        found = store.measurements()
    assert [m.num_tokens for m in found] == [2]


def test_a_measurement_edited_into_nonsense_is_not_believed(store):
    store.add_measurement(measured())
    with closing(sqlite3.connect(store.path)) as connection:
        connection.execute("DROP TRIGGER measurements_are_append_only")
        connection.execute("UPDATE measurements SET times_us = '[-5.0]'")
        connection.commit()
    with pytest.warns(StoreWarning, match=r"found -5\.0, expected finite and at least 0\.001"):
        assert store.measurements() == []


@pytest.mark.parametrize("time_us", [5e-324, 1e-300, 0.0, math.inf])
def test_a_time_that_no_call_takes_is_neither_stored_nor_read(store, time_us):
    with pytest.raises(StoreError, match=r"times_us: found .*, expected finite and at least"):
        store.add_measurement(measured(times_us=(10.0, time_us)))
    changes = ({"winner_us": time_us}, {"runner_up_us": time_us})
    for change in changes:
        with pytest.raises(StoreError, match=next(iter(change))):
            store.add_decision(decided(**change), DEVICE, COLD)
    store.add_decision(decided(), DEVICE, COLD)
    with closing(sqlite3.connect(store.path)) as connection:
        connection.execute("DROP TRIGGER decisions_are_append_only")
        connection.execute("UPDATE decisions SET winner_us = ?", (time_us or 1e-9,))
        connection.commit()
    with pytest.warns(StoreWarning, match=r"row decisions 1 ignored: .*winner_us: found"):
        assert store.decisions() == []


# export ------------------------------------------------------------------------------------


def strict(text: str):
    def refuse(constant):
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def test_the_export_is_strict_json_with_every_failure(store):
    nothing = ErrorFigures(None, None, None, None)
    store.add_measurements(
        [
            measured(times_us=(10.0, 20.0, 30.0)),
            failed("failed", candidate=Candidate.of("f")),
            failed("timeout", candidate=Candidate.of("t")),
            failed("nonfinite", candidate=Candidate.of("n"), errors=nothing),
        ]
    )
    store.add_decision(decided(low=1, high=None), DEVICE, COLD)
    data = strict(store.export_json())
    assert [m["status"] for m in data["measurements"]] == ["ok", "failed", "timeout", "nonfinite"]
    good, *bad = data["measurements"]
    assert good["time_us"] == 20.0
    assert good["times_us"] == [10.0, 20.0, 30.0]
    for m in bad:
        assert m["time_us"] is None
        assert m["times_us"] is None
        assert m["reason"] == f"was {m['status']}"
    (d,) = data["decisions"]
    assert d["bucket"] == {"low": 1, "high": None, "measured": 1, "label": "1+"}
    assert d["device"]["name"] == "Test GPU"
    assert d["timing"] == {"cache": "cold", "graph": True}
    assert strict(store.export_json(problem=replace(PROBLEM, top_k=1)))["measurements"] == []


@pytest.mark.parametrize("value", [math.nan, [math.inf], {"x": -math.inf}, object(), {1: {2}}])
def test_text_that_is_not_strict_json_is_never_made(value):
    with pytest.raises(StoreError, match="plain finite JSON"):
        records.to_json(value)


def test_the_views_give_names_and_figures_to_people(store):
    store.add_measurements([measured(times_us=(1.0, 2.0, 4.0, 10.0)), failed(num_tokens=3)])
    store.add_decision(decided(), DEVICE)
    with closing(sqlite3.connect(store.path)) as connection:
        connection.row_factory = sqlite3.Row
        good, bad = map(dict, connection.execute("SELECT * FROM results ORDER BY id"))
        assert (good["device"], good["problem"]) == ("Test GPU", PROBLEM.key)
        assert (good["min_us"], good["median_us"], good["samples"]) == (1.0, 3.0, 4)
        assert (bad["min_us"], bad["samples"], bad["status"]) == (None, 0, "failed")
        (failure,) = connection.execute("SELECT * FROM failures")
        assert failure["reason"] == "was failed"
        (winner,) = connection.execute("SELECT * FROM winners")
        assert (winner["winner"], winner["runner_up"]) == ("fast", "second")
        (row,) = connection.execute("SELECT * FROM problems")
        assert (row["num_experts"], row["num_bits"], row["group_size"]) == (8, 4, 128)


# places ------------------------------------------------------------------------------------


def open_with_notice(match: str, path: Path | None = None) -> Store:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = Store.open(path)
    assert len(caught) == 1, [str(w.message) for w in caught]
    assert issubclass(caught[0].category, StoreWarning)
    text = str(caught[0].message)
    assert match in text
    assert "\n" not in text
    assert caught[0].filename == __file__
    assert store.notice == text
    return store


def still_works(store: Store) -> None:
    store.add_measurement(measured())
    assert store.done(PROBLEM, 16, "uniform", FAST, DEVICE) == measured()
    store.close()


@pytest.fixture
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("AUTOSEL_DB", raising=False)
    return folder


linux = pytest.mark.skipif(sys.platform != "linux", reason="checks Linux's cache folder")


@linux
def test_the_default_place_is_the_private_cache_folder(home):
    with Store.open() as store:
        assert store.path == home / ".cache" / "autosel" / "autosel.db"
        assert stat.S_IMODE(store.path.parent.stat().st_mode) == 0o700
        store.add_measurement(measured())
    with Store.open() as store:
        assert store.measurements() == [measured()]


@linux
def test_the_cache_folder_may_be_elsewhere(home, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not yet" / "there"))
    with Store.open() as store:
        assert store.path == tmp_path / "not yet" / "there" / "autosel" / "autosel.db"


def test_the_variable_and_then_the_argument_override(home, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOSEL_DB", str(tmp_path / "new folder" / "by variable.db"))
    with Store.open() as store:
        assert store.path == tmp_path / "new folder" / "by variable.db"
    with Store.open(tmp_path / "100% odd?#name.db") as store:
        assert store.path.name == "100% odd?#name.db"
        still_works(store)
    assert (tmp_path / "100% odd?#name.db").exists()
    assert list(home.iterdir()) == []
    with Store.open(":memory:") as store:
        assert (store.path, store.notice) == (None, "")


@linux
def test_a_missing_home_is_not_made(home):
    home.rmdir()
    still_works(open_with_notice("does not exist"))
    assert not home.exists()


@linux
def test_the_root_folder_is_no_home(home, monkeypatch):
    monkeypatch.setenv("HOME", "/")
    before = set(os.listdir("/"))
    still_works(open_with_notice("the home folder is /"))
    assert set(os.listdir("/")) == before


@linux
def test_a_home_that_nobody_can_name_is_no_folder_called_tilde(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *a, **k: "~/.cache/autosel")
    still_works(open_with_notice("not an absolute path"))
    assert not (tmp_path / "~").exists()


@linux
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["folder", "file"])
def test_another_users_cache_is_left_alone(home, what, monkeypatch, tmp_path):
    Store.open().close()
    path = home / ".cache" / "autosel"
    os.chown(path if what == "folder" else path / "autosel.db", 12345, 12345)
    before = (path / "autosel.db").read_bytes()
    still_works(open_with_notice("belongs to another user (id 12345)"))
    assert (path / "autosel.db").read_bytes() == before
    monkeypatch.setenv("AUTOSEL_DB", str(tmp_path / "mine.db"))
    with Store.open() as store:
        assert store.path == tmp_path / "mine.db"


def as_unprivileged(path: Path | None, **environment: str) -> str:
    """What opening says in a child whose permissions count; root's do not."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        said = "died"
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            for name in ("AUTOSEL_DB", "XDG_CACHE_HOME"):
                os.environ.pop(name, None)
            os.environ.update(environment)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                store = Store.open(path)
            said = f"{store.path} {len(caught)} {len(store.measurements())} {store.notice}"
        except BaseException as error:
            said = repr(error)
        finally:
            os.write(writing, said.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said.strip()


@pytest.fixture
def open_tmp(tmp_path):
    """A folder that every user can reach, unlike pytest's own."""
    folder = Path(os.path.realpath("/tmp")) / f"autosel-test-{os.getpid()}-{time.time_ns()}"
    folder.mkdir(mode=0o755)
    yield folder
    subprocess.run(["chmod", "-R", "u+w", str(folder)], check=True)
    shutil.rmtree(folder)


@linux
def test_a_read_only_home_gives_a_store_in_memory(open_tmp):
    open_tmp.chmod(0o555)
    said = as_unprivileged(None, HOME=str(open_tmp))
    assert said.startswith("None 1 0 database: cannot create the folder")
    override = f"/tmp/autosel-test-override-{os.getpid()}.db"
    try:
        assert as_unprivileged(None, HOME=str(open_tmp), AUTOSEL_DB=override) == f"{override} 0 0"
    finally:
        for suffix in ("", "-wal", "-shm"):
            Path(override + suffix).unlink(missing_ok=True)


@linux
@pytest.mark.parametrize("killed", [False, True])
def test_a_read_only_file_is_read_into_memory(open_tmp, killed):
    path = open_tmp / "autosel.db"
    store = Store.open(path)
    store.add_measurements([measured(num_tokens=n) for n in (1, 2, 3)])
    if killed:  # The rows are only in the journal yet.
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", f"{open_tmp}/left.db{suffix}")
        path = open_tmp / "left.db"
    store.close()
    for file in open_tmp.iterdir():
        file.chmod(0o444)
    open_tmp.chmod(0o555)
    before = path.read_bytes()
    said = as_unprivileged(path)
    assert said.startswith("None 1 3 ")
    assert "cannot be written; what it holds was read" in said
    assert path.read_bytes() == before


@pytest.mark.parametrize("kind", ["folder", "under a file", "pipe"])
def test_a_path_that_cannot_be_a_file(tmp_path, kind):
    path = tmp_path / "thing"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("text")
        path = path / "autosel.db"
    still_works(open_with_notice(str(tmp_path), path))
    with pytest.raises(StoreError, match="database"):
        Store.open(path, strict=True)


def newer_file(path: Path) -> bytes:
    Store.open(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at)"
            " VALUES ('autosel', '9999_from_the_future', 'then')"
        )
        connection.commit()
    return path.read_bytes()


def test_a_newer_schema_is_left_untouched(tmp_path):
    path = tmp_path / "autosel.db"
    before = newer_file(path)
    store = open_with_notice("written by a newer autosel", path)
    assert store.path is None
    still_works(store)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir() if "damaged" in p.name] == []


def test_another_programs_database_is_left_untouched(tmp_path):
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    before = path.read_bytes()
    still_works(open_with_notice("another program's database", path))
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_renamed_only_if_its_name_says_it_should_be_one(tmp_path):
    precious = tmp_path / "config.json"
    precious.write_text("{}" * 500)
    still_works(open_with_notice("is not a database; it was left untouched", precious))
    assert precious.read_text() == "{}" * 500


def damage(path: Path, how: str) -> bytes:
    with Store.open(path) as store:
        store.add_measurements([measured(num_tokens=n) for n in range(1, 200)])
    data = bytearray(path.read_bytes())
    assert len(data) > 40_000
    if how == "header":
        data[:100] = bytes(100)
    elif how == "truncated":
        del data[len(data) // 2 :]
    elif how == "noise":
        data = bytearray(b"this is no database at all " * 400)
    else:  # one page somewhere in the middle
        page = (len(data) // 4096 // 2) * 4096
        data[page : page + 4096] = b"\xa5" * 4096
    path.write_bytes(data)
    return bytes(data)


@pytest.mark.parametrize("how", ["header", "truncated", "noise", "page"])
def test_a_damaged_file_is_set_aside_and_a_new_one_begun(tmp_path, how):
    path = tmp_path / "autosel.db"
    before = damage(path, how)
    store = open_with_notice("is damaged", path)
    assert store.path == path
    still_works(store)
    (aside,) = (p for p in tmp_path.glob("*damaged*") if not p.name.endswith(("-wal", "-shm")))
    assert aside.read_bytes() == before
    assert aside.name in store.notice
    assert integrity(path) == "ok"
    with Store.open(path) as again:  # and nothing is said a second time
        assert len(again.measurements()) == 1


def test_a_damaged_file_found_by_several_at_once_is_set_aside_once(tmp_path):
    path = tmp_path / "autosel.db"
    damage(path, "header")
    seen = path.stat()
    first = storefile._set_aside(path, seen, "test")
    with Store.open(path) as store:
        store.add_measurement(measured())
    storefile._set_aside(path, seen, "the second finder, late")
    with Store.open(path) as store:
        assert store.measurements() == [measured()]
    assert len(list(tmp_path.glob("*damaged*"))) == 1
    assert "set aside" in first


def test_a_full_disk_is_one_line_and_loses_nothing(store):
    (pages,) = store._tables._connection.execute("PRAGMA page_count").fetchone()
    store._tables._connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    stored = 0

    def fill():
        nonlocal stored
        for number in range(1, 500):
            store.add_measurement(measured(num_tokens=number))
            stored += 1

    with pytest.raises(StoreError, match="full") as caught:
        fill()
    assert "\n" not in str(caught.value)
    assert len(store.measurements()) == stored
    assert integrity(store.path) == "ok"


# threads and processes ---------------------------------------------------------------------


def test_threads_take_turns(store):
    def work(start):
        for number in range(start, start + 20):
            store.add_measurement(measured(num_tokens=number))

    threads = [threading.Thread(target=work, args=(1 + 20 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(m.num_tokens for m in store.measurements()) == list(range(1, 81))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_to_open_its_own(store):
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        try:
            store.add_measurement(measured())
        except StoreError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    still_works(store)


#: Many processes are forked from one that has opened nothing, since starting an interpreter for
#: each would take most of a minute.
PRELUDE = textwrap.dedent("""
    import os, select, sys, time, warnings
    sys.path[:0] = [{here!r}, {tests!r}]
    from test_store import Candidate, Store, measured
    warnings.simplefilter("error")
    path = sys.argv[1]
""").format(here=str(HERE), tests=str(Path(__file__).parent))


def child(code: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code), str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


WRITERS = """
    children = []
    for mark in range(16):
        pid = os.fork()
        children.append(pid)
        if pid:
            continue
        longest = 0.0
        with Store.open(path, strict=True) as store:
            for number in range(1, 201):
                start = time.perf_counter()
                who = Candidate.of(f"w{mark}")
                store.add_measurement(measured(num_tokens=number, candidate=who))
                longest = max(longest, time.perf_counter() - start)
        os.write(1, f"{longest}\\n".encode())
        os._exit(0)
    sys.exit(sum(os.waitpid(pid, 0)[1] != 0 for pid in children))
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_sixteen_processes_write_two_hundred_rows_each_while_one_reads(tmp_path):
    path = tmp_path / "autosel.db"  # nobody has made it yet: all start at once
    run = child(WRITERS, path)
    reads = seen = 0
    while run.poll() is None:
        if path.exists():
            with Store.open(path, strict=True) as store:
                count = len(store.measurements())
            assert count >= seen
            seen, reads = count, reads + 1
        time.sleep(0.02)
    out, err = run.communicate()
    assert run.returncode == 0, err
    assert max(map(float, out.split())) < sqlite_file.BUSY_S
    assert len(out.split()) == 16
    assert reads >= 1  # how many more depends on the machine; each held while rows were written
    with Store.open(path) as store:
        rows = store.measurements(history=True)
    assert len(rows) == 3200
    assert {(m.candidate.backend, m.num_tokens) for m in rows} == {
        (f"w{mark}", n) for mark in range(16) for n in range(1, 201)
    }
    assert integrity(path) == "ok"


KILLED = """
    for turn in range(50):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            with Store.open(path, strict=True) as store:
                for n in range(1, 10**6):
                    who = Candidate.of(f"r{turn}")
                    pair = [measured(num_tokens=2 * n + i, candidate=who) for i in (0, 1)]
                    store.add_measurements(pair)
                    os.write(writing, f"{turn} {n}\\n".encode())
        os.close(writing)
        if turn % 5:  # every fifth one dies while it opens the file
            select.select([reading], [], [], 30)
        time.sleep(0.001 * (turn * 7 % 23))
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        with os.fdopen(reading) as pipe:
            print(pipe.read(), end="", flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fifty_hard_kills_lose_nothing_that_was_committed(tmp_path):
    path = tmp_path / "autosel.db"
    run = child(KILLED, path)
    committed: list[tuple[int, ...]] = []
    for line in run.stdout:
        committed.append(tuple(map(int, line.split())))
        if len(committed) % 40 == 0:
            assert integrity(path) == "ok"
    _, err = run.communicate()
    assert run.returncode == 0, err
    assert len({turn for turn, _ in committed}) >= 40
    with Store.open(path) as store:
        found = {(m.candidate.backend, m.num_tokens) for m in store.measurements(history=True)}
    for turn, n in committed:
        assert {(f"r{turn}", 2 * n), (f"r{turn}", 2 * n + 1)} <= found
    # Pairs were written in one transaction: there is no half of one.
    assert all((who, tokens ^ 1) in found for who, tokens in found)
    assert integrity(path) == "ok"


CROWD = """
    import random
    random.seed(11)
    def writer(name, log):
        with Store.open(path, strict=True) as store:
            sweep = store.begin_sweep(measured().device, label=name)
            for n in range(1, 10**6):
                who = Candidate.of(name)
                pair = [measured(num_tokens=2 * n + i, candidate=who) for i in (0, 1)]
                store.add_measurements(pair, sweep)
                os.write(log, f"{name} {n}\\n".encode())
    running, started = {}, 0
    log = os.open(path + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    end = time.monotonic() + 7
    while time.monotonic() < end:
        while len(running) < 32:
            started += 1
            name = f"w{started}"
            pid = os.fork()
            if pid == 0:
                try:
                    writer(name, log)
                finally:
                    os._exit(1)
            running[pid] = name
        time.sleep(random.uniform(0.02, 0.2))
        victim = random.choice(list(running))
        os.kill(victim, 9)
        os.waitpid(victim, 0)
        del running[victim]
    for pid in running:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    print(started)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_thirty_two_writers_with_random_kills_lose_nothing_that_was_committed(tmp_path):
    path = tmp_path / "autosel.db"
    run = child(CROWD, path)
    out, err = run.communicate()
    assert run.returncode == 0, err
    assert "Error" not in err
    assert int(out) > 50  # many were killed and replaced
    lines = Path(f"{path}.log").read_text().splitlines()
    committed = [(who, int(n)) for who, n in (line.split() for line in lines)]
    assert len({who for who, _ in committed}) >= 20
    assert integrity(path) == "ok"
    with Store.open(path, strict=True) as store:
        rows = store.measurements(history=True)
        sweeps = store.sweeps()
    found = {(m.candidate.backend, m.num_tokens) for m in rows}
    assert len(found) == len(rows)
    for who, n in committed:
        assert {(who, 2 * n), (who, 2 * n + 1)} <= found
    assert all((who, tokens ^ 1) in found for who, tokens in found)
    assert len({sweep.uid for sweep in sweeps}) == len(sweeps)


def test_a_kill_between_begin_and_commit_leaves_nothing(tmp_path):
    path = tmp_path / "autosel.db"
    with Store.open(path) as store:
        store.add_measurement(measured())
    code = """
        store = Store.open(path)
        with store._tables.write():
            for number in range(500):
                columns = {"backend": f"x{number}", "params": "{}", "layout": ""}
                store._tables.insert("candidates", columns)
            print("inside", flush=True)
            time.sleep(60)
    """
    run = child(code, path)
    assert run.stdout.readline().strip() == "inside"
    run.send_signal(signal.SIGKILL)
    run.communicate()
    with Store.open(path) as store:
        assert store.measurements() == [measured()]
        store.add_measurement(measured(num_tokens=2))
        ((rows,),) = store._tables._connection.execute("SELECT count(*) FROM candidates")
    assert rows == 1
    assert integrity(path) == "ok"


def test_every_known_migration_is_applied(store):
    assert MIGRATIONS.pending(Database(store._tables._connection)) == []
