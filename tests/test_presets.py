"""The table of published shapes, and weights made up for them."""

from __future__ import annotations

import csv
import pickle
from importlib import resources

import pytest
import torch

from autosel import presets
from autosel.canonical import check_experts, dequantize_expert, expert_codes
from autosel.core import Problem
from autosel.errors import AutoselError, ConfigError
from autosel.sources import RandomSource


def _rows() -> list[dict[str, str]]:
    text = resources.files("autosel").joinpath("data/models.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def test_every_row_becomes_a_preset_with_the_tables_numbers() -> None:
    rows = _rows()
    assert len(presets.names()) == len(rows) >= 27
    assert len(set(presets.names())) == len(rows)
    for row, name in zip(rows, presets.names(), strict=True):
        problem = presets.get(name)
        assert problem.hidden_size == int(row["hidden_size"])
        assert problem.intermediate_size == int(row["moe_intermediate_size"])
        assert problem.num_experts == int(row["num_experts"])
        assert problem.num_local_experts == problem.num_experts
        assert problem.top_k == int(row["top_k"])
        assert problem.activation.gated == (row["gated"] == "yes")
        assert problem.router_weight_on_input == (row["weight_on_input"] == "yes")
        assert problem.has_bias == (row["expert_bias"] == "yes")
        assert Problem.from_dict(problem.to_dict()) == problem
        assert dict(presets.find(name).columns) == row


def test_numbers_of_models_checked_by_hand() -> None:
    """From the models' published config.json files, not from the table."""
    qwen = presets.get("qwen3-30b-a3b")
    assert (qwen.hidden_size, qwen.intermediate_size, qwen.num_experts, qwen.top_k) == (
        2048,
        768,
        128,
        8,
    )
    mixtral = presets.get("mixtral-8x7b")
    assert (mixtral.hidden_size, mixtral.intermediate_size) == (4096, 14336)
    assert (mixtral.num_experts, mixtral.top_k) == (8, 2)
    deepseek = presets.get("deepseek-v3")
    assert (deepseek.hidden_size, deepseek.intermediate_size) == (7168, 2048)
    assert (deepseek.num_experts, deepseek.top_k) == (256, 8)
    assert presets.get("llama-4-scout").router_weight_on_input
    assert presets.get("nemotron-3-nano-30b-a3b").activation.name == "relu2_no_mul"


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("  qwen3_30b_a3b ", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("deepseek-r1", "deepseek-v3"),
        ("GLM-4.6", "glm-4.5"),
        ("jamba-1.5-mini", "jamba-v0.1"),
        ("Kimi-K2", "kimi-k2"),
        ("moonshotai/Kimi-K2-Thinking", "kimi-k2"),
    ],
)
def test_spellings_and_aliases(spelling: str, name: str) -> None:
    assert presets.find(spelling).name == name


def test_no_alias_leads_to_two_presets() -> None:
    seen: dict[str, str] = {}
    for preset in presets.presets():
        for key in (preset.name, *preset.aliases):
            assert seen.setdefault(key, preset.name) == preset.name


def test_an_unknown_name_suggests_close_ones() -> None:
    with pytest.raises(ConfigError, match="qwen3-30b-a3b"):
        presets.get("qwen3-30b")
    with pytest.raises(ConfigError, match="mixtral-8x7b"):
        presets.get("zzzz")


def test_tensor_parallel_divides_the_intermediate_size_or_refuses() -> None:
    problem = presets.get("mixtral-8x7b", tp=2)
    assert problem.intermediate_size == 7168
    assert problem.w2 == problem.w13
    with pytest.raises(ConfigError) as error:
        presets.get("mixtral-8x7b", tp=3)
    text = str(error.value)
    assert "tp: found 3" in text
    assert "14336" in text
    assert "7, 8" in text
    with pytest.raises(ConfigError, match="tp: found 0"):
        presets.get("mixtral-8x7b", tp=0)


