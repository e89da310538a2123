"""Segments: the store where SQLite's locks cannot be relied on."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
import uuid
import warnings
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from autosel import network_fs, segments, sqlite_file
from autosel.core import Candidate
from autosel.errors import StoreError
from autosel.store import Store, StoreWarning
from tests.test_store import COLD, DEVICE, FAST, PROBLEM, decided, failed, measured

HERE = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", StoreWarning)
        yield


@pytest.fixture
def place(tmp_path):
    return tmp_path / "autosel.db"


def opened(place: Path) -> Store:
    return Store.open(place, strict=True, segments=True)


def files(place: Path) -> list[Path]:
    return sorted(Path(f"{place}.segments").glob("*.db"))


# one writer --------------------------------------------------------------------------------


def test_the_same_interface_and_answers_as_one_database(place):
    with opened(place) as store:
        number = store.begin_sweep(DEVICE, {"seed": 0}, label="a model")
        store.add_measurements([measured(), failed(num_tokens=3)], number)
        store.add_decision(decided(1, None), DEVICE, COLD, number)
        store.finish_sweep(number)
        assert store.segments
        assert store.path == Path(f"{place}.segments")
    with opened(place) as again:
        assert again.measurements() == [measured(), failed(num_tokens=3)]
        assert again.done(PROBLEM, 16, "uniform", FAST, DEVICE) == measured()
        assert again.decision(PROBLEM, DEVICE, 5, "uniform") == decided(1, None)
        (sweep,) = again.sweeps()
        assert (sweep.label, sweep.settings) == ("a model", {"seed": 0})
        assert sweep.finished is not None
        assert [m.num_tokens for m in again.measurements(sweep_id=sweep.id)] == [16, 3]
        assert again.nearest(PROBLEM, DEVICE, "uniform").exact
    assert not place.exists()


def test_commits_are_seen_at_once_by_a_store_that_is_open(place):
    with opened(place) as reader, opened(place) as writer:
        for number in range(1, 6):
            writer.add_measurement(measured(num_tokens=number))
            assert [m.num_tokens for m in reader.measurements()] == list(range(1, number + 1))


def test_a_sweep_that_ends_after_it_was_read_is_seen_to_end(place):
    with opened(place) as writer, opened(place) as reader:
        number = writer.begin_sweep(DEVICE, label="long")
        assert reader.sweeps()[0].finished is None
        writer.finish_sweep(number, ceilings={"read_gbps": 1.5})
        assert reader.sweeps()[0].finished is not None
        assert reader.sweeps()[0].ceilings == {"read_gbps": 1.5}
        assert len(reader.sweeps()) == 1


def test_one_small_file_a_writer_and_no_file_is_ever_changed(place, monkeypatch):
    contents: dict[str, bytes] = {}
    with opened(place) as store:
        for number in range(1, 30):
            store.add_measurement(measured(num_tokens=number))
            (file,) = files(place)
            for name, content in contents.items():
                assert name != file.name or content == file.read_bytes()
            contents[file.name] = file.read_bytes()
    assert len(contents) == 29


def test_a_large_segment_is_finished_and_the_next_begun(place, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 40_000)
    with opened(place) as store:
        number = store.begin_sweep(DEVICE)
        for tokens in range(1, 100):
            store.add_measurement(measured(num_tokens=tokens), number)
        store.finish_sweep(number)
        assert len(store.measurements()) == 99
    assert len(files(place)) > 2
    with opened(place) as again:
        assert [m.num_tokens for m in again.measurements()] == list(range(1, 100))
        (sweep,) = again.sweeps()
        assert sweep.finished
        assert len(again.measurements(sweep_id=sweep.id)) == 99


def test_what_an_ordinary_database_at_the_place_holds_is_read_and_kept(place):
    with Store.open(place, segments=False) as old:
        old.add_measurement(measured(num_tokens=1))
    before = place.read_bytes()
    with opened(place) as store:
        store.add_measurement(measured(num_tokens=2))
        assert {m.num_tokens for m in store.measurements()} == {1, 2}
    with opened(place) as store:
        assert {m.num_tokens for m in store.measurements()} == {1, 2}
    assert place.read_bytes() == before
    assert sorted(p.name for p in place.parent.iterdir()) == ["autosel.db", "autosel.db.segments"]


def test_the_folder_can_be_named_itself(place):
    with opened(place) as store:
        store.add_measurement(measured())
    with Store.open(f"{place}.segments", strict=True) as store:
        assert store.segments
        assert store.measurements() == [measured()]


# what must not spoil it --------------------------------------------------------------------


def test_half_written_segments_are_ignored_and_stay(place):
    with opened(place) as store:
        store.add_measurement(measured())
    folder, (whole,) = Path(f"{place}.segments"), files(place)
    content = whole.read_bytes()
    (folder / f".{uuid.uuid4().hex}-000001-000001-{'0' * 16}.db.partial").write_bytes(content[:999])
    (folder / "notes.txt").write_text("by hand")
    half = folder / f"{uuid.uuid4().hex}-000001-000001-{whole.stem[-16:]}.db"
    half.write_bytes(content[: len(content) // 2])
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.warns(StoreWarning, match=half.name):
        store = opened(place)
    for _ in range(2):  # and nothing is said a second time
        assert store.measurements() == [measured()]
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


@pytest.mark.parametrize("at", [10, 100, 5_000, -10])
def test_one_wrong_byte_anywhere_is_seen(place, at):
    with opened(place) as store:
        store.add_measurement(measured())
    (file,) = files(place)
    content = bytearray(file.read_bytes())
    content[at] ^= 0x40
    file.write_bytes(content)
    with pytest.warns(StoreWarning, match="not what its name says"):
        assert opened(place).measurements() == []


def test_the_version_before_counts_where_the_newer_is_not_whole(place):
    with opened(place) as store:
        store.add_measurement(measured(num_tokens=1))
        (first,) = files(place)
        kept = first.read_bytes()
        store.add_measurement(measured(num_tokens=2))
        (second,) = files(place)
    first.write_bytes(kept)  # its writer was killed before it could remove it
    with opened(place) as store:
        assert [m.num_tokens for m in store.measurements(history=True)] == [1, 2]
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.warns(StoreWarning, match=second.name), opened(place) as store:
        assert [m.num_tokens for m in store.measurements()] == [1]


def test_a_newer_autosels_segment_is_left_alone_with_one_warning(place):
    with opened(place) as store:
        store.add_measurement(measured(num_tokens=1))
    (file,) = files(place)
    with closing(sqlite3.connect(":memory:")) as newer:
        newer.deserialize(file.read_bytes())
        newer.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at)"
            " VALUES ('autosel', '9999_from_the_future', 'then')"
        )
        newer.commit()
        content = bytes(newer.serialize())
    name = f"{uuid.uuid4().hex}-000001-000001-{segments._digest(content)}.db"
    (file.parent / name).write_bytes(content)
    with pytest.warns(StoreWarning, match="newer autosel"), opened(place) as store:
        assert [m.num_tokens for m in store.measurements()] == [1]
    assert (file.parent / name).read_bytes() == content


def test_an_older_autosels_segment_is_migrated_in_memory(place):
    old = sqlite3.connect(":memory:")
    old.executescript((Path(__file__).parent / "data" / "store_schema_1.sql").read_text())
    content = bytes(old.serialize())
    folder = Path(f"{place}.segments")
    folder.mkdir()
    file = folder / f"{uuid.uuid4().hex}-000001-000001-{segments._digest(content)}.db"
    file.write_bytes(content)
    with opened(place) as store:
        assert store.done(PROBLEM, 16, "uniform", FAST, DEVICE).status == "ok"
        assert [sweep.label for sweep in store.sweeps()] == ["made by schema 1"]
    assert file.read_bytes() == content


@pytest.mark.parametrize("step", ["open", "fsync", "rename"])
def test_a_commit_that_does_not_reach_the_folder_is_none(place, monkeypatch, step):
    with opened(place) as store:
        store.add_measurement(measured(num_tokens=1))
        number = store.begin_sweep(DEVICE, label="whole")

        def fail(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as broken:
            broken.setattr(segments.os, step, fail)
            for _ in range(2):
                with pytest.raises(StoreError, match="No space left on device") as caught:
                    store.add_measurements([measured(num_tokens=n) for n in (2, 3)], number)
                assert "\n" not in str(caught.value)
            with pytest.raises(StoreError):
                store.begin_sweep(DEVICE, label="never")
        assert [m.num_tokens for m in store.measurements()] == [1]
        store.add_measurement(measured(num_tokens=4), number)
        store.finish_sweep(number)
    with opened(place) as store:
        assert [m.num_tokens for m in store.measurements()] == [1, 4]
        assert [(s.label, s.finished is None) for s in store.sweeps()] == [("whole", False)]
    assert not list(Path(f"{place}.segments").glob(".*"))


def test_a_folder_that_cannot_be_written_is_read_and_the_rest_kept_in_memory(place, monkeypatch):
    with opened(place) as store:
        store.add_measurement(measured())
    monkeypatch.setattr("autosel.storefile.os.access", lambda *a, **k: False)
    with pytest.warns(StoreWarning, match="cannot be written; what it holds was read"):
        store = Store.open(place, segments=True)
    assert store.measurements() == [measured()]
    store.add_measurement(measured(num_tokens=2))
    with pytest.raises(StoreError, match="cannot be written"):
        opened(place)


# many writers ------------------------------------------------------------------------------


def test_two_hosts_with_equal_process_numbers_and_clocks_keep_both(place, monkeypatch):
    monkeypatch.setattr("autosel.rows.now", lambda: "2026-01-01T00:00:00.000000Z")
    monkeypatch.setattr(os, "getpid", lambda: 7)
    with opened(place) as one, opened(place) as two:
        for store, tokens in ((one, (1, 2)), (two, (1, 3))):
            number = store.begin_sweep(DEVICE, {"seed": 0}, label="same")
            store.add_measurements([measured(num_tokens=n) for n in tokens], number)
            store.finish_sweep(number)
    with opened(place) as store:
        assert len(store.sweeps()) == 2
        assert len(store.measurements(history=True)) == 4
        for sweep in store.sweeps():
            assert len(store.measurements(sweep_id=sweep.id)) in (1, 2)
        assert {m.num_tokens for m in store.measurements()} == {1, 2, 3}


def test_the_newest_counts_whoever_stored_it(place):
    slow, fast = measured(times_us=(2.0,)), measured(times_us=(1.0,))
    with opened(place) as one, opened(place) as two:
        two.add_measurement(slow)
        one.add_measurement(fast)
        two.add_decision(decided(1, None, "old"), DEVICE, COLD)
        one.add_decision(decided(1, None, "new"), DEVICE, COLD)
        for store in (one, two):
            assert store.measurements() == [fast]
            assert store.decision(PROBLEM, DEVICE, 4, "uniform").winner.backend == "new"
    with opened(place) as store:
        assert store.measurements() == [fast]
        assert store.measurements(history=True) == [slow, fast]


def test_a_file_that_is_replaced_while_it_is_looked_for_costs_no_row(place, monkeypatch):
    """A reader lists a version, the writer replaces it, and only then does the reader open it."""
    with opened(place) as writer:
        writer.add_measurement(measured(num_tokens=1))
        listing, replaced = segments.segment_files, []

        def slow(folder: Path):
            found = listing(folder)
            if len(replaced) < 3:
                replaced.append(1)
                with monkeypatch.context() as looks:  # the writer looks for others' segments too
                    looks.setattr(segments, "segment_files", listing)
                    writer.add_measurement(measured(num_tokens=1 + len(replaced)))
            return found

        monkeypatch.setattr(segments, "segment_files", slow)
        with opened(place) as reader:
            assert [m.num_tokens for m in reader.measurements()] == [1, 2, 3, 4]


PRELUDE = textwrap.dedent("""
    import os, select, sys, time, warnings
    sys.path[:0] = [{here!r}]
    from autosel.store import Store
    from tests.test_store import Candidate, measured
    warnings.simplefilter("error")
    path = sys.argv[1]
