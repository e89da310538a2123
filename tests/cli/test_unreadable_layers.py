"""Damage that only reading finds costs ``sweep`` and ``verify`` that layer and no other."""

import pytest
import torch

from autosel.store import Store
from tests.checkpoint_builder import Made
from tests.fakes import judge_one_case, prove_quickly
from tests.threads import one_thread

COMMANDS = {
    "sweep": ("--tokens", "1", "--limit", "0.05", "--trials", "1", "--no-isolate"),
    "verify": (),
}


@pytest.fixture(autouse=True)
def _light(monkeypatch):
    """One verification case, in this process: what is asked about is the loop over layers."""
    from autosel import verify_layer

    judge_one_case(monkeypatch)
    prove_quickly(monkeypatch)
    isolated = verify_layer.bench_for
    monkeypatch.setattr(
        verify_layer, "bench_for", lambda *args, isolate: isolated(*args, isolate=False)
    )
    with one_thread():
        yield


@pytest.fixture
def run(autosel, tmp_path):
    def run(command, made, *more):
        folder = tmp_path / "model"
        if not folder.exists():
            made.write(folder)
        words = (*COMMANDS[command], "--backends", "emulation", *more)
        return autosel(command, folder, *words)

    return run


def damaged(layers, bad, biased=()):
    """Scales of some layers are NaN; some layers have a bias, which makes them another kind."""
    made = Made(layers=layers)
    for layer in range(layers):
        block = f"model.layers.{layer}.mlp.experts"
        if layer in bad:
            made.tensors[f"{block}.1.up_proj.scales"][0, 0] = float("nan")
        for expert in range(made.experts if layer in biased else 0):
            made.tensors[f"{block}.{expert}.up_proj.bias"] = torch.ones(32).half()
    return made


@pytest.mark.parametrize("command", COMMANDS)
def test_the_other_kinds_of_layers_go_on(run, command, tmp_path):
    ran = run(command, damaged(3, bad=[0], biased=[1]), "--json")
    assert ran.status == 1
    labels = [answer["layer"] for answer in ran.json["answers"]]
    assert labels == ["layers 0, 2", "layer 1"]
    (failed,) = ran.json["failed"]
    assert failed["layer"] == "layer 0"
    assert "experts.1.up_proj.scales: expert 1, output 0, group 0" in failed["error"]
    assert "warning: layer 0: model.safetensors: " in ran.err
    assert ran.error.endswith(": layer 0 (see above)")
    if command == "sweep":
        with Store.open(tmp_path / "autosel.db") as store:
            assert sorted(d.problem.has_bias for d in store.decisions()) == [False, True]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_kind_without_a_layer_that_can_be_read_is_left_out(run, command):
    ran = run(command, damaged(3, bad=[0, 2], biased=[1]))
    assert ran.status == 1
    assert "layer 1" in ran.out
    assert "layers 0, 2" not in ran.out
    assert ran.error.endswith(": layer 0, layer 2 (see above)")


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_that_can_be_read(run, command):
    ran = run(command, damaged(2, bad=[0, 1]), "--json")
    assert ran.status == 1
    assert ran.json["answers"] == []
    assert [item["layer"] for item in ran.json["failed"]] == ["layer 0", "layer 1"]
    assert "layer 0, layer 1" in ran.error


@pytest.mark.parametrize("command", COMMANDS)
def test_an_only_layer_is_the_commands_own_error(run, command):
    made = damaged(2, bad=[0])
    ran = run(command, made, "--layer", "0")
    assert ran.status == 1
    assert ran.error.startswith("error: model.safetensors: ")
    assert "warning" not in ran.err
    assert run(command, made, "--layer", "1").status == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_fault_that_is_no_damage_is_not_tried_on_every_alike_layer(run, command, monkeypatch):
    from autosel.errors import AutoselError
    from autosel.sources import CheckpointSource

    asked = []

    def load(self, device="cpu"):
        asked.append(self.layer)
        raise AutoselError("worker process: load: out of memory")

    monkeypatch.setattr(CheckpointSource, "load", load)
    ran = run(command, damaged(3, bad=[], biased=[1]))
    assert ran.status == 1
    assert asked == [0, 1]
    assert ran.error.endswith(": layers 0, 2, layer 1 (see above)")


def test_a_database_that_fails_stops_the_sweep(run, monkeypatch):
    from autosel.errors import StoreError

    def full(*args, **kwargs):
        raise StoreError("database: disk full")

    monkeypatch.setattr(Store, "begin_sweep", full)
    ran = run("sweep", damaged(2, bad=[], biased=[1]))
    assert ran.status == 1
    assert ran.error == "error: database: disk full"
