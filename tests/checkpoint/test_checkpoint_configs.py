"""The spellings of config.json, and what is said when it is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel.checkpoint import Checkpoint
from autosel.core import Problem
from autosel.errors import AutoselError
from autosel.json_file import locate
from tests.checkpoint_builder import Made, random_weight
from tests.checkpoint_builder import make_checkpoint as make


def problem_of(folder: Path, layer: int = 0) -> Problem:
    found = Checkpoint.open(folder).layer(layer)
    assert found.problem is not None, found.reason
    return found.problem


def refusal(folder: Path) -> str:
    with pytest.raises(AutoselError) as exc:
        Checkpoint.open(folder)
    assert "\n" not in str(exc.value)
    return str(exc.value)


def statuses(folder: Path) -> list[str]:
    return [layer.status for layer in Checkpoint.open(folder).layers]


def rewrite(folder: Path, change: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config, indent=1))


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_a_nested_config_gives_the_same_layer(tmp_path: Path, key: str) -> None:
    made = Made()
    plain = problem_of(made.write(tmp_path / "plain"))
    assert problem_of(made.write(tmp_path / "nested", nested=key)) == plain


@pytest.mark.parametrize("level", [("thinker_config",), ("thinker_config", "text_config")])
def test_quantisation_at_any_level_of_a_nested_config(tmp_path: Path, level: Any) -> None:
    made = Made(prefix="thinker.model.")
    folder = made.write(tmp_path / "nested")

    def nest(config: dict[str, Any]) -> None:
        text = dict(config)
        quant = text.pop("quantization_config")
        config.clear()
        config |= {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": text}}
        at = config
        for key in level:
            at = at[key]
        at["quantization_config"] = quant

    rewrite(folder, nest)
    assert problem_of(folder) == problem_of(Made().write(tmp_path / "plain"))


@pytest.mark.parametrize("inner", [True, False])
def test_a_second_stack_is_read_by_its_own_part(tmp_path: Path, inner: bool) -> None:
    """A talker's experts differ from the thinker's in more than sizes, which no tensor tells."""
    made = Made(prefix="thinker.model.")
    made.tensors |= Made(prefix="talker.model.", layers=1).tensors
    folder = made.write(tmp_path)

    def nest(config: dict[str, Any]) -> None:
        thinker = dict(config)
        quant = thinker.pop("quantization_config")
        talker = {**thinker, "num_experts_per_tok": 1, "hidden_act": "gelu"}
        config.clear()
        config |= {"model_type": "qwen3_omni_moe", "quantization_config": quant}
        config["thinker_config"] = {"text_config": thinker}
        config["talker_config"] = {"text_config": talker} if inner else talker

    rewrite(folder, nest)
    found = {
        layer.name.split(".")[0]: (layer.problem.top_k, layer.problem.activation.key)
        for layer in Checkpoint.open(folder).layers
        if layer.problem is not None
    }
    assert found == {"thinker": (2, "silu"), "talker": (1, "gelu")}


def test_quantisation_at_the_top_and_model_below(tmp_path: Path) -> None:
    made = Made()
    folder = made.write(tmp_path / "nested", nested="text_config")

    def lift(config: dict[str, Any]) -> None:
        config["quantization_config"] = config["text_config"].pop("quantization_config")
        config["torch_dtype"] = config["text_config"].pop("dtype")

    rewrite(folder, lift)
    assert problem_of(folder) == problem_of(made.write(tmp_path / "plain"))


def test_contradicting_blocks_are_refused_with_both_places(tmp_path: Path) -> None:
    folder = Made().write(tmp_path, nested="text_config")
    block = {**Made().quant, "group_size": 64}
    rewrite(folder, lambda c: c.update(quantization_config=block))
    message = refusal(folder)
    assert "found 32, expected 64" in message
    assert message.count("config.json:") == 2
    assert "text_config.quantization_config.group_size" in message


def test_equal_blocks_at_both_levels_are_fine(tmp_path: Path) -> None:
    folder = Made().write(tmp_path, nested="text_config")
    rewrite(folder, lambda c: c.update(quantization_config=Made().quant))
    assert statuses(folder) == ["quantized"]


@pytest.mark.parametrize(("key", "value"), [("bits", 8), ("checkpoint_format", "gptq_v2")])
def test_contradicting_quantize_config_is_refused(tmp_path: Path, key: str, value: object) -> None:
    folder = Made().write(tmp_path)
    (folder / "quantize_config.json").write_text(json.dumps({**Made().quant, key: value}))
    message = refusal(folder)
    assert "quantize_config.json" in message
    assert f"quantization_config.{key}" in message


def test_what_config_json_leaves_open_quantize_config_tells(tmp_path: Path) -> None:
    """The convention of zero points in the second file alone."""
    made = Made(fmt="gptq_v2", symmetric=False)
    expected = dict(Checkpoint.open(made.write(tmp_path / "a")).dequantize(0))
    del made.quant["checkpoint_format"]
    folder = made.write(tmp_path / "b")
    as_v1 = dict(Checkpoint.open(folder).dequantize(0))
    assert not all(torch.equal(as_v1[n], expected[n]) for n in expected)
    (folder / "quantize_config.json").write_text(json.dumps({"checkpoint_format": "gptq_v2"}))
    found = dict(Checkpoint.open(folder).dequantize(0))
    assert all(torch.equal(found[n], expected[n]) for n in expected)


def test_autogptqs_and_autoawqs_own_files_alone(tmp_path: Path) -> None:
    """Neither names its method, and config.json says nothing."""
    made = Made(fmt="gptq")
    block, made.quant = dict(made.quant), {}
    del block["quant_method"], block["checkpoint_format"]
    folder = made.write(tmp_path / "gptq")
    (folder / "quantize_config.json").write_text(json.dumps(block))
    assert Checkpoint.open(folder).layers[0].format == "gptq"
    made = Made(fmt="awq", symmetric=False)
    made.quant = {}
    folder = made.write(tmp_path / "awq")
    (folder / "quant_config.json").write_text(
        json.dumps({"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"})
    )
    assert Checkpoint.open(folder).layers[0].format == "awq"


def test_three_spellings_of_one_layer_give_one_key(tmp_path: Path) -> None:
    spellings = (
        ("gptq", {}),
        ("awq", {"bits": None, "group_size": None, "w_bit": 4, "q_group_size": 32}),
        ("compressed-tensors", {}),
    )
    for symmetric in (True, False):
        found = [
            problem_of(
                make(tmp_path / f"{fmt}{symmetric}", fmt=fmt, quant=quant, symmetric=symmetric)
            )
            for fmt, quant in spellings
        ]
        assert found[0] == found[1] == found[2]
        assert len({p.key for p in found}) == 1


def test_contradicting_spellings_are_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, fmt="awq", quant={"q_group_size": 64})
    assert "q_group_size: value: found 64, expected 32 as in group_size" in refusal(folder)


def three_layers(tmp_path: Path, dynamic: dict[str, Any]) -> Path:
    """CFG-4's model: layer 0 in 8 bits, layer 1 plain, layer 2 as the base says."""
    made = Made(layers=3, hidden=128, inter=128, group_size=128, quant={"dynamic": dynamic})
    for module in list(made.weights):
        if ".layers.0." in module:
            weight = random_weight(128, 128, bits=8, group_size=128)
            quant = made.linear_quant
            made.put(module, weight, type(quant)(8, 128, True, False, True))
        elif ".layers.1." in module:
            made.unquantise(module)
    return made.write(tmp_path)


