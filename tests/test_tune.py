"""The sweep on scripted backends: what becomes of each candidate, what is timed and decided."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import quarantine, residency, tune_search
from autosel.core import (
    Candidate,
    CanonicalExperts,
    Decision,
    Device,
    Measurement,
    Params,
    Problem,
    Reason,
    Routing,
    Support,
)
from autosel.decide import NothingUsable
from autosel.errors import AutoselError, CheckpointError, NothingUsableError, UnsupportedError
from autosel.interfaces import PackedExperts, Space
from autosel.sources import RandomSource
from autosel.store import Store
from autosel.timing import TimingSettings
from autosel.tune import sweep
from autosel.tune_types import Observer, SweepResult, SweepSettings
from tests.fakes import (
    CPU,
    PROBLEM,
    Clock,
    FakeBackend,
    PlainLayout,
    judge_one_case,
    prove_quickly,
    registered,
)
from tests.threads import one_thread

QUICK = TimingSettings(rounds=3, samples_per_round=4)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors: a second thread only waits, for milliseconds when the machine is busy."""
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def _quick_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The full set takes longer than all that is asked here."""
    prove_quickly(monkeypatch)


def run(
    clock: Clock,
    *,
    problem: Problem = PROBLEM,
    store: Store | None = None,
    observer: Observer | None = None,
    device: Device = CPU,
    **settings: Any,
) -> SweepResult:
    """A sweep over the fakes alone."""
    from autosel import registry

    fakes = [b.name for b in registry.all_backends() if isinstance(b, FakeBackend)]
    chosen = SweepSettings(
        **{"token_counts": (1, 8), "timing": QUICK, "backends": tuple(fakes), **settings}
    )
    return sweep(
        RandomSource(problem), chosen, device=device, store=store, observer=observer, timer=clock
    )


def rows(result: SweepResult, backend: str) -> list[Measurement]:
    return [m for m in result.measurements if m.candidate.backend == backend]


def test_the_fastest_correct_candidate_wins_at_every_token_count() -> None:
    clock = Clock()
    with registered(slow=FakeBackend(clock, 300.0), fast=FakeBackend(clock, 100.0)):
        result = run(clock)
    assert [d.winner.key for d in result.decisions] == ["fast", "fast"]
    assert [d.bucket.measured for d in result.decisions] == [1, 8]
    decision = result.decision(tokens=5)
    assert decision.winner_us == pytest.approx(100)
    assert decision.runner_up is not None
    assert decision.runner_up.backend == "slow"
    assert not decision.tie
    for m in result.measurements:
        assert m.status == "ok"
        assert len(m.times_us) == 12
        assert m.errors is not None
        assert m.errors.rel_rms is not None
        assert m.errors.rel_rms < 0.01
        assert m.candidate.layout == "plain"
        assert m.weight_bytes
        assert m.pack_ms is not None
        assert m.first_call_ms is not None


def raising(error: BaseException) -> Callable[[], None]:
    def fault() -> None:
        raise error

    return fault


def spoiled(change: Callable[[torch.Tensor, torch.Tensor, PackedExperts], None]) -> dict[str, Any]:
    return {"spoil": change}


def bad_run(error: BaseException) -> dict[str, Any]:
    def fault(params: Params) -> None:
        raise error

    return {"before": fault}


FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    # name: what is wrong with it, the status it must get, words of the reason
    "refuses": (
        {"supports": lambda: Support.no(Reason("device", "cpu", "cuda"))},
        "unsupported",
        "device: found cpu, required cuda",
    ),
    "support_raises": ({"supports": raising(KeyError("x"))}, "failed", "supports: KeyError"),
    "cannot_pack": (
        {"layout": PlainLayout("a", fault=raising(UnsupportedError("w2 zero point: found 0")))},
        "unsupported",
        "w2 zero point: found 0",
    ),
    "pack_raises": (
        {"layout": PlainLayout("b", fault=raising(ValueError("bad tile\nmore text")))},
        "failed",
        "pack: ValueError: bad tile more text",
    ),
    "raises": (bad_run(RuntimeError("no kernel image")), "failed", "no kernel image"),
    "exits": (bad_run(SystemExit(0)), "failed", "SystemExit: 0"),
    "torch_oom": (bad_run(torch.OutOfMemoryError("CUDA out of memory")), "oom", "out of memory"),
    "python_oom": (bad_run(MemoryError()), "oom", "MemoryError"),
    "other_oom": (
        bad_run(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")),
        "oom",
        "can't allocate",
    ),
    "pack_oom": ({"layout": PlainLayout("c", fault=raising(MemoryError()))}, "oom", "pack"),
    "wrong": (spoiled(lambda x, out, packed: out.mul_(1.1)), "wrong", ""),
    "half": (spoiled(lambda x, out, packed: out[:, 16:].fill_(torch.nan)), "nonfinite", ""),
    "infinite": (spoiled(lambda x, out, packed: out[0, :1].fill_(torch.inf)), "nonfinite", ""),
    "doubles_x": (spoiled(lambda x, out, packed: x.mul_(2)), "wrong", "changed its input"),
    "writes_weights": (
        spoiled(lambda x, out, packed: packed.tensors["w13.codes"].bitwise_xor_(0x11111111)),
        "wrong",
        "",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("first", [True, False], ids=["bad first", "bad last"])
def test_every_fault_is_a_row_with_its_reason_and_harms_no_other(
    name: str, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_one_case(monkeypatch)
    options, status, words = FAULTS[name]
    clock = Clock()
    bad = FakeBackend(clock, 1.0, **options)
    good = FakeBackend(clock, 100.0)
    fakes = {name: bad, "good": good} if first else {"good": good, name: bad}
    with Store.open(":memory:") as store, registered(**fakes):
        result = run(clock, store=store)
        stored = store.measurements(PROBLEM)
    found = rows(result, name)
    assert [m.num_tokens for m in found] == [1, 8]
    for m in found:
        assert m.status == status, m
        assert words in m.reason
        assert m.reason
        assert "\n" not in m.reason
        assert m.times_us == ()
    assert [m.status for m in rows(result, "good")] == ["ok", "ok"]
    assert [d.winner.backend for d in result.decisions] == ["good", "good"]
    assert bad.timed_calls == 0, "timed without having verified"
    assert all(any(r.candidate.backend == name for r in d.rejected) for d in result.decisions)
    assert len(stored) == len(result.measurements) == 4


def test_a_candidate_that_does_not_fit_is_tried_once_more_and_only_once() -> None:
    clock = Clock()
    layout = PlainLayout("big", fault=raising(MemoryError()))
    with registered(big=FakeBackend(clock, layout=layout), good=FakeBackend(clock)):
        run(clock, token_counts=(1,))
    assert layout.log == ["big", "big"]


def test_a_fault_that_passes_after_cleaning_up_is_no_failure() -> None:
    clock = Clock()
    left = [True]

    def once(params: Params) -> None:
        if left and left.pop():
            raise torch.OutOfMemoryError("CUDA out of memory")

    with registered(big=FakeBackend(clock, before=once)):
        result = run(clock, token_counts=(1,))
    assert [m.status for m in result.measurements] == ["ok"]


def test_a_late_fault_is_seen_after_timing() -> None:
    """Right while it is verified, wrong from the fortieth timed call on."""
    clock = Clock()
    late = FakeBackend(clock, 10.0)

    def spoil(x: torch.Tensor, out: torch.Tensor, packed: PackedExperts) -> None:
        if late.timed_calls > 10:
            out.mul_(1.5)

    late.spoil = spoil
    with registered(late=late, good=FakeBackend(clock, 100.0)):
        result = run(clock, token_counts=(8,))
    assert rows(result, "late")[0].status == "wrong"
    assert "timed calls" in rows(result, "late")[0].reason
    assert result.decision(8).winner.backend == "good"


def test_a_fault_during_timing_keeps_the_others() -> None:
    clock = Clock()
    breaks = FakeBackend(clock, 10.0)

    def before(params: Params) -> None:
        if breaks.timed_calls > 3:
            raise RuntimeError("illegal access")

    breaks.before = before
    with registered(breaks=breaks, good=FakeBackend(clock, 100.0)):
        result = run(clock, token_counts=(8,))
    assert rows(result, "breaks")[0].status == "failed"
    assert "time: RuntimeError: illegal access" in rows(result, "breaks")[0].reason
    assert rows(result, "good")[0].status == "ok"


def test_a_layout_is_packed_once_shared_and_freed() -> None:
    clock = Clock()
    packed: list[weakref.ref[Any]] = []

    class Watched(PlainLayout):
        def pack(self, experts: CanonicalExperts) -> PackedExperts:
            made = super().pack(experts)
            packed.append(weakref.ref(made.tensors["w13.codes"]))
            return made

    log: list[str] = []
    fakes = {
        name: FakeBackend(clock, us, layout=Watched("shared", log=log))
        for name, us in (("one", 100.0), ("two", 200.0))
    }
    with registered(**fakes):
        result = run(clock, token_counts=(1, 2, 4))
    assert log == ["shared"]
    assert len(result.measurements) == 6
    assert all(reference() is None for reference in packed)


def test_weights_spoiled_by_one_candidate_are_packed_anew_for_the_next() -> None:
    """Both read one layout; the first flips codes as it runs."""
    clock = Clock()
    log: list[str] = []
    vandal = FakeBackend(
        clock,
        1.0,
        layout=PlainLayout("shared", log=log),
        spoil=lambda x, out, packed: packed.tensors["w2.codes"].bitwise_xor_(1),
    )
    honest = FakeBackend(clock, 50.0, layout=PlainLayout("shared", log=log))
    with registered(vandal=vandal, honest=honest):
        result = run(clock)
    assert {m.status for m in rows(result, "vandal")} == {"wrong"}
    assert {m.status for m in rows(result, "honest")} == {"ok"}


# -------------------------------------------------------------------------------------- memory


def test_what_cannot_fit_is_refused_before_it_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "free_memory_bytes", lambda device: 1 << 30)
    clock = Clock()
    huge = PlainLayout("huge", size=64 << 30)
    with registered(huge=FakeBackend(clock, layout=huge), good=FakeBackend(clock)):
        result = run(clock, token_counts=(1,))
    (row,) = rows(result, "huge")
    assert row.status == "oom"
    assert str(1 << 30) in row.reason
    assert str(int((64 << 30) * residency.MARGIN) + residency.RESERVE_BYTES) in row.reason
    assert huge.log == []
    assert result.decision(1).winner.backend == "good"


def test_layouts_that_fit_only_one_at_a_time_are_all_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Room for one: the others are freed for it, and each is still packed, judged and timed."""
    clock = Clock()
    held: list[weakref.ref[Any]] = []

    class Big(PlainLayout):
        def pack(self, experts: CanonicalExperts) -> PackedExperts:
            made = super().pack(experts)
            held.append(weakref.ref(made.tensors["w13.codes"]))
            return made

    size = 1 << 30

    def free(device: Device) -> int:
        live = sum(reference() is not None for reference in held)
        return residency.RESERVE_BYTES + int(1.5 * residency.MARGIN * size) - live * size

    monkeypatch.setattr(residency, "free_memory_bytes", free)
    monkeypatch.setattr(
        PackedExperts, "nbytes", property(lambda self: size if self.layout != "small" else 1000)
    )
    fakes = {
        name: FakeBackend(clock, us, layout=Big(name, size=size))
        for name, us in (("one", 300.0), ("two", 100.0), ("three", 200.0))
    }
    with registered(**fakes):
        result = run(clock, token_counts=(1, 4))
    assert {m.status for m in result.measurements} == {"ok"}
    assert [d.winner.backend for d in result.decisions] == ["two", "two"]


