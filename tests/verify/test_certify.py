"""From a candidate to its certificate: what each check adds to the quick set."""

from dataclasses import replace

import pytest
import torch

from autosel.certify import certify
from autosel.core import Certificate, Problem, QuantScheme
from autosel.device import detect
from autosel.properties import unpacks_exactly
from autosel.sources import RandomSource
from autosel.verify_suite import Suite, extreme_experts
from bench.fault_kernel import Canonical, Kernel

SCHEME = QuantScheme(4, 32, False)
PROBLEM = Problem(4, 4, 2, 64, 32, SCHEME, SCHEME)
DEVICE = detect("cpu")


@pytest.fixture(scope="module")
def suite() -> Suite:
    return Suite(RandomSource(PROBLEM).load(), edges=(6, 4096))


def proven(backend, suite, level="full"):
    packed = backend.layout(suite.experts.problem, {}).pack(suite.experts)
    return certify(backend, packed, {}, suite, device=DEVICE, level=level)


def test_a_correct_candidate_is_certified_in_full(suite):
    found = proven(Kernel(), suite)
    assert found.status == "ok", found.reason
    assert all(case.passed for case in found.cases)
    names = [case.name for case in found.cases]
    assert {"no tokens", "uniform M=6", "uniform M=129", "zipf M=64", "expert map"} <= set(names)
    assert "uniform M=4096" not in names
    properties = dict(found.properties)
    assert properties.pop("graph_equals_eager") is None  # no graphs on a CPU
    properties.pop("batch_invariant")  # torch's matmul decides
    assert all(value is True for value in properties.values()), properties
    assert found.audit.passed
    assert found.audit.exact
    assert found.audit.experts == 4
    assert 0 < found.score < 0.7
    assert abs(found.bias) < 0.1
    assert found.runs > 200
    assert Certificate.from_dict(found.to_dict()) == found


def test_the_quick_level_leaves_the_rest_unchecked(suite):
    found = proven(Kernel(), suite, "quick")
    assert found.status == "ok"
    for name in ("batch_invariant", "handles_extreme_weights", "graph_equals_eager"):
        assert found.holds(name) is None
    assert found.holds("handles_missing_ids") is True


class OtherBits(Canonical):
    """Computes the right thing from what it packed and gives back other scales."""

    def unpack(self, packed):
        experts = super().unpack(packed)
        return replace(experts, w2=replace(experts.w2, scales=experts.w2.scales * 1.5))


def test_weights_that_do_not_come_back(suite):
    class Misreads(Kernel):
        def layout(self, problem, params):
            return OtherBits()

    found = proven(Misreads(), suite)
    assert found.status == "wrong"
    assert found.reason.startswith("audit: unpacked weights")
    assert found.audit.exact is False
    assert not found.audit.passed
    packed = Canonical().pack(suite.experts)
    assert unpacks_exactly(Canonical(), packed, suite.experts) is True
    rounded = replace(packed, meta={"rounded": ["w13 scales"]})
    assert unpacks_exactly(OtherBits(), rounded, suite.experts) is False

    class Silent(Canonical):
        def unpack(self, packed):
            raise NotImplementedError

    assert unpacks_exactly(Silent(), packed, suite.experts) is None


def test_extreme_weights_cost_a_property_and_no_more(suite):
    class NoZeroScale(Kernel):
        def dense(self, weight, expert, dtype):
            values = super().dense(weight, expert, dtype)
            zero = weight.scales[expert] == 0
            return values + zero.any() * 1.0  # a kernel that divides by the scale, say

    found = proven(NoZeroScale(), suite)
    assert found.status == "ok", found.reason
    assert found.holds("handles_extreme_weights") is False
    experts = extreme_experts(suite.experts)
    assert (experts.w13.scales == 0).any()
    assert {0, 15} <= set(experts.w13.zero_points.unique().tolist())
    assert experts.w13.scales.isfinite().all()


def test_overflow_of_float16_is_a_property_and_in_bfloat16_a_fault():
    class Half(Kernel):
        def activation(self, h, of):
            return super().activation(h, of).to(torch.float16).float()

    for act_dtype, status in (("float16", "ok"), ("bfloat16", "nonfinite")):
        on = Suite(RandomSource(PROBLEM.with_act_dtype(act_dtype)).load())
        found = proven(Half(), on, "quick")
        assert found.status == status, found.reason
        assert found.holds("no_overflow") is (False if status == "ok" else None)


def test_what_raises_only_in_the_full_set_is_a_verdict(suite):
    class Tires(Kernel):
        calls = 0

        def run(self, packed, x, routing, params, out):
            Tires.calls += 1
            if self.calls > 60:
                raise RuntimeError("worn out\nand a long trace")
            return super().run(packed, x, routing, params, out)

    found = proven(Tires(), suite)
    assert found.status == "failed"
    assert "RuntimeError: worn out" in found.reason
    assert "\n" not in found.reason
