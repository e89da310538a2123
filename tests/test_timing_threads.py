"""Threads bound while a sample is taken: one a processor, for that time and in that process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autosel import timing_cpu, timing_threads
from autosel.device import detect
from autosel.timing import TimingSettings, time_candidates, timer_for
from autosel.timing_threads import Binding

PROCESSORS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
CAN_BIND = 1 < PROCESSORS <= 64  # more threads would make these tests slow
binds = pytest.mark.skipif(not CAN_BIND, reason="needs Linux and 2 to 64 processors")


@pytest.fixture(autouse=True)
def _a_thread_a_processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in timing_threads.CHOSEN_BY_USER:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(PROCESSORS)
    yield
    torch.set_num_threads(before)


def affinities() -> dict[int, frozenset[int]]:
    """Of every thread of this process."""
    found = {}
    for name in os.listdir("/proc/self/task"):
        try:
            found[int(name)] = frozenset(os.sched_getaffinity(int(name)))
        except ProcessLookupError:
            continue
    return found


def bound() -> list[int]:
    """The processors that a thread is bound to, one for each thread that is bound."""
    return sorted(next(iter(cpus)) for cpus in affinities().values() if len(cpus) == 1)


@binds
def test_each_thread_of_the_pool_has_a_processor_and_is_free_again() -> None:
    before = affinities()
    binding = Binding(wanted=True)
    with binding.held():
        inside = bound()
        torch.ones(1 << 20).sum()
        assert bound() == inside
    assert len(inside) == len(set(inside)) == PROCESSORS
    assert binding.words == "one thread a processor: " + ",".join(map(str, inside))
    after = affinities()
    assert bound() == []
    assert {thread: after[thread] for thread in before if thread in after} == before


@binds
def test_a_candidate_that_fails_leaves_its_threads_free() -> None:
    binding = Binding(wanted=True)

    def fails() -> None:
        with binding.held():
            assert len(bound()) == PROCESSORS
            raise RuntimeError("the candidate failed")

    with pytest.raises(RuntimeError):
        fails()
    assert bound() == []


@binds
def test_threads_that_come_and_go_are_found_and_others_are_left_alone() -> None:
    binding = Binding(wanted=True)
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    with binding.held():
        assert len(bound()) == PROCESSORS
    other.start()
    try:
        torch.set_num_threads(1)
        torch.set_num_threads(PROCESSORS)
        with binding.held():
            assert len(set(bound())) == len(bound()) == PROCESSORS
            assert len(affinities()[other.native_id or 0]) > 1
    finally:
        stop.set()
        other.join()


@binds
def test_more_threads_than_processors_are_not_bound() -> None:
    """The mask changed, or a control group's, after torch had counted processors."""
    everywhere = os.sched_getaffinity(0)
    torch.ones(1 << 20).sum()  # the pool's threads keep their own mask
    binding = Binding(wanted=True)
    os.sched_setaffinity(0, {min(everywhere)})
    try:
        with binding.held():
            assert bound() == [min(everywhere)], "the calling thread alone, as it was"
    finally:
        os.sched_setaffinity(0, everywhere)
    assert binding.words == f"none: threads {PROCESSORS}, processors 1"
    with binding.held():
        assert len(bound()) == PROCESSORS, "and as soon as there are enough they are"
    assert affinities()[threading.get_native_id()] == everywhere


@binds
@pytest.mark.parametrize("threads", [1, PROCESSORS - 1])
def test_fewer_threads_than_processors_may_leave_a_busy_one(threads: int) -> None:
    torch.set_num_threads(threads)
    binding = Binding(wanted=True)
    with binding.held():
        assert bound() == []
    assert binding.words == f"none: threads {threads}, processors {PROCESSORS}"


@binds
def test_a_processor_that_goes_away_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    binding = Binding(wanted=True)
    real, everywhere = os.sched_setaffinity, os.sched_getaffinity(0)

    def gone(thread: int, processors: set[int]) -> None:
        if processors == {max(everywhere)}:
            raise OSError(22, "Invalid argument")
        real(thread, processors)

    monkeypatch.setattr(os, "sched_setaffinity", gone)
    with binding.held():
        pass
    assert binding.words == "none: Invalid argument"
    assert bound() == []


@pytest.mark.parametrize("name", timing_threads.CHOSEN_BY_USER)
def test_who_has_decided_where_threads_run_is_left_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "false")
    binding = Binding(wanted=True)
    assert binding.words == f"{name}=false"
    with binding.held():
        assert bound() == []


def test_only_a_process_of_ones_own_is_bound() -> None:
    device = detect("cpu")
    settings = TimingSettings(rounds=2, samples_per_round=2, flush_bytes=1 << 20)
    seen: list[list[int]] = []
    timer = timer_for(device, settings)
    found = time_candidates({"a": lambda: seen.append(bound())}, settings, timer)
    assert all(cpus == [] for cpus in seen)
    assert dict(found["a"].timing)["binding"] == "none"
    off = timer_for(device, TimingSettings(bind=False), owns_process=True)
    assert off.facts["binding"] == "none"


@binds
def test_the_timed_call_runs_bound() -> None:
    device = detect("cpu")
    settings = TimingSettings(rounds=2, samples_per_round=2, flush_bytes=1 << 20)
    seen: list[list[int]] = []
    timer = timer_for(device, settings, owns_process=True)
    found = time_candidates({"a": lambda: seen.append(bound())}, settings, timer)
    assert seen[0] == [], "the first call, which may start threads"
    assert [] not in seen[-1:]
    assert len(seen[-1]) == len(set(seen[-1])) == PROCESSORS
    assert str(dict(found["a"].timing)["binding"]).startswith("one thread a processor: ")
    assert bound() == []


# ------------------------------------------------------------------------------------- quotas


def group(root: Path, *parts: str, text: str) -> Path:
    folder = root.joinpath(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.stat").write_text(text)
    return folder / "cpu.stat"


def test_time_that_a_quota_takes_is_read_in_both_versions(tmp_path: Path) -> None:
    names = tmp_path / "cgroup"
    two = tmp_path / "two"
    leaf = group(two, "pod", "box", text="usage_usec 9\nnr_throttled 1\nthrottled_usec 250\n")
    above = group(two, "pod", text="throttled_usec 1000\n")
    group(two, text="usage_usec 9\n")
    names.write_text("0::/pod/box\n")
    files = timing_cpu.quota_files(str(two), str(names))
    assert files == [leaf.resolve(), above.resolve()]
    assert timing_cpu.held_back_us(files) == 1250.0
    leaf.write_text("throttled_usec 750\n")  # the quota was changed meanwhile
    assert timing_cpu.held_back_us(files) == 1750.0
    one = tmp_path / "one"
    group(one, "cpu,cpuacct", text="nr_periods 0\nthrottled_time 3000\n")
    (one / "cpu").symlink_to(one / "cpu,cpuacct")
    names.write_text("5:memory:/x\n4:cpu,cpuacct:/docker/of-the-host\n0::/\n")
    files = timing_cpu.quota_files(str(one), str(names))
    assert len(files) == 1
    assert timing_cpu.held_back_us(files) == 3.0


@pytest.mark.parametrize("text", ["", "0::/\n", "rubbish", "4:cpu\n", "0::/../..\n"])
def test_a_system_without_quotas_has_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text(text)
    files = timing_cpu.quota_files(str(tmp_path), str(tmp_path / "cgroup"))
    assert files == []
    assert timing_cpu.held_back_us(files) is None
