"""Tensor and expert parallelism without processes: the ranks' outputs sum to the uncut layer."""

import itertools

import pytest
import torch

from autosel import FusedMoE
from autosel.core import CanonicalExperts, Problem, QuantScheme, QuantWeight, Routing
from autosel.errors import CheckpointError, UnsupportedError
from autosel.packing import pack_last
from autosel.reference import moe
from autosel.sharding import shard_ep, shard_tp
from autosel.sources import RandomSource


def distance(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def calls(problem, tokens=6):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, problem.hidden_size, generator=generator)
    ids = torch.rand(tokens, problem.num_experts, generator=generator).topk(problem.top_k).indices
    return x, ids, torch.rand(tokens, problem.top_k, generator=generator)


def ranks(path, index, tp_size, ep_size):
    for tp_rank, ep_rank in itertools.product(range(tp_size), range(ep_size)):
        yield FusedMoE.from_checkpoint(
            path,
            index,
            tp_rank=tp_rank,
            tp_size=tp_size,
            ep_rank=ep_rank,
            ep_size=ep_size,
            act_dtype="float32",
        )


@pytest.fixture(scope="module")
def uncut():
    """Outputs of whole layers by the checkpoint's name: six splits are compared with each."""
    return {}


@pytest.mark.parametrize(("tp_size", "ep_size"), [(2, 1), (4, 1), (1, 2), (1, 3), (1, 4), (2, 2)])
def test_every_checkpoint(checkpoint, tp_size, ep_size, uncut):
    """Experts spread unevenly where 4, 3 or 2 ranks do not divide them."""
    index = checkpoint.moe_layers[-1]
    experts = checkpoint.expected[f"layers.{index}.router.weight"].shape[0]
    if experts < ep_size:
        with pytest.raises(UnsupportedError, match=f"at most {experts}"):
            list(ranks(checkpoint.path, index, tp_size, ep_size))
        return
    at, expected = f"layers.{index}.", checkpoint.expected
    call = expected[at + "input"], expected[at + "topk_ids"], expected[at + "topk_weights"]
    if checkpoint.name not in uncut:
        layer = FusedMoE.from_checkpoint(checkpoint.path, index, act_dtype="float32")
        uncut[checkpoint.name] = layer(*call)
    whole = uncut[checkpoint.name]
    parts = [layer(*call) for layer in ranks(checkpoint.path, index, tp_size, ep_size)]
    assert len(parts) == tp_size * ep_size
    assert distance(sum(parts), whole) < 5e-6
    assert distance(sum(parts[1:]), whole) > 1e-2  # every rank counts


