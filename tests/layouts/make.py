"""Random canonical experts for the layout and backend tests."""

from __future__ import annotations

from dataclasses import replace

import torch

from autosel.core import Activation, CanonicalExperts, Problem, QuantScheme, QuantWeight
from autosel.dtypes import torch_dtype
from autosel.interfaces import Layout, PackedExperts
from autosel.packing import pack_last


def problem(
    hidden: int = 256,
    inner: int = 128,
    *,
    bits: int = 4,
    group: int = 32,
    group2: int | None = None,
    symmetric: bool = True,
    act_order: str = "",
    scale_dtype: str = "bfloat16",
    act_dtype: str = "bfloat16",
    activation: Activation | str = "silu",
    experts: int = 2,
    local: int | None = None,
    top_k: int = 2,
    bias: bool = False,
    on_input: bool = False,
) -> Problem:
    """``act_order`` names the GEMMs that have a g_idx: "", "w2", "w13" or "w13+w2"."""
    parts = act_order.split("+")
    w13 = QuantScheme(bits, group, symmetric, "w13" in parts, scale_dtype)
    w2 = QuantScheme(
        bits, group if group2 is None else group2, symmetric, "w2" in parts, scale_dtype
    )
    return Problem(
        experts,
        experts if local is None else local,
        top_k,
        hidden,
        inner,
        w13,
        w2,
        Activation(activation) if isinstance(activation, str) else activation,
        act_dtype,
        bias,
        on_input,
    )


def weight(
    scheme: QuantScheme, experts: int, outputs: int, inputs: int, bias: bool, rng: torch.Generator
) -> QuantWeight:
    groups = scheme.num_groups(inputs)
    codes = torch.randint(
        0, 1 << scheme.num_bits, (experts, outputs, inputs), generator=rng, dtype=torch.uint8
    )
    dtype = torch_dtype(scheme.scale_dtype)
    spread = 2.0 ** (4 - scheme.num_bits) / 8 / inputs**0.5
    scales = (0.5 + torch.rand(experts, outputs, groups, generator=rng)) * spread
    zeros = None
    if not scheme.symmetric:
        zeros = torch.randint(
            0, 1 << scheme.num_bits, (experts, outputs, groups), generator=rng, dtype=torch.uint8
        )
    g_idx = None
    if scheme.has_g_idx:
        size = inputs if scheme.group_size == -1 else scheme.group_size
        rows = [torch.randperm(inputs, generator=rng) // size for _ in range(experts)]
        g_idx = torch.stack(rows).to(torch.int32)
    return QuantWeight(
        scheme,
        inputs,
        pack_last(codes, scheme.num_bits),
        scales.to(dtype),
        zeros,
        g_idx,
        torch.randn(experts, outputs, generator=rng).to(dtype) if bias else None,
    )


def experts(of: Problem, seed: int = 0) -> CanonicalExperts:
    rng = torch.Generator().manual_seed(seed)
    (e, n13, k13), (_, n2, k2) = of.w13_shape, of.w2_shape
    return CanonicalExperts(
        of,
        weight(of.w13, e, n13, k13, of.has_bias, rng),
        weight(of.w2, e, n2, k2, of.has_bias, rng),
    )


def assert_same(found: CanonicalExperts, expected: CanonicalExperts) -> None:
    """Bit for bit, dtypes included."""
    assert found.problem == expected.problem
    for name in ("w13", "w2"):
        a, b = getattr(found, name), getattr(expected, name)
        assert a.scheme == b.scheme
        assert a.num_inputs == b.num_inputs
        assert a.tensors.keys() == b.tensors.keys(), name
        for key, tensor in b.tensors.items():
            other = a.tensors[key]
            assert other.dtype == tensor.dtype, (name, key)
            assert torch.equal(other, tensor), (name, key)


def assert_round_trip(layout: Layout, of: CanonicalExperts) -> PackedExperts:
    """Packing and unpacking gives the experts back bit for bit, touches nothing, and the size is
    the one foretold.
    """
    before = copy(of)
    packed = layout.pack(of)
    assert_same(of, before)
    assert_same(layout.unpack(packed), before)
    assert packed.nbytes == layout.nbytes(of.problem)
    return packed


def copy(of: CanonicalExperts) -> CanonicalExperts:
    return replace(
        of,
        w13=replace(of.w13, **{n: t.clone() for n, t in of.w13.tensors.items()}),
        w2=replace(of.w2, **{n: t.clone() for n, t in of.w2.tensors.items()}),
    )


#: Ways in which a layout or a kernel can be silently wrong, as changes of the weights it holds.
FAULTS = ("nibble", "scale row", "zero point", "experts swapped", "gate and up exchanged")


def planted(of: CanonicalExperts, fault: str) -> CanonicalExperts:
    """The experts with one of :data:`FAULTS` in them; ``zero point`` needs asymmetric ones."""
    broken = copy(of)
    w13, w2 = broken.w13, broken.w2
    last = of.problem.num_local_experts - 1
    if fault == "nibble":
        w2.codes[last, 3, 1] ^= 1 << (of.problem.w2.num_bits - 1)  # top bit of one code
    elif fault == "scale row":
        w13.scales[last, 5] = w13.scales[last, 6]
    elif fault == "zero point":
        assert w13.zero_points is not None
        top = (1 << of.problem.w13.num_bits) - 1
        w13.zero_points[0, 2, 1] = top - w13.zero_points[0, 2, 1]
    elif fault == "experts swapped":
        for tensor in w2.tensors.values():
            tensor[[0, last]] = tensor[[last, 0]]
    else:
        for tensor in (w13.codes, w13.scales, w13.zero_points, w13.bias):
            if tensor is not None:
                tensor.copy_(torch.cat(tensor.chunk(2, 1)[::-1], 1))
    return broken
