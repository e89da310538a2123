"""Peak memory of loading a model: all packed layers, one source layer, one expert being checked."""

import gc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from autosel import load_moe_layers
from autosel.sources import CheckpointSource
from tests.layer.deep import repeat_layer

NAME = "awq-gptqmodel-w4-g32-mixtral"
COUNT = 5


@pytest.fixture(scope="module")
def deep(get_checkpoint, tmp_path_factory):
    return repeat_layer(get_checkpoint(NAME).path, tmp_path_factory.mktemp("deep") / "model", COUNT)


def peak(path, layers, **options):
    """Most bytes of torch's CPU allocator at once, bytes at the end, and the layers."""
    gc.collect()  # so that nothing older is freed while it counts
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        loaded = load_moe_layers(path, layers=layers, db=":memory:", **options)
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = top = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        top = max(top, now)
    return top, now, loaded


def packed(layers):
    return sum(sum(layer.resident.values()) for layer in layers.values())


def source_bytes(path):
    experts = CheckpointSource(str(path), 0).load()
    found = []
    for weight in (experts.w13, experts.w2):
        parts = (weight.codes, weight.scales, weight.zero_points, weight.g_idx)
        found += [t.numel() * t.element_size() for t in parts if t is not None]
    return sum(found)


def dense_expert(problem):
    """Bytes of one expert in float32."""
    return (problem.num_shards + 1) * problem.hidden_size * problem.intermediate_size * 4


@pytest.mark.parametrize("check", [True, False])
def test_one_source_layer_beside_what_is_packed(deep, check):
    load_moe_layers(deep, layers=[0], db=":memory:", check=check)  # what is made once and kept
    tops = {}
    for count in (1, COUNT):
        top, left, layers = peak(deep, range(count), check=check)
        assert len(layers) == count
        tops[count] = top - packed(layers)
        assert left < 1.3 * packed(layers)
    problem = layers[0].problem
    # Reading unpacks one expert at a time, and the check dequantises it, in a few 32-bit forms.
    allowed = source_bytes(deep) + (9 if check else 6) * dense_expert(problem)
    assert tops[1] < allowed
    kept = left - packed(layers)  # the small things of each layer, such as its probe
    assert tops[COUNT] <= tops[1] + kept


def test_sources_that_stay_are_seen(deep, monkeypatch):
    """The planted fault: whoever keeps the unpacked layers needs a source layer more for each."""
    kept = []
    load = CheckpointSource.load

    def keeping(self, device="cpu"):
        experts = load(self, device)
        kept.append(experts)
        return experts

    load_moe_layers(deep, layers=[0], db=":memory:")
    plain, left, layers = peak(deep, range(COUNT))
    monkeypatch.setattr(CheckpointSource, "load", keeping)
    top, _, _ = peak(deep, range(COUNT))
    small = left - packed(layers)
    assert top > plain + (COUNT - 1) * source_bytes(deep) - small


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_the_device_too(deep):
    def measured(count):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        layers = load_moe_layers(deep, layers=range(count), device="cuda", db=":memory:")
        top = torch.cuda.max_memory_allocated() - before
        return top, torch.cuda.memory_allocated() - before, layers

    measured(1)
    one, _, first = measured(1)
    del first
    top, left, layers = measured(COUNT)
    beside = left - packed(layers)
    rounding = COUNT * 32 * 512  # the allocator gives whole 512 bytes
    assert top - packed(layers) < one - packed({0: layers[0]}) + beside + rounding
    assert one < sum(layers[0].resident.values()) + source_bytes(deep) + 9 * dense_expert(
        layers[0].problem
    ) + rounding + (64 << 20)  # workspaces of libraries
