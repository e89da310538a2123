"""Which candidate a layer uses: decisions, then what measurements still say, then defaults."""

import itertools
import math
import warnings
from dataclasses import replace

import pytest
import torch

from autosel import FusedMoE, registry
from autosel.core import Candidate, Params, Reason, Support, TokenBucket
from autosel.device import detect
from autosel.errors import NothingUsableError, UnsupportedError
from autosel.interfaces import Space
from autosel.layer_choice import Chooser, WithdrawnWarning
from autosel.reference import moe
from autosel.sources import RandomSource
from autosel.store import Store, StoreWarning
from tests.fakes import PROBLEM, Clock, FakeBackend, PlainLayout, registered
from tests.layer.decided import store_times


@pytest.fixture
def device():
    return detect("cpu")


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "choice.db") as opened:
        yield opened


def fake(**options):
    return FakeBackend(Clock(), **options)


def named(name, layout="plain"):
    return Candidate.of(name, {}, layout)


def layer_of(store, **options):
    return FusedMoE.from_source(RandomSource(PROBLEM), db=store, **options)


def served(layer):
    return [(choice.bucket.label, choice.candidate.backend) for choice in layer.choices]


def call(layer, tokens=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, PROBLEM.hidden_size, generator=generator).to(torch.bfloat16)
    ids = torch.rand(tokens, 4, generator=generator).topk(2).indices
    weights = torch.rand(tokens, 2, generator=generator)
    return x, ids, weights, layer(x, ids, weights)


def is_right(layer, tokens=3):
    from autosel.core import Routing

    x, ids, weights, out = call(layer, tokens)
    ref = moe(x, RandomSource(PROBLEM).load(), Routing(ids, weights))
    return float((out.double() - ref).norm() / ref.norm()) < 0.01


def test_each_bucket_runs_its_own_winner(store, device):
    with registered(quick=fake(), steady=fake()):
        quick, steady = named("quick"), named("steady")
        store_times(
            store, PROBLEM, device, {4: {quick: 10, steady: 20}, 64: {quick: 90, steady: 50}}
        )
        layer = layer_of(store)
        assert served(layer) == [("1-16", "quick"), ("17+", "steady")]
        for tokens, name in ((1, "quick"), (16, "quick"), (17, "steady"), (500, "steady")):
            before = {n: registry.get(n).calls for n in ("quick", "steady")}
            assert is_right(layer, tokens)
            ran = [n for n in before if registry.get(n).calls > before[n]]
            assert ran == [name], tokens


def test_untuned_layers_get_the_documented_default(store):
    layer = layer_of(store)
    assert {choice.tuned for choice in layer.choices} == {False}
    assert layer.choices[0].bucket.low == 1
    assert layer.choices[-1].bucket.high is None
    assert "not tuned (the database is empty)" in layer.choices[0].why
    assert is_right(layer)


def test_default_is_the_first_that_supports_the_layer(store, device, monkeypatch):
    monkeypatch.setattr("autosel.native.compiler", lambda: None)
    assert served(layer_of(store)) == [("1+", "emulation")]


def test_decisions_of_other_software_are_not_used_and_the_reason_says_what_changed(store, device):
    with registered(quick=fake()):
        older = replace(device, versions=(("torch", "1.0"),))
        store_times(store, PROBLEM, older, {4: {named("quick"): 10}})
        layer = layer_of(store)
    assert not layer.choices[0].tuned
    assert "versions.torch" in layer.choices[0].why


def test_decisions_under_another_routing_are_not_used(store, device):
    with registered(quick=fake()):
        store_times(store, PROBLEM, device, {4: {named("quick"): 10}}, routing="one_hot")
        assert not layer_of(store).choices[0].tuned


@pytest.mark.parametrize("allowed", [False, True])
def test_8_bit_activations_only_where_allowed(store, device, allowed):
    with registered(narrow=fake(accuracy="a8"), exact=fake()):
        narrow, exact = named("narrow"), named("exact")
        times = {4: {narrow: 10, exact: 20}}
        store_times(store, PROBLEM, device, times, allow_a8=True, a8=[narrow])
        layer = layer_of(store, allow_a8=allowed)
        assert served(layer) == [("1+", "narrow" if allowed else "exact")]


def layouts_fakes():
    return {
        "small": fake(layout=PlainLayout("a")),
        "large": fake(layout=PlainLayout("b")),
    }


