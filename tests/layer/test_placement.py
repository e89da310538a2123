"""Which experts lie where: a map and the weights that are read for it say the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from autosel import FusedMoE, load_moe_layers
from autosel.checkpoint import Checkpoint
from autosel.core import Problem, QuantScheme, Routing
from autosel.errors import AutoselError, CheckpointError, RoutingError
from autosel.layer_moe_wna16 import MoeWna16Parameters
from autosel.layer_params import ExpertParameters
from autosel.reference import moe
from autosel.sharding import shard_ep
from autosel.sources import CheckpointSource, RandomSource
from tests.fakes import PROBLEM, Clock, FakeBackend, PlainLayout, registered
from tests.layer.deep import repeat_layer
from tests.layer.test_params import filled, format_of, tensors_of

NAME = "awq-w4-g32-deepseekv3"  # 8 experts


def distance(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.fixture(scope="module")
def path(get_checkpoint):
    return get_checkpoint(NAME).path


def call(layer, tokens=9):
    problem = layer.problem
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, problem.hidden_size, generator=generator)
    scores = torch.rand(tokens, problem.num_experts, generator=generator)
    return x, scores.topk(problem.top_k).indices, torch.rand(tokens, problem.top_k)


def placement(*experts):
    """The map that places these experts, in this order."""
    found = torch.full((8,), -1, dtype=torch.int64)
    found[list(experts)] = torch.arange(len(experts))
    return found


#: As engines deal experts out: in turns, by measured load, all but in another order.
PLACEMENTS = {
    "round robin": [(0, 2, 4, 6), (1, 3, 5, 7)],
    "uneven": [(7, 0, 3), (1,), (6, 5, 4, 2)],
    "reversed": [(7, 6, 5, 4, 3, 2, 1, 0)],
}


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_ranks_with_maps_read_the_experts_that_they_hold(path, kind):
    whole = FusedMoE.from_checkpoint(path, 1, act_dtype="float32")
    inputs = call(whole)
    parts = [
        FusedMoE.from_checkpoint(path, 1, act_dtype="float32", expert_map=placement(*held))
        for held in PLACEMENTS[kind]
    ]
    assert [p.problem.num_local_experts for p in parts] == [len(h) for h in PLACEMENTS[kind]]
    assert distance(sum(part(*inputs) for part in parts), whole(*inputs)) < 5e-6


def test_together_with_tensor_parallelism_and_with_ranks_that_say_the_same(path):
    whole = FusedMoE.from_checkpoint(path, 1, act_dtype="float32")
    inputs = call(whole)
    parts = [
        FusedMoE.from_checkpoint(
            path, 1, act_dtype="float32", expert_map=placement(*held),
            tp_rank=tp_rank, tp_size=2, ep_rank=ep_rank, ep_size=2,
        )
        for ep_rank, held in enumerate(PLACEMENTS["round robin"])
        for tp_rank in range(2)
    ]  # fmt: skip
    assert distance(sum(part(*inputs) for part in parts), whole(*inputs)) < 5e-6


def test_experts_read_in_another_place_than_the_map_says_are_far_off(path):
    """The planted fault: equal runs under the map of another placement."""
    whole = FusedMoE.from_checkpoint(path, 1, act_dtype="float32")
    inputs = call(whole)
    parts = [
        FusedMoE.from_experts(
            CheckpointSource(str(path), 1, ep_rank=rank, ep_size=2, act_dtype="float32").load(),
            expert_map=placement(*held),
        )
        for rank, held in enumerate(PLACEMENTS["round robin"])
    ]
    assert distance(sum(part(*inputs) for part in parts), whole(*inputs)) > 0.1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([-1] * 8, r"local ids: found \[\], expected each of 0 to 0 once"),
        ([0, 0, 1, 2, 3, 4, 5, 6], "no replicas"),
        ([0, 2, -1, -1, -1, -1, -1, -1], r"found \[0, 2\], expected each of 0 to 1"),
        ([0, 1, 2], "shape"),
        ([0.0] * 8, "dtype"),
        ([8, -1, -1, -1, -1, -1, -1, -1], "expert_map"),
    ],
)
def test_maps_that_make_no_sense_are_refused_before_anything_is_read(
    path, given, message, monkeypatch
):
    monkeypatch.setattr(CheckpointSource, "load", lambda *_: pytest.fail("loaded"))
    with pytest.raises(RoutingError, match=message):
        FusedMoE.from_checkpoint(path, 1, expert_map=torch.tensor(given))


def test_a_source_and_options_that_disagree_are_refused(path):
    source = CheckpointSource(str(path), 1, ep_rank=1, ep_size=2)
    for options in (
        {},
        {"ep_rank": 0, "ep_size": 2},
        {"ep_rank": 1, "ep_size": 4},
        {"expert_map": placement(0, 2, 4, 6)},
        {"expert_map": placement(5, 4, 6, 7)},
    ):
        with pytest.raises(RoutingError, match=r"experts read: found \[4, 5, 6, 7\], expected"):
            FusedMoE.from_source(source, **options)
    for options in ({"ep_rank": 1, "ep_size": 2}, {"expert_map": placement(4, 5, 6, 7)}):
        assert FusedMoE.from_source(source, **options).problem.num_local_experts == 4


def test_a_whole_model_with_a_map(path):
    layers = load_moe_layers(path, expert_map=placement(7, 1), act_dtype="float32")
    assert {layer.problem.num_local_experts for layer in layers.values()} == {2}
    for index, layer in layers.items():
        whole = FusedMoE.from_checkpoint(path, index, act_dtype="float32")
        x, ids, weights = call(layer)
        here = torch.where((ids == 7) | (ids == 1), ids, -1)
        assert distance(layer(x, ids, weights), whole(x, here, weights)) < 5e-6


# parameters of an engine's own loader ------------------------------------------------------------


@pytest.mark.parametrize("kind", ["stacked", "MoeWNA16"])
def test_parameters_with_a_map(get_checkpoint, kind):
    checkpoint = get_checkpoint(NAME)
    whole = FusedMoE.from_checkpoint(checkpoint.path, 1, act_dtype="float32")
    inputs = call(whole)
    problem = whole.problem
    total = 0
    for held in PLACEMENTS["uneven"]:
        if kind == "stacked":
            parameters = filled(checkpoint, 1, problem, expert_map=placement(*held))
        else:
            name = format_of(checkpoint)["format_name"]
            parameters = MoeWna16Parameters(name, problem, expert_map=placement(*held))
            for expert, shard, suffix, tensor in tensors_of(checkpoint, 1):
                used = parameters.load_weight(suffix, tensor, expert_id=expert, shard_id=shard)
                assert used == (expert in held)
        layer = parameters.process_weights_after_loading()
        assert layer.problem.num_local_experts == len(held)
        total = total + layer(*inputs)
    assert distance(total, whole(*inputs)) < 5e-6


def test_options_that_move_the_parameters_experts_are_refused(get_checkpoint):
    checkpoint = get_checkpoint(NAME)
    problem = FusedMoE.from_checkpoint(checkpoint.path, 1).problem
    parameters = filled(checkpoint, 1, problem, ep_rank=1, ep_size=2)
    for options in ({"ep_rank": 0}, {"expert_map": placement(0, 2, 4, 6)}):
        with pytest.raises(AutoselError, match=f"parameters: {next(iter(options))}"):
            parameters.process_weights_after_loading(**options)
    assert parameters.process_weights_after_loading(ep_rank=1, ep_size=2).problem


BIASED = Problem(4, 4, 2, 32, 32, QuantScheme(4, 16, True, scale_dtype="float32"),
                 QuantScheme(4, 16, True, scale_dtype="float32"), act_dtype="float32",
                 has_bias=True)  # fmt: skip


def biased(leave_out=()):
    parameters = ExpertParameters("compressed-tensors", BIASED)
    generator = torch.Generator().manual_seed(0)
    for expert in range(4):
        for shard in ("w1", "w2", "w3"):
            words = torch.randint(2**31 - 1, (32, 4), generator=generator).int()
            tensors = {
                "weight_packed": words,
                "weight_scale": torch.rand(32, 2, generator=generator) * 0.1,
                "bias": torch.rand(32, generator=generator),
            }
            for suffix, tensor in tensors.items():
                if (expert, shard, suffix) not in leave_out and (shard, suffix) not in leave_out:
                    parameters.load_weight(suffix, tensor, expert_id=expert, shard_id=shard)
    return parameters


def test_biases_that_were_never_loaded_are_named():
    assert biased().experts().w13.bias is not None
    assert biased({("w1", "bias"), ("w3", "bias")}).experts().w2.bias.any()
    with pytest.raises(CheckpointError, match=r"expert 2 w3\.bias: tensor: found never loaded"):
        biased({(2, "w3", "bias")}).experts()
    with pytest.raises(CheckpointError, match=r"expert 0 w1\.bias: tensor: found never loaded"):
        biased({(shard, "bias") for shard in ("w1", "w2", "w3")}).experts()


# what the weights say beyond their description ---------------------------------------------------


class Described:
    """A checkpoint's layer as its headers and expert 0 describe it."""

    def __init__(self, source):
        described = Checkpoint.open(source.path).layer(source.layer).problem
        self.problem = replace(described, act_dtype=source.act_dtype)
        self.label, self.load = source.label, source.load


