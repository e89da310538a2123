"""A shutdown or a time limit in the middle of a layer's work reaches the caller, and costs nobody
their place."""

import signal
import sys

import pytest
import torch

from autosel import FusedMoE, sweep
from autosel.device import detect
from autosel.layer_choice import WithdrawnWarning
from autosel.sources import RandomSource
from autosel.store import Store
from autosel.timing import TimingSettings
from autosel.tune_types import SweepSettings
from tests.fakes import PROBLEM, Clock, FakeBackend, PlainLayout, judge_one_case, registered
from tests.layer.decided import store_times
from tests.layer.test_choice import call, named, served


class RequestTimeoutError(Exception):
    pass


def limit(number, frame):
    raise RequestTimeoutError("the request took too long")


def shutdown(*given):
    sys.exit(0)


HANDLERS = {"shutdown": (shutdown, SystemExit), "time limit": (limit, RequestTimeoutError)}


@pytest.fixture(params=HANDLERS)
def raised(request):
    """What comes out where the signal arrives."""
    handler, error = HANDLERS[request.param]
    before = signal.signal(signal.SIGUSR2, handler)
    yield error
    signal.signal(signal.SIGUSR2, before)


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "here.db") as opened:
        yield opened


class Signal:
    """Arrives once, in the step that a test names."""

    def __init__(self):
        self.due = False

    def __call__(self, *_):
        if self.due:
            self.due = False
            signal.raise_signal(signal.SIGUSR2)


def backends(arrives, step):
    """The winner, in whose code the signal arrives, and the next one."""
    options = {
        "run": {"before": arrives},
        "pack": {"layout": PlainLayout("plain", fault=arrives)},
        "supports": {"supports": lambda: (arrives(), FakeBackend(Clock()).support())[1]},
    }[step]
    return {"quick": FakeBackend(Clock(), **options), "steady": FakeBackend(Clock())}


def layer_of(store):
    return FusedMoE.from_source(RandomSource(PROBLEM), db=store)


def nothing_stored(store):
    return {m.status for m in store.measurements()} == {"ok"}


@pytest.mark.parametrize("step", ["run", "pack", "supports"])
def test_while_the_layer_is_made(step, raised, store):
    arrives = Signal()
    with registered(**backends(arrives, step)):
        store_times(store, PROBLEM, detect("cpu"), {4: {named("quick"): 10, named("steady"): 30}})
        arrives.due = True
        with pytest.raises(raised):
            layer_of(store)
        assert nothing_stored(store)
        assert served(layer_of(store)) == [("1+", "quick")]


def test_in_a_call(raised, store):
    arrives = Signal()
    with registered(**backends(arrives, "run")):
        store_times(store, PROBLEM, detect("cpu"), {4: {named("quick"): 10, named("steady"): 30}})
        layer = layer_of(store)
        arrives.due = True
        with pytest.raises(raised):
            call(layer)
        assert nothing_stored(store)
        assert served(layer) == [("1+", "quick")]
        call(layer)


def test_an_exit_in_a_call_is_the_programs(store):
    """Whoever raised it: a process that serves a model must not go on after ``sys.exit``."""
    leaving = []

    def before(params):
        if leaving:
            raise SystemExit(0)

    with registered(quick=FakeBackend(Clock(), before=before), steady=FakeBackend(Clock())):
        store_times(store, PROBLEM, detect("cpu"), {4: {named("quick"): 10, named("steady"): 30}})
        layer = layer_of(store)
        leaving.append(True)
        with pytest.raises(SystemExit):
            call(layer)
        with pytest.raises(SystemExit):
            layer_of(store)
        assert nothing_stored(store)


def test_a_call_after_a_time_limit_still_finds_who_is_broken(store):
    """The caller tries again while it handles the limit's exception."""
    broken = []

    def before(params):
        if broken:
            raise RuntimeError("no kernel image")

    with registered(quick=FakeBackend(Clock(), before=before), steady=FakeBackend(Clock())):
        store_times(store, PROBLEM, detect("cpu"), {4: {named("quick"): 10, named("steady"): 30}})
        layer = layer_of(store)
        broken.append(True)
        previous = signal.signal(signal.SIGUSR2, limit)
        try:
            signal.raise_signal(signal.SIGUSR2)
        except RequestTimeoutError:
            with pytest.warns(WithdrawnWarning, match="no kernel image"):
                call(layer)
        finally:
            signal.signal(signal.SIGUSR2, previous)
        assert served(layer) == [("1+", "steady")]


@pytest.mark.parametrize("step", ["run", "pack", "supports"])
def test_in_a_sweep_of_this_process(step, raised, store, monkeypatch):
    judge_one_case(monkeypatch)
    arrives = Signal()
    timing = TimingSettings(rounds=2, samples_per_round=2, limit_s=0.05)
    settings = SweepSettings(timing=timing, isolate=False, token_counts=(4,), backends=("quick",))
    with registered(**backends(arrives, step)):
        arrives.due = True
        with pytest.raises(raised), torch.no_grad():
            sweep(RandomSource(PROBLEM), db=store, settings=settings)
        assert not [m for m in store.measurements() if m.status not in ("ok", "unsupported")]
