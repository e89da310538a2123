"""Router logits to routing: the rules of the published models, one function a scoring.

Sources: DeepSeek-V2 (arXiv:2405.04434) group-limited greedy; DeepSeek-V3 (arXiv:2412.19437)
sigmoid scores with a correction bias that only chooses; Phi-3.5-MoE's SparseMixer (Liu et al.,
arXiv:2310.00811) as it is used at inference. The rule's facts are a
:class:`autosel.routing_spec.RouterSpec`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from autosel.core import Routing
from autosel.errors import RoutingError, field_error
from autosel.routing_spec import RouterSpec
from autosel.routing_synthetic import make_routing

__all__ = ["make_routing", "route"]


def route(
    router_logits: torch.Tensor,
    spec: RouterSpec,
    correction_bias: torch.Tensor | None = None,
) -> Routing:
    """Experts and weights of each token: ids int32 and weights float32, ``[M, top_k]``.

    router_logits    ``[M, num_experts]``, any float dtype; scores are formed in float32
    correction_bias  ``[num_experts]`` where ``spec.has_correction_bias``, else None

    Slots come in falling order of what they were chosen by. Groups that were not chosen are out
    of the race whatever the bias, as in DeepSeek's own code (a mask of 0 instead lets them win
    against negative biased scores). Raises RoutingError for sizes that do not fit ``spec``.
    """
    _check(router_logits, spec, correction_bias)
    ids, weights = _SCORINGS[spec.scoring](router_logits.float(), spec, correction_bias)
    if spec.renormalize:
        # The least normal float keeps a row of zero scores finite without moving any other.
        least = torch.finfo(torch.float32).tiny
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=least)
    return Routing(ids.to(torch.int32), (weights * spec.scaling_factor).contiguous())


_Chosen = tuple[torch.Tensor, torch.Tensor]
_Rule = Callable[[torch.Tensor, RouterSpec, "torch.Tensor | None"], _Chosen]


def _softmax(logits: torch.Tensor, spec: RouterSpec, bias: torch.Tensor | None) -> _Chosen:
    return _choose(logits.softmax(dim=-1), spec, bias)


def _sigmoid(logits: torch.Tensor, spec: RouterSpec, bias: torch.Tensor | None) -> _Chosen:
    # A sigmoid saturates at 1, where different logits tie; without a bias or groups that add
    # scores up, the logits themselves choose the same experts and keep their order.
    if bias is None and spec.num_groups == 1:
        chosen, ids = logits.topk(spec.top_k, dim=-1)
        return ids, chosen.sigmoid()
    return _choose(logits.sigmoid(), spec, bias)


def _choose(scores: torch.Tensor, spec: RouterSpec, bias: torch.Tensor | None) -> _Chosen:
    """The best by ``scores + bias`` inside the best groups; weights are the bare scores."""
    choice = scores if bias is None else scores + bias.float()  # [M, E]
    if spec.num_groups > 1:
        tokens, experts = choice.shape
        shape = (tokens, spec.num_groups, experts // spec.num_groups)
        grouped = choice.reshape(shape)  # [M, groups, E / groups]
        value = _GROUP_SCORES[spec.group_score](grouped)  # [M, groups]
        best = value.topk(spec.topk_groups, dim=-1).indices
        out = torch.ones_like(value, dtype=torch.bool).scatter(-1, best, False)
        choice = grouped.masked_fill(out.unsqueeze(-1), -torch.inf).reshape(choice.shape)
    ids = choice.topk(spec.top_k, dim=-1).indices
    return ids, scores.gather(-1, ids)


_GROUP_SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda grouped: grouped.amax(dim=-1),
    "top2_sum": lambda grouped: grouped.topk(2, dim=-1).values.sum(dim=-1),
}


def _sparsemixer(logits: torch.Tensor, spec: RouterSpec, bias: torch.Tensor | None) -> _Chosen:
    """One expert after the other; each weight is a softmax over the logits close to its own.

    Close means within ``2 * jitter`` of the maximum, relative to the larger of ``|logit|`` and
    the maximum. Experts taken before are out of the next choice, and of its softmax.
    """
    left = logits
    ids: list[torch.Tensor] = []
    weights: list[torch.Tensor] = []
    for _ in range(spec.top_k):
        top, chosen = left.max(dim=-1, keepdim=True)  # [M, 1]
        far = (top - logits) / logits.abs().maximum(top) > 2 * spec.jitter  # [M, E]
        near = left.masked_fill(far, -torch.inf).softmax(dim=-1)
        ids.append(chosen)
        weights.append(near.gather(-1, chosen))
        left = left.scatter(-1, chosen, -torch.inf)
    return torch.cat(ids, dim=-1), torch.cat(weights, dim=-1)


_SCORINGS: dict[str, _Rule] = {
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "sparsemixer": _sparsemixer,
}


def _check(logits: torch.Tensor, spec: RouterSpec, bias: torch.Tensor | None) -> None:
    if logits.dim() != 2 or not logits.dtype.is_floating_point:
        found = f"{logits.dtype} {list(logits.shape)}"
        raise RoutingError(
            field_error("router_logits", "tensor", found, "floats [tokens, experts]")
        )
    experts = logits.shape[1]
    if spec.scoring not in _SCORINGS:
        known = ", ".join(_SCORINGS)
        raise RoutingError(field_error("RouterSpec.scoring", "value", spec.scoring, known))
    if not 1 <= spec.top_k <= experts:
        raise RoutingError(
            field_error("RouterSpec.top_k", "value", spec.top_k, f"1 to {experts} experts")
        )
    if (bias is not None) != spec.has_correction_bias:
        found = "none" if bias is None else "a tensor"
        wanted = f"[{experts}]" if spec.has_correction_bias else "none"
        raise RoutingError(field_error("correction_bias", "value", found, wanted))
    if bias is not None and tuple(bias.shape) != (experts,):
        raise RoutingError(field_error("correction_bias", "shape", list(bias.shape), [experts]))
    if spec.num_groups > 1:
        _check_groups(experts, spec)


def _check_groups(experts: int, spec: RouterSpec) -> None:
    if experts % spec.num_groups:
        raise RoutingError(
            field_error("RouterSpec.num_groups", "experts", experts, f"{spec.num_groups} x n")
        )
    size = experts // spec.num_groups
    if not 1 <= spec.topk_groups <= spec.num_groups or spec.top_k > spec.topk_groups * size:
        raise RoutingError(
            field_error(
                "RouterSpec.topk_groups",
                "value",
                spec.topk_groups,
                f"at most {spec.num_groups} groups, with {spec.top_k} experts of {size} a group",
            )
        )
    if spec.group_score not in _GROUP_SCORES or (spec.group_score == "top2_sum" and size < 2):
        raise RoutingError(
            field_error(
                "RouterSpec.group_score",
                "value",
                f"{spec.group_score} with {size} experts a group",
                "max, or top2_sum with at least 2",
            )
        )
