"""Names, prefixes, mixed layers, stacked tensors, routers and shared experts."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel.canonical import dequantize_expert
from autosel.checkpoint import Checkpoint, CheckpointWarning, MoELayer
from autosel.errors import AutoselError, CheckpointError
from autosel.formats.base import LinearQuant
from tests.checkpoint_builder import Made, make_checkpoint, random_weight, shuffled_g_idx

EXPERT = "model.layers.0.mlp.experts"


def only_layer(folder: Path) -> MoELayer:
    (layer,) = Checkpoint.open(folder).layers
    return layer


def rename(made: Made, old: str, new: str) -> None:
    made.tensors = {name.replace(old, new): t for name, t in made.tensors.items()}


def same_weights(folder: Path, made: Made, layer: int = 0) -> None:
    """read_experts gives the drawn weights, expert by expert."""
    experts = Checkpoint.open(folder).read_experts(layer)
    size = experts.problem.intermediate_size
    dtype = made.scale_dtype
    for e in range(made.experts):
        w13 = dequantize_expert(experts.w13, e, dtype)
        found = {
            "gate_proj": w13[:size],
            "up_proj": w13[size:],
            "down_proj": dequantize_expert(experts.w2, e, dtype),
        }
        for proj, weight in found.items():
            drawn = made.weights[f"{made.prefix}layers.{layer}.mlp.experts.{e}.{proj}"]
            assert torch.equal(weight, dequantize_expert(drawn, 0, dtype)), (e, proj)


@pytest.mark.parametrize(
    "prefix",
    ["model.", "", "language_model.model.", "model.language_model.", "thinker.model.", "backbone."],
)
def test_prefixes(tmp_path: Path, prefix: str) -> None:
    made = Made(prefix=prefix)
    folder = made.write(tmp_path)
    assert only_layer(folder).name == f"{prefix}layers.0.mlp.experts"
    same_weights(folder, made)


@pytest.mark.parametrize(
    ("model_type", "path", "names", "facts"),
    [
        ("mixtral", "block_sparse_moe", ("w1", "w3", "w2"), {"intermediate_size": 32}),
        ("phimoe", "block_sparse_moe", ("w1", "w3", "w2"), {"intermediate_size": 32}),
        ("minimax_m2", "block_sparse_moe", ("w1", "w3", "w2"), {"intermediate_size": 32}),
        ("olmoe", "mlp", ("gate_proj", "up_proj", "down_proj"), {"intermediate_size": 32}),
        ("jamba", "feed_forward", ("gate_proj", "up_proj", "down_proj"), {"intermediate_size": 32}),
        ("glm4_moe", "mlp", ("gate_proj", "up_proj", "down_proj"), {}),
        ("ernie4_5_moe", "mlp", ("gate_proj", "up_proj", "down_proj"), {}),
        ("never_heard_of", "ffn", ("gate_proj", "up_proj", "down_proj"), {}),
    ],
)
def test_models_names(
    tmp_path: Path, model_type: str, path: str, names: tuple[str, ...], facts: dict[str, Any]
) -> None:
    made = Made(config={"model_type": model_type, **facts})
    if facts:
        del made.config["moe_intermediate_size"]
    folder_truth = made.weights
    rename(made, ".mlp.", f".{path}.")
    for old, new in zip(("gate_proj", "up_proj", "down_proj"), names, strict=True):
        rename(made, old, new)
    folder = made.write(tmp_path)
    layer = only_layer(folder)
    assert layer.status == "quantized", layer.reason
    assert layer.name == f"model.layers.0.{path}.experts"
    assert (layer.router is None) == (model_type == "never_heard_of")
    found = dict(Checkpoint.open(folder).dequantize(0))
    assert len(found) == 12
    name = f"model.layers.0.{path}.experts.2.{names[2]}.weight"
    truth = folder_truth[f"{EXPERT}.2.down_proj"]
    assert torch.equal(found[name], dequantize_expert(truth, 0, torch.float16))
    same_weights(folder, made)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"model_type": "mixtral"}, {"scoring": "softmax", "renormalize": True}),
        ({"model_type": "qwen3_moe", "norm_topk_prob": False}, {"renormalize": False}),
        (
            {
                "model_type": "deepseek_v2",
                "topk_method": "group_limited_greedy",
                "n_group": 4,
                "topk_group": 2,
                "norm_topk_prob": False,
                "routed_scaling_factor": 16.0,
            },
            {
                "num_groups": 4,
                "topk_groups": 2,
                "group_score": "max",
                "scaling_factor": 16.0,
                "renormalize": False,
            },
        ),
        ({"model_type": "deepseek_v2", "topk_method": "greedy", "n_group": 4}, {"num_groups": 1}),
        (
            {"model_type": "deepseek_v3", "n_group": 2, "topk_group": 1},
            {"scoring": "sigmoid", "num_groups": 2, "topk_groups": 1, "group_score": "top2_sum"},
        ),
        ({"model_type": "phimoe"}, {"scoring": "sparsemixer", "jitter": 0.01}),
        ({"model_type": "jamba", "norm_topk_prob": None}, {"renormalize": False}),
    ],
)
def test_router_specs(tmp_path: Path, facts: dict[str, Any], expected: dict[str, Any]) -> None:
    router = only_layer(make_checkpoint(tmp_path, config={"intermediate_size": 32, **facts})).router
    assert router is not None
    assert {name: getattr(router, name) for name in expected} == expected
    assert router.top_k == 2


def test_groups_that_do_not_divide_the_experts_are_refused(tmp_path: Path) -> None:
    config = {"model_type": "deepseek_v3", "n_group": 3, "topk_group": 1}
    layer = only_layer(make_checkpoint(tmp_path, config=config))
    assert layer.status == "refused"
    assert "n_group" in layer.reason


@pytest.mark.parametrize(
    "name",
    [
        "mlp.gate.e_score_correction_bias",
        "mlp.e_score_correction_bias",
        "mlp.moe_statics.e_score_correction_bias",
    ],
)
def test_correction_biases(tmp_path: Path, name: str) -> None:
    made = Made(config={"model_type": "deepseek_v3"})
    made.tensors[f"model.layers.0.{name}"] = torch.arange(4.0)[None]
    folder = made.write(tmp_path)
    spec = only_layer(folder).router
    assert spec is not None
    assert spec.has_correction_bias
    found = Checkpoint.open(folder).router(0)["e_score_correction_bias"]
    assert torch.equal(found, torch.arange(4.0))


def test_llama4_weighs_the_input(tmp_path: Path) -> None:
    made = Made(
        top_k=1,
        prefix="language_model.model.",
        config={"model_type": "llama4_text", "intermediate_size": 32, "intermediate_size_mlp": 64},
    )
    del made.config["moe_intermediate_size"]
    rename(made, ".mlp.gate.", ".mlp.router.")
    rename(made, ".mlp.", ".feed_forward.")
    made.tensors["language_model.model.layers.0.feed_forward.shared_expert.up_proj.weight"] = (
        torch.zeros(32, 64)
    )
    folder = made.write(tmp_path, nested="text_config")
    layer = only_layer(folder)
    assert layer.problem is not None, layer.reason
    assert layer.problem.router_weight_on_input
    assert layer.num_shared_experts == 1
    assert layer.router is not None
    assert (layer.router.scoring, layer.router.renormalize) == ("sigmoid", False)
    assert Checkpoint.open(folder).router(0)["weight"].shape == (4, 64)


def test_experts_without_a_gate(tmp_path: Path) -> None:
    made = Made(config={"model_type": "nemotron_h", "mlp_hidden_act": "relu2"})
    for module in [m for m in made.weights if m.endswith("gate_proj")]:
        made.tensors = {n: t for n, t in made.tensors.items() if not n.startswith(module + ".")}
    folder = made.write(tmp_path)
    problem = only_layer(folder).problem
    assert problem is not None
    assert problem.activation.name == "relu2_no_mul"
    experts = Checkpoint.open(folder).read_experts(0)
    assert experts.w13.num_outputs == 32
    truth = made.weights[f"{EXPERT}.1.up_proj"]
    assert torch.equal(experts.w13.codes[1], truth.codes[0])


def test_a_gated_model_whose_gates_are_lost_is_refused(tmp_path: Path) -> None:
    made = Made()
    made.tensors = {n: t for n, t in made.tensors.items() if ".gate_proj." not in n}
    layer = only_layer(made.write(tmp_path))
    assert layer.status == "refused"
    assert f"{EXPERT}.0: gate projection: found no tensor" in layer.reason


def test_an_ungated_activation_with_gates_is_refused(tmp_path: Path) -> None:
    layer = only_layer(make_checkpoint(tmp_path, config={"hidden_act": "relu2"}))
    assert layer.status == "refused"
    assert "found gate" in layer.reason


@pytest.mark.parametrize("fmt", ["gptq", "awq", "compressed-tensors"])
def test_one_unquantised_projection_refuses_its_layer_alone(tmp_path: Path, fmt: str) -> None:
    made = Made(fmt=fmt, layers=2)
    made.unquantise(f"{EXPERT}.2.down_proj")
    folder = made.write(tmp_path)
    opened = Checkpoint.open(folder)
    bad, good = opened.layers
    assert bad.status == "refused"
    for part in ("layer 0", "expert 2", "down", "unquantised", "BF16 [64, 32]", "down_proj.weight"):
        assert part in bad.reason
    assert good.status == "quantized"
    same_weights(folder, made, 1)
    for use in (opened.read_experts, opened.dequantize):
        with pytest.raises(CheckpointError, match="expert 2"):
            use(0)
    assert all("layer refused" in r.why for r in opened.accounting() if ".0.mlp.experts" in r.name)


@pytest.mark.parametrize(
    ("fmt", "suffix"),
    [
        ("gptq", "scales"),
        ("gptq", "qweight"),
        ("awq", "scales"),
        ("compressed-tensors", "weight_scale"),
        ("compressed-tensors", "weight_packed"),
    ],
)
def test_a_missing_tensor_refuses_its_layer_by_name(tmp_path: Path, fmt: str, suffix: str) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{EXPERT}.1.up_proj.{suffix}"]

    layer = only_layer(make_checkpoint(tmp_path, drop, fmt=fmt))
    assert layer.status == "refused"
    assert f"{EXPERT}.1.up_proj" in layer.reason
    assert suffix in layer.reason


@pytest.mark.parametrize("fmt", ["gptq", "awq", "compressed-tensors"])
def test_missing_zero_points_of_an_asymmetric_layer(tmp_path: Path, fmt: str) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for suffix in ("qzeros", "weight_zero_point"):
            tensors.pop(f"{EXPERT}.3.gate_proj.{suffix}", None)

    layer = only_layer(make_checkpoint(tmp_path, drop, fmt=fmt, symmetric=False))
    assert layer.status == "refused"
    assert f"{EXPERT}.3.gate_proj" in layer.reason
    assert "found none" in layer.reason


def test_a_missing_expert_and_one_too_many(tmp_path: Path) -> None:
    made = Made()
    made.config["num_experts"] = 5
    made.tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(5, 64)
    layer = only_layer(made.write(tmp_path / "missing"))
    assert "experts.4: gate projection: found no tensor" in layer.reason
    made.config["num_experts"] = 3
    layer = only_layer(made.write(tmp_path / "more"))
    assert "expert number: found 3, expected below 3" in layer.reason


def test_experts_scattered_over_two_prefixes_are_refused_twice(tmp_path: Path) -> None:
    made = Made()
    rename(made, "model.layers.0.mlp.experts.1.", "language_model.model.layers.0.mlp.experts.1.")
    layers = Checkpoint.open(made.write(tmp_path)).layers
    assert [layer.status for layer in layers] == ["refused", "refused"]
    assert any("experts.1: gate projection" in layer.reason for layer in layers)


def test_a_layer_whose_experts_are_all_missing_is_not_overlooked(tmp_path: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if ".layers.1.mlp.experts." in n]:
            del tensors[name]

    layers = Checkpoint.open(make_checkpoint(tmp_path, drop, layers=3)).layers
    assert [layer.status for layer in layers] == ["quantized", "refused", "quantized"]
    assert "found none beside the router" in layers[1].reason


def test_shared_experts_are_left_aside(tmp_path: Path) -> None:
    made = Made(experts=8, config={"model_type": "qwen2_moe"})
    block = "model.layers.0.mlp"
    for proj, shape in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
        made.tensors[f"{block}.shared_expert.{proj}.weight"] = torch.zeros(shape).bfloat16()
    made.tensors[f"{block}.shared_expert_gate.weight"] = torch.zeros(1, 64)
    folder = made.write(tmp_path)
    layer = only_layer(folder)
    assert layer.status == "quantized"
    assert (layer.num_experts, layer.num_shared_experts) == (8, 1)
    same_weights(folder, made)
    whys = {r.name: r.why for r in Checkpoint.open(folder).accounting() if not r.used}
    assert set(whys.values()) == {"router", "shared expert"}
    assert len(whys) == 5


@pytest.mark.parametrize("fmt", ["gptq", "awq", "compressed-tensors"])
def test_a_quantised_router_is_reported_and_left_alone(tmp_path: Path, fmt: str) -> None:
    made = Made(fmt=fmt, experts=8)
    del made.tensors["model.layers.0.mlp.gate.weight"]
    made.put("model.layers.0.mlp.gate", random_weight(8, 64))
    folder = made.write(tmp_path)
    layer = only_layer(folder)
    assert layer.status == "quantized", layer.reason
    assert "the router is quantised" in layer.notes[0]
    same_weights(folder, made)
    opened = Checkpoint.open(folder)
    assert "weight" not in opened.router(0)
    routers = [r for r in opened.accounting() if ".mlp.gate." in r.name]
    assert len(routers) >= 3
    assert all(r.why == "router, quantised" and not r.used for r in routers)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("fmt", ["gptq", "gptq_v2", "awq", "compressed-tensors"])
def test_stacked_tensors_read_like_separate_ones(
    tmp_path: Path, fmt: str, symmetric: bool, act_order: bool, fused: bool
) -> None:
    if fmt == "awq" and act_order:
        act_order = False
    facts: dict[str, Any] = {"fmt": fmt, "symmetric": symmetric, "act_order": act_order}
    # 40 rows: with gate and up in one, their border lies inside a block of packed outputs
    separate = Made(hidden=96, inter=40, **facts)
    stacked = Made(hidden=96, inter=40, **facts)
    stacked.stack(fused)
    first = Checkpoint.open(separate.write(tmp_path / "separate"))
    second = Checkpoint.open(stacked.write(tmp_path / "stacked"))
    assert second.layers[0].problem == first.layers[0].problem, second.layers[0].reason
    left, right = first.read_experts(0), second.read_experts(0)
    for half in ("w13", "w2"):
        tensors = getattr(left, half).tensors
        assert tensors.keys() == getattr(right, half).tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(getattr(right, half).tensors[name], tensor), (half, name)
    dense = dict(first.dequantize(0))
    found = dict(second.dequantize(0))
    assert found.keys() == dense.keys()
    assert all(torch.equal(found[name], dense[name]) for name in dense)


@pytest.mark.parametrize("model_type", ["gpt_oss", "never_heard_of"])
def test_unknown_or_alternating_halves_are_refused(tmp_path: Path, model_type: str) -> None:
    made = Made(config={"model_type": model_type, "intermediate_size": 32})
    made.stack(True)
    layer = only_layer(made.write(tmp_path))
    assert layer.status == "refused"
    assert "order of gate and up rows" in layer.reason


def test_a_stack_of_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    made = Made()
    made.stack(False)
    name = f"{EXPERT}.up_proj.scales"
    made.tensors[name] = made.tensors[name][:3]
    layer = only_layer(made.write(tmp_path))
    assert layer.status == "refused"
    assert f"{name}: shape: found [3, 2, 32], expected [4 experts, ...]" in layer.reason


def test_a_plain_stacked_layer_is_unquantised(tmp_path: Path) -> None:
    made = Made()
    made.tensors = {n: t for n, t in made.tensors.items() if ".experts." not in n}
    made.tensors[f"{EXPERT}.gate_up_proj"] = torch.zeros(4, 64, 64).bfloat16()
    made.tensors[f"{EXPERT}.down_proj"] = torch.zeros(4, 64, 32).bfloat16()
    layer = only_layer(made.write(tmp_path))
    assert (layer.status, layer.reason) == ("unquantized", "all its weights are stored as BF16")


def test_gate_and_up_of_different_widths_still_dequantise(tmp_path: Path) -> None:
    made = Made(quant={"dynamic": {r".*\.up_proj": {"bits": 8}}})
    for module in [m for m in made.weights if m.endswith("up_proj")]:
        made.put(module, random_weight(32, 64, bits=8), replace(made.linear_quant, num_bits=8))
    opened = Checkpoint.open(made.write(tmp_path))
    layer = opened.layers[0]
    assert layer.status == "refused"
    assert "found 8, 32, float16" in layer.reason
    found = dict(opened.dequantize(0))
    for module, weight in made.weights.items():
        expected = dequantize_expert(weight, 0, torch.float16)
        assert torch.equal(found[f"{module}.weight"], expected)
    with pytest.raises(CheckpointError, match="refused"):
        opened.read_experts(0)


@pytest.mark.parametrize("expert", [0, 2])
def test_gate_and_up_in_different_orders(tmp_path: Path, expert: int) -> None:
    """Seen when listing in expert 0, else when reading; dequantising works all the same."""
    made = Made(hidden=96, act_order=True)
    module = f"{EXPERT}.{expert}.up_proj"
    made.put(module, random_weight(32, 96, g_idx=shuffled_g_idx(96, 32, 99)))
    opened = Checkpoint.open(made.write(tmp_path))
    assert (opened.layers[0].status == "refused") == (expert == 0)
    with pytest.raises(CheckpointError, match=f"experts.{expert}: group index of gate and up"):
        opened.read_experts(0)
    found = dict(opened.dequantize(0))[f"{module}.weight"]
    assert torch.equal(found, dequantize_expert(made.weights[module], 0, torch.float16))


def test_mixed_scale_dtypes_and_widths_are_refused(tmp_path: Path) -> None:
    made = Made()
    made.put(f"{EXPERT}.3.up_proj", random_weight(32, 64, scale_dtype=torch.bfloat16))
    layer = only_layer(made.write(tmp_path / "dtype"))
    assert "experts.3.up_proj" in layer.reason
    assert "bfloat16, expected 4, 32, float16" in layer.reason
    made = Made(quant={"dynamic": {r".*experts\.3\.down_proj": {"bits": 8}}})
    made.put(f"{EXPERT}.3.down_proj", random_weight(64, 32, bits=8), LinearQuant(8, 32, True))
    layer = only_layer(made.write(tmp_path / "bits"))
    assert "experts.3.down_proj: bits, group_size, scale dtype: found 8" in layer.reason


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("fmt", ["gptq", "awq", "compressed-tensors"])
def test_scales_that_are_not_finite(tmp_path: Path, fmt: str, value: float) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        name = next(n for n in tensors if "experts.3.down_proj" in n and "scale" in n)
        scales = tensors[name].clone()
        scales[(7, 0) if fmt == "compressed-tensors" else (0, 7)] = value
        tensors[name] = scales

    opened = Checkpoint.open(make_checkpoint(tmp_path, spoil, fmt=fmt))
    for use in (lambda: opened.read_experts(0), lambda: list(opened.dequantize(0))):
        with pytest.raises(
            CheckpointError,
            match=r"model\.safetensors: .*experts\.3\.down_proj.*expert 3, output 7, group 0",
        ):
            use()


def test_extreme_bf16_scales_keep_their_dtype(tmp_path: Path) -> None:
    """1e-8 and 70000 do not exist in fp16; the canonical form does not round them."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        name = f"{EXPERT}.0.down_proj.weight_scale"
        tensors[name] = tensors[name].clone()
        tensors[name][0, 0], tensors[name][1, 0] = 1e-8, 70000

    folder = make_checkpoint(tmp_path, spoil, fmt="compressed-tensors", scale_dtype=torch.bfloat16)
    experts = Checkpoint.open(folder).read_experts(0)
    assert experts.problem.act_dtype == "float16"
    assert experts.w2.scales.dtype == torch.bfloat16
    assert experts.w2.scales[0, :2, 0].tolist() == [
        torch.tensor(1e-8).bfloat16().item(),
        torch.tensor(70000.0).bfloat16().item(),
    ]