@pytest.mark.parametrize("described", [False, True], ids=["exact", "described"])
def test_zero_points_that_only_a_later_expert_has_count(get_checkpoint, tmp_path, described):
    """Declared symmetric, and expert 0 is: the description says so, another expert is not."""
    folder = repeat_layer(
        get_checkpoint("gptq-v1-w4-g64-sym-actorder-qwen3moe").path, tmp_path / "model", 1
    )
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if ".experts.2." in n and n.endswith("down_proj.qzeros"))
    tensors[name] = torch.full_like(tensors[name], 0x33333333)
    save_file(tensors, folder / "model.safetensors")
    source = CheckpointSource(str(folder), 0, act_dtype="float32")
    assert Described(source).problem.w2.symmetric
    with pytest.warns(UserWarning, match="declared symmetric"):
        layer = FusedMoE.from_source(Described(source) if described else source)
    assert not layer.problem.w2.symmetric
    experts = source.load()
    assert layer.problem == experts.problem
    x, _, weights = call(layer)
    ids = torch.tensor([[2, 0]] * len(x))
    right = moe(x, experts, Routing(ids, weights))
    assert distance(layer(x, ids, weights), right) < 1e-5
    flat = replace(experts, w2=replace(experts.w2, zero_points=None))
    assert distance(moe(x, flat, Routing(ids, weights)), right) > 0.05


