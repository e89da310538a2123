"""Parallel splits keep every weight: the ranks' parts put together are the uncut layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autosel.canonical import check_experts, dequantize_expert, group_index
from autosel.checkpoint import Checkpoint
from autosel.core import CanonicalExperts, QuantScheme, QuantWeight
from autosel.errors import UnsupportedError
from autosel.packing import pack_last
from autosel.rank_problem import expert_range
from autosel.sharding import shard_ep, shard_tp, tp_inputs
from tests.checkpoint_builder import Made, make_checkpoint, random_weight, shuffled_g_idx


def dense(experts: CanonicalExperts, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    return dequantize_expert(experts.w13, expert), dequantize_expert(experts.w2, expert)


def assert_parts_make_the_whole(whole: CanonicalExperts, size: int) -> None:
    parts = [shard_tp(whole, rank, size) for rank in range(size)]
    inter = whole.problem.intermediate_size
    share = inter // size
    assert len({part.problem for part in parts}) == 1  # one decision serves all ranks
    for part in parts:
        check_experts(part)
    for expert in range(whole.problem.num_local_experts):
        w13, w2 = dense(whole, expert)
        for rank, part in enumerate(parts):
            rows = slice(rank * share, (rank + 1) * share)
            found13, found2 = dense(part, expert)
            assert torch.equal(found13[:share], w13[:inter][rows])
            assert torch.equal(found13[share:], w13[inter:][rows])
            assert torch.equal(found2, w2[:, rows])


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("group_size", [-1, 32, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_parts_make_the_whole(tmp_path: Path, size: int, group_size: int, symmetric: bool) -> None:
    folder = make_checkpoint(
        tmp_path, inter=384, experts=2, group_size=group_size, symmetric=symmetric
    )
    assert_parts_make_the_whole(Checkpoint.open(folder).read_experts(0), size)


def w2_only(inputs: int, group_size: int, **facts: Any) -> QuantWeight:
    return random_weight(4, inputs, group_size=group_size, symmetric=False, **facts)


def test_a_border_inside_a_group_repeats_scales_on_the_common_divisor() -> None:
    """768 inputs in groups of 128 over 4 ranks: groups 0 0 1, 1 2 2, 3 3 4, 4 5 5."""
    weight = w2_only(768, 128)
    rows = [[0, 0, 1], [1, 2, 2], [3, 3, 4], [4, 5, 5]]
    whole = dequantize_expert(weight, 0)
    for rank, groups in enumerate(rows):
        part = tp_inputs(weight, rank, 4)
        assert part.scheme.group_size == 64
        assert torch.equal(part.scales, weight.scales[..., groups])
        assert part.zero_points is not None
        assert weight.zero_points is not None
        assert torch.equal(part.zero_points, weight.zero_points[..., groups])
        assert torch.equal(dequantize_expert(part, 0), whole[:, 192 * rank : 192 * (rank + 1)])


@given(
    share=st.integers(1, 60),
    size=st.sampled_from([2, 3, 4, 8]),
    group_size=st.sampled_from([-1, 8, 32, 48, 128]),
    bits=st.sampled_from([4, 8]),
    symmetric=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_split_of_inputs(
    share: int, size: int, group_size: int, bits: int, symmetric: bool, seed: int
) -> None:
    """Borders inside groups, inside words, partial last groups: no input is lost or moved."""
    weight = random_weight(
        3, share * size, bits=bits, group_size=group_size, symmetric=symmetric, seed=seed
    )
    whole = dequantize_expert(weight, 0)
    parts = [tp_inputs(weight, rank, size) for rank in range(size)]
    assert torch.equal(torch.cat([dequantize_expert(p, 0) for p in parts], 1), whole)
    assert len({p.scheme for p in parts}) == 1


def test_act_order_keeps_every_scale_and_cuts_the_index() -> None:
    """SHP-8's column: weights 2 1 6 2, of which rank 0 makes 4 and rank 1 makes 26."""
    scheme = QuantScheme(4, 2, False, has_g_idx=True, scale_dtype="float32")
    weight = QuantWeight(
        scheme,
        4,
        pack_last(torch.tensor([[1, 2, 3, 4]]), 4)[None],
        torch.tensor([[[0.5, 2.0]]]),
        torch.zeros(1, 1, 2, dtype=torch.uint8),
        torch.tensor([[1, 0, 1, 0]], dtype=torch.int32),
    )
    x = torch.tensor([1.0, 2, 3, 4])
    assert dequantize_expert(weight, 0).tolist() == [[2, 1, 6, 2]]
    products = []
    for rank in range(2):
        part = tp_inputs(weight, rank, 2)
        assert part.scales.shape == (1, 1, 2)
        products.append(float(dequantize_expert(part, 0)[0] @ x[2 * rank : 2 * rank + 2]))
    assert products == [4, 26]


@pytest.mark.parametrize("size", [2, 4])
def test_act_order_layers(tmp_path: Path, size: int) -> None:
    folder = make_checkpoint(
        tmp_path, hidden=96, inter=128, act_order=True, symmetric=False, experts=2
    )
    whole = Checkpoint.open(folder).read_experts(0)
    assert whole.w2.g_idx is not None
    assert_parts_make_the_whole(whole, size)


def test_a_wrong_group_is_seen() -> None:
    """The comparison by weights notices a scale row that is one group off."""
    part = tp_inputs(w2_only(768, 128), 1, 4)
    before = dequantize_expert(part, 0)
    part.scales.copy_(part.scales[..., [0, 1, 0]])
    assert not torch.equal(before, dequantize_expert(part, 0))