# --------------------------------------------------------------------------- storing, resuming


class Log(Observer):
    def __init__(self) -> None:
        self.events: list[str] = []
        self.fresh: list[Measurement] = []
        self.resumed: list[Measurement] = []

    def started(
        self, problem: Problem, device: Device, tokens: tuple[int, ...], backends: int
    ) -> None:
        self.events.append(f"started {tokens} {backends}")

    def step(self, what: str, num_tokens: int, candidate: Candidate | None = None) -> None:
        self.events.append(f"{what} {num_tokens}" + (f" {candidate.key}" if candidate else ""))

    def timed(self, num_tokens: int, done: int, total: int) -> None:
        assert 1 <= done <= total
        if done == total:
            self.events.append(f"timed {num_tokens}")

    def measured(self, measurement: Measurement, resumed: bool) -> None:
        (self.resumed if resumed else self.fresh).append(measurement)

    def decided(self, decision: Decision) -> None:
        self.events.append(f"decided {decision.bucket.measured} {decision.winner.key}")


def test_the_observer_hears_every_step_in_order() -> None:
    clock, log = Clock(), Log()
    with registered(only=FakeBackend(clock)):
        run(clock, token_counts=(4,), observer=log)
    assert log.events == [
        "started (4,) 1",
        "load 4",
        "pack 4 only",
        "first call 4 only",
        "verify 4 only",
        "time 4",
        "timed 4",
        "prove 4 only",
        "decided 4 only",
    ]


