"""Signed error: truncation shows, rounding to nearest does not, chance is allowed for."""

from dataclasses import replace

import pytest
import torch

from autosel.bias import SignedError
from autosel.compare import LIMITS
from autosel.error_scale import Judged, judge
from autosel.sources import RandomSource
from autosel.verify import make_cases, verify_candidate
from bench.fault_kernel import Kernel
from bench.fault_kernels import BiasedStochastic, Truncated, TruncatedWeights
from bench.planted_faults import experts_of
from tests.verify.layers import problem

LIMIT = LIMITS["exact"].bias


def made(error, *, shared=0.0, shift=None):
    """A judged input of 50 x 64 outputs with unit scale, and its output with ``error``."""
    ref = torch.randn(50, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scale = torch.ones_like(ref)
    part = torch.full((50,), shared, dtype=torch.float64)
    none = torch.zeros_like(ref)
    shifts = (none if shift is None else shift,)
    judged = Judged(ref, {"exact": scale}, part > 2, {"exact": part}, shifts)
    return ref + error * torch.ones_like(ref), judged, ref


def test_the_means_are_what_they_say():
    out, judged, ref = made(0.25)
    found = SignedError.of(out, judged, "exact")
    assert found.to_one_side == pytest.approx(0.25)
    assert found.towards_zero == pytest.approx(-0.25 * float(ref.sign().mean()))
    smaller = SignedError.of(ref - 0.25 * ref.sign(), judged, "exact")
    assert smaller.towards_zero == pytest.approx(0.25)


def test_sums_over_cases_are_means_over_all_outputs():
    one, judged, _ = made(0.25)
    two, _, _ = made(-0.25)
    both = SignedError.of(one, judged, "exact") + SignedError.of(two, judged, "exact")
    assert both.to_one_side == pytest.approx(0.0)
    assert SignedError() + both == both == both + SignedError()


def test_chance_known_shifts_and_shared_errors_widen_the_limit():
    def limit(**more):
        out, judged, _ = made(0.25, **more)
        return SignedError.of(out, judged, "exact").worst(LIMIT)[2]

    plain = limit()
    assert plain == pytest.approx(LIMIT + 6 / 3200**0.5)
    assert limit(shared=0.5) > 3 * plain
    assert limit(shift=torch.full((50, 64), 0.1, dtype=torch.float64)) == pytest.approx(plain + 0.1)


def test_a_token_served_nowhere_does_not_count():
    out, judged, _ = made(0.0)
    judged.scales["exact"][:] = 0
    assert SignedError.of(out, judged, "exact").count == 0
    assert SignedError().worst(LIMIT)[1] == 0


@pytest.mark.parametrize("kernel", [Truncated, TruncatedWeights, BiasedStochastic])
def test_what_the_limits_on_size_let_pass(kernel):
    experts = RandomSource(problem(8, 2, 256, 128), 0).load()
    cases = make_cases(experts, accuracies=("exact",))
    verdicts = {}
    for backend in (Kernel(), kernel()):
        packed = backend.layout(experts.problem, {}).pack(experts)
        verdicts[backend.__class__] = verify_candidate(backend, packed, {}, cases, repeats=1)
    assert verdicts[Kernel].status == "ok"
    assert abs(verdicts[Kernel].bias) < 0.05
    assert verdicts[kernel].status == "wrong"
    assert verdicts[kernel].reason.startswith("all cases: signed error ")
    # No single case was beyond its limits.
    assert all(result.passed for result in verdicts[kernel].results)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_reference_itself_has_none(seed):
    experts = experts_of(seed)
    for case in make_cases(experts, seed=seed, token_counts=(17,)):
        if not len(case.x):
            continue
        out = case.judged.reference.to(case.x.dtype)
        found = SignedError.of(out, case.judged, "exact")
        assert abs(found.worst(LIMIT)[1]) < 0.06
    assert replace(judge(case.x, experts, case.routing, expert_map=case.expert_map)) is not None
