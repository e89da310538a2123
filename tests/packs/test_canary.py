"""The check of compatible packs: what it lets pass, what it stops, and that it runs once."""

import warnings
from dataclasses import replace

import pytest
import torch

from autosel import FusedMoE
from autosel.core import Candidate, Device, Support, TokenBucket
from autosel.device import pretend
from autosel.layer_choice import WithdrawnWarning
from autosel.packs import canary, canary_results, content
from autosel.packs.canary import three
from autosel.sources import RandomSource
from autosel.store import Store
from tests.fakes import CPU, PROBLEM, Clock, FakeBackend, registered
from tests.packs.made import FAST, SLOW, entry, pack

MADE_ON = replace(CPU, versions=(("torch", "2.9.0"),))
HERE = replace(CPU, versions=(("torch", "2.9.1"),))
EXPERTS = RandomSource(PROBLEM).load()


def made(**changes):
    return pack(entry(MADE_ON, **changes))


def check(quick, steady, entry_=None, **options):
    clock = quick.clock
    with registered(quick=quick, steady=steady):
        return canary.run(entry_ or made().entries[0], EXPERTS, HERE, timer=clock, **options)


def fakes(us=(10.0, 20.0), **spoilt):
    clock = Clock()
    return FakeBackend(clock, us[0], **spoilt), FakeBackend(clock, us[1])


def test_right_and_fast_passes():
    found = check(*fakes())
    assert found.passed, found.why
    assert "winners are right" in found.why
    assert set(found.figures) == {"4", "32"}
    assert found.figures["4"]["winner_us"] == pytest.approx(10.0, rel=0.01)
    assert found.figures["4"]["runner_up_us"] == pytest.approx(20.0, rel=0.01)


def test_a_winner_that_lost_its_place_stops_it():
    found = check(*fakes((20.0, 10.0)))
    assert not found.passed
    assert "takes 20 us here and steady 10 us" in found.why


def test_within_the_tolerance_the_place_is_kept():
    assert check(*fakes((10.3, 10.0))).passed
    assert not check(*fakes((10.9, 10.0))).passed


def test_a_wrong_winner_stops_it_however_fast():
    quick, steady = fakes((1.0, 100.0), spoil=lambda x, out, packed: out.mul_(1.2))
    found = check(quick, steady)
    assert not found.passed
    assert "wrong" in found.why


def test_a_winner_that_is_wrong_at_large_sizes_only_stops_it():
    """Its timed outputs are judged as well, the last row among them."""

    def spoil(x, out, packed):
        if len(x) == 32:
            out[-1] = 0

    found = check(*fakes(spoil=spoil))
    assert not found.passed
    assert "at 32 tokens" in found.why


def test_nan_stops_it():
    found = check(*fakes(spoil=lambda x, out, packed: out.fill_(torch.nan)))
    assert not found.passed
    assert "nonfinite" in found.why


@pytest.mark.parametrize("error", [RuntimeError("no kernel image"), MemoryError()])
def test_a_winner_that_raises_stops_it_and_nothing_else(error):
    def before(params):
        raise error

    found = check(*fakes(before=before))
    assert not found.passed
    assert found.why.isprintable()


def test_a_rival_that_does_not_run_here_wins_nothing():
    clock = Clock()

    def before(params):
        raise RuntimeError("not here")

    assert check(FakeBackend(clock, 10.0), FakeBackend(clock, 1.0, before=before)).passed


def test_a_winner_that_is_not_supported_here_stops_it():
    from autosel.core import Reason

    no = Support.no(Reason("capability", "7.0", "8.0"))
    quick, steady = fakes(supports=lambda: no)
    found = check(quick, steady)
    assert not found.passed
    assert "not supported" in found.why
    assert quick.calls == 0


def test_parameters_from_outside_the_space_never_run():
    quick, steady = fakes()
    evil = made(winner=Candidate.of("quick", {"BLOCK": 10**9}, "plain")).entries[0]
    found = check(quick, steady, evil)
    assert not found.passed
    assert "no parameter BLOCK" in found.why
    assert quick.calls == 0


