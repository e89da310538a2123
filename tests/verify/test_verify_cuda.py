"""Truth and verification on a CUDA device give what they give on the CPU."""

import pytest
import torch

from autosel.core import QuantScheme, Routing
from autosel.dispatch import apply
from autosel.error_scale import judge
from autosel.expert_map import local_map
from autosel.properties import Subject, graph_equals_eager
from autosel.reference import moe
from autosel.routing_synthetic import make_routing
from autosel.verify import make_cases, verify_candidate
from bench.fault_kernel import Canonical
from tests.verify.layers import Truthful, layer, pack, problem, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

P = problem(8, 2, 128, 64, QuantScheme(4, 32, False, has_g_idx=True), has_bias=True)


def on_device(routing: Routing) -> Routing:
    return Routing(routing.topk_ids.cuda(), routing.topk_weights.cuda())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_truth_whatever_tf32_is_set_to(dtype):
    experts, x, routing = layer(P), tokens(40, P), make_routing("uniform", 40, P)
    expected = judge(x, experts, routing)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        got = judge(x.cuda(), experts.to("cuda"), on_device(routing), dtype=dtype)
        out = moe(x.cuda(), experts.to("cuda"), on_device(routing), dtype=dtype)
    finally:
        torch.set_float32_matmul_precision(before)
    limit = 1e-5 if dtype == torch.float32 else 1e-12
    for found in (got.reference, out):
        distance = (found.cpu().double() - expected.reference).norm()
        assert distance < limit * expected.reference.norm()
    torch.testing.assert_close(
        got.scales["exact"].cpu().double(), expected.scales["exact"], rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("local", [8, 2])
def test_a_candidate_on_the_device(local):
    p = problem(8, 2, 128, 64, QuantScheme(4, 32, False), local=local)
    experts = layer(p).to("cuda")
    cases = make_cases(experts, token_counts=(1, 17))
    assert all(case.x.is_cuda and case.judged.reference.is_cuda for case in cases)
    verdict = verify_candidate(Truthful(), pack(experts), {}, cases, experts=experts)
    assert verdict.status == "ok", verdict.reason
    assert verdict.audit_score < 4


def test_stray_ids_and_a_map_on_the_device():
    p = problem(8, 2, 128, 64, local=4)
    experts, x = layer(p), tokens(6, p)
    routing = make_routing("uniform", 6, p)
    routing = Routing(routing.topk_ids.long(), routing.topk_weights)
    routing.topk_ids[0, 0] = 2**40
    routing.topk_ids[1, 1] = -7
    held = local_map(p, 1)
    expected = apply(Truthful(), pack(experts), x, routing, {}, expert_map=held)
    packed = pack(experts.to("cuda"))
    got = apply(Truthful(), packed, x.cuda(), on_device(routing), {}, expert_map=held.cuda())
    torch.testing.assert_close(got.cpu(), expected, rtol=2e-2, atol=1e-3)


def test_a_captured_graph_is_compared_with_plain_calls():
    class OnDevice(Truthful):
        """Right in plain calls; replays give what was right when it was captured."""

        name = "on_device"

        def __init__(self, case, stale):
            self.case, self.stale = case, stale

        def run(self, packed, x, routing, params, out):
            right = self.case.judged.reference.to(out.dtype)
            if not self.stale:
                # Row by row, found by the activations, with nothing read back.
                same = (x.unsqueeze(1) == self.case.x.unsqueeze(0)).all(dim=2)
                right = right[same.int().argmax(dim=1)]
            return out.copy_(right)

    experts = layer(problem()).to("cuda")
    case = max(make_cases(experts, token_counts=(17,))[:1], key=lambda c: len(c.x))
    packed = Canonical().pack(experts)
    sound = Subject(OnDevice(case, False), packed, {}, "exact")
    assert graph_equals_eager(sound, case).value is True
    stale = graph_equals_eager(Subject(OnDevice(case, True), packed, {}, "exact"), case)
    assert stale.value is False
    assert "replayed from a graph" in stale.fault.reason