def test_dynamic_rules_apply_to_experts(tmp_path: Path) -> None:
    folder = three_layers(
        tmp_path, {r"+:.*layers\.0\..*experts.*": {"bits": 8}, r"-:.*layers\.1\..*experts.*": {}}
    )
    opened = Checkpoint.open(folder)
    assert [layer.status for layer in opened.layers] == ["quantized", "unquantized", "quantized"]
    assert "dynamic rule" in opened.layers[1].reason
    for layer, bits in ((0, 8), (2, 4)):
        problem = opened.layers[layer].problem
        assert problem is not None
        assert (problem.w13.num_bits, problem.w13.group_size) == (bits, 128)
        opened.read_experts(layer)


def test_the_first_matching_dynamic_rule_counts(tmp_path: Path) -> None:
    rules = {r".*layers\.0\..*": {"bits": 8}, r"-:.*layers\.[01]\..*": {}}
    assert statuses(three_layers(tmp_path / "a", rules)) == [
        "quantized",
        "unquantized",
        "quantized",
    ]
    turned = dict(reversed(rules.items()))
    assert statuses(three_layers(tmp_path / "b", turned))[0] == "unquantized"


def test_dynamic_rules_match_from_the_start_of_the_name(tmp_path: Path) -> None:
    """As GPTQModel's re.match: without .* in front the rule is for nobody."""
    folder = three_layers(tmp_path, {r"layers\.0\.": {"bits": 8}})
    layer = Checkpoint.open(folder).layers[0]
    assert layer.status == "refused"
    assert "qweight" in layer.reason