def test_shapes_that_contradict_the_config(tmp_path: Path) -> None:
    layer = only_layer(make_checkpoint(tmp_path / "a", config={"hidden_size": 128}))
    assert "64" in layer.reason
    assert "128" in layer.reason
    layer = only_layer(make_checkpoint(tmp_path / "b", config={"moe_intermediate_size": 48}))
    assert "intermediate size: found 32, expected 48" in layer.reason
    # 384 inputs with all 24 scale rows of 768: a group's size is no matter of shapes
    folder = make_checkpoint(
        tmp_path / "c", hidden=64, inter=384, group_size=16, quant={"group_size": 32}
    )
    layer = only_layer(folder)
    assert "found F16 [24, 64], expected F16/BF16/F32 [12, 64]" in layer.reason


@pytest.mark.parametrize("size", [8, 96])
def test_small_and_odd_sizes(tmp_path: Path, size: int) -> None:
    for fmt in ("gptq", "awq", "compressed-tensors"):
        made = Made(fmt=fmt, hidden=160, inter=size, symmetric=False)
        same_weights(made.write(tmp_path / fmt), made)


def test_declared_symmetric_with_other_zero_points(tmp_path: Path) -> None:
    made = Made(fmt="gptq_v2")
    odd = random_weight(32, 64, symmetric=False, seed=5)
    made.put(f"{EXPERT}.0.up_proj", odd)
    folder = made.write(tmp_path)
    layer = only_layer(folder)
    assert layer.problem is not None
    assert not layer.problem.w13.symmetric
    assert layer.problem.w2.symmetric
    assert "declared symmetric" in layer.notes[0]
    with pytest.warns(CheckpointWarning, match=r"experts\.0\.up_proj\.qzeros"):
        experts = Checkpoint.open(folder).read_experts(0)
    assert experts.problem == layer.problem
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same_weights(folder, made)