def test_a_second_sweep_takes_everything_from_the_store_and_loads_nothing() -> None:
    clock, log = Clock(), Log()
    fakes = {
        "good": FakeBackend(clock),
        "no": FakeBackend(clock, supports=lambda: Support.no(Reason("a", "b", "c"))),
        "wrong": FakeBackend(clock, spoil=lambda x, out, packed: out.mul_(2)),
    }
    with Store.open(":memory:") as store, registered(**fakes):
        first = run(clock, store=store)
        before = fakes["good"].calls
        second = run(clock, store=store, observer=log)
        kept = store.measurements(PROBLEM, history=True)
        assert fakes["good"].calls == before
        assert len(kept) == 6
        # Asked to, it measures again, and both stay.
        run(clock, store=store, resume=False)
        assert len(store.measurements(PROBLEM, history=True)) == 12
        assert len(store.measurements(PROBLEM)) == 6
    assert log.fresh == []
    assert len(log.resumed) == 6
    assert not any(event.startswith(("load", "pack", "time")) for event in log.events)
    assert [d.winner for d in first.decisions] == [d.winner for d in second.decisions]


def test_more_tokens_or_another_way_of_timing_measure_only_what_is_new() -> None:
    clock, log = Clock(), Log()
    with Store.open(":memory:") as store, registered(good=FakeBackend(clock)):
        run(clock, store=store, token_counts=(1, 8))
        result = run(clock, store=store, token_counts=(1, 8, 64), observer=log)
        assert [m.num_tokens for m in log.fresh] == [64]
        assert [m.num_tokens for m in log.resumed] == [1, 8]
        assert len(result.decisions) == 3
        other = replace(CPU, versions=(("torch", "99.0"),))
        again = Log()
        run(clock, store=store, token_counts=(1, 8), observer=again, device=other)
        assert len(again.fresh) == 2, "another torch is another machine"