def test_bias_is_added_once(tmp_path: Path) -> None:
    whole = Checkpoint.open(make_checkpoint(tmp_path, bias=True)).read_experts(0)
    parts = [shard_tp(whole, rank, 2) for rank in range(2)]
    assert whole.w2.bias is not None
    total = sum(part.w2.bias for part in parts if part.w2.bias is not None)
    assert torch.equal(total, whole.w2.bias)
    assert whole.w13.bias is not None
    first = parts[1].w13.bias
    assert first is not None
    assert torch.equal(first, torch.cat([whole.w13.bias[:, 16:32], whole.w13.bias[:, 48:]], 1))


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"fmt": "awq", "symmetric": False},
        {"fmt": "compressed-tensors", "act_order": True, "hidden": 96},
        {"group_size": 64},
    ],
)
def test_reading_a_rank_equals_cutting_the_whole(tmp_path: Path, facts: dict[str, Any]) -> None:
    opened = Checkpoint.open(Made(**{"inter": 96, "experts": 5, **facts}).write(tmp_path))
    whole = opened.read_experts(0)
    for tp_size, ep_size in ((1, 2), (2, 1), (3, 2), (4, 5)):
        for tp_rank in range(tp_size):
            for ep_rank in range(ep_size):
                found = opened.read_experts(
                    0, tp_rank=tp_rank, tp_size=tp_size, ep_rank=ep_rank, ep_size=ep_size
                )
                expected = shard_ep(shard_tp(whole, tp_rank, tp_size), ep_rank, ep_size)
                assert found.problem == expected.problem
                for half in ("w13", "w2"):
                    left, right = getattr(found, half), getattr(expected, half)
                    assert left.scheme == right.scheme
                    assert left.tensors.keys() == right.tensors.keys()
                    for name, tensor in right.tensors.items():
                        assert torch.equal(left.tensors[name], tensor), (half, name)


def test_what_cannot_be_cut_is_refused_with_both_numbers(tmp_path: Path) -> None:
    opened = Checkpoint.open(make_checkpoint(tmp_path))
    with pytest.raises(UnsupportedError, match="found 32, expected a multiple of 5"):
        opened.read_experts(0, tp_size=5)
    with pytest.raises(UnsupportedError, match="found 5, expected at most 4"):
        opened.read_experts(0, ep_size=5)
    for rank, size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(UnsupportedError, match="rank below the size"):
            opened.read_experts(0, tp_rank=rank, tp_size=size)
        with pytest.raises(UnsupportedError, match="rank below the size"):
            opened.read_experts(0, ep_rank=rank, ep_size=size)


def test_named_experts_are_read_in_their_order_or_refused(tmp_path: Path) -> None:
    """-1 would be the last expert, and an expert held twice would count twice."""
    plain = Checkpoint.open(make_checkpoint(tmp_path / "plain"))
    made = Made()
    made.stack(True)
    stacked = Checkpoint.open(made.write(tmp_path / "stacked"))
    for opened in (plain, stacked):
        whole = opened.read_experts(0)
        found = opened.read_experts(0, held=[3, 1])
        for slot, expert in enumerate((3, 1)):
            assert torch.equal(found.w2.scales[slot], whole.w2.scales[expert])
        for held, words in (
            ([-1], "entry 0: found -1, expected at least 0 and below 4"),
            ([0, 4], "entry 1: found 4"),
            ([2, 1, 2], "expert 2: found twice, expected once"),
            ([], "list: found empty, expected at least one"),
        ):
            with pytest.raises(UnsupportedError, match=words):
                opened.read_experts(0, held=held)


@given(count=st.integers(1, 300), size=st.integers(1, 300))
def test_expert_ranges_cover_all_once(count: int, size: int) -> None:
    if size > count:
        with pytest.raises(UnsupportedError):
            expert_range(count, 0, size)
        return
    ranges = [expert_range(count, rank, size) for rank in range(size)]
    assert [e for r in ranges for e in r] == list(range(count))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_a_ranks_groups_follow_the_index(tmp_path: Path) -> None:
    weight = random_weight(4, 64, group_size=16, g_idx=shuffled_g_idx(64, 16))
    parts = [group_index(tp_inputs(weight, rank, 4), 0) for rank in range(4)]
    assert torch.equal(torch.cat(parts), group_index(weight, 0))


@pytest.mark.parametrize("plain", [0, 1])
def test_one_expert_without_an_order_in_an_act_order_layer(tmp_path: Path, plain: int) -> None:
    """An expert that saw no calibration data keeps the plain order, be it the first or not."""
    made = Made(hidden=96, inter=128, experts=3, act_order=True)
    module = f"model.layers.0.mlp.experts.{plain}.down_proj"
    made.put(module, random_weight(96, 128, seed=77))
    opened = Checkpoint.open(made.write(tmp_path))
    problem = opened.layers[0].problem
    assert problem is not None
    assert problem.w2.has_g_idx
    whole = opened.read_experts(0)
    assert whole.problem == problem
    found = dequantize_expert(whole.w2, plain)
    assert torch.equal(found, dequantize_expert(made.weights[module], 0))
    parts = [opened.read_experts(0, tp_rank=rank, tp_size=2) for rank in range(2)]
    joined = torch.cat([dequantize_expert(part.w2, plain) for part in parts], 1)
    assert torch.equal(joined, found)
    alone = opened.read_experts(0, ep_rank=plain, ep_size=3)
    assert alone.problem.w2 == problem.w2