def test_bias_of_experts(tmp_path: Path) -> None:
    made = Made(bias=True)
    folder = made.write(tmp_path)
    experts = Checkpoint.open(folder).read_experts(0)
    assert experts.problem.has_bias
    assert experts.problem == only_layer(folder).problem
    assert experts.w13.bias is not None
    gate = made.weights[f"{EXPERT}.1.gate_proj"].bias
    assert gate is not None
    assert torch.equal(experts.w13.bias[1, :32], gate[0])


def test_a_second_stack_of_layers_is_numbered_after_the_first(tmp_path: Path) -> None:
    made = Made(layers=2)
    for name in [n for n in made.tensors if ".layers.0." in n]:
        made.tensors["mtp." + name.removeprefix("model.")] = made.tensors[name].clone()
    layers = Checkpoint.open(made.write(tmp_path)).layers
    assert [(layer.index, layer.name) for layer in layers] == [
        (0, "model.layers.0.mlp.experts"),
        (1, "model.layers.1.mlp.experts"),
        (2, "mtp.layers.0.mlp.experts"),
    ]


def test_unknown_expert_tensors_are_accounted_for(tmp_path: Path) -> None:
    made = Made()
    made.tensors[f"{EXPERT}.0.odd_proj.weight"] = torch.zeros(2)
    made.tensors["expert_statistics"] = torch.zeros(2)
    made.tensors[f"{EXPERT}.0.up_proj.extra"] = torch.zeros(2)
    rows = {r.name: r for r in Checkpoint.open(made.write(tmp_path)).accounting()}
    for name in (f"{EXPERT}.0.odd_proj.weight", "expert_statistics", f"{EXPERT}.0.up_proj.extra"):
        assert not rows[name].used
        assert "unknown" in rows[name].why


