"""A layer as one matmul an expert, and operators that take only slots served here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autosel.activations import activate
from autosel.core import Problem, Routing
from autosel.interfaces import PackedExperts

#: ``("w13" or "w2", expert, rows [R, K]) -> [R, N]``: one GEMM, without the bias.
Linear = Callable[[str, int, torch.Tensor], torch.Tensor]


def compute_dtypes(problem: Problem) -> tuple[str, ...]:
    """Dtypes to multiply in: that of the activations first, then float32."""
    return tuple(dict.fromkeys((problem.act_dtype, "float32")))


def run_per_expert(
    packed: PackedExperts,
    x: torch.Tensor,
    routing: Routing,
    out: torch.Tensor,
    dtype: torch.dtype,
    linear: Linear,
) -> torch.Tensor:
    """Group the slots by expert and write the weighted sum of ``w2(act(w13(x)))`` into ``out``.

    Rows reach ``linear`` in ``dtype``; biases (``w13_bias``, ``w2_bias`` of ``packed``,
    float32), the activation and the sum over slots are computed in float32.
    """
    problem = packed.problem
    bias13, bias2 = packed.tensors.get("w13_bias"), packed.tensors.get("w2_bias")
    tokens, weights, counts = group_slots(routing, problem.num_local_experts)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)  # [M, H]
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        rows, weight = tokens[start : start + count], weights[start : start + count, None]
        start += count
        inputs = x[rows]  # [R, H]
        if problem.router_weight_on_input:
            inputs = inputs.float() * weight
        h = linear("w13", expert, inputs.to(dtype)).float()  # [R, s*I]
        if bias13 is not None:
            h = h + bias13[expert]
        y = linear("w2", expert, activate(h, problem.activation).to(dtype)).float()  # [R, H]
        if bias2 is not None:
            y = y + bias2[expert]
        if not problem.router_weight_on_input:
            y = y * weight
        total.index_add_(0, rows, y)
    return out.copy_(total)


def group_slots(routing: Routing, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Slots served here, by expert: tokens int64 ``[R]``, weights ``[R]``, slots of each expert."""
    ids = routing.topk_ids.flatten()  # [M * top_k]
    order = torch.argsort(ids, stable=True)
    counts = torch.bincount(ids + 1, minlength=num_experts + 1).tolist()
    order = order[counts[0] :]  # -1 sorts first
    tokens = order // routing.topk_ids.shape[1]
    return tokens, routing.topk_weights.flatten()[order], counts[1:]


def run_served_slots(
    x: torch.Tensor,
    routing: Routing,
    out: torch.Tensor,
    run: Callable[[torch.Tensor, Routing, torch.Tensor], None],
) -> torch.Tensor:
    """``run(x, routing, out)`` for an operator that must not see an id of -1.

    Where there is one, every slot that is served becomes a token of its own with one expert, and
    the results are added up in float32: no work is spent on the others.
    """
    served = routing.topk_ids >= 0  # [M, top_k]
    if bool(served.all()):
        run(x, routing, out)
        return out
    tokens, slots = torch.nonzero(served, as_tuple=True)  # [R]
    total = torch.zeros(x.shape, dtype=torch.float32)
    if len(tokens):
        ids = routing.topk_ids[tokens, slots].unsqueeze(1)  # [R, 1]
        weights = routing.topk_weights[tokens, slots].unsqueeze(1)
        rows = x[tokens]
        partial = torch.zeros_like(rows)
        run(rows, Routing(ids, weights), partial)
        total.index_add_(0, tokens, partial.float())
    return out.copy_(total)
