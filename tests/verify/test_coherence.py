"""Weights that are alike: errors of inputs then add up by size, and the error scale knows it."""

import pytest
import torch

from autosel.coherence import Leading
from autosel.core import Activation
from autosel.error_scale import error_scale, judge, secant_slope
from autosel.routing_synthetic import make_routing
from bench.fault_kernel import Canonical, Int8Kernel, Kernel
from bench.planted_faults import WEIGHT_KINDS, experts_of
from tests.verify.layers import layer, problem, tokens


def test_leading_directions_are_those_of_the_singular_values():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(60, 40, generator=generator, dtype=torch.float64)
    weight += 9 * torch.outer(torch.ones(60), torch.randn(40, generator=generator)).double()
    weight += 4 * torch.outer(torch.randn(60, generator=generator), torch.ones(40)).double()
    found = Leading.of(weight)
    values = torch.linalg.svdvals(weight)[:2]
    sizes = found.profiles.norm(dim=1).sort(descending=True).values
    torch.testing.assert_close(sizes, values, rtol=1e-3, atol=0.0)
    gram = found.directions.T @ found.directions
    torch.testing.assert_close(gram, torch.eye(2, dtype=torch.float64))
    cross = found.profiles @ found.profiles.T
    assert cross[0, 1].abs() < 1e-6 * cross.diagonal().max()


@pytest.mark.parametrize("factor", [0.0, 1e-30])
def test_nothing_and_nearly_nothing(factor):
    found = Leading.of(torch.ones(8, 16) * factor)
    assert found.profiles.isfinite().all()
    assert found.directions.isfinite().all()
    assert Leading.of(torch.randn(1, 3)).directions.shape == (1, 1)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_the_scale_is_the_spread_of_8_bit_inputs(seed):
    """Measured over random roundings of one input, whatever the weights' signs."""
    experts = experts_of(4 * seed + seed)  # one kind of weights each
    problem_ = experts.problem
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, problem_.hidden_size, generator=generator).to(torch.float32)
    wide = problem_.with_act_dtype("float32")
    experts = type(experts)(wide, experts.w13, experts.w2)
    routing = make_routing("uniform", 1, wide, seed=seed)
    if wide.num_local_experts < wide.num_experts:
        routing.topk_ids.clamp_(max=wide.num_local_experts - 1)
    held = torch.arange(wide.num_experts)
    held[wide.num_local_experts :] = -1
    packed = Canonical().pack(experts)
    step = x.abs().max() / 127

    class Noisy(Kernel):
        def quantised(self, rows):
            width = rows.abs().amax(dim=1, keepdim=True) / 127
            if rows.shape[1] == wide.hidden_size:  # one rounding of x for all experts
                return rows + step * self.noise
            return rows + width * (torch.rand(rows.shape, generator=generator) - 0.5)

    kernel, rows = Noisy(), []
    for _ in range(300):
        kernel.noise = torch.rand(x.shape, generator=generator) - 0.5
        out = torch.zeros_like(x)
        rows.append(kernel.run(packed, x, routing, {}, out).double())
    spread = torch.cat(rows).std(dim=0)
    scale = error_scale(x, experts, routing, expert_map=held, accuracy="a8")[0]
    ratio = spread / scale
    kind = WEIGHT_KINDS[(4 * seed + seed) % 4]
    print(f"{kind}: measured spread over error scale {ratio.min():.2f} to {ratio.max():.2f}")
    # Above 1 a correct kernel would be refused too soon, far below a fault would hide.
    assert ratio.max() < 1.25
    assert ratio.mean() > 0.25


def test_outputs_that_err_together_are_one_draw():
    plain = judge(tokens(9, problem()), layer(problem()), make_routing("uniform", 9, problem()))
    assert plain.shared["exact"].max() < 0.2
    experts = experts_of(1)
    assert WEIGHT_KINDS[1] == "one sign"
    x = tokens(9, experts.problem)
    alike = judge(x, experts, make_routing("uniform", 9, experts.problem))
    assert alike.shared["a8"].median() > 0.5
    assert ((alike.shared["a8"] >= 0) & (alike.shared["a8"] <= 1)).all()


def test_a_slope_beside_a_clamp_counts():
    activation = Activation("silu", limit=7.0)
    h = torch.tensor([[7.5, 1.0], [20.0, 1.0]], dtype=torch.float64)  # gate, up
    a = torch.nn.functional.silu(h[:, :1].clamp(max=7.0)) * h[:, 1:]
    slope = torch.tensor([[0.0, 7.0], [0.0, 7.0]], dtype=torch.float64)
    deviation = torch.full_like(h, 0.5)
    steep = secant_slope(h, a, slope, deviation, activation)
    assert steep[0, 0] > 0.4  # the clamp is one deviation away
    assert steep[1, 0] == 0


def test_eight_bit_kernel_on_zero_rows():
    experts = layer(problem())
    x = torch.zeros(3, experts.problem.hidden_size, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    routing = make_routing("uniform", 3, experts.problem)
    Int8Kernel().run(Canonical().pack(experts), x, routing, {}, out)
    assert (out == 0).all()