def test_weights_of_another_size_than_described_are_refused():
    class Lying:
        problem = replace(PROBLEM, intermediate_size=2 * PROBLEM.intermediate_size)
        label = "lying"

        def load(self, device="cpu"):
            return RandomSource(PROBLEM).load(device)

    with pytest.raises(CheckpointError, match="weights: layer: found"):
        FusedMoE.from_source(Lying())


def test_the_layer_keeps_nothing_of_weights_in_memory():
    """Who hands over weights may reuse their memory: nothing packed may be a view of it."""
    problem = Problem(4, 4, 2, 64, 32, QuantScheme(4, 32, False), QuantScheme(4, 32, False))
    experts = RandomSource(problem).load()
    layer = FusedMoE.from_experts(experts)
    x = torch.randn(3, 64).bfloat16()
    ids, weights = torch.tensor([[0, 1], [2, 3], [3, 0]]), torch.rand(3, 2)
    before = layer(x, ids, weights)
    for weight in (experts.w13, experts.w2):
        for tensor in weight.tensors.values():
            tensor.zero_()
    assert torch.equal(layer(x, ids, weights), before)


def test_a_state_of_other_zero_points_is_refused():
    """Everything of two experts counts, not the codes and scales alone."""
    problem = replace(PROBLEM, w13=QuantScheme(4, 16, False), w2=QuantScheme(4, 16, False))
    experts = RandomSource(problem).load()
    state = FusedMoE.from_experts(experts).state_dict()
    FusedMoE.from_experts(experts).load_state_dict(state)
    experts.w2.zero_points[0, 0, 0] ^= 1
    with pytest.raises(AutoselError, match="weights"):
        FusedMoE.from_experts(experts).load_state_dict(state)


def test_a_map_counts_again_when_another_candidate_takes_over():
    """The next candidate is packed from the experts of the same rank, under the same map."""

    failing = False
    whole = RandomSource(replace(PROBLEM, act_dtype="float32")).load()
    part = shard_ep(whole, 1, 2)

    class Part:
        problem, label = part.problem, "part"

        def load(self, device="cpu"):
            return part

    class Local(FakeBackend):
        def run(self, packed, x, routing, params, out):
            if failing:
                raise RuntimeError("no")
            return out.copy_(expected)

    with (
        registered(first=Local(Clock(), layout=PlainLayout("a"))),
        pytest.MonkeyPatch.context() as p,
    ):
        p.setattr("autosel.layer_choice.DEFAULTS", ("first", "emulation"))
        x = torch.randn(4, PROBLEM.hidden_size)
        ids, weights = torch.tensor([[0, 2], [3, 1], [2, 3], [1, 0]]), torch.rand(4, 2)
        placed = torch.tensor([-1, -1, 0, 1])
        expected = moe(x, part, Routing(ids, weights), expert_map=placed).float()
        layer = FusedMoE.from_source(Part(), expert_map=placed, check=False)
        assert torch.equal(layer(x, ids, weights), expected)
        failing = True
        with pytest.warns(UserWarning, match="withdrawn"):
            out = layer(x, ids, weights)
    assert distance(out, expected) < 1e-5
