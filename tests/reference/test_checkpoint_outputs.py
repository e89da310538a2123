"""The emulation on real checkpoints against what transformers' own blocks computed.

The expected outputs are float32 results of transformers 4.57.3 on the CPU, made when the
checkpoints were; shared experts are in them and are added here as a plain gated MLP.
"""

from dataclasses import replace

import pytest
import torch

from autosel.checkpoint import Checkpoint
from autosel.core import Routing
from autosel.expert_map import local_map
from autosel.reference import moe
from autosel.routing import route

#: Relative error by norm of two float32 results; the outputs themselves are float32.
TOLERANCE = 2e-6


def shared_experts(expected, at: str, x: torch.Tensor) -> torch.Tensor:
    if at + "shared.gate" not in expected:
        return torch.zeros_like(x)
    gate, up, down = (expected[f"{at}shared.{n}"].float() for n in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def distance(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture
def layers(checkpoint):
    """(index, name prefix, x, routing) of every MoE layer, with the checkpoint open."""
    found = []
    for index in checkpoint.moe_layers:
        at = f"layers.{index}."
        e = checkpoint.expected
        routing = Routing(e[at + "topk_ids"], e[at + "topk_weights"])
        found.append((index, at, e[at + "input"], routing))
    return Checkpoint.open(checkpoint.path), found


def test_outputs(checkpoint, layers):
    opened, found = layers
    for index, at, x, routing in found:
        shared = shared_experts(checkpoint.expected, at, x)
        expected = checkpoint.expected[at + "output"]
        for dtype in (torch.float32, torch.float64):
            out = moe(x, opened.read_experts(index), routing, dtype=dtype, weights="dequantized")
            assert distance(out + shared, expected) < TOLERANCE


def test_expert_parallel_ranks_sum_to_the_output(checkpoint, layers):
    opened, found = layers
    index, at, x, routing = found[0]
    whole = opened.read_experts(index)
    total = shared_experts(checkpoint.expected, at, x).double()
    p = whole.problem
    held = next(n for n in (2, 3, 1) if p.num_experts % n == 0 and n < p.num_experts)
    for rank in range(p.num_experts // held):
        here = slice(rank * held, (rank + 1) * held)

        def part(weight, here=here):
            return replace(weight, **{n: t[here] for n, t in weight.tensors.items()})

        local = replace(
            whole,
            problem=replace(p, num_local_experts=held),
            w13=part(whole.w13),
            w2=part(whole.w2),
        )
        held_here = local_map(local.problem, rank)
        total += moe(x, local, routing, expert_map=held_here, weights="dequantized")
    assert distance(total, checkpoint.expected[at + "output"]) < TOLERANCE


def test_routing_by_the_rule_that_the_config_states(checkpoint):
    opened = Checkpoint.open(checkpoint.path)
    for layer in opened.layers:
        e, at = checkpoint.expected, f"layers.{layer.index}."
        logits = e[at + "input"] @ e[at + "router.weight"].T
        found = route(logits, layer.router, e.get(at + "router.bias"))
        shape = logits.shape

        def dense(ids, weights, shape=shape):
            return torch.zeros(shape).scatter_(1, ids.long(), weights.float())

        torch.testing.assert_close(
            dense(found.topk_ids, found.topk_weights),
            dense(e[at + "topk_ids"], e[at + "topk_weights"]),
            rtol=1e-5,
            atol=1e-6,
        )


def test_a_planted_fault_is_far_outside_the_tolerance(checkpoint, layers):
    """One code of one expert off by an eighth of the range: the tolerance is fine enough."""
    opened, found = layers
    index, _, x, routing = found[0]
    experts = opened.read_experts(index)
    clean = moe(x, experts, routing)
    codes = experts.w13.codes.clone()
    visited = int(routing.topk_ids[0, 0])
    codes[visited, 0, 0] ^= 1 << (experts.w13.scheme.num_bits - 3)
    wrong = moe(x, replace(experts, w13=replace(experts.w13, codes=codes)), routing)
    assert distance(wrong, clean) > 5 * TOLERANCE


def test_dequantized_weights_differ_from_exact_ones_by_their_own_rounding(checkpoint, layers):
    opened, found = layers
    index, _, x, routing = found[0]
    experts = opened.read_experts(index)
    unit = torch.finfo(experts.w13.scales.dtype).eps / 2
    rounded = moe(x, experts, routing, weights="dequantized")
    assert 0.1 * unit < distance(rounded, moe(x, experts, routing)) < 3 * unit
