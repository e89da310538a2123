"""What a sweep stores, a layer finds: the same key, for every format, width and split."""

import json
from dataclasses import replace

import pytest
import torch

from autosel import FusedMoE, load_moe_layers
from autosel.__main__ import main
from autosel.device import detect
from autosel.layer_choice import Chooser
from autosel.sources import CheckpointSource
from autosel.store import Store
from autosel.tune import sweep
from autosel.tune_types import SweepSettings
from tests.checkpoint_builder import Made, random_weight, shuffled_g_idx
from tests.fakes import Clock, FakeBackend, judge_one_case, prove_quickly, registered
from tests.threads import one_thread

SETTINGS = SweepSettings(token_counts=(2,), backends=("scripted",))


@pytest.fixture(autouse=True)
def one_case(monkeypatch):
    """What is right is tested elsewhere; here one verification case is enough."""
    judge_one_case(monkeypatch)
    prove_quickly(monkeypatch)


def swept(path, index, store, **split):
    clock = Clock()
    with registered(scripted=FakeBackend(clock)):
        source = CheckpointSource(str(path), index, **split)
        result = sweep(source, SETTINGS, device=detect("cpu"), store=store, timer=clock)
        (decision,) = result.decisions
        layer = FusedMoE.from_checkpoint(path, index, db=store, **split)
    return decision, layer


@pytest.mark.parametrize("split", [{}, {"tp_rank": 1, "tp_size": 2}], ids=["whole", "half"])
def test_every_layer_that_was_swept_is_tuned(checkpoint, split, tmp_path):
    with Store.open(tmp_path / "swept.db") as store:
        decision, layer = swept(checkpoint.path, checkpoint.moe_layers[0], store, **split)
        (choice,) = layer.choices
        assert choice.tuned
        assert choice.candidate == decision.winner


def test_a_key_that_differs_in_one_thing_is_not_found(get_checkpoint, tmp_path):
    """The planted fault of a key made of packed sizes: half the hidden size misses."""
    path = get_checkpoint("awq-w4-g32-deepseekv3").path
    with Store.open(tmp_path / "swept.db") as store:
        decision, _ = swept(path, 1, store)
        problem, device = decision.problem, detect("cpu")
        assert Chooser(problem, device, store).table()[0].tuned
        for changed in (
            replace(problem, hidden_size=problem.hidden_size // 2),
            replace(problem, act_dtype="float32"),
            replace(problem, top_k=problem.top_k + 1),
            replace(problem, w2=replace(problem.w2, symmetric=not problem.w2.symmetric)),
        ):
            assert not Chooser(changed, device, store).table()[0].tuned


EXPERTS = "model.layers.0.mlp.experts"


def by_rule(made):
    made.quant["dynamic"] = {r"+:.*experts\.1\.": {"sym": False}}


def by_zeros(made):
    made.put(f"{EXPERTS}.2.down_proj", random_weight(64, 64, symmetric=False, seed=9))


def by_bias(made):
    made.tensors[f"{EXPERTS}.2.down_proj.bias"] = torch.ones(64).half()


def by_order(made):
    made.tensors[f"{EXPERTS}.2.down_proj.g_idx"] = shuffled_g_idx(64, 32)


@pytest.mark.filterwarnings("ignore:.*declared symmetric")
@pytest.mark.parametrize("split", [{}, {"tp_rank": 1, "tp_size": 2}], ids=["whole", "half"])
@pytest.mark.parametrize("edit", [by_rule, by_zeros, by_bias, by_order])
def test_a_layer_that_only_a_later_expert_makes_special_is_tuned(edit, split, tmp_path):
    """The key is that of the weights, whatever expert 0 looks like."""
    made = Made(fmt="gptq_v2", inter=64)
    edit(made)
    path = made.write(tmp_path / "model")
    with Store.open(tmp_path / "swept.db") as store:
        decision, layer = swept(path, 0, store, **split)
        (choice,) = layer.choices
        assert choice.tuned
        assert choice.candidate == decision.winner
        assert layer.problem == decision.problem


def layers_key(layers, number):
    """The key of the number-th of a model's layers."""
    return [*layers.values()][number].problem.key


@pytest.fixture
def quickly(monkeypatch):
    """Sweeps by command line that time for a moment only."""
    from autosel import timing

    settings = timing.TimingSettings
    monkeypatch.setattr(
        timing, "TimingSettings", lambda **given: settings(**{**given, "limit_s": 0.02})
    )


@pytest.mark.filterwarnings("ignore:.*declared symmetric")
def test_a_sweep_by_command_line_tells_such_layers_from_their_neighbours(tmp_path, quickly, capsys):
    made = Made(fmt="gptq_v2", inter=64, layers=2)
    by_zeros(made)
    path, db = made.write(tmp_path / "model"), tmp_path / "cli.db"
    words = ["--db", str(db), "--tokens", "1"]
    with one_thread():
        sweep_words = [*words, "--backends", "emulation", "--no-isolate", "--trials", "1"]
        assert main(["sweep", str(path), *sweep_words]) == 0
    layers = load_moe_layers(path, db=db)
    assert [layer.problem.w2.symmetric for layer in layers.values()] == [False, True]
    assert all(layer.choices[0].tuned for layer in layers.values())
    for layer, asym in ((0, True), (1, False)):
        capsys.readouterr()
        assert main(["explain", str(path), *words, "--layer", str(layer), "--json"]) == 0
        (answer,) = json.loads(capsys.readouterr().out)["answers"]
        assert answer["status"] == "tuned"
        assert ("asym" in layers_key(layers, layer)) == asym


def test_a_sweep_by_command_line_is_found(get_checkpoint, tmp_path, quickly):
    db, path = tmp_path / "cli.db", get_checkpoint("gptq-v1-w4-g64-sym-actorder-qwen3moe").path
    words = ["sweep", str(path), "--db", str(db), "--tokens", "1", "--backends", "emulation"]
    assert main([*words, "--tp", "2"]) == 0
    layer = FusedMoE.from_checkpoint(path, 0, tp_rank=1, tp_size=2, db=db)
    assert all(choice.tuned for choice in layer.choices)
    assert not FusedMoE.from_checkpoint(path, 0, db=db).choices[0].tuned


def test_all_layers_of_a_model_are_loaded_from_one_database(get_checkpoint, tmp_path):
    path = get_checkpoint("gptq-v2-mixed-dynamic-qwen3moe").path
    clock = Clock()
    with Store.open(tmp_path / "swept.db") as store, registered(scripted=FakeBackend(clock)):
        source = CheckpointSource(str(path), 0)
        sweep(source, SETTINGS, device=detect("cpu"), store=store, timer=clock)
        layers = load_moe_layers(path, db=store)
    assert list(layers) == [0, 1]
    # Layers of the same problem share what was found for one of them.
    assert all(choice.tuned for layer in layers.values() for choice in layer.choices)