def test_what_failed_for_want_of_memory_is_tried_again_when_more_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    full = [True]
    free = [1 << 30]
    monkeypatch.setattr(quarantine, "free_memory_bytes", lambda device: free[0])

    def before(params: Params) -> None:
        if full[0]:
            raise MemoryError

    with Store.open(":memory:") as store, registered(big=FakeBackend(clock, before=before)):
        assert isinstance(run(clock, store=store, token_counts=(1,)).outcomes[0], NothingUsable)
        full[0] = False
        assert isinstance(run(clock, store=store, token_counts=(1,)).outcomes[0], NothingUsable)
        free[0] <<= 1
        assert run(clock, store=store, token_counts=(1,)).decision(1).winner.backend == "big"


def test_ctrl_c_keeps_the_token_counts_that_are_done(tmp_path: Path) -> None:
    clock = Clock()

    class Stops(Log):
        def decided(self, decision: Decision) -> None:
            raise KeyboardInterrupt

    path = tmp_path / "a.db"
    with registered(good=FakeBackend(clock)):
        with Store.open(path) as store, pytest.raises(KeyboardInterrupt):
            run(clock, store=store, observer=Stops())
        with Store.open(path) as store:
            assert [m.num_tokens for m in store.measurements(PROBLEM)] == [1]
            (unfinished,) = store.sweeps()
            assert unfinished.finished is None
            log = Log()
            run(clock, store=store, observer=log)
            assert [m.num_tokens for m in log.resumed] == [1]
            assert [m.num_tokens for m in log.fresh] == [8]
            assert store.sweeps()[-1].finished is not None


