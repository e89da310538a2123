"""The launches of the steps' kernels, in Triton's interpreter, against the plain forms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from autosel import dispatch, reference
from autosel.backends import _steps
from autosel.core import ACTIVATIONS, Activation, Routing
from tests.backends.test_triton import BACKEND, LIMIT, half, inputs, routing
from tests.layouts import make

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU the kernels are compiled; tests/gpu covers them"
)

IDS = torch.tensor([[0, 1], [1, -1], [2, 0], [-1, -1], [2, 1]], dtype=torch.int32)


def both(monkeypatch: pytest.MonkeyPatch, call: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Result of the plain form and of the kernel."""
    plain = call().clone()
    monkeypatch.setattr(_steps, "_plain", lambda tensor: False)
    return [plain, call().clone()]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    extra = {"swigluoai_uninterleave": {"limit": 2.0}, "situ": {"beta": 1.5}}.get(name, {})
    activation = Activation(name, **extra)
    width = 1100  # more than one block
    h = torch.randn(3, width * (2 if activation.gated else 1)).half() * 4
    out = torch.full((3, width), float("nan")).half()
    plain, kernel = both(monkeypatch, lambda: _steps.activate_into(out, h, activation))
    torch.testing.assert_close(kernel, plain, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("placed", [True, False])
@pytest.mark.parametrize("grid", [65535, 2])
def test_reduce(monkeypatch: pytest.MonkeyPatch, weighted: bool, placed: bool, grid: int) -> None:
    """``grid`` is the most tokens of one launch: with 2, five tokens take three."""
    monkeypatch.setattr(_steps, "MAX_GRID_Y", grid)
    rows = None
    y = torch.randn(10, 1100).half()
    if placed:
        rows = torch.where(IDS >= 0, torch.randperm(10).view(5, 2), -1).to(torch.int32)
        y[[i for i in range(10) if i not in rows.flatten().tolist()]] = float("nan")
    else:
        y[IDS.flatten() < 0] = float("nan")  # rows that nobody wrote
    weights = torch.rand(5, 2) if weighted else None
    out = torch.full((5, 1100), float("nan")).half()
    plain, kernel = both(monkeypatch, lambda: _steps.reduce_into(out, y, IDS, 3, weights, rows))
    assert plain.isfinite().all()
    torch.testing.assert_close(kernel, plain, rtol=1e-3, atol=1e-4)
    assert not kernel[3].any()


@pytest.mark.parametrize("grid", [65535, 4])
def test_rows_in_the_order_of_experts(monkeypatch: pytest.MonkeyPatch, grid: int) -> None:
    monkeypatch.setattr(_steps, "MAX_GRID_Y", grid)
    x = torch.randn(5, 1100).half()
    order = torch.stack([torch.randperm(1100) for _ in range(3)]).to(torch.int32)
    plain, kernel = both(monkeypatch, lambda: _steps.slot_rows(x, IDS, order))
    served = IDS.flatten() >= 0
    assert torch.equal(kernel[served], plain[served])
    assert torch.equal(plain[3 * 2 - 2], x[2][order[2].long()])  # slot (2, 0): token 2, expert 2


def test_a_layer_of_kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_steps, "_plain", lambda tensor: False)
    problem = half(96, 64, act_order="w13+w2", symmetric=False, activation="swigluoai")
    experts = make.experts(problem)
    x = inputs(problem, 5)
    routed: Routing = routing(problem, 5)
    packed = BACKEND.layout(problem, {}).pack(experts)
    out = dispatch.apply(BACKEND, packed, x, routed, {})
    expected = reference.moe(x, experts, routed)
    assert (out.double() - expected).norm() / expected.norm() < LIMIT
