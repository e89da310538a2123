"""Against transformers itself: its MoE blocks, and whole models whose experts are replaced."""

import importlib
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from autosel import FusedMoE
from autosel.canonical import dequantize_expert
from autosel.checkpoint import Checkpoint
from autosel.core import Activation, Problem, QuantScheme
from autosel.errors import AutoselError, CheckpointError, UnsupportedError
from autosel.integrations.transformers import replace_experts
from autosel.model_config import ModelConfig
from autosel.routing import route
from autosel.sources import RandomSource

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (it is no dependency)"
)

pytestmark = [
    pytest.mark.integration,
]

VERSION = int(transformers.__version__.split(".")[0])


def distance(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


# one block of each family ------------------------------------------------------------------------

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 16, "num_attention_heads": 2}

#: module of transformers, config, block, and the config's values beside the sizes
FAMILIES = {
    "mixtral": ("mixtral", "MixtralConfig", "MixtralSparseMoeBlock", {
        "intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2,
    }),
    "qwen3-moe": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock", {
        "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    }),
    "qwen3-moe, not renormalised": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock", {
        "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3,
        "norm_topk_prob": False,
    }),
    "deepseek-v3": ("deepseek_v3", "DeepseekV3Config", "DeepseekV3MoE", {
        "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 1,
    }),
    "glm-4.5": ("glm4_moe", "Glm4MoeConfig", "Glm4MoeMoE", {
        "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "n_shared_experts": 1,
    }),
    "llama-4": ("llama4", "Llama4TextConfig", "Llama4TextMoe", {
        "intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 1,
    }),
    "qwen2-moe": ("qwen2_moe", "Qwen2MoeConfig", "Qwen2MoeSparseMoeBlock", {
        "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 24, "norm_topk_prob": False,
    }),
    "olmoe": ("olmoe", "OlmoeConfig", "OlmoeSparseMoeBlock", {
        "intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2,
        "norm_topk_prob": False,
    }),
}  # fmt: skip


class Family:
    """A block of transformers with random weights, the same experts quantised, and its rule."""

    def __init__(self, name, folder):
        module, config, block, values = FAMILIES[name]
        place = f"transformers.models.{module}"
        configs = importlib.import_module(f"{place}.configuration_{module}")
        modeling = importlib.import_module(f"{place}.modeling_{module}")
        self.config = getattr(configs, config)(**SIZES, **values)
        torch.manual_seed(1)
        self.block = getattr(modeling, block)(self.config).float().eval()
        for parameter in self.block.parameters():
            nn.init.normal_(parameter, std=0.3)
        bias = getattr(getattr(self.block, "gate", None), "e_score_correction_bias", None)
        self.bias = None if bias is None else bias.uniform_(0, 0.2)
        (folder / "config.json").write_text(json.dumps(self.config.to_dict()))
        self.rule = ModelConfig.read(folder).router(self.bias is not None)
        on_input = ModelConfig.read(folder).router_weight_on_input
        self.source = RandomSource(
            Problem(
                8, 8, values["num_experts_per_tok"], 32, 16,
                QuantScheme(4, 16, False), QuantScheme(4, 16, False),
                Activation("silu"), "float32", router_weight_on_input=on_input,
            )
        )  # fmt: skip
        self.fill()

    def fill(self):
        """The block's experts, dequantised."""
        experts = self.source.load()
        for e in range(8):
            gate, up = dequantize_expert(experts.w13, e).chunk(2)
            down = dequantize_expert(experts.w2, e)
            set_expert(self.block.experts, e, gate, up, down)

    def logits(self, x):
        router = self.block.gate if hasattr(self.block, "gate") else self.block.router
        return nn.functional.linear(x, router.weight)

    def layer(self, **options):
        return FusedMoE.from_source(
            self.source, router=self.rule, correction_bias=self.bias, db=":memory:", **options
        )

    def output(self, x):
        out = self.block(x)
        return (out[0] if isinstance(out, tuple) else out).reshape(x.shape)

    def shared(self, x):
        block = self.block
        if hasattr(block, "shared_experts"):
            return block.shared_experts(x)
        if hasattr(block, "shared_expert_gate"):
            return block.shared_expert_gate(x).sigmoid() * block.shared_expert(x)
        return block.shared_expert(x) if hasattr(block, "shared_expert") else torch.zeros_like(x)


@torch.no_grad()
def set_expert(experts, number, gate, up, down):
    """One expert's [out, in] weights into a list of experts, or into the stacked form."""
    if not isinstance(experts, nn.ModuleList):
        both = torch.cat([gate, up]).float()
        inputs_first = type(experts).__name__.startswith("Llama4")
        experts.gate_up_proj[number] = both.t() if inputs_first else both
        experts.down_proj[number] = down.t() if inputs_first else down
        return
    module = experts[number]
    names = ("w1", "w3", "w2") if hasattr(module, "w1") else ("gate_proj", "up_proj", "down_proj")
    for name, weight in zip(names, (gate, up, down), strict=True):
        getattr(module, name).weight.copy_(weight)


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path):
    return Family(request.param, tmp_path)


