"""The vLLM plugin against the interfaces of vLLM 0.33 that it uses (``fake_vllm``)."""

import json
import logging
import subprocess
import sys
import threading
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import autosel
from autosel import device as devices
from autosel.core import Routing, TokenBucket
from autosel.errors import AutoselError
from autosel.integrations import vllm as plugin
from autosel.integrations import vllm_layer
from autosel.integrations.vllm_options import Options, switched_on
from autosel.reference import moe
from autosel.sources import CheckpointSource
from autosel.store import Store
from tests.checkpoint_builder import Made
from tests.integrations import fake_vllm
from tests.integrations.fake_vllm import FakeVllm, finish_loading, moe_config, vllm_config
from tests.integrations.stacked_tensors import stacked
from tests.layer.decided import MODE, candidate, store_times

BLOCK = "model.layers.0.mlp.experts"


class Case:
    """A checkpoint, a database that decides its layer, and a vLLM that loads it."""

    def __init__(self, tmp_path, monkeypatch, **facts):
        self.made = Made(**facts)
        self.folder = self.made.write(tmp_path / "model")
        self.db = tmp_path / "autosel.db"
        monkeypatch.setenv("AUTOSEL_DB", str(self.db))
        monkeypatch.setenv("AUTOSEL_VLLM", "1")
        vllm_layer._said.clear()
        self.vllm = FakeVllm().install(monkeypatch)
        self.vllm.config = vllm_config(str(self.folder))
        self.kind = "gptq" if self.made.fmt == "gptq_v2" else self.made.fmt

    def decide(self, *, tokens=(1, 64), backends=("torch_int4", "emulation"), **part):
        source = CheckpointSource(str(self.folder), 0, act_dtype="float16", **part)
        problem, machine = source.problem, devices.detect("cpu")
        times = {
            count: {
                candidate(name, problem, machine): 10.0 * (i + 1) for i, name in enumerate(backends)
            }
            for count in tokens
        }
        with Store.open(self.db) as store:
            store_times(store, problem, machine, times)
        return source

    def layer(self, tensors=None, **facts):
        """vLLM's layer with its weights in place, before the loader's last step."""
        held = facts.pop("held", range(self.made.experts))
        placed = facts.pop("placed", None)
        size, rank = facts.get("tp_size", 1), facts.get("tp_rank", 0)
        facts.setdefault("intermediate_size_per_partition", self.made.inter // size)
        config = moe_config(**facts)
        manager = SimpleNamespace(expert_map=placed, num_fused_shared_experts=0)
        made = self.vllm.routed_experts(BLOCK, config, self.made.quant, manager)
        if tensors is None:
            tensors = stacked(self.kind, self.made.tensors, BLOCK, held, tp_rank=rank, tp_size=size)
        made.load(tensors)
        return made

    def loaded(self, *args, **facts):
        plugin.register()
        made = self.layer(*args, **facts)
        finish_loading(made)
        return made


@pytest.fixture
def case(tmp_path, monkeypatch):
    return lambda **facts: Case(tmp_path, monkeypatch, **facts)


def calls(problem, tokens=5):
    gen = torch.Generator().manual_seed(3)
    x = (torch.randn(tokens, problem.hidden_size, generator=gen) * 0.5).half()
    ids = torch.stack(
        [torch.randperm(problem.num_experts, generator=gen)[: problem.top_k] for _ in range(tokens)]
    )
    weights = torch.rand(tokens, problem.top_k, generator=gen)
    return x, ids.int(), weights


def assert_right(made, source, experts=None, expert_map=None):
    x, ids, weights = calls(source.problem)
    out = made.forward_modular(x, weights, ids)
    truth = moe(x, experts or source.load(), Routing(ids, weights), expert_map=expert_map)
    assert out.dtype == torch.float16
    torch.testing.assert_close(
        out.float(), truth.float(), rtol=2e-2, atol=2e-2 * float(truth.abs().max())
    )


def assert_left(made, *words):
    assert isinstance(made.quant_method, fake_vllm._WNA16Method)
    assert made.quant_method.processed == 1
    assert "process_weights_after_loading" not in vars(made.quant_method)
    (status,) = plugin.in_use(made).values()
    for word in ("vLLM's own", *words):
        assert word in status, status
    x = torch.ones(2, made.hidden_size, dtype=torch.float16)
    assert bool((made.forward_modular(x, torch.ones(2, 2), torch.zeros(2, 2)) == 7).all())


# on and off --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "on"), [("", False), ("0", False), ("off", False), ("1", True), ("ON", True)]
)
def test_the_switch(word, on):
    assert switched_on({"AUTOSEL_VLLM": word}) is on
    assert switched_on({}) is False


