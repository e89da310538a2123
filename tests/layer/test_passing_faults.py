"""A full disk, a device in trouble, memory that was short: the next candidate serves this time, and
the next start begins with the winner again."""

import errno

import pytest
import torch

from autosel import FusedMoE
from autosel.device import detect
from autosel.layer_choice import Chooser, Fault, WithdrawnWarning
from autosel.ranks_choice import _fault_dict
from autosel.sources import RandomSource
from autosel.store import Store
from tests.fakes import PROBLEM, Clock, FakeBackend, PlainLayout, registered
from tests.layer.decided import store_times
from tests.layer.test_choice import call, is_right, named, served

MACHINE = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EMFILE, "Too many open files"),
    OSError(errno.EIO, "Input/output error"),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
]
MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("std::bad_alloc"),
]


class Trouble:
    def __init__(self):
        self.error = None

    def __call__(self, *_):
        if self.error is not None:
            raise self.error


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "here.db") as opened:
        times = {4: {named("quick"): 10, named("steady"): 30}}
        store_times(opened, PROBLEM, detect("cpu"), times)
        yield opened


def layer_of(store):
    return FusedMoE.from_source(RandomSource(PROBLEM), db=store)


def backends(trouble, step):
    options = {
        "run": {"before": trouble},
        "pack": {"layout": PlainLayout("plain", fault=trouble)},
    }[step]
    return {"quick": FakeBackend(Clock(), **options), "steady": FakeBackend(Clock())}


def is_as_before(store, trouble):
    trouble.error = None
    return {m.status for m in store.measurements()} == {"ok"} and served(layer_of(store)) == [
        ("1+", "quick")
    ]


@pytest.mark.parametrize("step", ["run", "pack"])
@pytest.mark.parametrize("error", [*MACHINE, *MEMORY], ids=repr)
def test_while_the_layer_is_made(error, step, store):
    trouble = Trouble()
    with registered(**backends(trouble, step)):
        trouble.error = error
        with pytest.warns(WithdrawnWarning):
            layer = layer_of(store)
        assert served(layer) != [("1+", "quick")]
        assert is_right(layer)
        assert is_as_before(store, trouble)


@pytest.mark.parametrize("error", MACHINE, ids=repr)
def test_in_a_call(error, store):
    trouble = Trouble()
    with registered(**backends(trouble, "run")):
        layer = layer_of(store)
        trouble.error = error
        with pytest.warns(WithdrawnWarning):
            call(layer)
        assert served(layer) == [("1+", "steady")]
        assert is_as_before(store, trouble)


def test_what_is_the_candidates_own_is_stored_as_before(store):
    trouble = Trouble()
    with registered(**backends(trouble, "run")):
        trouble.error = RuntimeError("no kernel image")
        with pytest.warns(WithdrawnWarning):
            layer_of(store)
        assert not is_as_before(store, trouble)


def test_the_first_rank_does_not_store_it_either(store):
    with registered(**backends(Trouble(), "run")):
        chooser = Chooser(PROBLEM, detect("cpu"), store)
        fault = Fault(chooser.table()[0], "failed", "Too many open files", tell=False)
        assert _fault_dict(fault)["tell"] is False
        with pytest.warns(WithdrawnWarning):
            chooser.settle(fault)
        assert {m.status for m in store.measurements()} == {"ok"}