def test_who_does_not_get_through_in_time_has_not_passed():
    found = check(*fakes(), budget_s=1e-9)
    assert not found.passed
    assert "did not get through" in found.why


# the count is a number in a stranger's file --------------------------------------------------


def at(tokens):
    decision = replace(entry(MADE_ON).decisions[0], bucket=TokenBucket(1, None, tokens))
    return replace(made().entries[0], decisions=(decision,))


class Slow:
    """Takes so many seconds a call and a token, and knows the counts it was called with."""

    def __init__(self, monkeypatch, call_s=0.0, token_s=0.0):
        self.counts = []
        self._call_s, self._token_s, self._now = call_s, token_s, 0.0
        monkeypatch.setattr(canary.time, "monotonic", lambda: self._now)

    def __call__(self, x, out, packed):
        self.counts.append(len(x))
        self._now += self._call_s + self._token_s * len(x)


@pytest.mark.parametrize("tokens", [10**8, 2**31 - 1])
def test_a_count_that_needs_gigabytes_is_refused_before_anything_is_made(monkeypatch, tokens):
    monkeypatch.setattr(canary, "make_routing", lambda *a, **k: pytest.fail("was made"))
    found = check(*fakes(), at(tokens))
    assert not found.passed
    assert f"at {tokens} tokens inputs and outputs take" in found.why
    assert found.why.isprintable()


def test_a_count_that_takes_too_long_is_refused_after_small_ones(monkeypatch):
    slow = Slow(monkeypatch, token_s=1e-4)
    found = check(*fakes(spoil=slow), at(1_000_000))
    assert not found.passed
    assert "at 1000000 tokens it would take about" in found.why
    assert found.seconds <= canary.BUDGET_S
    assert max(slow.counts) <= 4 * canary.FIRST_TOKENS


def test_what_each_call_takes_is_not_multiplied(monkeypatch):
    """Most of a call of few tokens is reading the weights: more tokens take little more."""
    slow = Slow(monkeypatch, call_s=0.1)
    found = check(*fakes(spoil=slow), at(2000))
    assert found.passed, found.why
    assert max(slow.counts) == 2000


def test_a_winner_slow_at_any_count_is_refused(monkeypatch):
    slow = Slow(monkeypatch, call_s=3.0)
    found = check(*fakes(spoil=slow), at(200))
    assert not found.passed
    assert max(slow.counts) <= canary.FIRST_TOKENS
    assert "it would take about" in found.why


def test_a_rival_that_is_slow_counts_as_well(monkeypatch):
    quick, _ = fakes()
    slow = Slow(monkeypatch, token_s=1e-4)
    found = check(quick, FakeBackend(quick.clock, 20.0, spoil=slow), at(1_000_000))
    assert not found.passed
    assert max(slow.counts) <= 4 * canary.FIRST_TOKENS


def test_a_quick_winner_is_timed_at_its_large_count(monkeypatch):
    slow = Slow(monkeypatch)
    found = check(*fakes(spoil=slow), at(3000))
    assert found.passed, found.why
    assert set(found.figures) == {"3000"}


def test_three_buckets():
    def decision(tokens):
        return replace(entry().decisions[0], bucket=TokenBucket(tokens, tokens, tokens))

    many = tuple(decision(1 << n) for n in range(14))
    assert [d.bucket.measured for d in three(many)] == [1, 128, 8192]
    assert [d.bucket.measured for d in three(many[:2])] == [1, 2]
    assert [d.bucket.measured for d in three(many[:1])] == [1]
    assert three(()) == ()


@pytest.fixture
def placed(tmp_path):
    """A compatible pack among the user's; the layer is built against it."""
    folder = tmp_path / "user" / "autosel-packs"
    folder.mkdir(parents=True)
    content.write(made(), folder / "p.json")
    return tmp_path / "user" / "autosel.db"


def served(**options):
    layer = FusedMoE.from_source(RandomSource(PROBLEM), **options)
    return {
        choice.bucket.label: choice.candidate.backend for choice in layer.choices if choice.tuned
    }


