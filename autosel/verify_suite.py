"""Everything that candidates of one layer are judged on, each part made when it is first asked for.

The **quick** set runs for every candidate; the **full** set besides for each that may win, once for
all token counts. Both are listed in docs/correctness.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch

from autosel.core import CanonicalExperts, Problem, QuantWeight
from autosel.packing import pack_last
from autosel.verify_cases import TOKEN_COUNTS, Case, full_token_counts, make_cases

#: Most experts of the made-up layer with extreme weights. Kernels read one like another.
EXTREME_EXPERTS = 4

#: Token counts of its drawn cases.
EXTREME_COUNTS = (1, 17)

#: Powers of two over which its scales are spread, around the layer's own.
EXTREME_SPREAD = (-6, 2)


class Suite:
    """Judged inputs of one layer on its device.

    edges  token counts of a sweep, which the full set takes in as far as they are small
    quick  the cases of the quick set, when they are there already
    """

    def __init__(
        self,
        experts: CanonicalExperts,
        *,
        seed: int = 0,
        edges: Sequence[int] = (),
        quick: Sequence[Case] | None = None,
    ) -> None:
        self.experts = experts
        self.seed = seed
        self.edges = tuple(edges)
        if quick is not None:
            self.__dict__["quick"] = list(quick)

    @cached_property
    def quick(self) -> list[Case]:
        return make_cases(self.experts, seed=self.seed)

    @cached_property
    def more(self) -> list[Case]:
        """What the full set has beyond the quick one, on other random numbers."""
        counts = [m for m in full_token_counts(self.edges) if m not in TOKEN_COUNTS]
        cases = make_cases(
            self.experts,
            token_counts=counts,
            routings=("uniform", "zipf"),
            seed=self.seed + 1,
        )
        return [case for case in cases if case.kind != "built"]

    @cached_property
    def extreme(self) -> tuple[CanonicalExperts, list[Case]]:
        """A small layer like this one but for its weights' values, and cases on it."""
        experts = extreme_experts(self.experts, self.seed)
        cases = make_cases(experts, token_counts=EXTREME_COUNTS, routings=(), seed=self.seed)
        kept = [case for case in cases if case.independent]
        return experts, [replace(case, name=f"extreme weights, {case.name}") for case in kept]


def extreme_problem(problem: Problem) -> Problem:
    """The shape of the layer with extreme weights."""
    count = min(EXTREME_EXPERTS, problem.num_local_experts)
    return replace(
        problem, num_experts=count, num_local_experts=count, top_k=min(problem.top_k, count)
    )


def extreme_experts(experts: CanonicalExperts, seed: int = 0) -> CanonicalExperts:
    """A few experts with the schemes and sizes of ``experts`` and values at their ends.

    Scales are spread over :data:`EXTREME_SPREAD` powers of two around the layer's own and some
    are 0; codes are even over their whole range, at its top in some rows and at its bottom in
    others; zero points, where there are any, take every value with both ends in each row.
    """
    small = extreme_problem(experts.problem)
    count = small.num_experts
    generator = torch.Generator().manual_seed(seed)

    def weight(source: QuantWeight) -> QuantWeight:
        bits, device = source.scheme.num_bits, source.codes.device
        shape = (count, source.num_outputs, source.num_inputs)
        codes = torch.randint(0, 1 << bits, shape, generator=generator)
        codes[:, 1::8], codes[:, 2::8] = (1 << bits) - 1, 0
        packed = pack_last(codes.to(torch.uint8), bits)
        assert packed.shape[1:] == source.codes.shape[1:]
        groups = source.scales[:count]
        usual = float(groups.float().abs().median()) or 1.0
        low, high = EXTREME_SPREAD
        powers = torch.randint(low, high + 1, groups.shape, generator=generator)
        scales = usual * torch.exp2(powers.float())
        scales[torch.rand(groups.shape, generator=generator) < 1 / 16] = 0
        zeros = None
        if source.zero_points is not None:
            zeros = torch.randint(0, 1 << bits, groups.shape, generator=generator)
            zeros[:, ::3, 0], zeros[:, 1::3, 0] = 0, (1 << bits) - 1
            zeros = zeros.to(torch.uint8).to(device)
        return replace(
            source,
            codes=packed.to(device),
            scales=scales.to(source.scales.dtype).to(device),
            zero_points=zeros,
            g_idx=None if source.g_idx is None else source.g_idx[:count].clone(),
            bias=None if source.bias is None else source.bias[:count].clone(),
        )

    return CanonicalExperts(small, weight(experts.w13), weight(experts.w2))