SCHEMES = {
    "grouped": QuantScheme(4, 128, True),
    "asymmetric": QuantScheme(4, 128, False),
    "act-order": QuantScheme(4, 128, True, has_g_idx=True),
    "channel": QuantScheme(4, -1, False),
    "8 bit": QuantScheme(8, 128, True),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_groups_cut_by_a_border(name):
    """768 inputs in groups of 128 over 4 ranks: 192 a rank, one group and a half."""
    scheme = SCHEMES[name]
    problem = Problem(3, 3, 2, 128, 768, scheme, scheme, act_dtype="float32", has_bias=True)
    experts = RandomSource(problem).load()
    x, ids, weights = calls(problem)
    whole = moe(x, experts, Routing(ids, weights))
    layers = [FusedMoE.from_experts(shard_tp(experts, rank, 4)) for rank in range(4)]
    assert distance(sum(layer(x, ids, weights) for layer in layers), whole) < 1e-5
    if name == "grouped":
        assert {layer.problem.w2.group_size for layer in layers} == {64}


def test_scale_rows_of_each_rank_where_a_group_is_cut():
    scheme = QuantScheme(4, 128, True, scale_dtype="float32")
    problem = Problem(1, 1, 1, 128, 768, scheme, scheme)
    experts = RandomSource(problem).load()
    numbered = torch.arange(6.0).expand(1, 128, 6).contiguous()
    w2 = QuantWeight(scheme, 768, experts.w2.codes, numbered)
    parts = [shard_tp(CanonicalExperts(problem, experts.w13, w2), rank, 4) for rank in range(4)]
    rows = [part.w2.scales[0, 0].int().tolist() for part in parts]
    assert rows == [[0, 0, 1], [1, 2, 2], [3, 3, 4], [4, 5, 5]]


def test_act_order_needs_every_scale_on_every_rank():
    """Weights 2, 1, 6, 2 by the group index [1, 0, 1, 0]; halves give 4 and 26 of 30."""
    from autosel.sharding import tp_inputs

    scheme = QuantScheme(4, 2, False, has_g_idx=True, scale_dtype="float32")
    codes = torch.tensor([[[1, 2, 3, 4]]], dtype=torch.uint8)
    weight = QuantWeight(
        scheme,
        4,
        pack_last(codes, 4),
        torch.tensor([[[0.5, 2.0]]]),
        torch.zeros(1, 1, 2, dtype=torch.uint8),
        torch.tensor([[1, 0, 1, 0]], dtype=torch.int32),
    )
    from autosel.canonical import dequantize_expert

    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert (dequantize_expert(weight, 0)[0] @ x).item() == 30
    halves = [tp_inputs(weight, rank, 2) for rank in range(2)]
    assert all(half.scales.shape[-1] == 2 for half in halves)
    got = [
        (dequantize_expert(half, 0)[0] @ x[2 * r : 2 * r + 2]).item()
        for r, half in enumerate(halves)
    ]
    assert got == [4, 26]


def test_whole_scale_table_on_a_rank_is_refused_with_both_numbers():
    scheme = QuantScheme(4, 32, True, scale_dtype="float32")
    problem = Problem(1, 1, 1, 64, 768, scheme, scheme, act_dtype="float32")
    half = shard_tp(RandomSource(problem).load(), 0, 2)
    whole = QuantWeight(scheme, 384, half.w2.codes, torch.ones(1, 64, 24))
    with pytest.raises(CheckpointError, match=r"found \[1, 64, 24\], expected \[1, 64, 12\]"):
        FusedMoE.from_experts(CanonicalExperts(half.problem, half.w13, whole))


def test_splits_that_do_not_divide_name_both_numbers(get_checkpoint):
    path = get_checkpoint("gptq-v2-mixed-dynamic-qwen3moe").path
    with pytest.raises(UnsupportedError, match="found 96, expected a multiple of 5"):
        FusedMoE.from_checkpoint(path, 0, tp_size=5)
    with pytest.raises(UnsupportedError, match="at most 5"):
        FusedMoE.from_checkpoint(path, 0, ep_size=6)
    with pytest.raises(UnsupportedError, match="rank"):
        FusedMoE.from_checkpoint(path, 0, tp_rank=2, tp_size=2)


@pytest.mark.parametrize("experts", [1, 60, 160, 384])
def test_odd_expert_counts_over_many_ranks(experts):
    scheme = QuantScheme(4, 16, True)
    problem = Problem(experts, experts, min(4, experts), 16, 16, scheme, scheme)
    problem = problem.with_act_dtype("float32")
    whole = RandomSource(problem).load()
    x, ids, weights = calls(problem)
    size = min(7, experts)
    total = sum(
        FusedMoE.from_experts(
            shard_ep(whole, rank, size), ep_rank=rank, ep_size=size, check=rank == 0
        )(x, ids, weights)
        for rank in range(size)
    )
    assert distance(total, moe(x, whole, Routing(ids, weights))) < 1e-5


def test_more_slots_than_experts_held():
    """8 experts over 4 ranks, 4 slots a token: a rank never serves more than its 2."""
    scheme = QuantScheme(4, 16, True)
    problem = Problem(8, 8, 4, 16, 16, scheme, scheme, act_dtype="float32")
    whole = RandomSource(problem).load()
    x, ids, weights = calls(problem)
    layers = [
        FusedMoE.from_experts(shard_ep(whole, rank, 4), ep_rank=rank, ep_size=4)
        for rank in range(4)
    ]
    total = sum(layer(x, ids, weights) for layer in layers)
    assert distance(total, moe(x, whole, Routing(ids, weights))) < 1e-5
