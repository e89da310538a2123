"""Odd but legal checkpoints of every format, from the file to every layout and adapter.

Sizes off every tile, other numbers of experts, every top-k, act-order with groups, stacked and
fused tensors: what is read must be what was written, each layout must come back exactly or refuse
with a reason, and whatever supports the layer must compute it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import registry
from autosel.backends.marlin import Marlin as MarlinBackend
from autosel.backends.marlin_int8 import MarlinInt8 as MarlinInt8Backend
from autosel.checkpoint import Checkpoint
from autosel.core import CanonicalExperts
from autosel.device import detect
from autosel.errors import UnsupportedError
from autosel.interfaces import Backend
from autosel.verify import verify_candidate
from autosel.verify_cases import make_cases
from tests.backends import stub_ops
from tests.backends.adapters import H200, without_vllm
from tests.checkpoint_builder import Made
from tests.layouts import make
from tests.layouts.test_planted_faults import LAYOUTS

CASES: dict[str, dict[str, Any]] = {
    "gptq 60 experts": {"experts": 60, "top_k": 4, "hidden": 96, "inter": 64},
    "gptq top-1": {"experts": 5, "top_k": 1, "hidden": 160, "inter": 96},
    "gptq top-8 of 8": {"experts": 8, "top_k": 8, "hidden": 128, "inter": 64, "group_size": 64},
    "gptq 8 bit channel": {"hidden": 72, "inter": 40, "bits": 8, "group_size": -1},
    "gptq act-order in groups": {"hidden": 128, "inter": 96, "act_order": True},
    "gptq act-order 8 bit asymmetric": {
        "hidden": 256, "inter": 128, "act_order": True, "bits": 8, "symmetric": False,
        "group_size": 64,
    },
    "gptq asymmetric": {"hidden": 128, "inter": 96, "symmetric": False, "top_k": 3},
    "gptq_v2 asymmetric": {"fmt": "gptq_v2", "hidden": 96, "inter": 160, "symmetric": False},
    "gptq_v2 act-order": {"fmt": "gptq_v2", "hidden": 128, "inter": 256, "act_order": True,
                          "group_size": 128, "symmetric": False},
    "gptq stacked": {"hidden": 128, "inter": 64, "stack": False},
    "gptq fused": {"hidden": 128, "inter": 64, "stack": True},
    "awq": {"fmt": "awq", "hidden": 96, "inter": 160, "symmetric": False, "top_k": 3},
    "awq group 128, 7 experts": {"fmt": "awq", "hidden": 128, "inter": 256, "symmetric": False,
                                 "group_size": 128, "experts": 7, "top_k": 5},
    "awq channel": {"fmt": "awq", "hidden": 72, "inter": 40, "symmetric": False,
                    "group_size": -1},
    "awq fused": {"fmt": "awq", "hidden": 128, "inter": 64, "symmetric": False, "stack": True},
    "ct 1 expert": {"fmt": "compressed-tensors", "experts": 1, "top_k": 1, "hidden": 128,
                    "inter": 192, "group_size": 64},
    "ct asymmetric 8 bit": {"fmt": "compressed-tensors", "hidden": 96, "inter": 64, "bits": 8,
                            "symmetric": False, "scale_dtype": torch.bfloat16},
    "ct asymmetric channel": {"fmt": "compressed-tensors", "hidden": 80, "inter": 48,
                              "symmetric": False, "group_size": -1, "top_k": 4},
    "ct float32 scales": {"fmt": "compressed-tensors", "hidden": 128, "inter": 64,
                          "scale_dtype": torch.float32},
    "ct act-order": {"fmt": "compressed-tensors", "hidden": 128, "inter": 128, "act_order": True},
    "ct bias": {"fmt": "compressed-tensors", "hidden": 128, "inter": 64, "bias": True},
    "ct fused": {"fmt": "compressed-tensors", "hidden": 128, "inter": 64, "stack": True},
}  # fmt: skip


def written(case: str, folder: Path) -> tuple[Made, Path]:
    facts = dict(CASES[case])
    stack = facts.pop("stack", None)
    made = Made(**facts)
    if stack is not None:
        made.stack(stack)
    return made, made.write(folder / "model")


def read(case: str, folder: Path) -> CanonicalExperts:
    made, path = written(case, folder)
    opened = Checkpoint.open(path)
    (layer,) = opened.layers
    assert layer.status == "quantized", layer
    experts = opened.read_experts(layer.index)
    for e in range(made.experts):
        base = f"{made.prefix}layers.0.mlp.experts.{e}"
        gate, up, down = (made.weights[f"{base}.{p}_proj"] for p in ("gate", "up", "down"))
        for name, tensor in down.tensors.items():
            assert torch.equal(experts.w2.tensors[name][e], tensor[0]), (e, name)
        for name, tensor in gate.tensors.items():
            both = tensor[0] if name == "g_idx" else torch.cat([tensor[0], up.tensors[name][0]])
            assert torch.equal(experts.w13.tensors[name][e], both), (e, name)
    return experts


@pytest.mark.parametrize("case", CASES)
def test_read_exactly_and_every_layout_exact_or_refused(case: str, tmp_path: Path) -> None:
    experts = read(case, tmp_path)
    packed, refused = set(), {}
    for layout in dict.fromkeys(layout for layout, _ in LAYOUTS.values()):
        try:
            stored = layout.pack(experts)
        except UnsupportedError as error:
            refused[layout.name] = str(error)
            continue
        if not stored.meta.get("rounded"):
            make.assert_same(layout.unpack(stored), experts)
        assert stored.nbytes == layout.nbytes(experts.problem)
        packed.add(layout.name)
    assert {"nfirst_bytes", "wna16_tiled"} <= packed
    assert all("found" in reason and "expected" in reason for reason in refused.values())


def backends(experts: CanonicalExperts) -> Iterator[tuple[Backend, Any]]:
    """The CPU's own, and the adapters whose operators have stand-ins."""
    device = detect("cpu")
    for backend in registry.all_backends():
        if backend.supports(experts.problem, device):
            yield backend, device
    for adapter in (MarlinBackend(), MarlinInt8Backend()):
        if adapter.supports(experts.problem, H200):
            yield adapter, H200


@contextmanager
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    without_vllm(monkeypatch, "_moe_C")
    with stub_ops.marlin():
        yield


@pytest.mark.parametrize("case", CASES)
def test_whatever_supports_it_computes_it(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = read(case, tmp_path)
    cases = make_cases(experts, token_counts=(5,))
    ran = set()
    with stand_ins(monkeypatch):
        for backend, device in backends(experts):
            params = dict(backend.space(experts.problem, 5, device).default)
            try:
                packed = backend.layout(experts.problem, params).pack(experts)
            except UnsupportedError:
                continue
            verdict = verify_candidate(backend, packed, params, cases, experts=experts, repeats=1)
            assert verdict, f"{backend.name} {params}: {verdict.reason}"
            ran.add(backend.name)
    assert "emulation" in ran
    problem = experts.problem
    takes = problem.w13.num_bits == 4 or problem.w13.symmetric
    assert ("marlin" in ran) == (takes and problem.hidden_size % 128 == 0)