def tokens(seed=2):
    return torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_router_logits_to_output_as_the_block_does(family):
    x = tokens()
    layer = family.layer(shared_experts=family.shared)
    assert distance(layer.apply_monolithic(x, family.logits(x)), family.output(x)) < 1e-5


@torch.no_grad()
def test_another_rule_is_seen(family):
    """The planted fault: one constant of the rule changed is far outside the tolerance."""
    from dataclasses import replace

    x = tokens()
    family.rule = replace(family.rule, scaling_factor=1.1 * family.rule.scaling_factor)
    layer = family.layer(shared_experts=family.shared)
    assert distance(layer.apply_monolithic(x, family.logits(x)), family.output(x)) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("name", ["deepseek-v3", "glm-4.5"])
def test_ids_and_weights_as_the_routers_give_them(name, tmp_path):
    family = Family(name, tmp_path)
    x = tokens().view(-1, 32)
    *_, ids, weights = family.block.gate(x)
    if VERSION >= 5:  # logits, weights, ids
        ids, weights = weights, ids
    found = route(family.logits(x), family.rule, family.bias)

    def dense(ids, weights):
        return torch.zeros(len(x), 8).scatter_(1, ids.long(), weights)

    torch.testing.assert_close(dense(found.topk_ids, found.topk_weights), dense(ids, weights))


@torch.no_grad()
def test_a_block_joined_to_the_layer_gives_its_own_output(family):
    from autosel.integrations import transformers as integration

    x = tokens()
    before = family.block(x)
    layer = family.layer()
    integration._join(family.block)(family.block, layer)
    after = family.block(x)
    assert isinstance(after, tuple) == isinstance(before, tuple)
    if isinstance(before, tuple):
        assert torch.equal(after[1], before[1])
        before, after = before[0], after[0]
    assert after.numel() == before.numel()
    assert distance(after.reshape(before.shape), before) < 1e-5


# whole models ------------------------------------------------------------------------------------

MODELS = [
    "gptq-v1-w4-g128-sym-mixtral",
    "awq-gptqmodel-w4-g32-mixtral",
    "gptq-autogptq-w8-g64-asym-mixtral",
    "gptq-v1-w4-g64-sym-actorder-qwen3moe",
    "awq-w4-g64-qwen3moe",
    "ct-w4-g32-sym-actgroup-qwen3moe",
    "gptq-v1-w8-g32-sym-actorder-deepseekv3",
    "awq-w4-g32-deepseekv3",
    "gptq-v1-w4-g32-asym-deepseekv2",
]


@pytest.fixture(scope="module", params=MODELS)
def quantised(request, fixtures_dir, get_checkpoint):
    if not (fixtures_dir / "checkpoints" / request.param).is_dir():
        pytest.skip("this checkpoint is not part of the carried subset")
    return get_checkpoint(request.param)


def spellings(name):
    """Mixtral's block has one name in transformers 4 and another one in 5."""
    names = [".mlp.", ".block_sparse_moe."]
    return {name} | {name.replace(a, b) for a, b in (names, names[::-1])}


def dense_model(checkpoint):
    """The model in float32: the checkpoint's own tensors where they are not quantised, experts
    from the packing tool's dequantised weights, and for its quantised attention random weights.
    """
    config = transformers.AutoConfig.from_pretrained(checkpoint.path)
    del config.quantization_config
    stated = json.loads((checkpoint.path / "config.json").read_text())
    if "num_local_experts" in stated and hasattr(config, "num_experts"):
        config.num_experts = stated["num_local_experts"]  # written by transformers 5
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    used = set()
    with torch.no_grad():
        for name, tensor in checkpoint.tensors.items():
            for spelling in spellings(name):
                if spelling in own and own[spelling].shape == tensor.shape:
                    own[spelling].copy_(tensor)
                    used.add(spelling)
    assert any("gate" in name for name in used)
    assert any("embed" in name for name in used)
    for layer, experts in experts_of(model):
        for e in range(experts_in(checkpoint, layer)):
            at = f"layers.{layer}.experts.{e}."
            set_expert(experts, e, *(checkpoint.expected[at + n] for n in ("gate", "up", "down")))
    return model


def experts_of(model):
    for name, module in model.named_modules():
        found = re.search(r"layers\.(\d+)\.\w+\.experts$", name)
        if found:
            yield int(found[1]), module


def experts_in(checkpoint, layer):
    return checkpoint.expected[f"layers.{layer}.router.weight"].shape[0]


def without_the_tools_rounding(model, checkpoint):
    """The same model with weights that were not rounded to the scales' dtype: a token chosen
    between two close logits then stays the same."""
    opened = Checkpoint.open(checkpoint.path)
    for layer, experts in experts_of(model):
        read = opened.read_experts(layer)
        for e in range(read.problem.num_experts):
            gate, up = dequantize_expert(read.w13, e).chunk(2)
            set_expert(experts, e, gate, up, dequantize_expert(read.w2, e))


def block_of(layer):
    return layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe


def prompt(model):
    generator = torch.Generator().manual_seed(5)
    return torch.randint(model.config.vocab_size, (2, 12), generator=generator)


