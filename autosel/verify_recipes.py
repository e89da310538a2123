"""How the judged inputs are made: routings for every path, activations that show faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from autosel.core import Problem, Routing
from autosel.routing_synthetic import NOWHERE, make_routing

#: Rows that each local expert gets in the case that visits them all.
ROWS_PER_EXPERT = 2

#: First GEMM's outputs in the case of large numbers: 300 * 300 is beyond float16's 65504, and for
#: an activation that multiplies nothing the output itself must be.
LARGE, LARGE_SINGLE = 300.0, 1e5

#: Router weights there, so that the result is in range again.
LARGE_WEIGHT = 0.01

#: How much larger than the others the one row is that must not touch them.
NEIGHBOUR, NEIGHBOUR_HALF = 1024.0, 32.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a case is made: its routing, and what is done to normal activations ``[M, H]``.

    ``mapped`` shows the candidate the same call behind another expert map; ``is_large`` says that
    activations are larger than a model's. The rest as in :class:`~autosel.verify_cases.Case`.
    """

    name: str
    routing: Callable[[Plan], Routing]
    kind: str = "built"
    change: Callable[[torch.Tensor, torch.Generator, Problem], torch.Tensor] = lambda x, g, p: x
    independent: bool = True
    mapped: bool = False
    is_large: bool = False
    proves: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Makes the routings of the cases, all from one seed. ``num_tokens`` is that of big cases."""

    problem: Problem
    seed: int
    rank: int
    num_tokens: int

    def made_up(self, kind: str, num_tokens: int, offset: int = 0) -> Routing:
        seed = self.seed + offset
        return make_routing(kind, num_tokens, self.problem, seed=seed, rank=self.rank)

    def activations(self, recipe: Recipe, num_tokens: int, index: int) -> torch.Tensor:
        """Normal numbers, changed as the recipe says, ``[M, H]``, others for each case."""
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        x = torch.randn(num_tokens, self.problem.hidden_size, generator=generator)
        return recipe.change(x, generator, self.problem)


def uniform(num_tokens: int) -> Recipe:
    def routing(plan: Plan) -> Routing:
        return plan.made_up("uniform", num_tokens, num_tokens)

    return Recipe(f"uniform M={num_tokens}", routing, "uniform")


def drawn(kind: str, num_tokens: int) -> Recipe:
    return Recipe(f"{kind} M={num_tokens}", lambda plan: plan.made_up(kind, num_tokens), kind)


def _every_expert(plan: Plan) -> Routing:
    """Each local expert gets :data:`ROWS_PER_EXPERT` rows; the experts of a token differ."""
    problem = plan.problem
    held = problem.num_local_experts
    slots = min(problem.top_k, held)
    rows = -(-ROWS_PER_EXPERT * held // slots)
    order = torch.randperm(held, generator=torch.Generator().manual_seed(plan.seed))
    local = order[torch.arange(rows * slots).remainder(held)].reshape(rows, slots)
    ids = torch.full((rows, problem.top_k), NOWHERE, dtype=torch.int32)
    ids[:, :slots] = (local + plan.rank * held).to(torch.int32)
    return Routing(ids, plan.made_up("uniform", rows).topk_weights)


def _each_alone(plan: Plan) -> Routing:
    """One token for each local expert and no other slot: a small expert beside a large one in a
    token would be judged by the rounding of the large one."""
    problem = plan.problem
    ids = torch.full((problem.num_local_experts, problem.top_k), NOWHERE, dtype=torch.int32)
    ids[:, 0] = torch.arange(problem.num_local_experts) + plan.rank * problem.num_local_experts
    return Routing(ids, plan.made_up("uniform", len(ids)).topk_weights)


def _stray_slots(plan: Plan) -> Routing:
    """Ids of -1, ids that are no expert, an expert twice in one token, a token with none."""
    routing = plan.made_up("uniform", max(8, plan.num_tokens))
    ids = routing.topk_ids.clone()
    ids[0::4, 0] = NOWHERE
    ids[1::8, -1] = plan.problem.num_experts
    ids[2::8, -1] = torch.iinfo(torch.int32).max
    ids[3::4] = ids[3::4, :1]
    ids[5] = -5
    return Routing(ids, routing.topk_weights)


def _duplicates(plan: Plan) -> Routing:
    """Every token names one local expert in all its slots, each with a weight of its own."""
    problem = plan.problem
    routing = plan.made_up("uniform", max(5, min(problem.num_local_experts, 16)))
    first = torch.arange(routing.num_tokens).remainder(problem.num_local_experts)
    ids = (first + plan.rank * problem.num_local_experts).to(torch.int32)
    return Routing(ids.unsqueeze(1).repeat(1, problem.top_k), routing.topk_weights)


def _nothing_here(plan: Plan) -> Routing:
    routing = plan.made_up("uniform", 3)
    return Routing(torch.full_like(routing.topk_ids, NOWHERE), routing.topk_weights)


def _identical(plan: Plan) -> Routing:
    one = _every_expert(plan)
    rows = max(16, plan.num_tokens)
    return Routing(
        one.topk_ids[:1].repeat(rows, 1).contiguous(),
        one.topk_weights[:1].repeat(rows, 1).contiguous(),
    )


def _light(plan: Plan) -> Routing:
    routing = _every_expert(plan)
    return Routing(routing.topk_ids, routing.topk_weights * LARGE_WEIGHT)


def _some(num_tokens: int, offset: int) -> Callable[[Plan], Routing]:
    return lambda plan: plan.made_up("uniform", num_tokens, offset)


def _same_rows(x: torch.Tensor, generator: torch.Generator, problem: Problem) -> torch.Tensor:
    return x[:1].expand_as(x).clone()


def _outlier_channels(
    x: torch.Tensor, generator: torch.Generator, problem: Problem
) -> torch.Tensor:
    columns = torch.randperm(x.shape[1], generator=generator)[: max(1, x.shape[1] // 128)]
    x[:, columns] *= 10
    return x


def _one_sign(x: torch.Tensor, generator: torch.Generator, problem: Problem) -> torch.Tensor:
    return x.abs()


def _large(x: torch.Tensor, generator: torch.Generator, problem: Problem) -> torch.Tensor:
    multiplies = problem.activation.gated or problem.activation.name == "relu2_no_mul"
    return x * (LARGE if multiplies else LARGE_SINGLE)


def _large_row(x: torch.Tensor, generator: torch.Generator, problem: Problem) -> torch.Tensor:
    x[len(x) // 2] *= NEIGHBOUR_HALF if problem.act_dtype == "float16" else NEIGHBOUR
    return x


def _zero_rows(x: torch.Tensor, generator: torch.Generator, problem: Problem) -> torch.Tensor:
    x[::2] = 0
    return x


IDENTICAL = "identical tokens"
LARGE_NUMBERS = "large numbers"

#: Cases that are built rather than drawn.
SPECIAL = (
    Recipe("every expert", _every_expert),
    Recipe(
        "every expert, outlier channels", _every_expert, change=_outlier_channels, is_large=True
    ),
    Recipe("each expert alone", _each_alone),
    Recipe("stray slots", _stray_slots, proves="handles_missing_ids"),
    Recipe("duplicate ids", _duplicates, proves="handles_duplicate_ids"),
    Recipe(
        "expert map", _stray_slots, independent=False, mapped=True, proves="handles_expert_maps"
    ),
    Recipe("nothing here", _nothing_here),
    Recipe("no tokens", _some(0, 0)),
    Recipe(IDENTICAL, _identical, change=_same_rows, independent=False),
    Recipe("inputs of one sign", _every_expert, change=_one_sign, independent=False, is_large=True),
    Recipe("one large row", _some(9, 1), change=_large_row, independent=False, is_large=True),
    Recipe("rows of zeros", _some(6, 2), change=_zero_rows, independent=False),
    Recipe(LARGE_NUMBERS, _light, change=_large, independent=False, proves="no_overflow"),
)