def test_one_layout_is_resident_the_one_that_loses_least(store, device):
    with registered(**layouts_fakes()):
        small, large = named("small", "a"), named("large", "b")
        times = {4: {small: 10, large: 11}, 64: {small: 100, large: 50}}
        store_times(store, PROBLEM, device, times)
        layer = layer_of(store)
        assert served(layer) == [("1-16", "large"), ("17+", "large")]
        assert list(layer.resident) == ["b"]
        assert "small is" in layer.choices[0].why
        assert "another layout" in layer.choices[0].why
        everything = layer_of(store, layouts="all")
        assert served(everything) == [("1-16", "small"), ("17+", "large")]
        assert sorted(everything.resident) == ["a", "b"]


def test_no_layout_for_all_buckets_keeps_the_winners(store, device):
    with registered(**layouts_fakes()):
        times = {4: {named("small", "a"): 10}, 64: {named("large", "b"): 50}}
        store_times(store, PROBLEM, device, times)
        assert served(layer_of(store)) == [("1-16", "small"), ("17+", "large")]


def test_layouts_are_packed_once_and_the_source_is_let_go(store, device):
    log = []
    with registered(quick=fake(layout=PlainLayout("plain", log)), steady=fake()):
        times = {4: {named("quick"): 10}, 64: {named("quick"): 90, named("steady"): 50}}
        store_times(store, PROBLEM, device, times)
        layer_of(store)
    assert log == ["plain"]


class Faulty(FakeBackend):
    """Fails in the step that a test names."""

    step = "pack"

    def run(self, packed, x, routing, params: Params, out):
        if self.step == "first run" or (self.step == "run" and x.shape[0] > 2):
            raise RuntimeError("this kernel no longer compiles")
        out = super().run(packed, x, routing, params, out)
        return out.mul_(2) if self.step == "wrong" else out


def faulty(step):
    def refuse():
        if step == "pack":
            raise RuntimeError("this layout no longer packs")

    backend = Faulty(
        Clock(),
        layout=PlainLayout("other", fault=refuse),
        supports=lambda: (
            Support.no(Reason("driver", "1", "2")) if step == "unsupported" else Support.yes()
        ),
    )
    backend.step = step
    return backend