def test_a_sweep_killed_hard_goes_on_where_it_was(tmp_path: Path) -> None:
    """Ten shapes, the process killed after seven: seven are kept, three are measured."""
    script = tmp_path / "sweep.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys
            import torch
            from dataclasses import replace
            from autosel.store import Store
            from autosel.tune_types import Observer
            import pytest
            from tests.fakes import PROBLEM, Clock, FakeBackend, judge_one_case, prove_quickly
            from tests.fakes import registered
            from tests.test_tune import run

            torch.set_num_threads(1)
            patch = pytest.MonkeyPatch()
            judge_one_case(patch)
            prove_quickly(patch)
            path, kill_after = sys.argv[1], int(sys.argv[2])
            seen = {"fresh": 0, "resumed": 0}

            class Counts(Observer):
                def measured(self, measurement, resumed):
                    seen["resumed" if resumed else "fresh"] += 1

                def decided(self, decision):
                    if seen["fresh"] == kill_after:
                        os.kill(os.getpid(), 9)

            clock = Clock()
            with Store.open(path, strict=True) as store, registered(good=FakeBackend(clock)):
                for width in range(1, 11):
                    problem = replace(PROBLEM, intermediate_size=16 * width)
                    run(clock, problem=problem, store=store, observer=Counts(), token_counts=(2,))
            print(seen["fresh"], seen["resumed"])
            """
        ),
        encoding="utf-8",
    )
    root = str(Path(__file__).resolve().parent.parent)

    def start(kill_after: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), str(tmp_path / "a.db"), str(kill_after)]
        return subprocess.run(
            command, cwd=root, env={"PYTHONPATH": root, "PATH": ""}, capture_output=True,
            text=True, timeout=200, check=False,
        )  # fmt: skip

    killed = start(7)
    assert killed.returncode == -9, killed.stderr
    again = start(-1)
    assert again.returncode == 0, again.stderr
    assert again.stdout.split() == ["3", "7"]


def test_weights_that_cannot_be_read_end_the_sweep_and_store_nothing() -> None:
    class Broken(RandomSource):
        def load(self, device: Any = "cpu") -> CanonicalExperts:
            raise CheckpointError("model.safetensors: damaged")

    clock = Clock()
    settings = SweepSettings((1,), backends=("good",), timing=QUICK)
    with Store.open(":memory:") as store, registered(good=FakeBackend(clock)):
        with pytest.raises(CheckpointError, match="damaged"):
            sweep(Broken(PROBLEM), settings, device=CPU, store=store, timer=clock)
        assert store.measurements() == []
        assert store.decisions() == []


# ---------------------------------------------------------------------------- tokens, routings


def test_no_tokens_are_never_timed_or_stored() -> None:
    clock = Clock()
    with Store.open(":memory:") as store, registered(good=FakeBackend(clock)):
        result = run(clock, store=store, token_counts=(0, 4))
        assert {m.num_tokens for m in store.measurements()} == {4}
    assert result.decision(tokens=0) == result.decision(tokens=4)
    with pytest.raises(AutoselError, match="token_counts"):
        SweepSettings(token_counts=(-1,))
    with registered(good=FakeBackend(clock)), pytest.raises(AutoselError, match="token counts"):
        run(clock, token_counts=(0,))


def test_decisions_for_different_routings_stand_side_by_side() -> None:
    """Two fakes whose order depends on how many experts are hit."""
    clock = Clock()

    def by_experts(routing: Routing, params: Params) -> float:
        return 40.0 * len(routing.topk_ids.unique())

    fakes = {"dense": FakeBackend(clock, 100.0), "sparse": FakeBackend(clock, by_experts)}
    with Store.open(":memory:") as store, registered(**fakes):
        winners = {
            kind: run(clock, store=store, token_counts=(64,), routing=kind).decision(64)
            for kind in ("uniform", "zipf", "one_hot")
        }
        stored = {d.routing: d.winner.backend for d in store.decisions(PROBLEM)}
    assert winners["uniform"].winner.backend == "dense"
    assert winners["one_hot"].winner.backend == "sparse"
    assert stored == {kind: d.winner.backend for kind, d in winners.items()}
    assert {d.routing for d in winners.values()} == {"uniform", "zipf", "one_hot"}
    with registered(good=FakeBackend(clock)), pytest.raises(AutoselError, match="routing kind"):
        run(clock, routing="fancy")


def test_noise_never_changes_the_winner_and_the_tie_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two candidates of 100 us with 5 % noise, tuned twenty times."""
    clock = Clock()
    rng = random.Random(7)
    judge_one_case(monkeypatch)

    def noisy(routing: Routing, params: Params) -> float:
        return 100.0 * rng.gauss(1.0, 0.05)

    winners = set()
    with registered(b=FakeBackend(clock, noisy), a=FakeBackend(clock, noisy)):
        for seed in range(20):
            result = run(clock, token_counts=(2,), seed=seed)
            winners.add(result.decision(2).winner.key)
            assert result.decision(2).tie
            assert "tie" in result.decision(2).why
    assert len(winners) == 1


