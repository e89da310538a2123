"""How a model turns router logits into experts and weights: the facts, without the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: softmax      softmax over all experts
#: sigmoid      one sigmoid an expert
#: sparsemixer  Phi-MoE: top-1 twice, each weight a softmax over the logits near the maximum
Scoring = Literal["softmax", "sigmoid", "sparsemixer"]

#: max       a group counts as much as its best expert (DeepSeek-V2)
#: top2_sum  a group counts as much as its two best experts together (DeepSeek-V3)
GroupScore = Literal["max", "top2_sum"]


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """The routing rule of one MoE layer.

    ``renormalize`` divides the chosen weights by their sum; ``scaling_factor`` multiplies them
    last. With ``num_groups`` above 1 the experts stand in that many equal groups, of which only
    ``topk_groups`` may be chosen from, ranked by ``group_score``. A correction bias is added to
    the scores for choosing (of groups and experts) and never to the weights.
    ``jitter`` is Phi-MoE's ``router_jitter_noise``, the width of its masks at inference too.
    """

    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    topk_groups: int = 1
    group_score: GroupScore = "max"
    scaling_factor: float = 1.0
    has_correction_bias: bool = False
    jitter: float = 0.0