def count_canaries(monkeypatch, passed=True):
    """Replaces the timing by a verdict and counts how often it is asked for."""
    ran = []

    def run(entry, experts, device, **options):
        ran.append(entry)
        return canary_results.CanaryResult(passed, "so it is", 0.1, "2026-01-31T12:00:00Z", {})

    monkeypatch.setattr(canary, "run", run)
    return ran


def test_the_layer_checks_a_compatible_pack_once(placed, monkeypatch):
    ran = count_canaries(monkeypatch)
    with registered(quick=fakes()[0], steady=fakes()[1]), pretend(HERE):
        for _ in range(3):
            assert served() == {"1-16": "quick", "17-64": "quick"}
        assert len(ran) == 1
        canary_results._memory.clear()  # another process
        assert served() == {"1-16": "quick", "17-64": "quick"}
        assert len(ran) == 1
    assert len(list((placed.parent / "autosel-packs" / "checks").iterdir())) == 1


def test_a_check_that_fails_is_not_run_again_and_defaults_serve(placed, monkeypatch):
    ran = count_canaries(monkeypatch, passed=False)
    with registered(quick=fakes()[0], steady=fakes()[1]), pretend(HERE):
        assert served() == {}
        assert served() == {}
    assert len(ran) == 1


def test_the_real_check_runs_inside_the_layer(placed):
    """Real time on fakes of equal speed: no claim about which is faster, a tie passes."""
    with registered(quick=fakes()[0], steady=fakes()[1]), pretend(HERE):
        found = served()
    (path,) = (placed.parent / "autosel-packs" / "checks").iterdir()
    assert found in ({"1-16": "quick", "17-64": "quick"}, {})
    assert ('"passed":true' in path.read_text()) == bool(found)


def test_an_exact_pack_needs_no_check(placed, monkeypatch):
    ran = count_canaries(monkeypatch)
    with registered(quick=fakes()[0], steady=fakes()[1]), pretend(MADE_ON):
        assert served() == {"1-16": "quick", "17-64": "quick"}
    assert ran == []


def test_a_foreign_pack_is_neither_checked_nor_used(placed, monkeypatch):
    ran = count_canaries(monkeypatch)
    device = Device(kind="cpu", name="another machine", threads=1)
    with registered(quick=fakes()[0], steady=fakes()[1]), pretend(device):
        assert served() == {}
    assert ran == []


def test_ranks_do_not_check_for_themselves(placed, monkeypatch):
    """DST-1: ranks that timed for themselves could choose differently."""
    ran = count_canaries(monkeypatch)
    group = torch.distributed
    monkeypatch.setattr(group, "is_initialized", lambda: True)
    monkeypatch.setattr(group, "get_world_size", lambda: 4)
    with registered(quick=fakes()[0], steady=fakes()[1]), pretend(HERE):
        assert served() == {}
    assert ran == []


def test_what_the_database_covers_is_not_checked(placed, monkeypatch):
    from tests.layer.decided import store_times

    ran = count_canaries(monkeypatch)
    with registered(quick=fakes()[0], steady=fakes()[1]), pretend(HERE):
        with Store.open(placed) as store:
            store_times(store, PROBLEM, HERE, {4: {SLOW: 1.0, FAST: 2.0}})
        assert served() == {"1+": "steady"}
    assert ran == []


@pytest.mark.parametrize("samples", [True, False])
def test_a_winner_of_a_pack_that_fails_at_work_is_withdrawn_for_the_next(placed, samples):
    """CAC-10: the pack says quick; it raises; steady takes over, now and after a restart."""
    (path,) = placed.parent.glob("autosel-packs/*.json")
    content.write(made(samples=samples), path)

    def before(params):
        raise RuntimeError("no kernel image")

    with registered(quick=fakes(before=before)[0], steady=fakes()[1]), pretend(MADE_ON):
        with pytest.warns(WithdrawnWarning, match="quick is withdrawn"):
            assert served() == {"1-16": "steady", "17-64": "steady"}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert "quick" not in served().values()
