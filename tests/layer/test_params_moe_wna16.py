"""The MoeWNA16 layout filled tensor by tensor, against weights read and converted as a whole."""

import pytest
import torch

from autosel import FusedMoE
from autosel.canonical import dequantize_expert
from autosel.checkpoint import Checkpoint
from autosel.core import Problem, QuantScheme
from autosel.errors import AutoselError, CheckpointError
from autosel.formats import moe_wna16
from autosel.layer_moe_wna16 import MoeWna16Parameters
from tests.layer.test_params import format_of, tensors_of

SPLITS = {
    "whole": {},
    "tp": {"tp_rank": 1, "tp_size": 2},
    "ep": {"ep_rank": 1, "ep_size": 2},
    "tp ep": {"tp_rank": 0, "tp_size": 2, "ep_rank": 2, "ep_size": 3},
}


def filled(checkpoint, layer, problem, **options):
    parameters = MoeWna16Parameters(problem=problem, **format_of(checkpoint), **options)
    for expert, shard, suffix, tensor in tensors_of(checkpoint, layer):
        parameters.load_weight(suffix, tensor, expert_id=expert, shard_id=shard)
    return parameters


@pytest.mark.parametrize("split", SPLITS)
def test_what_is_loaded_equals_what_is_read(checkpoint, split):
    layer = checkpoint.moe_layers[0]
    opened = Checkpoint.open(checkpoint.path)
    problem = opened.layer(layer).problem
    outside = (
        format_of(checkpoint)["format_name"] == "compressed-tensors"
        or problem.w13.has_g_idx
        or problem.w13.group_size == -1
        or problem.w13 != problem.w2
        or problem.intermediate_size // SPLITS[split].get("tp_size", 1) % 32 > 0
    )
    if outside:
        with pytest.raises(AutoselError, match="found"):
            filled(checkpoint, layer, problem, **SPLITS[split])
        return
    parameters = filled(checkpoint, layer, problem, **SPLITS[split])
    read = opened.read_experts(layer, **SPLITS[split])
    made = parameters.experts()
    for weight in ("w13", "w2"):
        ours, theirs = getattr(made, weight), getattr(read, weight)
        for expert in range(read.problem.num_local_experts):
            assert torch.equal(dequantize_expert(ours, expert), dequantize_expert(theirs, expert))
    if split == "whole":
        written = moe_wna16.write(read)
        assert written.keys() == {name for name, _ in parameters.named_parameters()}
        for name, tensor in written.items():
            found = getattr(parameters, name)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor), name


def test_some_checkpoints_can_be_held(get_checkpoint):
    """So that the test above does not pass because everything is refused."""
    for name in ("awq-w4-g32-deepseekv3", "gptq-v1-w4-g32-asym-deepseekv2"):
        checkpoint = get_checkpoint(name)
        layer = checkpoint.moe_layers[0]
        problem = Checkpoint.open(checkpoint.path).layer(layer).problem.with_act_dtype("float32")
        made = filled(checkpoint, layer, problem).process_weights_after_loading(db=":memory:")
        at, expected = f"layers.{layer}.", checkpoint.expected
        call = expected[at + "input"], expected[at + "topk_ids"], expected[at + "topk_weights"]
        read = FusedMoE.from_checkpoint(checkpoint.path, layer, act_dtype="float32", db=":memory:")
        error = (made(*call) - read(*call)).norm() / read(*call).norm()
        assert float(error) < 1e-5


ASYM = QuantScheme(4, 128, False, scale_dtype="bfloat16")


@pytest.mark.parametrize("bits", [4, 8])
def test_names_shapes_and_dtypes(bits):
    """Group 128 does not divide 192 inputs: both sizes go over to 64."""
    scheme = QuantScheme(bits, 128, False)
    problem = Problem(6, 6, 2, 256, 384, scheme, scheme)
    made = MoeWna16Parameters("gptq", problem, tp_size=2)
    v = 8 // bits
    shapes = {name: (list(t.shape), t.dtype) for name, t in made.named_parameters()}
    assert made.group_size == 64
    assert shapes == {
        "w13_qweight": ([6, 384, 256 // v], torch.uint8),
        "w2_qweight": ([6, 256, 192 // v], torch.uint8),
        "w13_scales": ([6, 384, 4], torch.bfloat16),
        "w2_scales": ([6, 256, 3], torch.bfloat16),
        "w13_qzeros": ([6, 384 // v, 4], torch.uint8),
        "w2_qzeros": ([6, 256 // v, 3], torch.uint8),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheme": QuantScheme(4, 128, True, has_g_idx=True)}, "group index: found True"),
        ({"scheme": QuantScheme(4, -1, True)}, "group_size .* found -1"),
        ({"scheme": ASYM, "inter": 80}, "group_size .* found 128"),
        ({"scheme": ASYM, "bias": True}, "bias: found True"),
        ({"scheme": ASYM, "format": "compressed-tensors"}, "expected gptq or awq"),
    ],
)
def test_layers_that_the_layout_cannot_hold_are_refused(change, message):
    scheme = change["scheme"]
    problem = Problem(
        2, 2, 1, 256, change.get("inter", 128), scheme, scheme, has_bias=change.get("bias", False)
    )
    with pytest.raises(AutoselError, match=message):
        MoeWna16Parameters(change.get("format", "gptq"), problem)


def test_tensors_that_are_missing_or_not_finite_are_named(get_checkpoint):
    checkpoint = get_checkpoint("awq-w4-g32-deepseekv3")
    layer = checkpoint.moe_layers[0]
    problem = Checkpoint.open(checkpoint.path).layer(layer).problem
    made = MoeWna16Parameters(problem=problem, **format_of(checkpoint))
    tensors = list(tensors_of(checkpoint, layer))
    for expert, shard, suffix, tensor in tensors[:-1]:
        made.load_weight(suffix, tensor, expert_id=expert, shard_id=shard)
    with pytest.raises(CheckpointError, match="never loaded"):
        made.experts()
    expert, shard, suffix, tensor = tensors[-1]
    made.load_weight(suffix, tensor, expert_id=expert, shard_id=shard)
    made.w13_scales.data[3, 1, 0] = float("nan")
    with pytest.raises(CheckpointError, match="w13_scales"):
        made.experts()