def test_a_word_that_is_neither_yes_nor_no_leaves_it_off(case, monkeypatch, caplog):
    made = case()
    monkeypatch.setenv("AUTOSEL_VLLM", "perhaps")
    with caplog.at_level(logging.INFO, "vllm.autosel"):
        plugin.register()
    assert not made.vllm.registry.oot
    assert "AUTOSEL_VLLM" in caplog.text
    assert "'perhaps'" in caplog.text


def test_off_it_does_nothing_and_imports_nothing(monkeypatch, tmp_path):
    code = (
        "import sys; from autosel.integrations import vllm; vllm.register();"
        "print([n for n in sys.modules if n.split('.')[0] == 'vllm'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "", "PYTHONPATH": ":".join(p for p in sys.path if p)},
    )
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


def test_autosel_itself_imports_no_vllm(case):
    code = "import sys, autosel; print('vllm' in sys.modules, 'huggingface_hub' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_vllm_finds_it_by_its_entry_point():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (entry,) = project["entry-points"]["vllm.general_plugins"].items()
    assert entry == ("autosel", f"{plugin.register.__module__}:{plugin.register.__name__}")


def test_registering_twice_is_once(case):
    made = case()
    plugin.register()
    first = dict(made.vllm.registry.oot)
    plugin.register()
    assert made.vllm.registry.oot == first
    assert list(first) == ["RoutedExperts"]


# a vLLM that is not known ------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0", "0.330.0"])
def test_another_version_is_left_alone(case, monkeypatch, caplog, version):
    case()
    other = FakeVllm(version).install(monkeypatch)
    with caplog.at_level(logging.INFO, "vllm.autosel"):
        plugin.register()
    assert not other.registry.oot
    assert caplog.text.count("\n") == 1
    assert f"version: found {version}, expected 0.32.x or 0.33.x" in caplog.text


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.1.dev4+gabc", "0.32.0+cpu"])
def test_known_versions(case, monkeypatch, version):
    case()
    other = FakeVllm(version).install(monkeypatch)
    plugin.register()
    assert list(other.registry.oot) == ["RoutedExperts"]


def test_another_signature_is_left_alone(case, caplog):
    made = case()
    made.vllm.routed_experts._replace_quant_method = lambda self, quant_method, why: None
    with caplog.at_level(logging.INFO, "vllm.autosel"):
        plugin.register()
    assert not made.vllm.registry.oot
    assert "_replace_quant_method: parameters: found self, quant_method, why" in caplog.text


def test_a_missing_module_is_left_alone(case, monkeypatch, caplog):
    made = case()
    monkeypatch.delitem(sys.modules, "vllm.model_executor.custom_op")
    with caplog.at_level(logging.INFO, "vllm.autosel"):
        plugin.register()
    assert not made.vllm.registry.oot
    assert "ModuleNotFoundError" in caplog.text


def test_another_plugins_layer_stays(case, caplog):
    made = case()
    made.vllm.registry.oot["RoutedExperts"] = theirs = type("Theirs", (), {})
    with caplog.at_level(logging.INFO, "vllm.autosel"):
        plugin.register()
    assert made.vllm.registry.oot == {"RoutedExperts": theirs}
    assert "RoutedExperts: found replaced by" in caplog.text