@pytest.mark.parametrize(
    ("fmt", "key", "entries"),
    [
        ("gptq", "dynamic", {r"-:model\.layers\.1\.": {}}),
        ("awq", "modules_to_not_convert", ["model.layers.1."]),
        ("awq", "modules_to_not_convert", ["layers.1.mlp.experts"]),
        ("compressed-tensors", "ignore", ["model.layers.1"]),
        ("compressed-tensors", "ignore", ["model.layers.1.mlp.experts"]),
        ("compressed-tensors", "ignore", [r"re:.*layers\.1\.mlp.*"]),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_skip_lists_by_parent(
    tmp_path: Path, fmt: str, key: str, entries: Any, packed: bool
) -> None:
    """Layer 1 and never layer 10, whether or not the files follow the list."""
    made = Made(fmt=fmt, layers=11, experts=2, quant={key: entries})
    for module in list(made.weights):
        if ".layers.1." in module and not packed:
            made.unquantise(module)
    opened = Checkpoint.open(made.write(tmp_path))
    assert [layer.index for layer in opened.layers if layer.status == "unquantized"] == [1]
    assert [layer.status for layer in opened.layers].count("quantized") == 10
    assert ("all the same" in opened.layers[1].reason) == packed


@pytest.mark.parametrize("fmt", ["gptq", "awq", "compressed-tensors"])
def test_skip_lists_by_every_child(tmp_path: Path, fmt: str) -> None:
    made = Made(fmt=fmt, layers=2)
    names = [module for module in made.weights if ".layers.1." in module]
    key, value = {
        "gptq": ("dynamic", {f"-:{name.replace('.', chr(92) + '.')}": {} for name in names}),
        "awq": ("modules_to_not_convert", names),
        "compressed-tensors": ("ignore", names),
    }[fmt]
    made.quant[key] = value
    for name in names:
        made.unquantise(name)
    assert statuses(made.write(tmp_path)) == ["quantized", "unquantized"]


def test_a_skip_list_that_hits_packed_experts_by_accident_is_settled_by_the_files(
    tmp_path: Path,
) -> None:
    """AWQ's entry for the router, gate, is also part of gate_proj."""
    folder = make(tmp_path, fmt="awq", quant={"modules_to_not_convert": ["gate"]})
    layer = Checkpoint.open(folder).layers[0]
    assert layer.status == "quantized"
    assert "it is packed and is read" in layer.notes[0]


def test_per_channel_in_both_spellings(tmp_path: Path) -> None:
    weights = {}
    for fmt, quant in (("gptq", {}), ("compressed-tensors", {})):
        folder = make(tmp_path / fmt, fmt=fmt, group_size=-1, quant=quant)
        assert problem_of(folder).w13.group_size == -1
        weights[fmt] = dict(Checkpoint.open(folder).dequantize(0))
    assert all(torch.equal(w, weights["gptq"][n]) for n, w in weights["compressed-tensors"].items())


def test_infinity_nan_marks_and_truncation(tmp_path: Path) -> None:
    folder = make(tmp_path)
    path = folder / "config.json"
    good = path.read_text()
    path.write_text(good.replace('"hidden_act"', '"unrelated": Infinity,\n "hidden_act"'))
    assert statuses(folder) == ["quantized"]
    path.write_bytes(b"\xef\xbb\xbf" + good.encode())
    assert statuses(folder) == ["quantized"]
    path.write_bytes(good.encode("utf-16"))
    assert statuses(folder) == ["quantized"]
    path.write_text(good.replace('"group_size": 32', '"group_size": NaN'))
    line = good[: good.index('"group_size"')].count("\n") + 1
    message = refusal(folder)
    assert f"config.json:{line}: quantization_config.group_size: value: found nan" in message
    path.write_text(good[:120])
    assert f"config.json:{good[:120].count(chr(10)) + 1}:" in refusal(folder)
    path.write_text(good.replace('"silu"', '"si\xff"'), encoding="latin-1")
    assert "not valid utf-8" in refusal(folder)
    path.write_text("[" * 100_000)
    assert "config.json" in refusal(folder)
    path.write_text("")
    assert "config.json:1" in refusal(folder)
    path.unlink()
    assert "config.json: file: found none" in refusal(folder)


@pytest.mark.parametrize("value", ["NaN", "Infinity", '"4"', "true", "4.5", "[4, 5]", "0"])
@pytest.mark.parametrize("field", ["hidden_size", "num_experts", "num_experts_per_tok"])
def test_needed_fields_of_a_wrong_kind(tmp_path: Path, field: str, value: str) -> None:
    folder = make(tmp_path)
    path = folder / "config.json"
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if f'"{field}"' in line)
    lines[at] = f' "{field}": {value},'
    path.write_text("\n".join(lines))
    assert f"config.json:{at + 1}: {field}: value: found" in refusal(folder)


def test_locate_finds_nested_values_and_the_last_of_equal_keys() -> None:
    text = '{"a": {"b": [1, {"b": 2}], "c\\"d": 3}, "a": {"b": 4}}'
    assert locate(text, ("a", "b")) == text.rindex("4")
    assert locate(text, ("a", "x")) is None
    assert locate('{"c\\"d": 3}', ('c"d',)) == 9


@pytest.mark.parametrize(
    ("fmt", "quant", "expected"),
    [
        ("gptq", {"checkpoint_format": "marlin"}, "'gptq' or 'gptq_v2'"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format"),
        ("gptq", {"pack_dtype": "int16"}, "'int32'"),
        ("gptq", {"group_size": 0}, "-1 or at least 1"),
        ("gptq", {"group_size": -2}, "-1 or at least 1"),
        ("gptq", {"group_size": None}, "group_size"),
        ("gptq", {"bits": None}, "4 or 8"),
        ("gptq", {"dynamic": {"+:(": {"bits": 8}}}, "a regular expression"),
        ("gptq", {"dynamic": {"(a+)+x": {"bits": 8}}}, "a repeat inside a repeat"),
        ("gptq", {"quant_method": "bitsandbytes"}, "'bitsandbytes', expected one of"),
        ("awq", {"version": "gemv"}, "'gemm'"),
        ("awq", {"version": "marlin"}, "'gemm'"),
        ("awq", {"backend": "llm-awq"}, "'autoawq'"),
        ("compressed-tensors", {"transform_config": {"config_groups": {"u": 1}}}, "transforms"),
        ("compressed-tensors", {"sparsity_config": {"format": "sparse-24"}}, "'dense'"),
        ("compressed-tensors", {"config_groups": {}}, "at least one group"),
    ],
)
def test_kinds_that_are_not_read_stop_the_opening(
    tmp_path: Path, fmt: str, quant: dict[str, Any], expected: str
) -> None:
    message = refusal(make(tmp_path, fmt=fmt, quant=quant))
    assert expected in message
    assert "config.json:" in message


def weights_block(**changes: Any) -> dict[str, Any]:
    made = Made(fmt="compressed-tensors")
    group = made.quant["config_groups"]["group_0"]
    changed = {k: v for k, v in changes.items() if k not in group}
    group.update({k: v for k, v in changes.items() if k in group})
    group["weights"].update(changed)
    return {"config_groups": {"g": group}}


@pytest.mark.parametrize(
    ("quant", "expected"),
    [
        (weights_block(num_bits=3), "num_bits: value: found 3, expected 4 or 8"),
        (weights_block(type="float"), "'int'"),
        (weights_block(strategy="tensor"), "'group' or 'channel'"),
        (weights_block(dynamic=True), "dynamic"),
        (weights_block(input_activations={"num_bits": 8}), "activation quantisation"),
        ({"format": "nvfp4-pack-quantized"}, "'pack-quantized'"),
        (weights_block(targets=["re:.*self_attn.*"]), "no config group targets it"),
    ],
)
def test_schemes_that_are_not_read_refuse_the_layer(
    tmp_path: Path, quant: dict[str, Any], expected: str
) -> None:
    layer = Checkpoint.open(make(tmp_path, fmt="compressed-tensors", quant=quant)).layers[0]
    assert layer.status == "refused"
    assert expected in layer.reason


@pytest.mark.parametrize(("bits", "fmt"), [(3, "gptq"), (2, "gptq"), (8, "awq")])
def test_other_widths_refuse_the_layer(tmp_path: Path, bits: int, fmt: str) -> None:
    made = Made(fmt=fmt)
    made.quant["bits"] = bits
    layer = Checkpoint.open(made.write(tmp_path)).layers[0]
    assert layer.status == "refused"
    assert f"found {bits}, expected 4" in layer.reason


def test_format_may_stand_in_the_group(tmp_path: Path) -> None:
    quant = weights_block()
    quant["config_groups"]["g"]["format"] = "pack-quantized"
    quant["format"] = "mixed-precision"
    assert statuses(make(tmp_path, fmt="compressed-tensors", quant=quant)) == ["quantized"]


@pytest.mark.parametrize(
    ("order", "has"),
    [
        ("group", True),
        ("dynamic", True),
        ("GROUP", True),
        (True, True),
        ("weight", False),
        ("static", False),
        (None, False),
        (False, False),
    ],
)
def test_spellings_of_actorder(tmp_path: Path, order: object, has: bool) -> None:
    made = Made(fmt="compressed-tensors", hidden=96, inter=64, act_order=has)
    made.quant["config_groups"]["group_0"]["weights"]["actorder"] = order
    assert problem_of(made.write(tmp_path)).w13.has_g_idx == has


def test_config_groups_by_name_pattern_and_class(tmp_path: Path) -> None:
    """A name beats a pattern beats the class, whatever the order in the file."""
    made = Made(fmt="compressed-tensors")
    base = made.quant["config_groups"].pop("group_0")
    eight = {**base, "weights": {**base["weights"], "num_bits": 8}}
    three = {**base, "weights": {**base["weights"], "num_bits": 3}}
    down = [m for m in made.weights if m.endswith("down_proj")]
    made.quant["config_groups"] = {
        "a": {**base, "targets": ["Linear"]},
        "b": {**three, "targets": [r"re:.*down_proj$"]},
        "c": {**eight, "targets": down},
    }
    for module in down:
        made.put(module, random_weight(64, 32, bits=8), type(made.linear_quant)(8, 32, True))
    problem = problem_of(made.write(tmp_path))
    assert (problem.w13.num_bits, problem.w2.num_bits) == (4, 8)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
@pytest.mark.parametrize("dtype_key", ["dtype", "torch_dtype"])
def test_spellings_of_counts_and_dtype(tmp_path: Path, key: str, dtype_key: str) -> None:
    made = Made()
    made.config[key] = made.config.pop("num_experts")
    del made.config["dtype"]
    made.config[dtype_key] = "bfloat16"
    problem = problem_of(made.write(tmp_path))
    assert problem.num_experts == 4
    assert problem.act_dtype == "bfloat16"
    assert problem.w13.scale_dtype == "float16"


def test_contradicting_expert_counts_are_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, config={"num_local_experts": 8})
    assert "expected 8 as in num_local_experts" in refusal(folder)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"hidden_act": "silu"}, "silu"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "gelu_tanh"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_act": "silu", "swiglu_limit": 7.0}, "siluL7"),
        (
            {"hidden_act": "silu", "swiglu_limit": 7.0, "swiglu_alpha": 1.702, "swiglu_beta": 1},
            "swigluoai_uninterleaveL7a1.702b1",
        ),
    ],
)
def test_activations(tmp_path: Path, facts: dict[str, Any], expected: str) -> None:
    assert problem_of(make(tmp_path, config=facts)).activation.key == expected


