"""Real checkpoints, written by the public packing tools, through every backend that takes them."""

from __future__ import annotations

import pytest

from autosel import registry
from autosel.checkpoint import Checkpoint
from autosel.device import detect
from autosel.errors import UnsupportedError
from autosel.verify import make_cases, verify_candidate
from tests.threads import one_thread


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def test_every_backend_on_every_layer(checkpoint):
    """The reader's weights equal the tools' own elsewhere; here the kernels equal the reference."""
    device = detect("cpu")
    opened = Checkpoint.open(checkpoint.path)
    layers = [layer for layer in opened.layers if layer.status == "quantized"]
    assert layers
    ran = set()
    for layer in layers:
        experts = opened.read_experts(layer.index)
        cases = make_cases(experts, token_counts=(1, 5))
        for backend in registry.all_backends():
            if not backend.supports(experts.problem, device):
                continue
            for params in backend.space(experts.problem, 5, device):
                try:
                    packed = backend.layout(experts.problem, params).pack(experts)
                except UnsupportedError:
                    continue
                verdict = verify_candidate(backend, packed, params, cases, repeats=1)
                assert verdict, f"layer {layer.index} {backend.name} {params}: {verdict.reason}"
                ran.add(backend.name)
    assert "emulation" in ran
