"""What failed here is not tried again: for how long, at which token counts, and what ends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from autosel import quarantine
from autosel.core import Candidate, Device, Measurement, Params
from autosel.incidents import Incident
from autosel.quarantine import code_hash, held_back
from autosel.store import Store
from autosel.tune_types import SweepResult
from tests.fakes import CPU, PROBLEM, Clock, FakeBackend, PlainLayout, prove_quickly, registered
from tests.test_tune import Log, run


@pytest.fixture(autouse=True)
def _quick_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    """How winners are proven is not asked here."""
    prove_quickly(monkeypatch)


def status(result: SweepResult, num_tokens: int = 1, backend: str = "bad") -> str:
    (found,) = [
        m for m in result.measurements
        if m.candidate.backend == backend and m.num_tokens == num_tokens
    ]  # fmt: skip
    return found.status


def reason(result: SweepResult, num_tokens: int) -> str:
    (found,) = [
        m for m in result.measurements
        if m.candidate.backend == "bad" and m.num_tokens == num_tokens
    ]  # fmt: skip
    return found.reason


class Bad(FakeBackend):
    """Raises ``error`` while it is set."""

    def __init__(self, clock: Clock, error: BaseException | None) -> None:
        super().__init__(clock, before=self._raise)
        self.error = error

    def _raise(self, params: Params) -> None:
        if self.error is not None:
            raise self.error


def test_what_failed_is_not_tried_again_and_says_so() -> None:
    clock = Clock()
    bad = Bad(clock, RuntimeError("misaligned tile"))
    with Store.open(":memory:") as store, registered(bad=bad, good=FakeBackend(clock)):
        run(clock, store=store, token_counts=(1,))
        calls, log = bad.calls, Log()
        again = run(clock, store=store, token_counts=(1,), observer=log)
        assert bad.calls == calls
        assert log.fresh == []
        assert status(again) == "failed"
        (incident,) = store.incidents(PROBLEM, CPU)
        assert (incident.status, incident.step, incident.num_tokens) == ("failed", "first call", 1)
        assert "misaligned tile" in incident.reason
        # Asked to measure afresh, it still is not tried; asked to retry, it is.
        fresh = run(clock, store=store, token_counts=(1,), resume=False)
        assert bad.calls == calls
        assert "not tried again" in reason(fresh, 1)
        assert "failed once, last on 20" in reason(fresh, 1)
        run(clock, store=store, token_counts=(1,), retry_failed=True)
        assert bad.calls == calls + 1
        (held,) = held_back(store.incidents(PROBLEM, CPU))
        assert held.count == 2
        assert "failed 2 times" in held.reason


def test_a_retry_that_goes_well_ends_it() -> None:
    clock = Clock()
    bad = Bad(clock, RuntimeError("no cubin"))
    with Store.open(":memory:") as store, registered(bad=bad):
        run(clock, store=store, token_counts=(1,))
        bad.error = None
        assert status(run(clock, store=store, token_counts=(1,))) == "failed"
        assert status(run(clock, store=store, token_counts=(1,), retry_failed=True)) == "ok"
        assert held_back(store.incidents(PROBLEM, CPU)) == []
        assert status(run(clock, store=store, token_counts=(1,), resume=False)) == "ok"


@pytest.mark.parametrize(
    "change",
    [
        lambda d: replace(d, driver="570.1"),
        lambda d: replace(d, versions=(("torch", "99"),)),
        lambda d: replace(d, versions=(("autosel-kernels", "sha256:1"),)),
        lambda d: replace(d, name="another machine"),
    ],
    ids=["driver", "package", "kernels", "device"],
)
def test_another_driver_package_kernel_or_device_is_tried(
    change: Callable[[Device], Device],
) -> None:
    clock = Clock()
    bad = Bad(clock, RuntimeError("boom"))
    with Store.open(":memory:") as store, registered(bad=bad):
        run(clock, store=store, token_counts=(1,))
        calls = bad.calls
        run(clock, store=store, token_counts=(1,), device=change(CPU))
        assert bad.calls == calls + 1


def test_another_layer_is_tried() -> None:
    clock = Clock()
    bad = Bad(clock, RuntimeError("boom"))
    with Store.open(":memory:") as store, registered(bad=bad):
        run(clock, store=store, token_counts=(1,))
        calls = bad.calls
        run(clock, store=store, token_counts=(1,), problem=replace(PROBLEM, top_k=1))
        assert bad.calls == calls + 1


def test_an_edit_of_the_source_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    bad = Bad(clock, RuntimeError("boom"))
    with Store.open(":memory:") as store, registered(bad=bad):
        run(clock, store=store, token_counts=(1,))
        calls = bad.calls
        source = quarantine._source
        monkeypatch.setattr(quarantine, "_source", lambda cls: source(cls) + b"# edited")
        quarantine._code_hash.cache_clear()
        run(clock, store=store, token_counts=(1,))
        assert bad.calls == calls + 1
    quarantine._code_hash.cache_clear()


def test_the_hash_knows_classes_without_a_file() -> None:
    space: dict[str, Any] = {}
    code = "class B(Base):\n    def run(self): return {}"
    hashes = []
    for body in ("1", "2", "1"):
        space = {"Base": FakeBackend, "__name__": "nowhere_on_disk"}
        exec(compile(code.format(body), "<text>", "exec"), space)
        made = object.__new__(space["B"])
        hashes.append(code_hash(made, PlainLayout()))
    assert hashes[0] == hashes[2] != hashes[1]


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), RuntimeError("no CUDA-capable device is detected")],
)
def test_a_fault_of_the_machine_puts_nobody_in_quarantine(error: Exception) -> None:
    clock = Clock()
    bad = Bad(clock, error)
    with Store.open(":memory:") as store, registered(bad=bad):
        assert status(run(clock, store=store, token_counts=(1,))) == "failed"
        assert store.incidents() == []
        bad.error = None
        assert status(run(clock, store=store, token_counts=(1,))) == "ok"


def test_an_interrupt_puts_nobody_in_quarantine() -> None:
    clock = Clock()
    bad = Bad(clock, KeyboardInterrupt())
    with Store.open(":memory:") as store, registered(bad=bad):
        with pytest.raises(KeyboardInterrupt):
            run(clock, store=store, token_counts=(1,))
        assert store.incidents() == []
        assert store.measurements() == []
        bad.error = None
        assert status(run(clock, store=store, token_counts=(1,))) == "ok"


def test_a_wrong_result_holds_at_every_token_count_within_the_sweep() -> None:
    """Verification knows no token count; with no store at all it is remembered as well."""
    clock = Clock()
    wrong = FakeBackend(clock)

    def spoil(x: torch.Tensor, out: torch.Tensor, packed: object) -> None:
        if len(x) not in (1, 8):
            out.mul_(2)

    wrong.spoil = spoil
    with registered(bad=wrong):
        result = run(clock, token_counts=(1, 8))
    assert status(result, 1) == status(result, 8) == "wrong"
    assert "not tried again" in reason(result, 8)


def test_a_call_that_raises_at_one_token_count_is_tried_at_others() -> None:
    """More tokens than verification has: a kernel that fails within those is good nowhere."""
    clock = Clock()
    few = FakeBackend(clock)

    def spoil(x: torch.Tensor, out: torch.Tensor, packed: object) -> None:
        if len(x) == 600:
            raise RuntimeError("at most 512 tokens")

    few.spoil = spoil
    with Store.open(":memory:") as store, registered(bad=few):
        first = run(clock, store=store, token_counts=(1, 600))
        assert (status(first, 1), status(first, 600)) == ("ok", "failed")
        assert status(run(clock, store=store, token_counts=(2,)), 2) == "ok"
        again = run(clock, store=store, token_counts=(600,), resume=False)
        assert "not tried again" in reason(again, 600)


@pytest.mark.parametrize(
    ("kind", "step", "concerned"),
    [
        ("crashed", "first call", {1, 8, 64}),
        ("crashed", "time", {1, 8, 64}),
        ("timeout", "first call", {8, 64}),
        ("oom", "first call", {8, 64}),
        ("oom", "pack", {1, 8, 64}),
        ("timeout", "pack", {1, 8, 64}),
        ("failed", "pack", {1, 8, 64}),
        ("wrong", "verify", {1, 8, 64}),
        ("failed", "first call", {8}),
        ("nonfinite", "time", {8}),
    ],
)
def test_which_token_counts_an_incident_concerns(kind: Any, step: str, concerned: set[int]) -> None:
    incident = Incident(PROBLEM, CPU, Candidate.of("bad"), "c", 8, kind, step, "why")
    assert {m for m in (1, 8, 64) if incident.concerns(m)} == concerned


def test_an_unnamed_device_remembers_nothing() -> None:
    clock = Clock()
    bad = Bad(clock, RuntimeError("boom"))
    unnamed = replace(CPU, name=" ")
    with Store.open(":memory:") as store, registered(bad=bad):
        run(clock, store=store, token_counts=(1,), device=unnamed)
        assert store.incidents() == []


def test_retried_failures_are_not_tried_twice_in_one_sweep() -> None:
    clock = Clock()
    bad = Bad(clock, None)

    def spoil(x: torch.Tensor, out: torch.Tensor, packed: object) -> None:
        out.mul_(3)

    bad.spoil = spoil
    with Store.open(":memory:") as store, registered(bad=bad):
        first = run(clock, store=store, token_counts=(1,))
        assert isinstance(first.measurements[0], Measurement)
        calls = bad.calls
        run(clock, store=store, token_counts=(1, 2, 4), retry_failed=True)
        assert bad.calls <= calls * 4
        assert [i.num_tokens for i in store.incidents()].count(4) <= 1