def test_an_unknown_activation_refuses_the_layers(tmp_path: Path) -> None:
    layer = Checkpoint.open(make(tmp_path, config={"hidden_act": "quick_gelu"})).layers[0]
    assert layer.status == "refused"
    assert "'quick_gelu'" in layer.reason


def test_an_unquantised_model_lists_its_layers(tmp_path: Path) -> None:
    made = Made()
    made.quant = {}
    folder = made.write(tmp_path / "packed")
    layer = Checkpoint.open(folder).layers[0]
    assert layer.status == "refused"
    assert "no quantization_config" in layer.reason
    for module in list(made.weights):
        made.unquantise(module)
    layer = Checkpoint.open(made.write(tmp_path / "plain")).layers[0]
    assert (layer.status, layer.reason) == ("unquantized", "all its weights are stored as BF16")


@pytest.mark.parametrize(
    "spelling", ["num_experts", "num_experts_per_tok", "moe_intermediate_size"]
)
def test_a_size_given_once_a_layer(tmp_path: Path, spelling: str) -> None:
    """Hunyuan's configs give some sizes as lists: equal entries are one size, others refused."""
    made = Made(layers=2)
    size = made.config[spelling]
    folder = made.write(tmp_path / "plain")
    plain = [problem_of(folder, layer) for layer in (0, 1)]

    rewrite(folder, lambda config: config.update({spelling: [size, size]}))
    assert [problem_of(folder, layer) for layer in (0, 1)] == plain

    for wrong in ([size, size + 1], [size, True], [], [[size]], [float(size)]):
        rewrite(folder, lambda config, wrong=wrong: config.update({spelling: wrong}))
        try:
            said = Checkpoint.open(folder).layer(0).reason
        except AutoselError as exc:
            said = str(exc)
        assert "config.json:" in said
        assert spelling in said
        assert "\n" not in said


