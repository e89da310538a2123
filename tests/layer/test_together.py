"""Sweep, plan and pack by the command line, then the layer on a machine with an empty database."""

import shutil

import pytest
import torch

from autosel import FusedMoE, load_moe_layers, registry
from autosel.__main__ import main
from autosel.core import Problem, QuantScheme
from autosel.device import detect
from autosel.errors import NothingUsableError
from autosel.sources import CheckpointSource

NAME = "ct-w4-g128-sym-mixtral"


@pytest.fixture(scope="module")
def shipped(get_checkpoint, tmp_path_factory):
    """A model's folder with a pack in it, made from what one machine swept and planned."""
    scheme = QuantScheme(4, 128, True)
    if not registry.get("cpu_native").supports(
        Problem(8, 8, 2, 128, 128, scheme, scheme), detect("cpu")
    ):
        pytest.skip("cpu_native does not run here")
    from autosel import timing

    folder = tmp_path_factory.mktemp("shipped")
    model, db = folder / "model", str(folder / "there.db")
    shutil.copytree(get_checkpoint(NAME).path, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOSEL_DB", db)
        settings = timing.TimingSettings
        patch.setattr(
            timing, "TimingSettings", lambda **given: settings(**{**given, "limit_s": 0.02})
        )
        backends = ["--backends", "cpu_native,emulation"]
        words = ["sweep", str(model), "--tokens", "1,16", "--require", "deterministic", *backends]
        assert main(words) == 0
        assert (
            main(["plan", str(model), "--weight-budget", "1x", "--histogram", "decode-only"]) == 0
        )
        assert main(["pack", str(model), "-o", str(model / "autosel-pack.json")]) == 0
    return model


def call(problem, tokens=16):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, problem.hidden_size, generator=generator)
    scores = torch.rand(tokens, problem.num_experts, generator=generator)
    ids = scores.topk(problem.top_k).indices
    x = x.to(getattr(torch, problem.act_dtype))
    return x, ids, torch.rand(tokens, problem.top_k, generator=generator)


def test_the_pack_beside_the_model_decides_with_its_plan_and_certificates(shipped, tmp_path):
    db = tmp_path / "here.db"
    layer = FusedMoE.from_checkpoint(shipped, 0, db=db, require=["deterministic"])
    assert layer.choices[0].tuned
    assert "by the plan for decode-only traffic" in layer.choices[0].why
    assert len(layer.resident) == 1
    assert layer.choices[0].bucket.low == 1
    assert layer.choices[-1].bucket.high is None
    plain = FusedMoE.from_checkpoint(get_plain(shipped, tmp_path), 0, db=tmp_path / "none.db")
    assert not any(choice.tuned for choice in plain.choices)
    inputs = call(layer.problem)
    assert float((layer(*inputs).float() - plain(*inputs).float()).norm()) < 0.02 * float(
        plain(*inputs).float().norm()
    )


def get_plain(shipped, folder):
    """The same model without the pack."""
    plain = folder / "plain"
    shutil.copytree(shipped, plain)
    (plain / "autosel-pack.json").unlink()
    return plain


def test_what_the_pack_does_not_certify_is_not_run(shipped, tmp_path):
    with pytest.raises(NothingUsableError, match="graph_equals_eager"):
        FusedMoE.from_checkpoint(
            shipped, 0, db=tmp_path / "here.db", require=["graph_equals_eager"]
        )


def test_a_whole_model_uses_it_and_ranks_do_not_mistake_it_for_theirs(shipped, tmp_path):
    layers = load_moe_layers(shipped, db=tmp_path / "here.db", require=["deterministic"])
    assert all(layer.choices[0].tuned for layer in layers.values())
    whole = layers[0]
    parts = [
        FusedMoE.from_checkpoint(
            shipped, 0, tp_rank=rank, tp_size=2, db=tmp_path / "here.db", act_dtype="float32"
        )
        for rank in range(2)
    ]
    # Half a layer is another layer: nothing is decided for it, and the default says so.
    assert not any(choice.tuned for part in parts for choice in part.choices)
    assert "not tuned" in parts[0].choices[0].why
    x, ids, weights = call(whole.problem)
    total = sum(part(x.float(), ids, weights) for part in parts)
    exact = FusedMoE.from_checkpoint(shipped, 0, act_dtype="float32", db=":memory:")
    right = exact(x.float(), ids, weights)
    assert float((total - right).norm() / right.norm()) < 1e-5


def test_the_callers_plan_comes_before_the_packs(shipped, tmp_path):
    from autosel import planning
    from autosel.core import TokenBin, Workload
    from autosel.store import Store
    from autosel.weight_budget import WeightBudget

    problem = CheckpointSource(str(shipped), 0).problem
    with Store.open(shipped.parent / "there.db") as store:
        policy = planning.Policy(
            Workload("mine", (TokenBin(1, 1, 1.0),)), WeightBudget.parse("4GiB")
        )
        mine = planning.plan_layer(store, problem, detect("cpu"), policy)
    layer = FusedMoE.from_checkpoint(shipped, 0, db=tmp_path / "here.db", plan=mine)
    assert "by the plan for mine traffic" in layer.choices[0].why
