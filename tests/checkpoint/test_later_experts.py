"""Experts that differ from expert 0: what the plan says of them, and what the weights have."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import api, layer_planner
from autosel.canonical import dequantize_expert
from autosel.checkpoint import Checkpoint
from autosel.cli.options import LayerOptions
from autosel.cli.target import resolve
from autosel.errors import CheckpointError
from autosel.packs.models import of_checkpoint
from autosel.rank_problem import rank_problem
from autosel.sources import CheckpointSource
from autosel.tensor_index import TensorReader
from tests.checkpoint_builder import Made, make_checkpoint, random_weight, shuffled_g_idx

EXPERTS = "model.layers.0.mlp.experts"


def half_ordered(ordered: str, first: torch.Tensor | None) -> Made:
    """Rules promise an order to some experts alone; ``first`` takes the place of expert 0's."""
    made = Made(act_order=True)
    made.quant["dynamic"] = {rf".*experts\.(?!{ordered})\d+\.": {"desc_act": False}}
    for name in [n for n in made.tensors if n.endswith("g_idx")]:
        if name.split(".")[5] not in ordered:
            del made.tensors[name]
        elif first is not None and ".experts.0." in name:
            made.tensors[name] = torch.arange(len(made.tensors[name])).int() // 32
    return made


@pytest.mark.parametrize(
    ("ordered", "first", "has_g_idx"),
    [("0", torch.arange(64), False), ("0", None, True), ("[23]", None, True)],
    ids=["none in the end", "the first alone", "later ones alone"],
)
def test_an_order_that_rules_promise_to_some_experts_alone(
    tmp_path: Path, ordered: str, first: torch.Tensor | None, has_g_idx: bool
) -> None:
    opened = Checkpoint.open(half_ordered(ordered, first).write(tmp_path))
    (layer,) = opened.layers
    assert layer.problem is not None, layer.reason
    assert layer.problem.w13.has_g_idx == has_g_idx
    assert opened.read_experts(0).problem == layer.problem


def test_one_expert_that_is_declared_asymmetric_makes_its_matrix_so(tmp_path: Path) -> None:
    made = Made(fmt="gptq_v2", quant={"dynamic": {r"+:.*experts\.1\.down": {"sym": False}}})
    opened = Checkpoint.open(made.write(tmp_path))
    problem = opened.layers[0].problem
    assert problem is not None
    assert (problem.w13.symmetric, problem.w2.symmetric) == (True, False)
    assert opened.read_experts(0).problem == problem


def zeros(made: Made) -> None:
    made.put(f"{EXPERTS}.2.down_proj", random_weight(64, 64, symmetric=False, seed=9))


def bias(made: Made) -> None:
    made.tensors[f"{EXPERTS}.2.down_proj.bias"] = torch.ones(64).half()


def order(made: Made) -> None:
    suffix = "weight_g_idx" if made.fmt == "compressed-tensors" else "g_idx"
    made.tensors[f"{EXPERTS}.2.down_proj.{suffix}"] = shuffled_g_idx(64, 32)


LATE = [
    *((fmt, zeros) for fmt in ("gptq", "awq", "compressed-tensors")),
    *((fmt, bias) for fmt in ("gptq", "awq", "compressed-tensors")),
    *((fmt, order) for fmt in ("gptq", "compressed-tensors")),
]
SPLITS: list[dict[str, Any]] = [
    {},
    {"tp_size": 2, "tp_rank": 1},
    {"ep_size": 2, "ep_rank": 0},  # does not hold the odd expert
    {"ep_size": 2, "ep_rank": 1},
]


@pytest.mark.filterwarnings("ignore:.*declared symmetric")
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("fmt", "edit"), LATE)
def test_the_key_is_that_of_the_weights_on_every_rank(
    tmp_path: Path, fmt: str, edit: Callable[[Made], None], stacked: bool
) -> None:
    made = Made(fmt=fmt, inter=64)
    edit(made)
    if stacked:
        stack_small_ones(made)
    folder = made.write(tmp_path)
    described = Checkpoint.open(folder).layers[0].problem
    assert described is not None
    for split in SPLITS:
        source = CheckpointSource(str(folder), 0, **split)
        assert source.problem == source.load().problem, split
        assert source.problem != rank_problem(described, **split), split


def test_packs_and_plans_count_layers_by_the_same_key(tmp_path: Path) -> None:
    made = Made(layers=3, inter=64)
    zeros(made)
    folder = made.write(tmp_path)
    odd, usual = (CheckpointSource(str(folder), layer).problem for layer in (0, 1))
    layers = {item.problem: tuple(item.indices) for item in of_checkpoint(folder).layers}
    assert layers == {odd: (0,), usual: (1, 2)}
    assert (api._alike(folder, odd), api._alike(folder, usual)) == (1, 2)


def stack_small_ones(made: Made) -> None:
    """One tensor for all experts; those that lack one get what says nothing."""
    block = f"{EXPERTS}."
    found: dict[str, dict[int, torch.Tensor]] = {}
    for name in [n for n in made.tensors if n.startswith(block)]:
        expert, rest = name.removeprefix(block).split(".", 1)
        found.setdefault(rest, {})[int(expert)] = made.tensors.pop(name)
    for rest, tensors in found.items():
        some = next(iter(tensors.values()))
        silent = torch.zeros_like(some)
        if rest.endswith("zero_point"):  # the middle code in every field
            silent = torch.full_like(some, -0x77777778)
        parts = [tensors.get(expert, silent) for expert in range(made.experts)]
        made.tensors[block + rest] = torch.stack(parts)


