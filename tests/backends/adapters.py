"""What the tests of adapters share: made-up calls, the comparison, stand-ins for packages."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from autosel import dispatch, reference
from autosel.backends import _vllm_ops
from autosel.core import Device, Problem, Routing
from autosel.interfaces import Backend
from tests.layouts import make

H200 = Device("cuda", "H200", (9, 0), 132, 150 << 30, 50 << 20, 232448)
#: Relative error of a layer whose products are rounded to the activations' dtype.
LIMITS = {"bfloat16": 1.2e-2, "float16": 2e-3}


def routing(problem: Problem, tokens: int, seed: int = 0) -> Routing:
    rng = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, problem.num_experts, generator=rng)
    return weighted(scores.topk(problem.top_k, 1).indices.to(torch.int32), rng)


def weighted(ids: torch.Tensor, rng: torch.Generator) -> Routing:
    """``ids`` with random weights, none of them near 0."""
    return Routing(ids, torch.rand(ids.shape, generator=rng) + 0.1)


def inputs(problem: Problem, tokens: int, seed: int = 9) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, problem.hidden_size, generator=rng)
    return x.to(getattr(torch, problem.act_dtype))


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def check(
    backend: Backend,
    problem: Problem,
    tokens: int = 5,
    *,
    routed: Routing | None = None,
    expert_map: torch.Tensor | None = None,
    limits: Mapping[str, float] = LIMITS,
    **params: object,
) -> torch.Tensor:
    """Run ``backend`` on a made-up call and compare with the emulation; returns the output."""
    experts = make.experts(problem)
    x, routed = inputs(problem, tokens), routed or routing(problem, tokens)
    packed = backend.layout(problem, {}).pack(experts)
    out = torch.full_like(x, float("nan"))
    dispatch.apply(backend, packed, x, routed, params, expert_map=expert_map, out=out)
    error = relative_error(out, reference.moe(x, experts, routed, expert_map=expert_map))
    assert error < limits[problem.act_dtype], error
    return out


def check_slots_served_elsewhere(backend: Backend, **params: object) -> None:
    """Experts 0 to 3 of 8 are here; ids name the others, and numbers that no expert has."""
    ids = torch.tensor([[0, 5], [6, 7], [3, 3], [-5, 2**31 - 1], [2, 1]], dtype=torch.int32)
    expert_map = torch.tensor([0, 1, 2, 3, -1, -1, -1, -1], dtype=torch.int32)
    problem = make.problem(128, 64, experts=8, local=4)
    routed = Routing(ids, torch.ones(ids.shape))
    out = check(backend, problem, routed=routed, expert_map=expert_map, **params)
    assert not out[1].any()
    assert not out[3].any()


def run_one_zero_token(backend: Backend, problem: Problem) -> None:
    packed = backend.layout(problem, {}).pack(make.experts(problem))
    x = torch.zeros(1, problem.hidden_size, dtype=torch.bfloat16)
    routed = Routing(torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 2))
    backend.run(packed, x, routed, {}, x.clone())


def without_vllm(monkeypatch: pytest.MonkeyPatch, namespace: str = "") -> None:
    """No real operator is found; skips where a library already holds ``namespace``."""
    if namespace and _vllm_ops._taken(namespace):
        pytest.skip(f"a library with namespace {namespace} is loaded: the stand-ins cannot be")
    monkeypatch.delenv(_vllm_ops.LIBRARY_VARIABLE, raising=False)
    monkeypatch.setattr(_vllm_ops, "DISTRIBUTIONS", ())
    monkeypatch.setattr(_vllm_ops, "_tried", set())
    monkeypatch.setattr(_vllm_ops, "_errors", {})
    monkeypatch.setattr(_vllm_ops, "_missing", set())


def stand_in(
    monkeypatch: pytest.MonkeyPatch, package: str, members: Mapping[str, Mapping[str, Any]]
) -> None:
    """Put a package and modules with these ``members`` where imports find them."""
    for name in (package, *members):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        for member, value in members.get(name, {}).items():
            setattr(module, member, value)
        monkeypatch.setitem(sys.modules, name, module)
