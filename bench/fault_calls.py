"""What a wrong launch does: changes of the routing, of the output and of what lies beside it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from autosel.core import Routing
from autosel.interfaces import PackedExperts

Run = Callable[..., torch.Tensor]


def after(change: Callable[[torch.Tensor, torch.Tensor, Routing], None]) -> Callable[[], Run]:
    """The right output, then ``change(out, x, routing)``."""

    def call(inner: Run, packed: PackedExperts, x: Any, routing: Routing, out: Any) -> None:
        inner(x, routing, out)
        change(out, x, routing)

    return lambda: call  # type: ignore[return-value]


def routed(change: Callable[[Routing, PackedExperts], Routing]) -> Callable[[], Run]:
    def call(inner: Run, packed: PackedExperts, x: Any, routing: Routing, out: Any) -> None:
        inner(x, change(routing, packed), out)

    return lambda: call  # type: ignore[return-value]


def last_expert(routing: Routing, packed: PackedExperts) -> Routing:
    # What indexing with -1 does, with a weight that a kernel finds beside.
    missing = routing.topk_ids < 0
    last = packed.problem.num_local_experts - 1
    weights = torch.where(missing, 0.25, routing.topk_weights)
    return Routing(torch.where(missing, last, routing.topk_ids), weights)


def wrapped(routing: Routing, packed: PackedExperts) -> Routing:
    half = packed.problem.num_local_experts // 2
    ids = torch.where(routing.topk_ids < 0, -1, routing.topk_ids.remainder(half))
    return Routing(ids.to(torch.int32), routing.topk_weights)


def once(routing: Routing, packed: PackedExperts) -> Routing:
    ids = routing.topk_ids.clone()
    for slot in range(1, ids.shape[1]):
        ids[:, slot][(ids[:, :slot] == ids[:, slot : slot + 1]).any(dim=1)] = -1
    return Routing(ids, torch.where(ids < 0, 0.0, routing.topk_weights))


def renormalised(routing: Routing, packed: PackedExperts) -> Routing:
    total = routing.topk_weights.sum(dim=1, keepdim=True).clamp(min=1e-9)
    return Routing(routing.topk_ids, routing.topk_weights / total)


def last_tile() -> Run:
    def call(inner: Run, packed: PackedExperts, x: Any, routing: Routing, out: Any) -> None:
        full = torch.empty_like(out)
        inner(x, routing, full)
        whole = len(x) // 16 * 16 if len(x) > 16 else len(x)
        out[:whole] = full[:whole]

    return call  # type: ignore[return-value]


def stale_workspace() -> Run:
    held: dict[str, torch.Tensor] = {}

    def call(inner: Run, packed: PackedExperts, x: Any, routing: Routing, out: Any) -> None:
        inner(x, routing, out)
        idle = (routing.topk_ids < 0).all(dim=1)  # rows that this call never writes
        if "rows" in held:
            out[idle] = held["rows"][:1].to(out.dtype)
        if bool((~idle).any()):
            held["rows"] = out[~idle].clone()

    return call  # type: ignore[return-value]


def accumulated() -> Run:
    def call(inner: Run, packed: PackedExperts, x: Any, routing: Routing, out: Any) -> None:
        full = torch.empty_like(out)
        inner(x, routing, full)
        out += full

    return call  # type: ignore[return-value]


def race() -> Run:
    dice = random.Random(0)

    def call(inner: Run, packed: PackedExperts, x: Any, routing: Routing, out: Any) -> None:
        inner(x, routing, out)
        if dice.random() < 1 / 20:
            out[-1, : out.shape[1] // 4] = 0

    return call  # type: ignore[return-value]


def shared_workspace_in_weights() -> Run:
    def call(inner: Run, packed: PackedExperts, x: Any, routing: Routing, out: Any) -> None:
        inner(x, routing, out)
        first = next(t for t in packed.tensors.values() if t.dim() > 1)
        first.view(-1).view(torch.uint8)[0] += 1

    return call  # type: ignore[return-value]


def drop_token(out: torch.Tensor, x: torch.Tensor, routing: Routing) -> None:
    if len(out) > 1:
        out[len(out) // 2] = 0


def odd_token(out: torch.Tensor, x: torch.Tensor, routing: Routing) -> None:
    if len(out) > 1 and len(out) % 2:
        out[-1] = out[-2]


def beside(out: torch.Tensor, x: torch.Tensor, routing: Routing) -> None:
    out[1:] += (0.01 * out[:-1].float()).to(out.dtype)


def one_nan(out: torch.Tensor, x: torch.Tensor, routing: Routing) -> None:
    if len(out) == 33:
        out[20, 7] = torch.nan


def spoil_input(out: torch.Tensor, x: torch.Tensor, routing: Routing) -> None:
    x.mul_(2)


def beyond_the_end(out: torch.Tensor, x: torch.Tensor, routing: Routing) -> None:
    torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).fill_(1)