def test_a_border_inside_a_group_gives_the_common_divisor() -> None:
    """768 inputs in groups of 128 over 4 ranks: 192 each, which groups of 64 divide."""
    problem = presets.get("qwen3-30b-a3b", tp=4)
    assert problem.intermediate_size == 192
    assert problem.w2.group_size == 64
    assert problem.w13.group_size == 128


def test_expert_parallel_and_fewer_experts() -> None:
    problem = presets.get("qwen3-30b-a3b", ep=16)
    assert (problem.num_experts, problem.num_local_experts) == (128, 8)
    with pytest.raises(ConfigError, match="ep: found 3"):
        presets.get("qwen3-30b-a3b", ep=3)
    small = presets.get("qwen3-30b-a3b", experts=4)
    assert (small.num_experts, small.num_local_experts, small.top_k) == (4, 4, 4)
    with pytest.raises(ConfigError, match="experts: found 0"):
        presets.get("qwen3-30b-a3b", experts=0)


def test_quantisation_is_the_callers_and_checked() -> None:
    problem = presets.get(
        "olmoe-1b-7b", num_bits=8, group_size=-1, symmetric=False, act_dtype="float16"
    )
    assert problem.w13.key == "w8chasym-fp16"
    assert problem.act_dtype == "float16"
    assert presets.get("olmoe-1b-7b", scale_dtype="float16").w2.scale_dtype == "float16"
    with pytest.raises(AutoselError, match="num_bits"):
        presets.get("olmoe-1b-7b", num_bits=3)


CASES = [
    {"experts": 3},
    {"experts": 3, "symmetric": False, "group_size": 32},
    {"experts": 2, "num_bits": 8, "group_size": -1, "act_dtype": "float16"},
    {"experts": 2, "has_g_idx": True, "group_size": 64, "symmetric": False},
    {"experts": 2, "tp": 8},  # 64 inputs of w2 in groups of 64
]


@pytest.mark.parametrize("options", CASES)
def test_made_up_weights_fit_their_problem_and_repeat(options: dict[str, object]) -> None:
    problem = presets.get("granite-3-1b-a400m", **options)  # type: ignore[arg-type]
    source = pickle.loads(pickle.dumps(RandomSource(problem, seed=5)))
    experts = source.load()
    check_experts(experts)
    assert experts.problem == source.problem == problem
    again = source.load()
    other = RandomSource(problem, seed=6).load()
    for weight, twin, stranger in (
        (experts.w13, again.w13, other.w13),
        (experts.w2, again.w2, other.w2),
    ):
        for name, tensor in weight.tensors.items():
            assert torch.equal(tensor, twin.tensors[name]), name
            assert not torch.equal(tensor, stranger.tensors[name]), name
        assert not torch.equal(weight.codes[0], weight.codes[1])
        codes = expert_codes(weight, 0)
        levels = 1 << weight.scheme.num_bits
        counts = torch.bincount(codes.flatten().long(), minlength=levels)
        assert counts.min() > 0.5 * codes.numel() / levels  # every code, 0 among them
        assert counts.max() < 1.5 * codes.numel() / levels
        assert torch.isfinite(weight.scales.float()).all()
        assert (weight.scales > 0).all()
        # A unit input gives outputs of about unit size.
        size = dequantize_expert(weight, 0).square().sum(1).mean().sqrt()
        assert 0.5 < size < 2


def test_odd_sizes_pad_the_last_word_with_zero_codes() -> None:
    base = presets.get("granite-3-1b-a400m", experts=2)
    data = base.to_dict() | {"hidden_size": 13, "intermediate_size": 5, "has_bias": True}
    experts = RandomSource(Problem.from_dict(data)).load()
    check_experts(experts)
    assert experts.w13.bias is not None
    tail = experts.w13.codes[..., -1] >> (4 * (13 % 8))
    assert (tail == 0).all()