def test_nothing_usable_is_said_and_no_winner_is_stored() -> None:
    clock = Clock()
    fakes = {
        "wrong": FakeBackend(clock, spoil=lambda x, out, packed: out.mul_(2)),
        "no": FakeBackend(clock, supports=lambda: Support.no(Reason("bits", "4", "8"))),
    }
    with Store.open(":memory:") as store, registered(**fakes):
        result = run(clock, store=store, token_counts=(1,))
        assert store.decisions() == []
        assert len(store.measurements()) == 2
    assert result.decisions == ()
    assert len(result.rejected(1)) == 2
    with pytest.raises(NothingUsableError, match="bits: found 4, required 8"):
        result.decision(1)


def test_eight_bit_activations_win_only_when_allowed() -> None:
    clock = Clock()
    fakes = {"w4a8": FakeBackend(clock, 10.0, accuracy="a8"), "exact": FakeBackend(clock, 100.0)}
    with registered(**fakes):
        shy = run(clock, token_counts=(4,)).decision(4)
        bold = run(clock, token_counts=(4,), allow_a8=True).decision(4)
    assert shy.winner.backend == "exact"
    assert any(r.candidate.backend == "w4a8" and "would gain" in r.reason for r in shy.rejected)
    assert bold.winner.backend == "w4a8"
    assert bold.accuracy == "a8"


def test_few_local_experts_and_many_slots_can_be_tuned() -> None:
    """128 experts over 64 ranks: two here, four slots a token."""
    problem = replace(PROBLEM, num_experts=128, num_local_experts=2, top_k=4)
    settings = SweepSettings((1, 16), backends=("emulation",), timing=QUICK)
    result = sweep(RandomSource(problem), settings, device=CPU, timer=Clock())
    # The scripted clock stands still, so there is no time; but everything ran and was judged.
    assert {m.num_tokens for m in result.measurements} == {1, 16}
    assert not [m for m in result.measurements if m.status in ("wrong", "failed", "nonfinite")]


# -------------------------------------------------------------------------------- the spaces


def test_a_default_that_nothing_beats_clearly_is_kept() -> None:
    clock = Clock()
    space = Space(default={"tile": 64}, choices={"tile": (16, 32, 64, 128)})
    times = {16: 130.0, 32: 120.0, 64: 100.0, 128: 110.0}
    tuned = FakeBackend(clock, lambda routing, params: times[int(params["tile"] or 0)], space=space)
    with registered(tuned=tuned):
        result = run(clock, token_counts=(4,))
    assert result.decision(4).winner.params_dict == {"tile": 64}
    assert len(result.measurements) == 4
    times[32] = 50.0
    with registered(tuned=tuned):
        assert run(clock, token_counts=(4,)).decision(4).winner.params_dict == {"tile": 32}


