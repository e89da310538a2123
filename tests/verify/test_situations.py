"""What users of kernel selectors have met, through the public extension point and a whole sweep."""

import threading
from dataclasses import replace

import pytest
import torch

from autosel import registry
from autosel.compare import LIMITS
from autosel.core import QuantScheme, Routing
from autosel.device import detect
from autosel.error_scale import judge
from autosel.reference import moe
from autosel.routing_synthetic import make_routing
from autosel.sources import RandomSource
from autosel.timing import TimingSettings
from autosel.tune import sweep
from autosel.tune_types import SweepSettings
from tests.fakes import CPU, PROBLEM, Clock, FakeBackend, registered


def run(clock, names, tokens=(8,)):
    chosen = SweepSettings(
        token_counts=tokens,
        timing=TimingSettings(rounds=3, samples_per_round=4),
        backends=tuple(names),
    )
    return sweep(RandomSource(PROBLEM), chosen, device=CPU, timer=clock)


def half_written(x, out, packed):
    out[:, out.shape[1] // 2 :] = torch.full_like(out, torch.nan)[:, out.shape[1] // 2 :]


def set_to(value, everywhere):
    def spoil(x, out, packed):
        out[... if everywhere else (0, 3)] = value

    return spoil


def doubles_input(x, out, packed):
    x.mul_(2)


def one_and_a_half_limits(x, out, packed):
    """Errors of 1.5 times the tolerance in every element, whatever the call."""
    size = out.float().square().mean().sqrt()
    sign = 1 - 2 * (torch.arange(out.numel()) % 2).reshape(out.shape)
    # 2.4 unit roundoffs is about the error scale of a layer.
    out += (1.5 * LIMITS["exact"].rms * 2.4 * 2.0**-9 * size * sign).to(out.dtype)


SPOILS = {
    "doubling": (doubles_input, "wrong", "it changed its input x"),
    "half": (half_written, "nonfinite", "non-finite"),
    "onenan": (set_to(torch.nan, False), "nonfinite", "output: non-finite: found 1 NaN and 0"),
    "allnan": (set_to(torch.nan, True), "nonfinite", "output: non-finite"),
    "oneinf": (set_to(torch.inf, False), "nonfinite", "0 NaN and 1 infinite"),
    "sloppy": (one_and_a_half_limits, "wrong", "error over rounding"),
}


@pytest.mark.parametrize("first", ["bad ones", "good one"])
def test_nobody_that_misbehaves_is_chosen_however_fast_and_in_whatever_order(first):
    clock = Clock()
    bad = {name: FakeBackend(clock, 10.0, spoil=spoil) for name, (spoil, _, _) in SPOILS.items()}
    good = {"good": FakeBackend(clock, 100.0)}
    with registered(**({**bad, **good} if first == "bad ones" else {**good, **bad})):
        result = run(clock, [*bad, *good] if first == "bad ones" else [*good, *bad])
    assert result.decision(8).winner.key == "good"
    found = {row.candidate.key: row for row in result.measurements}
    for name, (_, status, words) in SPOILS.items():
        assert found[name].status == status, found[name]
        assert words in found[name].reason
        assert not found[name].times_us
    assert found["good"].errors.rel_rms < 0.01


class Locks(FakeBackend):
    """A kernel with lock counters in a workspace that must be zero; a failure leaves them dirty."""

    def __init__(self, clock, fails_at):
        super().__init__(clock, 10.0)
        self.counters = torch.zeros(4)
        self.fails_at = fails_at
        self.seen = 0

    def run(self, packed, x, routing, params, out):
        self.seen += 1
        self.counters += 1
        if self.seen == self.fails_at:
            raise RuntimeError("the kernel stopped in the middle")
        super().run(packed, x, routing, params, out)
        out += (self.counters[0] - 1).to(out.dtype)  # who waits for a dirty counter goes too soon
        self.counters -= 1
        return out


def test_a_dirty_workspace_after_a_failure_is_never_chosen():
    clock = Clock()
    for fails_at in (1, 12):
        with registered(locks=Locks(clock, fails_at), good=FakeBackend(clock, 100.0)):
            result = run(clock, ["locks", "good"], tokens=(4, 8))
        assert all(d.winner.key == "good" for d in result.decisions)
        found = [row for row in result.measurements if row.candidate.key == "locks"]
        assert found[0].status == "failed"
        assert all(row.status in ("failed", "wrong") for row in found)


@pytest.fixture
def native():
    backend, device = registry.get("cpu_native"), detect("cpu")
    scheme = QuantScheme(4, 32, True)
    problem = replace(PROBLEM, hidden_size=64, intermediate_size=32, w13=scheme, w2=scheme)
    if not backend.supports(problem, device):
        pytest.skip(str(backend.supports(problem, device)))
    experts = RandomSource(problem).load()
    params = dict(backend.space(problem, 8, device).default)
    packed = backend.layout(problem, params).pack(experts)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    routing = make_routing("uniform", 16, problem)

    def call():
        return backend.run(packed, x, routing, params, torch.full_like(x, torch.nan))

    return backend, call, moe(x, experts, routing).bfloat16()


def test_our_kernel_needs_no_clean_workspace(native):
    backend, call, _ = native
    first = call()
    backend._workspace(1).fill_(0xFF)  # every float in it a NaN
    assert torch.equal(call(), first)


def test_two_threads_at_once_do_not_share_a_workspace(native):
    _, call, expected = native
    first = call()
    torch.testing.assert_close(first, expected, rtol=0.05, atol=0.05)
    wrong = []

    def many():
        for _ in range(50):
            if not torch.equal(call(), first):
                wrong.append(1)

    threads = [threading.Thread(target=many) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_sixty_four_identical_rows_equal_the_single_one(native):
    backend, _, _ = native
    problem = replace(PROBLEM, hidden_size=64, intermediate_size=32,
                      w13=QuantScheme(4, 32, True), w2=QuantScheme(4, 32, True))  # fmt: skip
    experts = RandomSource(problem).load()
    packed = backend.layout(problem, {}).pack(experts)
    row = torch.randn(1, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    one = make_routing("uniform", 1, problem)
    many = Routing(one.topk_ids.repeat(64, 1), one.topk_weights.repeat(64, 1))
    alone = backend.run(packed, row, one, {"dot": "fp32"}, torch.empty_like(row))
    x = row.repeat(64, 1)
    out = backend.run(packed, x, many, {"dot": "fp32"}, torch.empty_like(x))
    scale = judge(row, experts, one).scales["exact"]
    assert ((out.double() - alone.double()).abs() <= LIMITS["exact"].element * scale).all()
    assert torch.equal(out, out[:1].expand_as(out))
