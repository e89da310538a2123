"""Random experts of any scheme for the kernel tests."""

from __future__ import annotations

import torch

from autosel.core import Activation, CanonicalExperts, Problem, QuantScheme, QuantWeight
from autosel.packing import pack_last

#: Schemes and extras that every path must compute.
SCHEMES = [
    {"bits": 4, "group": 64, "symmetric": False},
    {"bits": 8, "group": 32},
    {"bits": 8, "group": -1, "symmetric": False},
    {"group": -1},
    {"dtype": "float16", "group": 32},
    {"bias": True},
    {"act_order": True, "group": 32},
]
ACTIVATIONS = [
    Activation("silu", limit=1.0),
    Activation("gelu"),
    Activation("gelu_tanh"),
    Activation("swigluoai"),
    Activation("swigluoai_uninterleave", limit=2.0, alpha=1.3, beta=0.5),
    Activation("swiglustep"),
    Activation("situ", beta=2.0, linear_beta=3.0),
    Activation("silu_no_mul"),
    Activation("gelu_tanh_no_mul"),
    Activation("relu2_no_mul"),
]
#: Slots of experts 0 to 3 and of none; the second token has none at all.
ELSEWHERE = [[0, -1], [-1, -1], [3, 2], [2, 0], [-1, 2]]

#: Settings of each path on small sizes; :func:`paths` changes them.
DECODE = {
    "path": "decode",
    "up_r": 1,
    "up_ks": 2,
    "up_kw": 64,
    "up_sub": 64,
    "up_stages": 0,
    "down_r": 1,
    "down_ks": 1,
    "down_kw": 64,
    "down_sub": 64,
    "down_stages": 0,
    "down_warps": 4,
}
SCAN = {
    "path": "scan",
    "tok": 4,
    "up_bn": 64,
    "up_bk": 64,
    "up_stages": 2,
    "up_warps": 4,
    "down_bn": 64,
    "down_bk": 64,
    "down_stages": 2,
    "down_warps": 4,
    "prefetch": 64,
    "up_with": "triton",
    "down_with": "triton",
}


def paths(decode: dict, scan: dict, long_stages: int) -> dict[str, dict]:
    """Settings by path, with these changes to DECODE and SCAN."""
    decode, scan = DECODE | decode, SCAN | scan
    rows = {"down_with": "rows", "down_rt": 2}
    stages = {"up_stages": long_stages, "down_stages": long_stages}
    return {
        "decode": decode,
        "long": decode | stages | {"up_r": 2},
        "scan": scan,
        "sorted": scan | {"path": "sorted"},
        "rows": scan | rows,
        "srows": scan | rows | {"path": "sorted"},
    }


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
