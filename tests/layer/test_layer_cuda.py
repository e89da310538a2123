"""The layer on a CUDA device: graph capture and torch.compile with every backend that is there."""

import pytest
import torch

from autosel import FusedMoE, registry
from autosel.core import Problem, QuantScheme, Routing
from autosel.device import detect
from autosel.errors import AutoselError, UnsupportedError
from autosel.reference import moe
from autosel.sources import RandomSource
from autosel.store import Store
from tests.layer.decided import candidate, store_times

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SCHEME = QuantScheme(4, 128, True)
SOURCE = RandomSource(Problem(16, 16, 4, 512, 256, SCHEME, SCHEME))


@pytest.fixture(params=["emulation", "triton", "wna16_tiled", "marlin", "humming"])
def layer(request, tmp_path):
    device = detect("cuda")
    backend = registry.get(request.param)
    support = backend.supports(SOURCE.problem, device)
    if not support:
        pytest.skip(f"{request.param}: {support}")
    with Store.open(tmp_path / "layer.db") as store:
        winner = candidate(request.param, SOURCE.problem, device, 4)
        store_times(store, SOURCE.problem, device, {4: {winner: 10.0}})
        made = FusedMoE.from_source(SOURCE, device="cuda", db=store)
    assert [choice.candidate for choice in made.choices] == [winner]
    return made


def inputs(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 512, generator=generator).to(torch.bfloat16)
    ids = torch.rand(tokens, 16, generator=generator).topk(4).indices.to(torch.int32)
    return x.cuda(), ids.cuda(), torch.rand(tokens, 4, generator=generator).cuda()


def close(out, x, ids, weights):
    ref = moe(x.cpu(), SOURCE.load(), Routing(ids.cpu(), weights.cpu()), dtype=torch.float32)
    return float((out.cpu().float() - ref).norm() / ref.norm()) < 2e-2


@pytest.mark.parametrize("trusted", [False, True])
def test_captured_and_replayed_with_new_inputs(layer, trusted):
    layer.warm_up(8)
    held = inputs(8)
    out = torch.empty_like(held[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer(*held, trusted=trusted)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(layer(*held, trusted=trusted))
    for seed in (1, 2):
        for kept, new in zip(held, inputs(8, seed), strict=True):
            kept.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        assert close(out, *held)


def test_compiled_without_a_graph_break(layer):
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    with torch.no_grad():
        for tokens in (3, 8, 17):
            call = inputs(tokens)
            assert close(compiled(*call), *call)


def test_it_cannot_be_made_inside_a_capture():
    graph = torch.cuda.CUDAGraph()
    kept = torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        kept.add_(1)
        with pytest.raises((AutoselError, UnsupportedError), match="capture"):
            FusedMoE.from_source(SOURCE, device="cuda", db=":memory:")
    graph.replay()
    torch.cuda.synchronize()
    assert kept.tolist() == [1.0] * 4