@pytest.mark.parametrize("step", ["pack", "first run", "wrong", "unsupported"])
def test_a_winner_that_fails_is_withdrawn_once(step, store, device):
    with registered(broken=faulty(step), second=fake(), third=fake()):
        times = {4: {named("broken", "other"): 10, named("second"): 30, named("third"): 90}}
        store_times(store, PROBLEM, device, times)
        with pytest.warns(WithdrawnWarning, match="broken is withdrawn") as caught:
            layer = layer_of(store)
        assert len([w for w in caught if w.category is WithdrawnWarning]) == 1
        assert served(layer) == [("1+", "second")]
        assert layer.choices[0].tuned
        assert is_right(layer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the database was told: it does not happen again
            assert served(layer_of(store)) == [("1+", "second")]
        kept = store.measurements(PROBLEM, device, candidate=named("broken", "other"))
        assert "ok" not in kept[-1].status


def test_values_that_do_not_fit_withdraw_the_winner_for_this_layer_alone(store, device):
    refusing = True

    def refuse():
        if refusing:
            raise UnsupportedError("scale: found 70000, expected at most 65504")

    with registered(narrow=fake(layout=PlainLayout("other", fault=refuse)), second=fake()):
        times = {4: {named("narrow", "other"): 10, named("second"): 30}}
        store_times(store, PROBLEM, device, times)
        with pytest.warns(WithdrawnWarning, match="found 70000"):
            assert served(layer_of(store)) == [("1+", "second")]
        refusing = False  # another layer of the same problem
        assert served(layer_of(store)) == [("1+", "narrow")]


def test_a_winner_that_fails_in_a_call_hands_the_call_over(store, device):
    with registered(broken=faulty("run"), second=fake()):
        times = {4: {named("broken", "other"): 10, named("second"): 30}}
        store_times(store, PROBLEM, device, times)
        layer = layer_of(store)
        assert served(layer) == [("1+", "broken")]
        with pytest.warns(WithdrawnWarning, match="run with 5 tokens: RuntimeError"):
            assert is_right(layer, 5)
        assert served(layer) == [("1+", "second")]
        assert list(layer.resident) == ["plain"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert is_right(layer, 5)
            assert served(layer_of(store)) == [("1+", "second")]


def test_threads_that_meet_a_failing_winner_withdraw_it_once(store, device, tmp_path):
    """Each call is answered rightly, whoever comes first."""
    import threading

    path = store.path
    with registered(broken=faulty("run"), second=fake()):
        times = {4: {named("broken", "other"): 10, named("second"): 30}}
        store_times(store, PROBLEM, device, times)
        layer = FusedMoE.from_source(RandomSource(PROBLEM), db=path)
        right: list[bool] = []
        threads = [
            threading.Thread(target=lambda: right.append(is_right(layer, 5))) for _ in range(8)
        ]

        def run_all():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        with pytest.warns(WithdrawnWarning) as caught:
            run_all()
        assert right == [True] * 8
        assert len(caught) == 1
        assert served(layer) == [("1+", "second")]


def test_out_of_memory_in_a_call_is_the_callers_and_nothing_is_withdrawn(store, device):
    def starve(params):
        if starved:
            raise torch.OutOfMemoryError("CUDA out of memory")

    starved = False
    with registered(hungry=fake(before=starve)):
        store_times(store, PROBLEM, device, {4: {named("hungry"): 10}})
        layer = layer_of(store)
        starved = True
        with pytest.raises(torch.OutOfMemoryError):
            call(layer)
        starved = False
        assert is_right(layer)
        assert served(layer) == [("1+", "hungry")]


def test_a_wrong_call_is_no_fault_of_the_candidate(store, device):
    from autosel.errors import AutoselError

    with registered(quick=fake()):
        store_times(store, PROBLEM, device, {4: {named("quick"): 10}})
        layer = layer_of(store)
        x, ids, weights, _ = call(layer)
        with pytest.raises(AutoselError, match="dtype"):
            layer(x.float(), ids, weights)
        assert served(layer) == [("1+", "quick")]


def test_all_stored_ones_fail_and_the_default_serves(store, device):
    with registered(one=faulty("pack"), two=faulty("first run")):
        times = {4: {named("one", "other"): 10, named("two", "other"): 20}}
        store_times(store, PROBLEM, device, times)
        with pytest.warns(WithdrawnWarning) as caught:
            layer = layer_of(store)
        assert len(caught) == 2
        assert not layer.choices[0].tuned
        assert is_right(layer)


def test_when_nothing_is_left_every_reason_is_named(store, device, monkeypatch):
    def broken(self, experts):
        raise RuntimeError("no memory for this joke")

    monkeypatch.setattr("autosel.layouts.panel16.Panel16Layout.pack", broken)
    monkeypatch.setattr("autosel.layouts.dense.Dense.pack", broken)
    with (
        pytest.warns(WithdrawnWarning),
        pytest.raises(NothingUsableError, match=r"emulation failed: .*joke"),
    ):
        layer_of(store)


def test_a_default_that_the_weights_do_not_suit_is_passed_over_without_a_warning(store):
    def refuse(self, experts):
        raise UnsupportedError("group: found 3, expected 4")

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr("autosel.layouts.panel16.Panel16Layout.pack", refuse)
        layer = layer_of(store)
    assert served(layer) == [("1+", "emulation")]
    assert "cpu_native unsupported: group: found 3, expected 4" in layer.choices[0].why


def test_a_winner_whose_layout_changed_is_withdrawn(store, device):
    with registered(moved=fake(layout=PlainLayout("new"))):
        store_times(store, PROBLEM, device, {4: {named("moved", "old"): 10}})
        with pytest.warns(WithdrawnWarning, match="found new, expected old"):
            assert not layer_of(store).choices[0].tuned


def test_a_backend_that_is_gone_is_withdrawn(store, device):
    store_times(store, PROBLEM, device, {4: {named("left_town"): 10}})
    with pytest.warns(WithdrawnWarning, match="left_town"):
        assert not layer_of(store).choices[0].tuned


def test_a_database_that_cannot_be_written_is_named_and_does_not_stop(tmp_path, device):
    path = tmp_path / "mine.db"
    with registered(broken=faulty("pack"), second=fake()):
        with Store.open(path) as store:
            times = {4: {named("broken", "other"): 10, named("second"): 30}}
            store_times(store, PROBLEM, device, times)
        closed = Store.open(path)
        chooser = Chooser(PROBLEM, device, closed)
        closed.close()
        with pytest.warns(WithdrawnWarning, match="the database could not be told"):
            chooser.withdraw(chooser.table()[0], "failed", "it broke")
        assert [choice.candidate for choice in chooser.table()] == [named("second")]


def test_stopped_sweeps_are_decided_from_what_they_measured(store, device):
    with registered(quick=fake(), steady=fake()):
        quick, steady = named("quick"), named("steady")
        with Store.open(":memory:") as other:
            store_times(other, PROBLEM, device, {4: {quick: 10, steady: 20}})
            store.add_measurements(other.measurements())
        layer = layer_of(store)
        assert served(layer) == [("1+", "quick")]
        assert layer.choices[0].tuned


@pytest.mark.parametrize(
    ("covered", "gaps"),
    [
        ([], [(1, None)]),
        ([(1, 8)], [(9, None)]),
        ([(5, 8)], [(1, 4), (9, None)]),
        ([(5, 8), (20, None)], [(1, 4), (9, 19)]),
        ([(1, None)], []),
    ],
)
def test_defaults_fill_exactly_the_gaps(covered, gaps, store, device):
    with registered(quick=fake()):
        decisions = []
        for low, high in covered:
            with Store.open(":memory:") as other:
                (d,) = store_times(other, PROBLEM, device, {low: {named("quick"): 10}})
            decisions.append(replace(d, bucket=TokenBucket(low, high, low)))
        for d in decisions:
            store.add_decision(d, device, (("cache", "cold"),))
        table = Chooser(PROBLEM, device, store).table()
    assert table[0].bucket.low == 1
    assert table[-1].bucket.high is None
    for a, b in itertools.pairwise(table):
        assert b.bucket.low == a.bucket.high + 1
    default = [(c.bucket.low, c.bucket.high) for c in table if not c.tuned]
    tuned = [(c.bucket.low, c.bucket.high) for c in table if c.tuned]
    assert tuned == covered
    covered_by_default = {m for low, high in default for m in range(low, (high or 40) + 1)}
    expected = {m for low, high in gaps for m in range(low, (high or 40) + 1)}
    assert covered_by_default == expected


def test_default_settings_follow_the_token_count(store, device, monkeypatch):
    """Where a default backend's settings depend on the tokens, the default has several buckets."""

    class Sized(FakeBackend):
        def space(self, problem, num_tokens, device):
            return Space({"block": 16 if num_tokens < 64 else 64})

    with registered(sized=Sized(Clock())):
        monkeypatch.setattr("autosel.layer_choice.DEFAULTS", ("sized",))
        table = Chooser(PROBLEM, device, store).table()
    assert [dict(c.candidate.params)["block"] for c in table] == [16, 64]
    assert [c.bucket.label for c in table] == ["1-32", "33+"]
    assert {c.candidate.layout for c in table} == {"plain"}


def test_an_unknown_device_gets_nothing_stored(store, device):
    nameless = replace(device, name=" ")
    with registered(quick=fake()):
        store_times(store, PROBLEM, nameless, {4: {named("quick"): 10}})
        assert not Chooser(PROBLEM, nameless, store).table()[0].tuned


def test_the_chosen_layout_minimises_the_geometric_mean(store, device):
    """A planted answer: a loses 1.1 at one count, b loses 1.05 at each of two."""
    with registered(**layouts_fakes()):
        a, b = named("small", "a"), named("large", "b")
        times = {
            1: {a: 100, b: 121},
            32: {a: 130, b: 100},
            1024: {a: 100, b: 101.5},
        }
        store_times(store, PROBLEM, device, times)
        table = Chooser(PROBLEM, device, store).table()
    losses = {
        "small": math.log(1.0) + math.log(1.3) + math.log(1.0),
        "large": math.log(1.21) + math.log(1.0) + math.log(1.015),
    }
    assert {c.candidate.backend for c in table} == {min(losses, key=losses.get)}


def test_an_unreadable_database_still_gives_a_layer(tmp_path):
    path = tmp_path / "folder.db"
    path.mkdir()
    with pytest.warns(StoreWarning):
        layer = FusedMoE.from_source(RandomSource(PROBLEM), db=path)
    assert not layer.choices[0].tuned
