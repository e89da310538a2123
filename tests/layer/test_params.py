"""Parameters filled tensor by tensor against the reader of whole checkpoints, bit for bit."""

import json
import re
from dataclasses import replace

import pytest
import torch

from autosel import FusedMoE
from autosel.checkpoint import Checkpoint
from autosel.core import Problem, QuantScheme
from autosel.errors import AutoselError, CheckpointError, UnsupportedError
from autosel.formats import moe_wna16
from autosel.layer_params import ExpertParameters
from autosel.sources import RandomSource

SHARDS = {
    "w1": "w1", "w2": "w2", "w3": "w3",
    "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3",
}  # fmt: skip
NAME = re.compile(r"layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.(\w+)$")


def tensors_of(checkpoint, layer):
    """(expert, shard, suffix, tensor) of one layer, in the order of the files."""
    for name, tensor in checkpoint.tensors.items():
        found = NAME.search(name)
        if found and int(found[1]) == layer:
            yield int(found[2]), SHARDS[found[3]], found[4], tensor


def format_of(checkpoint):
    config = json.loads((checkpoint.path / "config.json").read_text())["quantization_config"]
    first = config.get("checkpoint_format", "gptq") == "gptq"
    return {"format_name": config["quant_method"], "zeros_minus_one": first}


def filled(checkpoint, layer, problem, **options):
    parameters = ExpertParameters(problem=problem, **format_of(checkpoint), **options)
    for expert, shard, suffix, tensor in tensors_of(checkpoint, layer):
        parameters.load_weight(suffix, tensor, expert_id=expert, shard_id=shard)
    return parameters


def same_bits(a, b):
    for weight in ("w13", "w2"):
        ours, theirs = getattr(a, weight), getattr(b, weight)
        assert ours.scheme == theirs.scheme
        assert ours.tensors.keys() == theirs.tensors.keys()
        for name, tensor in ours.tensors.items():
            assert tensor.dtype == theirs.tensors[name].dtype
            assert torch.equal(tensor, theirs.tensors[name]), f"{weight}.{name}"
    assert a.problem == b.problem


