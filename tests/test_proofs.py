"""What is chosen is proven on the full set first, once, and its certificate is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autosel.interfaces import PackedExperts
from autosel.store import Store
from autosel.verify_cases import TOKEN_COUNTS, full_token_counts
from tests.fakes import CPU, PROBLEM, Clock, FakeBackend, registered
from tests.test_tune import Log, run
from tests.threads import one_thread

#: A token count that only the full set has.
FULL_ONLY = next(m for m in full_token_counts((4,)) if m not in (*TOKEN_COUNTS, 4))


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def wrong_in_full(x: torch.Tensor, out: torch.Tensor, packed: PackedExperts) -> None:
    if len(x) == FULL_ONLY:
        out.mul_(1.5)


def test_a_fault_that_only_the_full_set_finds_costs_the_choice() -> None:
    clock = Clock()
    fakes = {
        "hasty": FakeBackend(clock, 10.0, spoil=wrong_in_full),
        "sound": FakeBackend(clock, 100.0),
        "slower": FakeBackend(clock, 200.0),
    }
    with Store.open(":memory:") as store, registered(**fakes):
        log = Log()
        result = run(clock, store=store, token_counts=(4, 8), observer=log)
        assert [d.winner.backend for d in result.decisions] == ["sound", "sound"]
        rows = [m for m in result.measurements if m.candidate.backend == "hasty"]
        assert [m.status for m in rows] == ["wrong", "wrong"]
        assert f"M={FULL_ONLY}" in rows[0].reason
        assert rows[0].times_us == ()
        (incident,) = store.incidents()
        assert (incident.step, incident.status) == ("prove", "wrong")
        # Proven once for all token counts; who is not chosen is judged on the quick set alone.
        assert [e for e in log.events if e.startswith("prove")] == [
            "prove 4 hasty",
            "prove 4 sound",
        ]
        levels = {c.candidate.backend: (c.level, c.status) for c in store.certificates(PROBLEM)}
        assert levels == {
            "hasty": ("full", "wrong"),
            "sound": ("full", "ok"),
            "slower": ("quick", "ok"),
        }
        assert {d.winner.backend for d in store.decisions(PROBLEM, CPU)} == {"sound"}
        # A later sweep, at another token count, takes the proof from the store.
        log = Log()
        again = run(clock, store=store, token_counts=(4, 16), observer=log)
        assert [d.winner.backend for d in again.decisions] == ["sound", "sound"]
        assert not any(e.startswith("prove") for e in log.events)
        assert {c.level for c in store.certificates(PROBLEM, candidate=again.decision(16).winner)} \
            == {"full"}  # fmt: skip
        # Other packages, another proof.
        log = Log()
        other = replace(CPU, versions=(("torch", "99"),))
        run(clock, store=store, token_counts=(4,), device=other, observer=log)
        assert any(e.startswith("prove") for e in log.events)