def test_illegal_settings_are_never_run_and_an_illegal_default_is_told() -> None:
    """Shared memory: 147456 bytes wanted where 101376 are."""
    clock = Clock()
    ran: set[int] = set()

    def legal(params: Params) -> Reason | None:
        need = 18432 * int(params["stages"] or 0)
        return Reason("shared memory", f"{need} bytes", "101376") if need > 101376 else None

    space = Space(default={"stages": 8}, choices={"stages": (2, 4, 8)}, constraint=legal)
    fake = FakeBackend(clock, space=space, before=lambda p: ran.add(int(p["stages"] or 0)))
    with registered(fake=fake):
        result = run(clock, token_counts=(4,))
    assert ran == {2, 4}
    (refused,) = [m for m in result.measurements if m.status == "unsupported"]
    assert refused.candidate.params_dict == {"stages": 8}
    assert "147456" in refused.reason
    assert "101376" in refused.reason


def test_a_large_space_is_searched_and_its_best_is_timed_in_full() -> None:
    clock = Clock()
    space = Space(
        default={"m": 0, "n": 0},
        choices={"m": tuple(range(12)), "n": tuple(range(12))},
        constraint=lambda p: Reason("m", "11", "at most 10") if p["m"] == 11 else None,
    )
    ran: list[Params] = []

    def us(routing: Routing, params: Params) -> float:
        ran.append(dict(params))
        if params["n"] == 3:
            raise RuntimeError("misaligned")
        return 50.0 + 10 * abs(int(params["m"] or 0) - 7) + 5 * abs(int(params["n"] or 0) - 9)

    fake = FakeBackend(clock, us, space=space)
    with Store.open(":memory:") as store, registered(fake=fake):
        result = run(clock, store=store, token_counts=(4,), trials=24)
        log = Log()
        run(clock, store=store, token_counts=(4,), trials=24, observer=log)
    assert log.fresh == []
    good = [m for m in result.measurements if m.status == "ok"]
    assert all(len(m.times_us) == 12 for m in good), "finalists are timed in full"
    assert len(good) <= tune_search.FINALISTS + 1
    assert any(m.candidate.params_dict == {"m": 0, "n": 0} for m in good), "the default is there"
    assert all(p["m"] != 11 for p in ran)
    failed = [m for m in result.measurements if m.status == "failed"]
    assert failed
    assert all("misaligned" in m.reason for m in failed)
    # 121 legal points that run, of 50 to 165 us; the default takes 165.
    assert result.decision(4).winner_us <= 90


def test_backends_are_chosen_by_name_and_unknown_names_are_refused() -> None:
    clock = Clock()
    with registered(one=FakeBackend(clock), two=FakeBackend(clock)):
        result = run(clock, token_counts=(1,), backends=("TWO", "two"))
        assert {m.candidate.backend for m in result.measurements} == {"two"}
        with pytest.raises(AutoselError, match=r"'tow'.*did you mean two"):
            run(clock, backends=("tow",))


# -------------------------------------------------------------------------------- the devices


def test_on_an_old_gpu_everything_is_sorted_out_before_conversion() -> None:
    """Pretend capability 7.0: every built-in GPU backend refuses, nothing is loaded."""
    device = Device(kind="cuda", name="Tesla V100", capability=(7, 0), memory_bytes=16 << 30)
    settings = SweepSettings((1,), backends=("marlin",), timing=QUICK)
    log = Log()
    result = sweep(RandomSource(PROBLEM), settings, device=device, observer=log, timer=Clock())
    assert {m.status for m in result.measurements} == {"unsupported"}
    assert not any(event.startswith("load") for event in log.events)
    with pytest.raises(NothingUsableError):
        result.decision(1)


def test_an_unnamed_device_matches_nothing_stored() -> None:
    clock = Clock()
    unnamed = replace(CPU, name="")
    with Store.open(":memory:") as store, registered(good=FakeBackend(clock)):
        for _ in range(2):
            log = Log()
            run(clock, store=store, token_counts=(1,), device=unnamed, observer=log)
            assert len(log.fresh) == 1
            assert log.resumed == []
