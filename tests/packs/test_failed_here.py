"""What the user's database knows to fail here is not chosen from a site's database or a pack, nor
tried again at every start."""

import warnings
from dataclasses import replace

import pytest

from autosel import FusedMoE, registry
from autosel.core import Rejected
from autosel.device import detect
from autosel.explanation import explain
from autosel.layer_choice import Chooser, WithdrawnWarning
from autosel.sources import RandomSource
from autosel.store import Store
from autosel.tiers import open_tiers
from tests.fakes import PROBLEM, Clock, FakeBackend, registered
from tests.layer.decided import store_times
from tests.packs.made import FAST, MACHINE, SLOW, entry, pack, row
from tests.packs.test_tiers import OTHERS, ask, fill, put

FAILED = {"status": "failed", "reason": "it raised", "times_us": (), "errors": None, "timing": ()}


@pytest.fixture(autouse=True)
def _backends():
    names = ("quick", "steady", "third", "fourth", "fifth")
    with registered(**{name: FakeBackend(Clock()) for name in names}):
        yield


def fails(tmp_path, candidate=FAST, tokens=4):
    path = tmp_path / "user" / "autosel.db"
    path.parent.mkdir(exist_ok=True)
    with Store.open(path) as store:
        store.add_measurement(row(candidate, tokens=tokens, **FAILED))


def test_a_sites_winner_gives_way_to_the_next(tmp_path):
    fill(tmp_path / "site" / "autosel.db", FAST)
    assert ask(tmp_path)[1].decision.winner == FAST
    fails(tmp_path)
    answers, found = ask(tmp_path)
    assert found.origin.tier == "site"
    assert found.decision.winner == SLOW
    site = next(a for a in answers.usable if a.origin.tier == "site")
    assert {m.candidate for m in site.measurements if m.status == "ok"} == {SLOW}
    with open_tiers() as tiers:
        assert explain(tiers, PROBLEM, MACHINE, 4).used == SLOW


def test_a_site_of_which_nothing_is_left_does_not_answer(tmp_path):
    fill(tmp_path / "site" / "autosel.db", FAST)
    fails(tmp_path)
    fails(tmp_path, SLOW)
    assert ask(tmp_path)[1] is None
    assert not Chooser(PROBLEM, MACHINE, tmp_path / "user" / "autosel.db").table()[0].tuned


def test_a_failure_that_the_site_knows_is_the_sites_own_affair(tmp_path):
    """Only the user's database is about what happened here."""
    fill(tmp_path / "user" / "autosel.db", FAST)
    with Store.open(tmp_path / "site.db") as store:
        store.add_measurement(row(**FAILED))
    (tmp_path / "site").mkdir()
    (tmp_path / "site.db").rename(tmp_path / "site" / "autosel.db")
    assert ask(tmp_path)[1].decision.winner == FAST


@pytest.mark.parametrize("samples", [True, False])
def test_who_failed_is_no_second_either(tmp_path, samples):
    """A layer that keeps one copy takes the best of that layout: not one that failed here."""
    made = entry(samples=samples)
    second = Rejected(OTHERS[0], "ok", "slower", time_us=11.0)
    decisions = tuple(replace(d, rejected=(*d.rejected, second)) for d in made.decisions)
    measured = made.measured
    if samples:
        extra = replace(measured[0], row=row(OTHERS[0], 11.0, 4))
        measured = (*measured, extra)
    put(tmp_path, "model", pack(replace(made, decisions=decisions, measured=measured)))
    fails(tmp_path, OTHERS[0])
    answers, found = ask(tmp_path)
    assert found.decision.winner == FAST
    state = {r.candidate: r.status for r in found.decision.rejected}
    assert state[OTHERS[0]] == "failed"
    rows = [m for a in answers.usable for m in a.measurements if m.candidate == OTHERS[0]]
    assert {m.status for m in rows if m.num_tokens == 4} == {"failed"}


def test_a_layer_tries_a_sites_winner_once(tmp_path):
    def before(params):
        raise RuntimeError("boom")

    device, path = detect("cpu"), tmp_path / "user" / "autosel.db"
    (tmp_path / "site").mkdir()
    path.parent.mkdir(exist_ok=True)
    with Store.open(tmp_path / "site" / "autosel.db") as site:
        times = {4: {FAST: 10, SLOW: 30}, 64: {FAST: 20, SLOW: 50}}
        store_times(site, PROBLEM, device, times)
    registry.get("quick").before = before
    with pytest.warns(WithdrawnWarning, match="quick is withdrawn"):
        layer = FusedMoE.from_source(RandomSource(PROBLEM), db=path)
    assert {c.candidate for c in layer.choices} == {SLOW}
    with Store.open(path) as store:
        known = len(store.measurements(history=True))
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer = FusedMoE.from_source(RandomSource(PROBLEM), db=path)
        assert {c.candidate for c in layer.choices} == {SLOW}
        assert all(c.tuned for c in layer.choices)
    with Store.open(path) as store:
        assert len(store.measurements(history=True)) == known
