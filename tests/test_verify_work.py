"""How often verification does its work in a sweep: counted, so that nothing is done twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from autosel import error_scale, verify, verify_cases
from autosel.sources import RandomSource
from autosel.timing import TimingSettings
from autosel.trial import Bench
from autosel.tune_types import Observer, SweepSettings
from autosel.verify_cases import Case, make_cases
from tests.fakes import CPU, PROBLEM, Clock, FakeBackend, PlainLayout, registered

TOKENS = (5, 11)  # neither is a token count of the judged cases


class Counted:
    """What was judged, audited and called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.judged: list[tuple[int, Any]] = []
        self.audits = 0
        self.calls: Counter[str] = Counter()
        judge, audit, guarded = error_scale.judge, verify.audit, verify.run_guarded

        def counted_judge(x: torch.Tensor, *args: Any, **options: Any) -> Any:
            self.judged.append((len(x), options["dtype"]))
            return judge(x, *args, **options)

        def counted_audit(*args: Any, **options: Any) -> Any:
            self.audits += 1
            return audit(*args, **options)

        def counted_call(backend: Any, packed: Any, params: Any, case: Case, *args: Any) -> Any:
            self.calls[f"{backend.name}: {case.name}"] += 1
            return guarded(backend, packed, params, case, *args)

        for module in (error_scale, verify_cases):
            monkeypatch.setattr(module, "judge", counted_judge)
        monkeypatch.setattr(verify, "audit", counted_audit)
        monkeypatch.setattr(verify, "run_guarded", counted_call)


def bench(clock: Clock, **options: Any) -> Bench:
    settings = SweepSettings(TOKENS, timing=TimingSettings(rounds=1, samples_per_round=1))
    source = RandomSource(PROBLEM)
    return Bench(source, settings, CPU, TOKENS, clock, Observer(), **options)


def test_each_case_runs_twice_and_a_layout_is_audited_once_for_who_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the number of token counts, and of candidates that read a layout."""
    counted, clock = Counted(monkeypatch), Clock()
    fakes = {
        "one": FakeBackend(clock),
        "two": FakeBackend(clock),
        "other": FakeBackend(clock, layout=PlainLayout("other")),
    }
    with registered(**fakes):
        made = bench(clock)
        for tokens in TOKENS:
            for backend in fakes.values():
                row = made.attempt(made.candidate(backend, {}), tokens)
                assert row.status == "ok"
    assert counted.audits == 0
    names = [case.name for case in make_cases(RandomSource(PROBLEM).load())]
    expected = {f"{backend}: {name}": 2 for backend in fakes for name in names}
    assert counted.calls == expected
    assert [backend.calls for backend in fakes.values()] == [
        # One more for each token count, and none for the case without tokens.
        len(TOKENS) + 2 * (len(names) - 1)
    ] * 3
    with registered(**fakes):
        for backend in fakes.values():
            for _ in range(2):
                row = made.row(made.candidate(backend, {}), TOKENS[0], "ok", "")
                assert made.prove(row).certificate.status == "ok"
    assert counted.audits == 2


def test_right_results_are_worked_out_once_and_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass for what is timed and for the cases; float64 is for weights that need it, and
    tokens of nothing but zeros are no such reason."""
    counted, clock = Counted(monkeypatch), Clock()
    taken: list[Any] = []

    def take(make: Any) -> Any:
        taken.append(make() if not taken else taken[0])
        return taken[0]

    for _ in range(2):  # a fresh worker takes what the one before has worked out
        made = bench(clock, cases=take)
        with registered(fake=FakeBackend(clock)):
            made.load()
            made.load()
    cases = sum(len(case.x) for case in taken[0][1])
    assert counted.judged == [(sum(TOKENS) + cases, torch.float32)]


def test_numbers_too_small_for_float32_are_judged_in_float64() -> None:
    experts = RandomSource(PROBLEM).load()
    experts.w2.scales.mul_(2.0**-100)
    (case,) = (case for case in make_cases(experts) if case.name == "uniform M=64")
    assert case.judged.reference.dtype == torch.float64
    scale = case.judged.scales["exact"]
    assert bool((scale > 0).all())
