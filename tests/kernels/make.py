"""Random experts of any scheme for the kernel tests."""

from __future__ import annotations

import torch

from autosel.core import Activation, CanonicalExperts, Problem, QuantScheme, QuantWeight
from autosel.packing import pack_last

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def make_problem(
    experts: int = 4,
    hidden: int = 128,
    inner: int = 64,
    top_k: int = 2,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    act_order: bool = False,
    activation: Activation | str = "silu",
    dtype: str = "bfloat16",
    bias: bool = False,
) -> Problem:
    act = Activation(activation) if isinstance(activation, str) else activation
    scheme = QuantScheme(bits, group, symmetric, act_order, dtype)
    return Problem(
        experts, experts, top_k, hidden, inner, scheme, scheme, act, dtype, has_bias=bias
    )


def make_weight(
    scheme: QuantScheme, experts: int, outputs: int, inputs: int, bias: bool, gen: torch.Generator
) -> QuantWeight:
    groups = scheme.num_groups(inputs)
    shape = (experts, outputs, inputs)
    top = 1 << scheme.num_bits
    codes = torch.randint(0, top, shape, dtype=torch.uint8, generator=gen)
    scales = torch.rand((experts, outputs, groups), generator=gen) * 0.04 + 0.005
    zeros = g_idx = offset = None
    if not scheme.symmetric:
        zeros = torch.randint(0, top, (experts, outputs, groups), dtype=torch.uint8, generator=gen)
    if scheme.has_g_idx:
        base = torch.arange(inputs) // (inputs if scheme.group_size == -1 else scheme.group_size)
        g_idx = torch.stack([base[torch.randperm(inputs, generator=gen)] for _ in range(experts)])
        g_idx = g_idx.to(torch.int32)
    if bias:
        offset = torch.randn((experts, outputs), generator=gen).to(DTYPES[scheme.scale_dtype])
    return QuantWeight(
        scheme,
        inputs,
        pack_last(codes, scheme.num_bits),
        scales.to(DTYPES[scheme.scale_dtype]),
        zeros,
        g_idx,
        offset,
    )


def make_experts(problem: Problem, seed: int = 0) -> CanonicalExperts:
    gen = torch.Generator().manual_seed(seed)
    _, n13, k13 = problem.w13_shape
    e, n2, k2 = problem.w2_shape
    return CanonicalExperts(
        problem,
        make_weight(problem.w13, e, n13, k13, problem.has_bias, gen),
        make_weight(problem.w2, e, n2, k2, problem.has_bias, gen),
    )