SPLITS = {
    "whole": {},
    "tp": {"tp_rank": 1, "tp_size": 2},
    "tp 4": {"tp_rank": 3, "tp_size": 4},
    "ep": {"ep_rank": 1, "ep_size": 2},
    "tp ep": {"tp_rank": 0, "tp_size": 2, "ep_rank": 2, "ep_size": 3},
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_what_is_loaded_equals_what_is_read(checkpoint, split, transposed):
    layer = checkpoint.moe_layers[0]
    opened = Checkpoint.open(checkpoint.path)
    problem = opened.layer(layer).problem
    refused = ""
    try:
        parameters = filled(checkpoint, layer, problem, transposed=transposed, **SPLITS[split])
    except UnsupportedError as error:
        refused = str(error)
    if refused:
        assert problem.intermediate_size // SPLITS[split]["tp_size"] % 8
        assert "values in a word" in refused
        return
    expected = opened.read_experts(layer, **SPLITS[split])
    same_bits(parameters.experts(), expected)


def test_process_gives_a_layer_and_lets_the_parameters_go(checkpoint):
    layer = checkpoint.moe_layers[0]
    at, expected = f"layers.{layer}.", checkpoint.expected
    call = expected[at + "input"], expected[at + "topk_ids"], expected[at + "topk_weights"]
    problem = Checkpoint.open(checkpoint.path).layer(layer).problem.with_act_dtype("float32")
    parameters = filled(checkpoint, layer, problem)
    assert list(parameters.parameters())
    made = parameters.process_weights_after_loading(db=":memory:")
    assert list(parameters.parameters()) == []
    read = FusedMoE.from_checkpoint(checkpoint.path, layer, act_dtype="float32", db=":memory:")
    assert torch.equal(made(*call), read(*call))


SYM = QuantScheme(4, 32, True, scale_dtype="float16")
ASYM = QuantScheme(4, 32, False, scale_dtype="bfloat16")
LAYER = Problem(6, 6, 2, 128, 64, ASYM, ASYM)


@pytest.mark.parametrize(
    ("name", "transposed", "shapes"),
    [
        ("gptq", False, {
            "w13_qweight": [6, 16, 128], "w2_qweight": [6, 8, 128],
            "w13_scales": [6, 4, 128], "w2_scales": [6, 2, 128],
            "w13_qzeros": [6, 4, 16], "w2_qzeros": [6, 2, 16],
        }),
        ("awq", False, {
            "w13_qweight": [6, 128, 16], "w2_qweight": [6, 64, 16],
            "w13_scales": [6, 4, 128], "w2_scales": [6, 2, 128],
            "w13_qzeros": [6, 4, 16], "w2_qzeros": [6, 2, 16],
        }),
        ("compressed-tensors", False, {
            "w13_weight_packed": [6, 128, 16], "w2_weight_packed": [6, 128, 8],
            "w13_weight_scale": [6, 128, 4], "w2_weight_scale": [6, 128, 2],
            "w13_weight_zero_point": [6, 16, 4], "w2_weight_zero_point": [6, 16, 2],
        }),
        ("compressed-tensors", True, {
            "w13_weight_packed": [6, 16, 128], "w2_weight_packed": [6, 8, 128],
            "w13_weight_scale": [6, 4, 128], "w2_weight_scale": [6, 2, 128],
            "w13_weight_zero_point": [6, 4, 16], "w2_weight_zero_point": [6, 2, 16],
        }),
    ],
)  # fmt: skip
def test_names_shapes_and_dtypes(name, transposed, shapes):
    parameters = ExpertParameters(name, LAYER, transposed=transposed)
    made = dict(parameters.named_parameters())
    assert {key: list(tensor.shape) for key, tensor in made.items()} == shapes
    for key, tensor in made.items():
        assert tensor.dtype == (torch.bfloat16 if "scale" in key else torch.int32)
        assert bool((tensor == (1 if "scale" in key else 0)).all())


def test_gate_stands_before_up():
    parameters = ExpertParameters("gptq", LAYER)
    for shard, value in (("w1", 1), ("w3", 3)):
        parameters.load_weight(
            "qweight", torch.full((16, 64), value, dtype=torch.int32), expert_id=2, shard_id=shard
        )
    stacked = parameters.w13_qweight[2]  # [H / 8, 2 * I]
    assert bool((stacked[:, :64] == 1).all())
    assert bool((stacked[:, 64:] == 3).all())
    assert not parameters.w13_qweight[[0, 1, 3, 4, 5]].any()


def test_the_bias_of_down_is_on_the_first_rank_alone():
    layer = replace(LAYER, has_bias=True)
    for rank, expected in ((0, 5.0), (1, 0.0)):
        parameters = ExpertParameters("gptq", layer, tp_rank=rank, tp_size=2)
        down, up = torch.full((128,), 5.0).bfloat16(), torch.arange(64.0).bfloat16()
        parameters.load_weight("bias", down, expert_id=1, shard_id="w2")
        parameters.load_weight("bias", up, expert_id=1, shard_id="w3")
        assert bool((parameters.w2_bias[1] == expected).all())
        assert parameters.w13_bias[1, 32:].tolist() == up[32 * rank : 32 * rank + 32].tolist()


def test_shapes_of_a_rank():
    """Cut groups go over to the common divisor; act-order keeps every scale of w2."""
    layer = replace(LAYER, intermediate_size=96, num_experts=7, num_local_experts=7)
    split = {"tp_rank": 1, "tp_size": 4, "ep_rank": 0, "ep_size": 2}
    made = dict(ExpertParameters("gptq", layer, **split).named_parameters())
    assert list(made["w2_scales"].shape) == [4, 3, 128]
    assert list(made["w2_qweight"].shape) == [4, 3, 128]
    ordered = replace(layer, w2=replace(ASYM, has_g_idx=True))
    made = dict(ExpertParameters("gptq", ordered, **split).named_parameters())
    assert list(made["w2_scales"].shape) == [4, 3, 128]
    assert list(made["w2_g_idx"].shape) == [4, 24]
    channel = replace(layer, w2=replace(ASYM, group_size=-1))
    made = dict(ExpertParameters("gptq", channel, **split).named_parameters())
    assert list(made["w2_scales"].shape) == [4, 1, 128]


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(UnsupportedError, match="found 64, expected a multiple of 3"):
        ExpertParameters("gptq", LAYER, tp_size=3)
    with pytest.raises(UnsupportedError, match=r"found 4 to 8, expected multiples of 8"):
        ExpertParameters("gptq", LAYER, tp_rank=1, tp_size=16)
    with pytest.raises(AutoselError, match="found 'gguf', expected gptq, awq, compressed-tensors"):
        ExpertParameters("gguf", LAYER)


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("suffix", "tensor", "place", "message"),
    [
        ("qweight", zeros(8, 64), ("w1", 0), r"shape: found \[8, 64\], expected \[16, 64\]"),
        ("qweight", zeros(16, 64).long(), ("w1", 0), "dtype: found I64, expected I32"),
        ("scales", torch.ones(4, 64), ("w1", 0), "dtype: found F32, expected BF16"),
        ("weight", zeros(1), ("w1", 0), "expected one of qweight"),
        ("qweight", zeros(16, 64), ("w4", 0), "none there"),
        ("qweight", zeros(16, 64), ("w1", 6), "none there"),
        ("bias", torch.ones(64), ("w1", 0), "values: found others, expected zeros"),
        ("g_idx", torch.arange(127, -1, -1) // 32, ("w1", 0), "an order of its own"),
    ],
)
def test_tensors_that_do_not_fit_are_named(suffix, tensor, place, message):
    parameters = ExpertParameters("gptq", LAYER)
    with pytest.raises(CheckpointError, match=message):
        parameters.load_weight(suffix, tensor, shard_id=place[0], expert_id=place[1])


def test_a_symmetric_layer_with_other_zero_points_is_refused():
    parameters = ExpertParameters("gptq", replace(LAYER, w13=SYM, w2=SYM))
    implicit = torch.full((4, 8), 0x77777777, dtype=torch.int32)
    assert parameters.load_weight("qzeros", implicit, expert_id=0, shard_id="w1")
    with pytest.raises(CheckpointError, match="implicit zero point"):
        parameters.load_weight("qzeros", implicit - 1, expert_id=0, shard_id="w1")


def test_tensors_that_are_missing_are_named(get_checkpoint):
    checkpoint = get_checkpoint("gptq-v1-w4-g64-sym-actorder-qwen3moe")
    problem = Checkpoint.open(checkpoint.path).layer(0).problem
    for leave_out in ("qweight", "scales", "g_idx"):
        parameters = ExpertParameters("gptq", problem)
        for expert, shard, suffix, tensor in tensors_of(checkpoint, 0):
            if (expert, shard, suffix) != (3, "w1", leave_out):
                parameters.load_weight(suffix, tensor, expert_id=expert, shard_id=shard)
        with pytest.raises(CheckpointError, match=rf"expert 3 w1\.{leave_out}: .*never loaded"):
            parameters.experts()


def test_a_group_index_out_of_range_and_a_scale_of_nan_are_named(get_checkpoint):
    checkpoint = get_checkpoint("gptq-v1-w4-g64-sym-actorder-qwen3moe")
    problem = Checkpoint.open(checkpoint.path).layer(0).problem
    parameters = filled(checkpoint, 0, problem)
    parameters.w13_g_idx.data[2, 0] = 99
    with pytest.raises(CheckpointError, match=r"expert 2 w1\.g_idx: .*99"):
        parameters.experts()
    parameters = filled(checkpoint, 0, problem)
    parameters.w2_scales.data[1, 0, 5] = torch.nan
    with pytest.raises(CheckpointError, match=r"expert 1 w2\.scales, output 5, group 0"):
        parameters.experts()


def test_gate_and_up_of_different_orders_are_refused(get_checkpoint):
    checkpoint = get_checkpoint("gptq-v1-w4-g64-sym-actorder-qwen3moe")
    parameters = ExpertParameters("gptq", Checkpoint.open(checkpoint.path).layer(0).problem)
    order = next(t for _, s, n, t in tensors_of(checkpoint, 0) if n == "g_idx" and s == "w1")
    parameters.load_weight("g_idx", order, expert_id=0, shard_id="w1")
    with pytest.raises(CheckpointError, match="group index of gate and up"):
        parameters.load_weight("g_idx", order.flip(0), expert_id=0, shard_id="w3")


def test_the_layout_of_moe_wna16_becomes_a_layer():
    experts = RandomSource(replace(LAYER, act_dtype="float32")).load()
    stored = moe_wna16.write(experts)
    assert {name: list(t.shape) for name, t in stored.items()} == {
        "w13_qweight": [6, 128, 64], "w2_qweight": [6, 128, 32],
        "w13_scales": [6, 128, 4], "w2_scales": [6, 128, 2],
        "w13_qzeros": [6, 64, 4], "w2_qzeros": [6, 64, 2],
    }  # fmt: skip
    layer = FusedMoE.from_experts(moe_wna16.read(stored, experts.problem))
    x = torch.randn(5, 128)
    ids, weights = torch.rand(5, 6).topk(2).indices, torch.rand(5, 2)
    assert torch.equal(layer(x, ids, weights), FusedMoE.from_experts(experts)(x, ids, weights))