# taken over --------------------------------------------------------------------------------------

FORMATS = [
    {"fmt": "gptq"},
    {"fmt": "gptq", "group_size": -1},
    {"fmt": "gptq", "bits": 8},
    {"fmt": "gptq", "symmetric": False},
    {"fmt": "gptq_v2", "symmetric": False},
    {"fmt": "awq", "symmetric": False},
    {"fmt": "compressed-tensors"},
    {"fmt": "compressed-tensors", "symmetric": False},
    {"fmt": "compressed-tensors", "group_size": -1, "bits": 8},
]


@pytest.mark.parametrize("facts", FORMATS, ids=lambda f: "-".join(str(v) for v in f.values()))
def test_a_layer_with_decisions_runs_by_them(case, caplog, facts):
    made = case(**facts)
    backend = "emulation" if facts.get("bits") == 8 else "torch_int4"
    source = made.decide(backends=(backend,))
    with caplog.at_level(logging.INFO, "vllm.autosel"):
        layer = made.loaded()
    assert layer.quant_method.method_name == "AutoselMoEMethod"
    (status,) = plugin.in_use(layer).values()
    assert backend in status, status
    assert f"autosel: runs {BLOCK}: {status}" in caplog.text
    assert not list(layer.parameters()), "vLLM's copy of the weights is gone"
    assert_right(layer, source)


def test_each_token_count_runs_its_own_candidate(case):
    made = case()
    problem = CheckpointSource(str(made.folder), 0, act_dtype="float16").problem
    machine = devices.detect("cpu")
    first, second = (candidate(n, problem, machine) for n in ("torch_int4", "emulation"))
    with Store.open(made.db) as store:
        store_times(
            store, problem, machine, {1: {first: 1.0, second: 9.0}, 64: {first: 9.0, second: 1.0}}
        )
    layer = made.loaded()
    names = [choice.candidate.backend for choice in layer.quant_method.experts.choices]
    assert len(set(names)) == 1, "one resident copy without a plan"
    assert layer.quant_method.experts.choices[0].tuned


def test_a_pack_beside_the_model_decides(case, tmp_path, monkeypatch):
    made = case()
    source = made.decide()
    autosel.pack(made.folder, made.folder / "autosel-pack.json", db=made.db)
    monkeypatch.setenv("AUTOSEL_DB", str(tmp_path / "empty.db"))
    layer = made.loaded()
    assert layer.quant_method.method_name == "AutoselMoEMethod", plugin.in_use(layer)
    assert_right(layer, source)


def test_scales_are_those_that_vllm_rounded(case):
    """A float16 checkpoint served in bfloat16: vLLM's parameters hold bfloat16 scales."""
    made = case()
    problem = CheckpointSource(str(made.folder), 0, act_dtype="bfloat16").problem
    machine = devices.detect("cpu")
    with Store.open(made.db) as store:
        times = {1: {candidate("emulation", problem, machine): 1.0}}
        store_times(store, problem, machine, times)
    tensors = stacked("gptq", made.made.tensors, BLOCK, range(4), scale_dtype=torch.bfloat16)
    layer = made.loaded(tensors, in_dtype=torch.bfloat16)
    assert layer.quant_method.method_name == "AutoselMoEMethod", plugin.in_use(layer)
    assert layer.quant_method.experts.problem.w13.scale_dtype == "float16"


def test_one_rank_of_tensor_parallelism(case):
    made = case(inter=64)
    source = made.decide(tp_rank=1, tp_size=2)
    layer = made.loaded(tp_rank=1, tp_size=2)
    assert layer.quant_method.method_name == "AutoselMoEMethod", plugin.in_use(layer)
    assert_right(layer, source)