@pytest.mark.parametrize(
    ("model_type", "scoring", "renormalize", "group_score", "num_groups"),
    [
        # modeling_*.py of transformers 5: HunYuanMoEV1Gate, Lfm2MoeTopKRouter,
        # ExaoneMoeTopkRouter and SolarOpenTopkRouter
        ("hunyuan_v1_moe", "softmax", True, "max", 1),
        ("lfm2_moe", "sigmoid", True, "max", 1),
        ("exaone_moe", "sigmoid", True, "top2_sum", 2),
        ("solar_open", "sigmoid", True, "top2_sum", 2),
        ("dots1", "sigmoid", False, "top2_sum", 2),  # Dots1Config's norm_topk_prob
    ],
)
def test_routing_that_only_the_model_type_tells(
    tmp_path: Path,
    model_type: str,
    scoring: str,
    renormalize: bool,
    group_score: str,
    num_groups: int,
) -> None:
    made = Made(config={"model_type": model_type, "n_group": 2, "topk_group": 1})
    made.config.pop("norm_topk_prob")
    made.config.pop("hidden_act" if model_type == "lfm2_moe" else "norm_topk_prob", None)
    layer = Checkpoint.open(made.write(tmp_path)).layer(0)
    assert layer.status == "quantized", layer.reason
    router = layer.router
    assert router is not None
    assert (router.scoring, router.renormalize) == (scoring, renormalize)
    assert router.num_groups == num_groups
    if num_groups > 1:
        assert router.group_score == group_score