@torch.no_grad()
def test_same_logits_and_same_tokens(quantised):
    model = dense_model(quantised)
    ids = prompt(model)
    logits = model(ids).logits
    without_the_tools_rounding(model, quantised)
    exact = model(ids).logits
    written = model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)
    before = sum(p.numel() for p in model.parameters())
    layers = replace_experts(model, quantised.path)
    assert sorted(layers) == quantised.moe_layers
    assert sum(p.numel() for p in model.parameters()) < before
    assert distance(model(ids).logits, exact) < 1e-5
    rounding = 2e-2 if quantised.name.startswith("ct") else 3e-3  # bfloat16 or float16 scales
    assert distance(model(ids).logits, logits) < rounding
    got = model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)
    assert torch.equal(got, written)


@torch.no_grad()
def test_in_bfloat16_too(get_checkpoint):
    checkpoint = get_checkpoint("awq-gptqmodel-w4-g32-mixtral")
    model = dense_model(checkpoint).to(torch.bfloat16)
    ids = prompt(model)
    logits = model(ids).logits
    layers = replace_experts(model, checkpoint.path)
    assert {layer.problem.act_dtype for layer in layers.values()} == {"bfloat16"}
    assert distance(model(ids).logits, logits) < 3e-2
    assert model.to(torch.bfloat16) is model
    assert model.eval() is model


@torch.no_grad()
def test_the_documented_lines(get_checkpoint):
    """What docs/layer.md shows, as it stands there."""
    checkpoint = get_checkpoint("awq-gptqmodel-w4-g32-mixtral")
    page = Path(__file__).resolve().parents[2] / "docs" / "layer.md"
    (shown,) = re.findall(r"^```py\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    model = dense_model(checkpoint)
    ids = prompt(model)
    logits = model(ids).logits
    exec(shown.replace("path/to/quantised/checkpoint", str(checkpoint.path)), {"model": model})
    assert isinstance(block_of(model.model.layers[0]).experts, FusedMoE)
    assert distance(model(ids).logits, logits) < 3e-3


@torch.no_grad()
def test_experts_swapped_between_layers_are_seen(get_checkpoint):
    """The planted fault: the tolerance tells one layer's experts from another's."""
    checkpoint = get_checkpoint("awq-gptqmodel-w4-g32-mixtral")
    model = dense_model(checkpoint)
    ids = prompt(model)
    logits = model(ids).logits
    replace_experts(model, checkpoint.path)
    blocks = [block_of(layer) for layer in model.model.layers]
    blocks[0].experts, blocks[1].experts = blocks[1].experts, blocks[0].experts
    assert distance(model(ids).logits, logits) > 3e-2


def test_models_that_do_not_fit_are_refused_whole(get_checkpoint):
    checkpoint = get_checkpoint("awq-gptqmodel-w4-g32-mixtral")
    model = dense_model(checkpoint)
    gate = block_of(model.model.layers[1]).gate
    gate.weight.data.mul_(1.5)
    with pytest.raises(CheckpointError, match="layer 1: router: weights"):
        replace_experts(model, checkpoint.path)
    gate.weight.data.div_(1.5)
    with pytest.raises(CheckpointError, match="router: shape"):
        replace_experts(model, get_checkpoint("ct-w4-g128-sym-mixtral").path)
    with pytest.raises(UnsupportedError, match="MoE blocks"):
        replace_experts(nn.Linear(2, 2), checkpoint.path)
    assert not isinstance(block_of(model.model.layers[0]).experts, FusedMoE)
    replace_experts(model, checkpoint.path)
    with pytest.raises(AutoselError, match="replaced already"):
        replace_experts(model, checkpoint.path)


def test_a_model_with_another_rule_than_the_checkpoint_is_refused(get_checkpoint):
    """Blocks that route by the checkpoint's rule: a model loaded with another number of experts a
    token would go on with the checkpoint's without a word."""
    checkpoint = get_checkpoint("gptq-v1-w4-g64-sym-actorder-qwen3moe")
    model = dense_model(checkpoint)
    block = block_of(model.model.layers[-1])
    if not hasattr(block, "top_k"):
        pytest.skip("the blocks of this transformers route by themselves")
    for name, other in (("top_k", block.top_k + 1), ("norm_topk_prob", not block.norm_topk_prob)):
        before = getattr(block, name)
        setattr(block, name, other)
        with pytest.raises(CheckpointError, match=rf"router: {name}: found {before}, .*{other}"):
            replace_experts(model, checkpoint.path)
        setattr(block, name, before)
    assert replace_experts(model, checkpoint.path)


@torch.no_grad()
def test_a_model_whose_experts_were_never_made(get_checkpoint):
    """Experts on meta cost no memory; the model that comes out is the same."""
    checkpoint = get_checkpoint("gptq-v1-w4-g64-sym-actorder-qwen3moe")
    model = dense_model(checkpoint)
    ids = prompt(model)
    replace_experts(model, checkpoint.path)
    expected = model(ids).logits
    model = dense_model(checkpoint)
    for layer in model.model.layers:
        layer.mlp.experts.to("meta")
    replace_experts(model, checkpoint.path)
    assert torch.equal(model(ids).logits, expected)