@pytest.mark.parametrize("held", [(2, 3), (1, 3), (3, 0)])
def test_one_rank_of_expert_parallelism(case, held):
    made = case()
    placed = torch.full((4,), -1, dtype=torch.int32)
    placed[list(held)] = torch.arange(2, dtype=torch.int32)
    source = made.decide(held=held)
    layer = made.loaded(held=held, placed=placed, num_local_experts=2, ep_size=2)
    assert layer.quant_method.method_name == "AutoselMoEMethod", plugin.in_use(layer)
    assert_right(layer, source, expert_map=placed)


def test_what_runs_is_part_of_the_key_of_vllms_compile_cache(case):
    made = case()
    made.decide()
    layer = made.loaded()
    served = made.vllm.config.additional_config[plugin.SERVED]
    name, text = served[BLOCK]
    assert name == layer.quant_method.experts.operator_name
    assert "torch_int4" in text
    json.dumps(made.vllm.config.additional_config)


def test_a_second_load_is_refused(case):
    made = case()
    made.decide()
    layer = made.loaded()
    with pytest.raises(AutoselError, match="loaded again"):
        finish_loading(layer)


def test_a_candidate_that_fails_later_is_replaced_from_the_files(case, monkeypatch):
    made = case()
    source = made.decide()
    layer = made.loaded()
    runtime = layer.quant_method.experts._runtime

    def broken(*args):
        raise RuntimeError("broken")

    for entry in runtime.entries:
        entry.backend._run = broken
    with pytest.warns(UserWarning, match="withdrawn"):
        assert_right(layer, source)
    assert layer.quant_method.experts.choices[0].candidate.backend == "emulation"


# left to vLLM ------------------------------------------------------------------------------------


def test_without_decisions_vllm_keeps_its_own(case, caplog):
    made = case()
    with caplog.at_level(logging.INFO, "vllm.autosel"):
        layer = made.loaded()
    assert_left(layer, "no decision for 1")
    assert caplog.text.count(f"leaves {BLOCK} to vLLM") == 1


def test_a_range_without_decision_is_named(case, tmp_path, monkeypatch):
    """A pack may say nothing about large batches: then vLLM serves all of them, small ones too."""
    made = case()
    problem = CheckpointSource(str(made.folder), 0, act_dtype="float16").problem
    machine, first = devices.detect("cpu"), TokenBucket(1, 8, 1)
    with Store.open(made.db) as store:
        whole = store_times(
            store, problem, machine, {1: {candidate("torch_int4", problem, machine): 1.0}}
        )
    with Store.open(tmp_path / "other.db") as store:
        store.add_decision(replace(whole[0], bucket=first), machine, MODE)
    monkeypatch.setenv("AUTOSEL_DB", str(tmp_path / "other.db"))
    assert_left(made.loaded(), "no decision for 9+ tokens")


