"""Sweeps with real worker processes and backends that misbehave, one a kind."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from autosel import registry
from autosel.core import Candidate, Measurement
from autosel.sources import RandomSource
from autosel.store import Store
from autosel.timing import TimingSettings
from autosel.tune import sweep
from autosel.tune_types import Observer, SweepResult, SweepSettings
from autosel.worker_limits import StepLimits
from tests.fakes import PROBLEM
from tests.threads import one_thread
from tests.worker import misbehaving as m

pytestmark = pytest.mark.skipif(os.name != "posix", reason="workers need sessions of processes")

#: A machine that is busy with other tests has stood still for 2 s.
LIMIT_S = 4.0
LIMITS = StepLimits(
    pack_s=LIMIT_S, first_call_s=LIMIT_S, verify_s=LIMIT_S * 10, call_s=LIMIT_S,
    memory_bytes=900 << 20, processes=30,
)  # fmt: skip
QUICK = TimingSettings(rounds=2, samples_per_round=3, flush_bytes=1 << 20, race=False)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def run(
    *kinds: type[m.Good],
    store: Store | None = None,
    observer: Observer | None = None,
    **settings: Any,
) -> SweepResult:
    """A sweep of a tiny layer over these backends alone."""
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(registry.register(kind))
        chosen = SweepSettings(
            **{
                "token_counts": (m.TOKENS,),
                "backends": tuple(kind.name for kind in kinds),
                "timing": QUICK,
                "limits": LIMITS,
                **settings,
            }
        )
        return sweep(RandomSource(PROBLEM), chosen, store=store, observer=observer)


def row(result: SweepResult, kind: type[m.Good]) -> Measurement:
    (found,) = [r for r in result.measurements if r.candidate.backend == kind.name]
    return found


def ours() -> set[int]:
    """Processes below this one, and those that carry a worker's mark."""
    found = {p.pid for p in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "autosel-test-leftover" in process.cmdline():
                found.add(process.pid)
    return {p for p in found if psutil.pid_exists(p)
            and psutil.Process(p).status() != psutil.STATUS_ZOMBIE}  # fmt: skip


def test_every_kind_of_misbehaviour_is_a_row_and_harms_nobody() -> None:
    before = ours()
    # Good ones stand between bad ones: what a bad one leaves behind would meet them.
    bad = list(m.BAD)
    bad.remove(m.ReportsSettings)
    kinds = [m.Slow, *bad, m.ChangesSettings, m.ReportsSettings, *m.HARMLESS[1:], m.Fast]
    cwd, handler, threads = os.getcwd(), threading.active_count(), torch.get_num_threads()
    result = run(*kinds)
    for kind, (status, words) in m.BAD.items():
        found = row(result, kind)
        assert found.status == status, (kind, found.status, found.reason)
        assert words in found.reason, (kind, found.reason)
        assert "\n" not in found.reason
        assert len(found.reason) < 600
        assert not found.times_us
    for kind in (m.Slow, m.Fast, *m.HARMLESS):
        assert row(result, kind).status == "ok", (kind, row(result, kind).reason)
    # Every limit of time is named.
    for kind in (m.LoopsInPython, m.HangsInC, m.StopsItself):
        assert f"{LIMIT_S:g} s" in row(result, kind).reason
    # Where it was, and what it said last.
    assert "misbehave (misbehaving.py:" in row(result, m.Segfault).reason
    assert "about to read address 0" in row(result, m.Segfault).reason
    # What one changed, the next did not find.
    found = row(result, m.ReportsSettings).reason
    assert f"'threads': {threads}" in found
    assert "'dtype': torch.float32" in found
    assert f"'cwd': '{cwd}'" in found
    assert "'leak': None" in found
    assert "'path': True" in found
    assert "'term': False" in found
    assert "'alarm': False" in found
    # The parent is as it was, and nothing is left of any worker.
    assert os.getcwd() == cwd
    assert torch.get_num_threads() == threads
    deadline = time.monotonic() + 10
    while (ours() - before or threading.active_count() > handler) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ours() - before == set()
    assert threading.active_count() <= handler
    # And the choice is right: the slow one is never taken for the fast one.
    assert result.decision(m.TOKENS).winner.backend != "slow"
    slow, fast = row(result, m.Slow), row(result, m.Fast)
    assert min(slow.times_us) > 9_000
    assert min(fast.times_us) < min(slow.times_us)


def test_memory_that_no_limit_of_the_process_counts_is_watched_from_outside() -> None:
    most = 500 << 20
    result = run(m.TakesSharedMemory, m.Fast, limits=StepLimits(memory_bytes=most))
    found = row(result, m.TakesSharedMemory)
    assert found.status == "oom"
    assert f"bytes resident, at most {most} allowed" in found.reason
    assert row(result, m.Fast).status == "ok"


def test_crashes_are_not_repeated_and_a_sweep_after_a_crash_goes_on(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a.db") as store:
        result = run(m.Segfault, m.Fast, store=store, token_counts=(m.TOKENS, m.TOKENS + 1))
        rows = {r.num_tokens: r for r in result.measurements if r.candidate.backend == "segfault"}
        assert {r.status for r in rows.values()} == {"crashed"}
        assert "not tried again" not in rows[m.TOKENS].reason
        assert "not tried again (--retry-failed does)" in rows[m.TOKENS + 1].reason
        (incident,) = store.incidents()
        assert (incident.status, incident.step) == ("crashed", "first call")
        assert len(store.measurements()) == 4
    assert [d.winner.backend for d in result.decisions] == ["fast", "fast"]


class Steps(Observer):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int, str]] = []

    def step(self, what: str, num_tokens: int, candidate: Candidate | None = None) -> None:
        self.seen.append((what, num_tokens, candidate.backend if candidate else ""))

    def of(self, what: str, backend: str = "") -> list[int]:
        return [n for w, n, b in self.seen if w == what and (not backend or b == backend)]


def test_every_fourth_misbehaves_and_nothing_is_done_twice_but_loading() -> None:
    """What a fresh worker costs is reading the weights; what is known of the others it is told.

    Times are not compared here: the machine that runs the tests may be busy. What makes up the
    time is: each candidate is verified once, each bad one ends one worker, at one token count.
    """
    good = [type(f"Good{i}", (m.Good,), {"name": f"good{i}"}) for i in range(6)]
    bad = [m.Segfault, m.HangsInC]
    kinds = [*good[:3], bad[0], *good[3:], bad[1]]
    steps, counts = Steps(), (m.TOKENS, m.TOKENS + 1, m.TOKENS + 2)
    result = run(*kinds, observer=steps, token_counts=counts)
    for kind in good:
        rows = [r for r in result.measurements if r.candidate.backend == kind.name]
        assert [r.status for r in rows] == ["ok"] * len(counts), [r.reason for r in rows]
        assert steps.of("verify", kind.name) == [m.TOKENS]
        assert steps.of("first call", kind.name) == list(counts)
    for kind in bad:
        assert steps.of("first call", kind.name) == [m.TOKENS]
    assert len(steps.of("load")) == 1 + len(bad)
    assert len(steps.of("time")) == len(counts)
    assert all(d.winner.backend.startswith("good") for d in result.decisions)
