"""What carries tensors: canonical weights and where the tokens go. Nothing is computed here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autosel.core.problem import Problem, QuantScheme

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class QuantWeight:
    """One GEMM's quantised weights for all local experts, in the canonical form.

    codes        int32 ``[E, N, ceil(K / pack_factor)]``, packed along K, first code in low bits
    scales       ``[E, N, G]`` in the checkpoint's dtype
    zero_points  uint8 ``[E, N, G]`` TRUE zero points, or None when symmetric
    g_idx        int32 ``[E, K]`` group of each input (act-order), or None for ``k // group_size``
    bias         ``[E, N]`` or None
    """

    scheme: QuantScheme
    num_inputs: int
    codes: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None = None
    g_idx: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def num_experts(self) -> int:
        return int(self.codes.shape[0])

    @property
    def num_outputs(self) -> int:
        return int(self.codes.shape[1])

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        found = {
            "codes": self.codes,
            "scales": self.scales,
            "zero_points": self.zero_points,
            "g_idx": self.g_idx,
            "bias": self.bias,
        }
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalExperts:
    """The one internal form of a layer's routed experts; gate rows stand before up rows in w13."""

    problem: Problem
    w13: QuantWeight
    w2: QuantWeight

    @property
    def nbytes(self) -> int:
        return self.w13.nbytes + self.w2.nbytes

    def to(self, device: str | torch.device) -> CanonicalExperts:
        """The same experts on ``device``; tensors already there are shared, not copied."""

        def moved(weight: QuantWeight) -> QuantWeight:
            tensors: dict[str, Any] = {n: t.to(device) for n, t in weight.tensors.items()}
            return replace(weight, **tensors)

        return replace(self, w13=moved(self.w13), w2=moved(self.w2))


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Where each token goes: ``topk_ids`` int32 and ``topk_weights`` float32, both ``[M, top_k]``.

    An id outside ``[0, num_experts)`` is a slot that no expert here serves; it adds nothing.
    """

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.topk_ids.shape[0])