def test_decisions_of_another_rank_split_do_not_count(case):
    made = case(inter=64)
    made.decide()
    assert_left(made.loaded(tp_rank=0, tp_size=2), "intermediate_size: wanted 32, stored 64")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"moe_backend": "marlin"}, "--moe-backend marlin"),
        ({"is_lora_enabled": True}, "LoRA"),
        ({"enable_eplb": True}, "EPLB"),
        ({"num_logical_experts": 3}, "redundant"),
        ({"dp_size": 2}, "data-parallel"),
        ({"pcp_size": 2}, "context parallelism"),
        ({"sp_size": 2}, "sequence parallelism"),
        ({"hidden_dim_unpadded": 60}, "padded"),
        ({"tp_shard_with_padding": True}, "padded"),
        ({"experts_per_token": 3}, "top_k: 3 in vLLM, 2 in the checkpoint"),
        ({"activation": fake_vllm.MoEActivation.GELU}, "activation"),
        ({"in_dtype": torch.float32}, "no decision for 1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_built_is_left_with_its_reason(case, facts, words):
    made = case()
    made.decide()
    assert_left(made.loaded(**facts), words)


def test_fused_shared_experts_and_eight_bit_activations(case):
    made = case()
    made.decide()
    plugin.register()
    layer = made.layer()
    layer.expert_map_manager.num_fused_shared_experts = 1
    finish_loading(layer)
    assert_left(layer, "shared experts are fused")
    layer = made.layer()
    layer.quant_method.input_dtype = torch.int8
    finish_loading(layer)
    assert_left(layer, "8-bit activations")


def test_replicas_of_experts(case):
    made = case()
    made.decide()
    placed = torch.tensor([0, 0, 1, -1], dtype=torch.int32)
    assert_left(made.loaded(held=(0, 2), placed=placed, num_local_experts=2), "no replicas")


def test_act_order(case):
    made = case(act_order=True)
    made.decide(backends=("emulation",))
    assert_left(made.loaded(), "act-order")


def test_a_method_that_is_none_of_the_three(case, monkeypatch):
    made = case()
    made.decide()
    monkeypatch.setattr(
        fake_vllm, "method_for", lambda quant, moe: fake_vllm.UnquantizedFusedMoEMethod(moe)
    )
    assert_left(made.loaded(), "UnquantizedFusedMoEMethod is none of")


def test_a_model_that_is_not_on_disk(case):
    made = case()
    made.decide()
    made.vllm.config.model_config.model = "somebody/something-that-is-not-here"
    assert_left(made.loaded(), "folder")


def test_made_up_weights(case):
    made = case()
    made.decide()
    made.vllm.config.load_config.load_format = "dummy"
    assert_left(made.loaded(), "dummy")


def test_a_layer_without_a_number(case, monkeypatch):
    made = case()
    made.decide()
    plugin.register()
    layer = made.layer()
    layer.layer_name = "experts"
    finish_loading(layer)
    assert_left(layer, "no layer's number")


def test_an_unexpected_error_stops_nothing(case, monkeypatch):
    made = case()
    made.decide()

    def broken(*args, **options):
        raise MemoryError("no memory left")

    monkeypatch.setattr(vllm_layer, "build", broken)
    assert_left(made.loaded(), "MemoryError: no memory left")


def test_nothing_that_was_decided_can_run(case, monkeypatch):
    """Every decided candidate is wrong here: the default is not served untuned, vLLM is."""
    from autosel.backends import torch_int4

    made = case()
    made.decide(backends=("torch_int4",))
    backend = torch_int4.BACKEND if hasattr(torch_int4, "BACKEND") else None
    cls = type(backend) if backend else torch_int4.TorchInt4
    run = cls.run
    monkeypatch.setattr(
        cls,
        "run",
        lambda self, packed, x, routing, params, out: run(
            self, packed, x, routing, params, out
        ).mul_(2),
    )
    with pytest.warns(UserWarning, match="withdrawn"):
        layer = made.loaded()
    assert_left(layer, "nothing decided for")


# planted faults ----------------------------------------------------------------------------------


def swapped_halves(name, tensor, kind):
    if not name.startswith("w13"):
        return tensor
    axis = 1 if kind == "compressed-tensors" else 2
    gate, up = tensor.chunk(2, axis)
    return torch.cat([up, gate], axis)


def swapped_nibbles(name, tensor, kind):
    if not name.endswith(("qweight", "weight_packed")):
        return tensor
    low, high = tensor & 0x0F0F0F0F, (tensor >> 4) & 0x0F0F0F0F
    return (low << 4) | high


def shifted_experts(name, tensor, kind):
    return tensor.roll(1, 0)


def shifted_zeros(name, tensor, kind):
    return tensor ^ 1 if name.endswith(("qzeros", "zero_point")) else tensor


def doubled_scales(name, tensor, kind):
    return tensor * 2 if name.startswith("w2") and tensor.is_floating_point() else tensor


@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed-tensors"])
@pytest.mark.parametrize(
    "fault", [swapped_halves, swapped_nibbles, shifted_experts, shifted_zeros, doubled_scales]
)
def test_other_weights_than_the_checkpoints_are_noticed(case, kind, fault):
    made = case(fmt=kind, symmetric=False)
    made.decide()
    right = stacked(kind, made.made.tensors, BLOCK, range(4))
    assert made.loaded(dict(right)).quant_method.method_name == "AutoselMoEMethod"
    wrong = {name: fault(name, tensor, kind) for name, tensor in right.items()}
    layer = made.loaded(wrong)
    assert_left(layer, "others in vLLM's parameters, expected the checkpoint's")


def test_another_ranks_part_is_noticed(case):
    made = case(inter=64)
    made.decide(tp_rank=0, tp_size=2)
    other = stacked("gptq", made.made.tensors, BLOCK, range(4), tp_rank=1, tp_size=2)
    assert_left(made.loaded(other, tp_rank=0, tp_size=2), "codes")


def test_a_wrong_convention_of_zero_points_is_noticed(case):
    made = case(fmt="gptq", symmetric=False)
    made.decide()
    plugin.register()
    layer = made.layer()
    layer.quant_method.quant_config.full_config = {"checkpoint_format": "gptq_v2"}
    finish_loading(layer)
    assert_left(layer, "zero points")


# options and ranks -------------------------------------------------------------------------------


def test_options(tmp_path):
    assert Options.of({}) == Options()
    given = {"db": "a.db", "allow_a8": True, "require": ["deterministic"]}
    assert Options.of({"autosel": given, "other": 1}) == Options(
        "a.db", None, True, "uniform", ("deterministic",)
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (SimpleNamespace(), "additional_config: found SimpleNamespace"),
        ({"autosel": 1}, "found int"),
        ({"autosel": {"speed": 1}}, "option: found 'speed'"),
        ({"autosel": {"db": 1}}, "db: found 1"),
        ({"autosel": {"require": ["fast"]}}, "'fast'"),
    ],
)
def test_options_that_are_not_understood(case, config, words):
    with pytest.raises(AutoselError, match=words):
        Options.of(config)
    made = case()
    made.decide()
    made.vllm.config.additional_config = config
    assert_left(made.loaded(), words)


