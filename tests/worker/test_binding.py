"""A sweep's worker binds its threads while it takes samples; nobody else is bound."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autosel.timing_threads import CHOSEN_BY_USER
from tests.fakes import judge_one_case, prove_quickly
from tests.test_timing_threads import CAN_BIND, PROCESSORS, affinities
from tests.worker import misbehaving as m
from tests.worker.test_worker import row, run

pytestmark = pytest.mark.skipif(not CAN_BIND, reason="needs Linux and 2 to 64 processors")


class Tells(m.Good):
    """Writes down where each thread of its process may run, at every call that is swept."""

    name = "tells"

    def misbehave(self, x: torch.Tensor) -> None:
        if len(x) == m.TOKENS:
            with Path(os.environ["AUTOSEL_TEST_THREADS"]).open("a") as file:
                file.write(json.dumps([sorted(cpus) for cpus in affinities().values()]) + "\n")


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in CHOSEN_BY_USER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AUTOSEL_TEST_THREADS", str(tmp_path / "threads"))
    judge_one_case(monkeypatch)  # each call of many threads waits for the slowest of them
    prove_quickly(monkeypatch)
    before = torch.get_num_threads()
    torch.set_num_threads(PROCESSORS)
    yield tmp_path / "threads"
    torch.set_num_threads(before)


def bound(path: Path) -> list[list[int]]:
    """For each call the processors that a thread is bound to."""
    calls = [json.loads(line) for line in path.read_text().splitlines()]
    return [sorted(cpus[0] for cpus in threads if len(cpus) == 1) for threads in calls]


def test_the_workers_threads_are_bound_and_the_parents_are_not(told: Path) -> None:
    before = affinities()
    found = row(run(Tells), Tells)
    after = affinities()
    calls = bound(told)
    assert calls[0] == [], "packing, verification and the first call"
    assert [len(cpus) for cpus in calls].count(PROCESSORS) >= len(found.times_us)
    assert all(len(set(cpus)) == len(cpus) for cpus in calls), "two threads on one processor"
    assert str(dict(found.timing)["binding"]).startswith("one thread a processor: ")
    assert {thread: after[thread] for thread in before if thread in after} == before


def test_a_user_who_bound_threads_is_obeyed(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    found = row(run(Tells), Tells)
    assert not any(bound(told))
    assert dict(found.timing)["binding"] == "OMP_PROC_BIND=false"


def test_in_the_callers_own_process_nothing_is_bound(told: Path) -> None:
    found = row(run(Tells, isolate=False), Tells)
    assert not any(bound(told))
    assert dict(found.timing)["binding"] == "none"