def test_a_layer_number_that_is_not_there(tmp_path: Path) -> None:
    opened = Checkpoint.open(make_checkpoint(tmp_path, layers=2))
    for use in (opened.layer, opened.router, opened.read_experts, opened.dequantize):
        with pytest.raises(AutoselError, match="MoE layer: found 7, expected one of 0, 1"):
            use(7)


def test_act_dtype_can_be_chosen(tmp_path: Path) -> None:
    experts = Checkpoint.open(make_checkpoint(tmp_path)).read_experts(0, act_dtype="bfloat16")
    assert experts.problem.act_dtype == "bfloat16"
    assert experts.w13.scales.dtype == torch.float16


def test_hostile_numbers_and_sizes_are_no_traceback(tmp_path: Path) -> None:
    made = Made()
    made.tensors[f"{EXPERT}.{'9' * 5000}.up_proj.qweight"] = torch.zeros(1, 1, dtype=torch.int32)
    made.tensors[f"model.layers.{'9' * 5000}.mlp.experts.0.up_proj.qweight"] = torch.zeros(1, 1)
    assert Checkpoint.open(made.write(tmp_path / "numbers")).layers[0].status == "quantized"
    made = Made(config={"moe_intermediate_size": None})
    for name in list(made.tensors):
        if ".experts." in name:
            made.tensors[name] = made.tensors[name][:0]
    layer = only_layer(made.write(tmp_path / "empty"))
    assert layer.status == "refused"


