"""What engines pass and this layer cannot honour: one clear line each, never dropped silently."""

import inspect

import pytest
import torch

from autosel import FusedMoE
from autosel.core import Problem, QuantScheme
from autosel.errors import AutoselError, CheckpointError, RoutingError, UnsupportedError
from autosel.layer_build import DEFAULTS, LayerOptions
from autosel.layer_params import ExpertParameters
from autosel.layer_refusals import REFUSED
from autosel.routing_spec import RouterSpec
from autosel.sources import RandomSource

SCHEME = QuantScheme(4, 32, True)
SOURCE = RandomSource(Problem(8, 8, 2, 64, 32, SCHEME, SCHEME))


@pytest.fixture(scope="module")
def layer():
    return FusedMoE.from_source(SOURCE, router=RouterSpec(2), db=":memory:")


def call(tokens=3):
    ids = torch.tensor([[0, 1]] * tokens)
    return torch.ones(tokens, 64, dtype=torch.bfloat16), ids, torch.full((tokens, 2), 0.5)


@pytest.mark.parametrize("name", REFUSED)
def test_each_name_is_refused_with_its_reason_where_it_has_a_value(layer, name):
    plain = layer(*call())
    assert torch.equal(layer(*call(), **{name: None}), plain)
    logits = torch.zeros(3, 8)
    for attempt in (
        lambda: layer(*call(), **{name: torch.ones(8)}),
        lambda: layer.apply(*call(), **{name: torch.ones(8)}),
        lambda: layer.apply_monolithic(call()[0], logits, **{name: torch.ones(8)}),
        lambda: FusedMoE.from_source(SOURCE, db=":memory:", **{name: torch.ones(8)}),
    ):
        with pytest.raises(UnsupportedError, match=f"{name}: found a tensor, expected none: ") as e:
            attempt()
        assert "\n" not in str(e.value)


def test_a_name_that_nobody_knows_is_an_error_of_the_caller(layer, monkeypatch):
    with pytest.raises(TypeError, match="'topk_id'"):
        layer(*call(), topk_id=3)
    # Before anything is packed.
    monkeypatch.setattr(RandomSource, "load", lambda *_: pytest.fail("loaded"))
    with pytest.raises(TypeError, match=r"'sharedexperts'; there are ep_rank, .*shared_experts"):
        FusedMoE.from_source(SOURCE, db=":memory:", sharedexperts=None)


@pytest.mark.parametrize("make", ["from_checkpoint", "from_source", "from_experts"])
def test_every_way_to_build_shows_each_option_with_its_default(make):
    shown = inspect.signature(getattr(FusedMoE, make)).parameters
    for name in LayerOptions.__annotations__:
        assert shown[name].default == DEFAULTS[name]
    assert set(DEFAULTS) == set(LayerOptions.__annotations__)


def test_experts_are_held_once(layer):
    assert layer.supports_eplb is False
    replicas = torch.tensor([0, 1, 2, 3, 4, 5, 6, 6])
    with pytest.raises(RoutingError, match=r"once \(no replicas\)"):
        FusedMoE.from_source(SOURCE, db=":memory:", expert_map=replicas)


@pytest.mark.parametrize("suffix", ["input_scale", "input_global_scale"])
def test_static_scales_of_activations_in_a_checkpoint_are_named(suffix):
    parameters = ExpertParameters("compressed-tensors", SOURCE.problem)
    with pytest.raises(CheckpointError, match=f"expert 1 w2.{suffix}.*row by row"):
        parameters.load_weight(suffix, torch.ones(1), expert_id=1, shard_id="w2")


@pytest.mark.parametrize(
    ("order", "size", "full_w2", "k_full", "groups"),
    [
        (False, 1, False, True, (4, 6)),
        (False, 2, False, True, (4, 3)),
        (False, 4, False, True, (4, 3)),  # 48 inputs a rank: three groups of the common divisor 16
        (True, 1, True, True, (4, 6)),
        (True, 2, True, False, (4, 6)),
    ],
)
def test_the_rules_for_scales_of_w2(order, size, full_w2, k_full, groups):
    scheme = QuantScheme(4, 32, True, has_g_idx=order)
    made = ExpertParameters("gptq", Problem(2, 2, 1, 128, 192, scheme, scheme), tp_size=size)
    assert made.load_full_w2 is full_w2
    assert made.is_k_full is k_full
    assert (made.num_groups_w13, made.num_groups_w2) == groups
    assert made.w2_scales.shape[1] == groups[1]
    whole = QuantScheme(4, -1, True, has_g_idx=False)
    made = ExpertParameters("gptq", Problem(2, 2, 1, 128, 192, whole, whole), tp_size=size)
    assert (made.num_groups_w13, made.num_groups_w2, made.is_k_full) == (1, 1, True)


def test_an_order_with_the_arguments_of_vllm_swapped_is_named(layer):
    x, ids, weights = call()
    with pytest.raises(AutoselError, match=r"topk_ids.*dtype"):
        layer(x, weights, ids)