def test_another_database(case, tmp_path, monkeypatch):
    made = case()
    made.decide()
    monkeypatch.setenv("AUTOSEL_DB", str(tmp_path / "empty.db"))
    made.vllm.config = vllm_config(str(made.folder), db=str(made.db))
    assert made.loaded().quant_method.method_name == "AutoselMoEMethod"


def test_batch_invariance_is_required_where_vllm_requires_it(case):
    made = case()
    made.decide()
    sys.modules["vllm.envs"].VLLM_BATCH_INVARIANT = True
    assert_left(made.loaded(), "batch_invariant")


def test_a_rank_that_refuses_makes_all_refuse(case):
    made = case()
    made.decide()
    said = []

    def others_refuse(text):
        said.append(text)
        return False

    engine = vllm_layer.Engine(Options(), lambda: made.folder, agree=others_refuse)
    layer = made.layer()
    assert (
        vllm_layer.take_over(layer, layer.quant_method, engine) == "another rank leaves it to vLLM"
    )
    assert len(said) == 1
    assert said[0]


def test_ranks_that_chose_differently_all_refuse(case):
    made = case()
    made.decide()
    answers = iter([True, False])
    engine = vllm_layer.Engine(Options(), lambda: made.folder, agree=lambda text: next(answers))
    layer = made.layer()
    reason = vllm_layer.take_over(layer, layer.quant_method, engine)
    assert reason == "another rank would run it in another way"
    assert list(layer.parameters()), "nothing of vLLM's was let go"


def test_agreement_over_gloo(tmp_path):
    """Two ranks in two threads, each with a process group of its own on one store."""
    store = torch.distributed.HashStore()
    texts = [("same", "same"), ("one", "other"), ("", ""), ("x", "")]
    found = [[], []]

    def rank(number):
        group = torch.distributed.ProcessGroupGloo(store, number, 2)
        for pair in texts:
            found[number].append(plugin.agreed(group, 2, pair[number]))

    threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[0] == found[1] == [True, False, False, False]
