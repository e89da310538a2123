"""The emulation that defines truth: dequantise one expert, multiply, next expert.

Slow and obvious on purpose. It shares no code with any kernel; what it computes is section
"Layer arithmetic" of every WNA16 kernel's documentation::

    h = x[t] @ w13[e].T + b13[e];  a = act(h);  y = a @ w2[e].T + b2[e]
    out[t] = sum over slots of topk_weights[t, slot] * y
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from autosel import float32
from autosel.activations import activate
from autosel.canonical import dequantize_expert
from autosel.core import CanonicalExperts, QuantWeight, Routing
from autosel.dtypes import torch_dtype
from autosel.errors import AutoselError, RoutingError, field_error
from autosel.expert_map import localize

#: Routed rows multiplied at once: bounds the memory of ``h`` when one expert gets every token.
ROWS_AT_ONCE = 4096


def moe(
    x: torch.Tensor,
    experts: CanonicalExperts,
    routing: Routing,
    *,
    expert_map: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    weights: Literal["exact", "dequantized"] = "exact",
    rounded: bool = False,
) -> torch.Tensor:
    """The layer's output ``[M, H]`` in ``dtype`` (float64 or float32), on x's device.

    x        ``[M, H]``, any float dtype; its values are taken as they are
    routing  GLOBAL ids as in :func:`autosel.dispatch.apply`; slots served elsewhere add nothing
    weights  ``exact`` takes ``(u - z) * S`` as it is, like a kernel without dense weights;
             ``dequantized`` rounds it once to the dtype of S, the dense weight that the packing
             tools give, and so equals their model run in ``dtype``. The two differ by up to the
             rounding of that dtype; kernels are judged by the exact ones.
    rounded  round to the act dtype wherever a correct 16-bit kernel may: weights, first GEMM's
             output, activation, second GEMM's output, sum. For calibration, not for truth.
    """
    problem = experts.problem
    act_dtype = torch_dtype(problem.act_dtype)

    def through(values: torch.Tensor) -> torch.Tensor:
        return values.to(act_dtype).to(dtype) if rounded else values

    x = checked_input(x, problem.hidden_size, dtype)
    out = torch.zeros(x.shape, dtype=dtype, device=x.device)  # [M, H]
    with exact_arithmetic(x.device):
        for part in routed_parts(x, experts, routing, expert_map):
            w13, w2 = part.w13(dtype), part.w2(dtype)  # [s*I, H], [H, I]
            if weights == "dequantized":
                w13 = w13.to(experts.w13.scales.dtype).to(dtype)
                w2 = w2.to(experts.w2.scales.dtype).to(dtype)
            w13, w2 = through(w13), through(w2)
            for tokens, router_weights in part.rows():
                weight = router_weights.to(dtype).unsqueeze(1)  # [R, 1]
                rows = x[tokens]  # [R, H]
                if problem.router_weight_on_input:
                    rows = through(rows * weight)
                h = through(_linear(rows, w13, experts.w13, part.expert))  # [R, s*I]
                a = through(activate(h, problem.activation))  # [R, I]
                y = _linear(a, w2, experts.w2, part.expert)  # [R, H]
                if not problem.router_weight_on_input:
                    y = y * weight
                out.index_add_(0, tokens, through(y))
    return through(out)


@dataclass(frozen=True, slots=True)
class RoutedPart:
    """The tokens of one local expert, each once: int64 ``[R]``, and float64 weights ``[R]``."""

    experts: CanonicalExperts
    expert: int
    tokens: torch.Tensor
    weights: torch.Tensor

    def w13(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantize_expert(self.experts.w13, self.expert, dtype)

    def w2(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantize_expert(self.experts.w2, self.expert, dtype)

    def rows(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The tokens and weights in runs of at most :data:`ROWS_AT_ONCE`."""
        for start in range(0, len(self.tokens), ROWS_AT_ONCE):
            run = slice(start, start + ROWS_AT_ONCE)
            yield self.tokens[run], self.weights[run]


def routed_parts(
    x: torch.Tensor,
    experts: CanonicalExperts,
    routing: Routing,
    expert_map: torch.Tensor | None,
) -> Iterator[RoutedPart]:
    """Every local expert that serves at least one slot, in order.

    An expert that stands twice in one token's slots serves it once, with the sum of the weights:
    the same result, and one rounding error instead of two equal ones that look independent.
    """
    local = localize(routing, experts.problem, expert_map, device=x.device)
    if local.num_tokens != x.shape[0]:
        raise RoutingError(
            field_error("topk_ids", "tokens", local.num_tokens, f"{x.shape[0]} as in x")
        )
    # All experts' rows from one sort: a look at the device for each expert would make the host wait
    # for that expert's products before it may ask for the next one's.
    num_tokens = max(local.num_tokens, 1)
    token = torch.arange(local.num_tokens, device=x.device).unsqueeze(1)  # [M, 1]
    ids = local.topk_ids.long()
    keys = torch.where(ids >= 0, ids * num_tokens + token, -1).flatten()  # [M * top_k]
    served, slot = torch.unique(keys, return_inverse=True)  # ascending: by expert, then by token
    weights = torch.zeros(len(served), dtype=torch.float64, device=x.device)
    weights.index_add_(0, slot, local.topk_weights.double().flatten())
    found, counts = torch.unique_consecutive(
        torch.where(served < 0, -1, served // num_tokens), return_counts=True
    )
    sizes: list[int] = counts.tolist()
    tokens = torch.split(served % num_tokens, sizes)
    for expert, rows, weight in zip(
        found.tolist(), tokens, torch.split(weights, sizes), strict=True
    ):
        if expert >= 0:
            yield RoutedPart(experts, expert, rows, weight)


def _linear(
    rows: torch.Tensor, weight: torch.Tensor, source: QuantWeight, expert: int
) -> torch.Tensor:
    product = rows @ weight.T  # [R, N]
    return product if source.bias is None else product + source.bias[expert].to(product.dtype)


def checked_input(x: torch.Tensor, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    """x detached and in ``dtype``; raises AutoselError for another width or type."""
    if dtype not in (torch.float32, torch.float64):
        raise AutoselError(field_error("reference", "dtype", dtype, "float32 or float64"))
    if x.dim() != 2 or x.shape[1] != hidden_size:
        raise AutoselError(field_error("x", "shape", list(x.shape), f"[tokens, {hidden_size}]"))
    return x.detach().to(dtype)


@contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """Switch off what would make a float32 product less than float32 (autocast, TF32, bf16).

    Restores the caller's settings: a reference that changed them would change the candidates.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(float32.exact())
        yield
