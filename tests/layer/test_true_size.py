"""More elements than 32 bits count, in activations and in weights, at their true size.

8 slots of 7,168 values for 37,449 tokens are 2,147,475,456 elements, for 37,450 tokens
2,147,532,800: below and above 2**31. 512 experts of 2,048 x 4,096 weights are 2**32.
"""

from __future__ import annotations

import os
import warnings

import pytest
import torch

from autosel import FusedMoE, registry, workspace
from autosel.core import CanonicalExperts, Problem, QuantScheme, QuantWeight, Routing
from autosel.cpuinfo import available_memory
from autosel.device import detect
from autosel.errors import AutoselError
from autosel.layer_choice import WithdrawnWarning
from autosel.reference import moe
from autosel.sources import RandomSource
from autosel.store import Store
from tests.layer.decided import candidate, store_times

GIB = 1 << 30
HIDDEN, SLOTS = 7168, 8
GROUP_32 = QuantScheme(4, 32, True)
LONG = Problem(8, 8, SLOTS, HIDDEN, 32, GROUP_32, GROUP_32)
GROUP_128 = QuantScheme(4, 128, True)
WIDE = Problem(512, 512, SLOTS, 4096, 1024, GROUP_128, GROUP_128)

ON_CPU = ["cpu_native", "emulation", "torch_int4"]
ON_CUDA = ["wna16_tiled", "triton", "moe_wna16", "marlin", "humming"]


@pytest.fixture(autouse=True)
def scratch():
    """13 GB that no later test needs."""
    yield
    workspace.release()


def layer_of(experts, name, kind, tmp_path):
    problem, device = experts.problem, detect(kind)
    support = registry.get(name).supports(problem, device)
    if not support:
        pytest.skip(f"{name}: {support}")
    with Store.open(tmp_path / "layer.db") as store:
        winner = candidate(name, problem, device, 4096)
        store_times(store, problem, device, {4096: {winner: 10.0}})
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", WithdrawnWarning)
            layer = FusedMoE.from_experts(experts, device=kind, db=store)
    withdrawn = [str(w.message) for w in said if issubclass(w.category, WithdrawnWarning)]
    if withdrawn and name == "moe_wna16":  # its bfloat16 partial sums are too coarse for some sizes
        pytest.skip(withdrawn[0])
    assert not withdrawn
    assert [choice.candidate for choice in layer.choices] == [winner]
    return layer


def needs_memory(gib):
    free = available_memory()
    if free is not None and free < gib * GIB:
        pytest.skip(f"{free / GIB:.0f} GiB of memory are free, and this takes {gib}")


def takes_minutes():
    """Our own kernel past 2**31 elements is checked always, the others where somebody asks."""
    if not os.environ.get("AUTOSEL_TEST_TRUE_SIZE"):
        pytest.skip("a minute and gigabytes each: set AUTOSEL_TEST_TRUE_SIZE=1")


def far_from(out, x, experts, routing):
    ref = moe(x.cpu(), experts, routing, dtype=torch.float32)
    return float((out.cpu().float() - ref).norm(dim=1).div(ref.norm(dim=1)).max())


def check_long(name, kind, tokens, tmp_path):
    experts = RandomSource(LONG).load()
    layer = layer_of(experts, name, kind, tmp_path)
    generator = torch.Generator(kind).manual_seed(tokens)
    x = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device=kind)
    x.normal_(generator=generator)
    # Every token in another order, so that a row in the wrong place is another row.
    order = torch.rand(tokens, 8, generator=generator, device=kind).argsort(1)
    weights = torch.rand(tokens, SLOTS, generator=generator, device=kind)
    if name == "moe_wna16" and tokens * SLOTS * HIDDEN >= 2**31:
        with pytest.warns(WithdrawnWarning), pytest.raises(AutoselError, match="slots x width"):
            layer(x, order, weights)
        return
    out = layer(x, order, weights)
    last = tokens - 1
    # First rows, those around 2**30 elements, and the last ones, where 2**31 is passed.
    rows = torch.tensor([0, 1, 18723, 18724, 18725, tokens // 2, last - 1, last], device=kind)
    routing = Routing(order[rows].int().cpu(), weights[rows].cpu())
    assert far_from(out[rows], x[rows], experts, routing) < 2e-2
    wrong = Routing(routing.topk_ids.roll(1, 0), routing.topk_weights.roll(1, 0))
    assert far_from(out[rows], x[rows], experts, wrong) > 0.1  # another row's routing is seen


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tokens", [37449, 37450])
@pytest.mark.parametrize("name", ON_CPU)
def test_tokens_on_both_sides_of_31_bits(name, tokens, tmp_path):
    if (name, tokens) != ("cpu_native", 37450):
        takes_minutes()
    needs_memory(8)
    check_long(name, "cpu", tokens, tmp_path)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("tokens", [37449, 37450])
@pytest.mark.parametrize("name", ON_CUDA)
def test_tokens_on_both_sides_of_31_bits_on_a_gpu(name, tokens, tmp_path):
    check_long(name, "cuda", tokens, tmp_path)


@pytest.fixture(scope="module")
def wide():
    """Random words as codes; each expert's scales are its own, so that no two are alike."""
    needs_memory(10)
    generator = torch.Generator().manual_seed(0)

    def weight(outputs, inputs):
        codes = torch.empty(512, outputs, inputs // 8, dtype=torch.int32)
        for expert in codes:
            expert.random_(-(2**31), 2**31 - 1, generator=generator)
        size = (12 / inputs) ** 0.5 / 16
        scales = torch.rand(512, outputs, inputs // 128, generator=generator).add_(0.5).mul_(size)
        return QuantWeight(GROUP_128, inputs, codes, scales.bfloat16())

    experts = CanonicalExperts(WIDE, weight(2048, 4096), weight(4096, 1024))
    assert experts.w13.codes.numel() * 8 == 2**32
    return experts


def check_wide(experts, name, kind, tmp_path):
    layer = layer_of(experts, name, kind, tmp_path)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 4096, generator=generator).bfloat16()
    # Experts on both sides of 2**31 codes (256) and of 2**31 bytes (511), and the last in each row.
    ids = torch.tensor([[0, 1, 127, 128, 255, 256, 510, 511]]).repeat(16, 1)
    ids[1::2] = torch.rand(8, 512, generator=generator).topk(8).indices
    weights = torch.rand(16, SLOTS, generator=generator)
    out = layer(x.to(kind), ids.to(kind), weights.to(kind))
    assert far_from(out, x, experts, Routing(ids.int(), weights)) < 2e-2
    wrong = Routing((ids.int() + 1) % 512, weights)
    assert far_from(out, x, experts, wrong) > 0.1  # another expert's weights are seen


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_weights_of_32_bits(request, tmp_path):
    takes_minutes()
    wide = request.getfixturevalue("wide")
    check_wide(wide, "cpu_native", "cpu", tmp_path)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ON_CUDA)
def test_weights_of_32_bits_on_a_gpu(wide, name, tmp_path):
    check_wide(wide, name, "cuda", tmp_path)