""").format(here=str(HERE))


def child(code: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code), str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


KILLED = """
    import random
    random.seed(5)
    for turn in range(16):
        children = []
        for mark in range(4):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                with Store.open(path, strict=True, segments=True) as store:
                    for n in range(1, 10**6):
                        who = Candidate.of(f"r{turn}.{mark}")
                        pair = [measured(num_tokens=2 * n + i, candidate=who) for i in (0, 1)]
                        store.add_measurements(pair)
                        os.write(writing, f"r{turn}.{mark} {n}\\n".encode())
            os.close(writing)
            children.append((pid, reading))
        if turn % 4:  # every fourth time they die while they open the folder
            select.select([children[0][1]], [], [], 30)
        time.sleep(random.uniform(0.0, 0.05))
        for pid, reading in children:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            with os.fdopen(reading) as pipe:
                print(pipe.read(), end="", flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_hard_kills_of_four_writers_at_once_lose_nothing_that_was_committed(place):
    with opened(place) as reader:
        run = child(KILLED, place)
        while run.poll() is None:  # a store that stays open all the while
            count = len(reader.measurements(history=True))
            assert count % 2 == 0
            time.sleep(0.05)
        out, err = run.communicate()
        assert run.returncode == 0, err
        last = {(m.candidate.backend, m.num_tokens) for m in reader.measurements(history=True)}
    committed = [line.split() for line in out.splitlines()]
    assert len({who for who, _ in committed}) >= 12
    with opened(place) as store:
        rows = store.measurements(history=True)
    found = {(m.candidate.backend, m.num_tokens) for m in rows}
    assert len(found) == len(rows)
    assert found == last
    for who, n in committed:
        assert {(who, 2 * int(n)), (who, 2 * int(n) + 1)} <= found
    assert all((who, tokens ^ 1) in found for who, tokens in found)


WRITERS = """
    children = []
    for mark in range(16):
        pid = os.fork()
        children.append(pid)
        if pid:
            continue
        with Store.open(path, strict=True, segments=True) as store:
            for number in range(1, 41):
                store.add_measurement(
                    measured(num_tokens=number, candidate=Candidate.of(f"w{mark}"))
                )
        os._exit(0)
    sys.exit(sum(os.waitpid(pid, 0)[1] != 0 for pid in children))
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_sixteen_processes_write_at_once(place):
    run = child(WRITERS, place)
    _, err = run.communicate()
    assert run.returncode == 0, err
    with opened(place) as store:
        rows = store.measurements(history=True)
    assert {(m.candidate.backend, m.num_tokens) for m in rows} == {
        (f"w{mark}", n) for mark in range(16) for n in range(1, 41)
    }
    assert len(rows) == 640


def test_a_kill_inside_a_write_leaves_at_most_a_partial_file(place):
    code = """
        import autosel.segments as segments
        store = Store.open(path, strict=True, segments=True)
        store.add_measurement(measured(num_tokens=1))
        def wait(descriptor):
            print("inside", flush=True)
            time.sleep(60)
        segments.os.fsync = wait
        store.add_measurement(measured(num_tokens=2))
    """
    run = child(code, place)
    assert run.stdout.readline().strip() == "inside"
    run.send_signal(signal.SIGKILL)
    run.communicate()
    assert len(list(Path(f"{place}.segments").glob(".*.partial"))) == 1
    with opened(place) as store:
        assert [m.num_tokens for m in store.measurements()] == [1]
        store.add_measurement(measured(num_tokens=3))
        assert [m.num_tokens for m in store.measurements()] == [1, 3]


# which file systems ------------------------------------------------------------------------

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:5 / /proc rw - proc proc rw
30 22 0:40 / /home rw,relatime shared:9 - nfs4 server:/home rw,vers=4.2
31 30 0:41 / /home/me/local rw - tmpfs tmpfs rw
32 22 0:42 / /mnt/with\\040space rw - cifs //server/share rw
33 22 0:43 / /ssh rw - fuse.sshfs me@there: rw
34 22 0:44 / /over rw - overlay overlay rw
35 34 0:45 / /over rw - lustre x@tcp:/scratch rw
36 22 0:46 / /homestead rw - xfs /dev/vdb rw
37 22 0:47 / /scratch rw - fuse.rclone remote: rw
nonsense
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/x.db", None),
        ("/home", "nfs4"),
        ("/home/me/deep/not/there.db", "nfs4"),
        ("/home/me/local/x.db", None),
        ("/homestead/x.db", None),
        ("/mnt/with space/x.db", "cifs"),
        ("/ssh/x.db", "fuse.sshfs"),
        ("/over/x.db", "lustre"),
        ("/scratch/x.db", "fuse.rclone"),
    ],
)
def test_the_file_system_of_a_path(tmp_path, monkeypatch, path, kind):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    monkeypatch.setattr(network_fs.os.path, "realpath", str)
    assert network_fs.network_type(Path(path), mounts) == kind


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "smb2", "smb3", "fuse.sshfs", "lustre", "gpfs", "beegfs", "9p",
             "ceph", "fuse.ceph-fuse", "afs"],
)  # fmt: skip
def test_every_kind_of_shared_file_system_gets_segments(tmp_path, monkeypatch, kind):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 0 0:1 / / rw - ext4 x rw\n2 1 0:2 / {tmp_path} rw - {kind} server:/ rw\n")
    monkeypatch.setattr(
        "autosel.storefile.network_type", lambda path: network_fs.network_type(path, mounts)
    )
    with Store.open(tmp_path / "autosel.db") as store:
        assert store.segments
        store.add_measurement(measured())
    with Store.open(tmp_path / "autosel.db") as store:
        assert store.measurements() == [measured()]
    assert not (tmp_path / "autosel.db").exists()


def test_no_list_of_mounts_means_a_local_file(tmp_path):
    assert network_fs.network_type(tmp_path, tmp_path / "missing") is None


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists its mounts")
def test_a_real_mount_is_told_by_its_type(tmp_path):
    name = subprocess.run(
        ["stat", "-f", "-c", "%T", str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout.strip()
    kind = network_fs.file_system_type(tmp_path)
    assert kind is not None
    assert kind.startswith(name.split("/")[0][:3])  # "ext2/ext3" for ext4, and others as they are


def test_a_merge_of_a_segment_and_a_database_are_the_same_rows(place, tmp_path):
    """Segments are whole databases: SQLite's own reader finds the views in them."""
    with opened(place) as store:
        store.add_measurement(measured(times_us=(1.0, 2.0, 4.0)))
    (file,) = files(place)
    copy = shutil.copy(file, tmp_path / "copy.db")
    with closing(sqlite3.connect(copy)) as connection:
        (row,) = connection.execute("SELECT device, median_us FROM results").fetchall()
    assert row == ("Test GPU", 2.0)
    with closing(sqlite_file.read_copy(Path(copy))) as memory:
        assert memory.execute("SELECT count(*) FROM measurements").fetchone() == (1,)


def test_layers_and_devices_of_many_writers_stay_apart(place):
    with opened(place) as one, opened(place) as two:
        one.add_measurement(measured(problem=replace(PROBLEM, hidden_size=512)))
        two.add_measurement(measured(device=replace(DEVICE, driver="1")))
        two.add_measurement(measured(candidate=Candidate.of("other")))
    with opened(place) as store:
        assert len(store.measurements()) == 3
        assert len(store.entries()) == 3