def test_granite_keeps_its_experts_beside_the_router(tmp_path: Path) -> None:
    made = Made(config={"model_type": "granitemoe", "intermediate_size": 32})
    del made.config["moe_intermediate_size"]
    made.stack(True)
    rename(made, ".mlp.experts.gate_up_proj.", ".block_sparse_moe.input_linear.")
    rename(made, ".mlp.experts.down_proj.", ".block_sparse_moe.output_linear.")
    rename(made, ".mlp.gate.", ".block_sparse_moe.router.layer.")
    folder = made.write(tmp_path)
    layer = only_layer(folder)
    assert layer.status == "quantized", layer.reason
    assert Checkpoint.open(folder).router(0)["weight"].shape == (4, 64)
    same_weights(folder, made)


def test_a_router_of_another_width_is_refused(tmp_path: Path) -> None:
    made = Made()
    made.tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(5, 64)
    with pytest.raises(CheckpointError, match=r"gate\.weight: shape: found \[5, 64\]"):
        Checkpoint.open(made.write(tmp_path)).router(0)


def test_a_stacked_layer_whose_children_have_other_rules(tmp_path: Path) -> None:
    """The tensor has one width; which of two rules it follows is not guessed."""
    made = Made(quant={"dynamic": {r".*experts\.\d+\.down_proj": {"bits": 8}}})
    made.stack(False)
    layer = only_layer(made.write(tmp_path))
    assert layer.status == "refused"
    assert "rules differ" in layer.reason


@pytest.mark.parametrize(
    "copy", [f"{EXPERT}.1.w1.", f"{EXPERT}.1.gate_up_proj.", f"{EXPERT}.gate_proj."]
)
def test_weights_that_are_stored_twice_are_refused(tmp_path: Path, copy: str) -> None:
    made = Made()
    for name, tensor in list(made.tensors.items()):
        if name.startswith(f"{EXPERT}.1.gate_proj."):
            made.tensors[name.replace(f"{EXPERT}.1.gate_proj.", copy)] = tensor.clone()
    layer = only_layer(made.write(tmp_path))
    assert layer.status == "refused"
    assert "weights stored: found also as" in layer.reason


def test_a_draft_head_does_not_take_the_first_number(tmp_path: Path) -> None:
    made = Made()
    for name in [n for n in made.tensors if ".layers.0." in n]:
        made.tensors["mtp." + name.removeprefix("model.")] = made.tensors[name].clone()
    layers = Checkpoint.open(made.write(tmp_path)).layers
    assert [layer.name[:6] for layer in layers] == ["model.", "mtp.la"]
