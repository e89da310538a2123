"""Through the layer, every real checkpoint gives what transformers' own blocks computed."""

import pytest
import torch
from torch.nn import functional

from autosel import FusedMoE, registry
from autosel.checkpoint import Checkpoint
from autosel.device import detect
from autosel.store import Store
from tests.layer.decided import candidate, store_times

#: Expected outputs come from weights rounded to the scales' dtype, which the exact ones are not.
ROUNDINGS = 3


def shared_experts(expected, at):
    """The block's shared experts as a callable, from the tools' own dense weights."""
    if at + "shared.gate" not in expected:
        return None
    gate, up, down = (expected[f"{at}shared.{n}"].float() for n in ("gate", "up", "down"))

    def run(x):
        x = x.float()
        return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    return run


def distance(out, expected):
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def unit(problem):
    dtype = getattr(torch, problem.w13.scale_dtype)
    return float(torch.finfo(dtype).eps / 2)


def exact_backends(problem):
    device = detect("cpu")
    for backend in registry.all_backends():
        if not backend.supports(problem, device):
            continue
        params = backend.space(problem, 16, device).default
        if backend.accuracy(params) == "exact":
            yield backend


@pytest.mark.parametrize("act_dtype", ["float32", "bfloat16"])
def test_outputs_through_every_backend(checkpoint, act_dtype, tmp_path):
    opened, device, ran = Checkpoint.open(checkpoint.path), detect("cpu"), set()
    for index in checkpoint.moe_layers:
        at, expected = f"layers.{index}.", checkpoint.expected
        problem = opened.layer(index).problem.with_act_dtype(act_dtype)
        x = expected[at + "input"].to(getattr(torch, act_dtype))
        limit = ROUNDINGS * unit(problem) + (0 if act_dtype == "float32" else 1.5e-2)
        for backend in exact_backends(problem):
            with Store.open(tmp_path / f"{backend.name}-{index}.db") as store:
                winner = candidate(backend.name, problem, device)
                store_times(store, problem, device, {16: {winner: 10.0}})
                layer = FusedMoE.from_checkpoint(
                    checkpoint.path,
                    index,
                    act_dtype=act_dtype,
                    db=store,
                    shared_experts=shared_experts(expected, at),
                )
            assert [c.candidate for c in layer.choices] == [winner]
            assert layer.choices[0].tuned
            out = layer(x, expected[at + "topk_ids"], expected[at + "topk_weights"])
            assert out.dtype == x.dtype
            assert distance(out, expected[at + "output"]) < limit, backend.name
            ran.add(backend.name)
    assert "emulation" in ran


def test_monolithic_routes_as_the_model_does(checkpoint):
    """From router logits alone: the rule, its constants and the bias come from the checkpoint."""
    for index in checkpoint.moe_layers:
        at, expected = f"layers.{index}.", checkpoint.expected
        layer = FusedMoE.from_checkpoint(
            checkpoint.path,
            index,
            act_dtype="float32",
            shared_experts=shared_experts(expected, at),
        )
        x = expected[at + "input"]
        out = layer.apply_monolithic(x, x @ expected[at + "router.weight"].T)
        assert distance(out, expected[at + "output"]) < ROUNDINGS * unit(layer.problem)


def test_a_wrong_expert_is_far_outside_the_tolerance(checkpoint):
    index = checkpoint.moe_layers[0]
    at, expected = f"layers.{index}.", checkpoint.expected
    layer = FusedMoE.from_checkpoint(
        checkpoint.path, index, act_dtype="float32", shared_experts=shared_experts(expected, at)
    )
    ids = (expected[at + "topk_ids"] + 1) % layer.problem.num_experts
    out = layer(expected[at + "input"], ids, expected[at + "topk_weights"])
    assert distance(out, expected[at + "output"]) > 10 * ROUNDINGS * unit(layer.problem)