def test_opening_reads_small_tensors_of_expert_0_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    get = TensorReader.get
    monkeypatch.setattr(
        TensorReader, "get", lambda self, name: (read.append(name), get(self, name))[1]
    )
    opened = Checkpoint.open(make_checkpoint(tmp_path, layers=2))
    assert read
    assert all(".experts.0." in name for name in read)
    read.clear()
    for _ in range(2):
        assert opened.exact_problem(0) == opened.layers[0].problem
    assert len(read) == len(set(read)) == 4 * 3 * 2  # qzeros and g_idx of each linear, once
    assert not any("qweight" in name or "scales" in name for name in read)


def test_damage_counts_for_nothing_until_the_weights_are_read(tmp_path: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{EXPERTS}.1.up_proj.bias"] = torch.full((32,), float("nan")).half()
        tensors[f"{EXPERTS}.3.up_proj.bias"] = torch.ones(32).half()

    folder = make_checkpoint(tmp_path, damage)
    source = CheckpointSource(str(folder), 0)
    assert source.problem.has_bias
    with pytest.raises(CheckpointError, match=r"experts\.1\.up_proj\.bias.*found nan"):
        source.load()


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((torch.float16, torch.float32), torch.float32),
        ((torch.float32, torch.float16), torch.float32),
        ((torch.float16, torch.bfloat16), torch.float32),
        ((torch.float16, torch.float16), torch.float16),
    ],
)
def test_biases_of_several_types_lose_no_bit(
    tmp_path: Path, dtypes: tuple[torch.dtype, torch.dtype], expected: torch.dtype
) -> None:
    drawn = [torch.rand(64).add(1).to(dtype) for dtype in (dtypes[0], *dtypes, dtypes[1])]

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for expert, values in enumerate(drawn):
            tensors[f"{EXPERTS}.{expert}.down_proj.bias"] = values

    opened = Checkpoint.open(make_checkpoint(tmp_path, edit, bias=True))
    assert opened.layers[0].status == "quantized"
    found = opened.read_experts(0).w2.bias
    assert found is not None
    assert found.dtype == expected
    for expert, values in enumerate(drawn):
        assert torch.equal(found[expert], values.to(expected))


def test_an_unforeseen_fault_of_one_layer_is_told_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = layer_planner.build_problem

    def faulty(error: BaseException) -> Callable[..., Any]:
        def run(plan: Any, *args: Any) -> Any:
            if plan.layer.index == 0:
                raise error
            return build(plan, *args)

        return run

    folder = make_checkpoint(tmp_path, layers=2)
    monkeypatch.setattr(layer_planner, "build_problem", faulty(KeyError("g_idx")))
    bad, good = Checkpoint.open(folder).layers
    assert (bad.status, good.status) == ("refused", "quantized")
    assert "unexpected KeyError: 'g_idx' (at test_later_experts.py:" in bad.reason
    monkeypatch.setattr(layer_planner, "build_problem", faulty(MemoryError("full")))
    with pytest.raises(MemoryError):  # says nothing about the layer
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "index",
    [
        torch.zeros(0, dtype=torch.int32),
        torch.tensor(1),
        torch.zeros(64),
        torch.zeros(1, 64, dtype=torch.int32),
        shuffled_g_idx(64, 32),
        torch.arange(64, dtype=torch.int32) // 32,
    ],
    ids=["empty", "scalar", "float", "2-D", "an order", "plain"],
)
@pytest.mark.parametrize("expert", [0, 2])
def test_a_group_index_in_awq_is_refused_by_name(
    tmp_path: Path, index: torch.Tensor, expert: int
) -> None:
    made = Made(fmt="awq", symmetric=False, layers=2)
    for part in ("gate_proj", "up_proj"):
        made.tensors[f"{EXPERTS}.{expert}.{part}.g_idx"] = index.clone()
    opened = Checkpoint.open(made.write(tmp_path))
    bad, good = opened.layers
    assert (bad.status, good.status) == ("refused", "quantized")
    assert f"experts.{expert}.gate_proj.g_idx" in bad.reason
    assert "not part of this format" in bad.reason
    with pytest.raises(CheckpointError):
        opened.read_experts(0)


def test_later_experts_are_read_as_they_are(tmp_path: Path) -> None:
    """The wider scheme changes no weight of the experts that do not need it."""
    made = Made(inter=64)
    zeros(made)
    order(made)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        experts = Checkpoint.open(made.write(tmp_path)).read_experts(0)
    weight = made.weights[f"{EXPERTS}.1.down_proj"]
    assert torch.equal(
        dequantize_expert(experts.w2, 1, torch.float16), dequantize_expert(weight, 0, torch.float16)
    )


@pytest.mark.parametrize("every", [True, False])
def test_looking_up_reads_one_of_alike_layers(
    tmp_path: Path, every: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All small tensors of a large GPTQ model are gigabytes; a sweep reads its weights anyway."""
    folder = Made(layers=4).write(tmp_path)
    asked: list[int] = []
    exact = Checkpoint.exact_problem

    def noted(self: Checkpoint, layer: int) -> Any:
        asked.append(layer)
        return exact(self, layer)

    monkeypatch.setattr(Checkpoint, "exact_problem", noted)
    (layer,) = resolve(str(folder), LayerOptions(), every=every).layers
    assert layer.indices == (0, 1, 2, 3)
    assert sorted(set(asked)) == ([0, 1, 2, 3] if every else [0])
