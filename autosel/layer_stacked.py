"""Stacked parameters of a whole layer, as serving engines hold them after loading, made canonical.

The tensors have the names and shapes of :mod:`autosel.layer_params`: a format's own tensors with
the experts in front and gate before up. Here they are whole and on the layer's device;
``ExpertParameters`` is for loaders that bring them one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autosel.canonical import check_experts
from autosel.core import CanonicalExperts, Problem, QuantScheme, QuantWeight
from autosel.dtypes import torch_dtype
from autosel.errors import CheckpointError, UnsupportedError, field_error
from autosel.formats import all_formats
from autosel.formats.base import (
    Format,
    LinearQuant,
    Origin,
    clear_padding,
    dtype_name,
    require_finite,
)

#: Formats whose linears may be stacked along the outputs and read as one.
FORMATS = ("gptq", "awq", "compressed-tensors")


def stacked_experts(
    format_name: str,
    tensors: Mapping[str, torch.Tensor],
    problem: Problem,
    *,
    zeros_minus_one: bool = True,
) -> CanonicalExperts:
    """A rank's stacked parameters as canonical weights, in new memory on the tensors' device.

    format_name      one of :data:`FORMATS`
    tensors          ``w13_<suffix>`` and ``w2_<suffix>``, such as ``w13_qweight`` int32
                     ``[E, H/p, s*I]`` for GPTQ. Zero points are read where ``problem`` is
                     asymmetric, ``w13_bias`` ``[E, s*I]`` where it has biases; others are ignored.
                     Scales may have another float dtype than the problem's and are converted
    problem          the part of the layer that the tensors hold
    zeros_minus_one  GPTQ: zero points are stored less one (``checkpoint_format`` ``gptq``)

    Raises UnsupportedError for act-order and for sizes that cut a word of packed values, and
    CheckpointError, naming tensor, found and expected, for what does not fit the problem.
    """
    fmt = next(
        (found for found in all_formats() if found.name == format_name and found.name in FORMATS),
        None,
    )
    if fmt is None:
        raise UnsupportedError(
            field_error("stacked experts", "format", repr(format_name), ", ".join(FORMATS))
        )
    halves = {
        "w13": (problem.w13, problem.w13_shape),
        "w2": (problem.w2, problem.w2_shape),
    }
    made = {
        half: _weight(fmt, half, tensors, problem, scheme, shape, zeros_minus_one)
        for half, (scheme, shape) in halves.items()
    }
    experts = CanonicalExperts(problem, made["w13"], made["w2"])
    check_experts(experts)
    return experts


def _weight(
    fmt: Format,
    half: str,
    tensors: Mapping[str, torch.Tensor],
    problem: Problem,
    scheme: QuantScheme,
    shape: tuple[int, int, int],
    zeros_minus_one: bool,
) -> QuantWeight:
    """One GEMM. Expert after expert, since AWQ takes eight times its size while it is unpacked."""
    count, outputs, inputs = shape
    _require_whole_words(fmt, half, problem, scheme, outputs)
    quant = LinearQuant(
        scheme.num_bits,
        scheme.group_size,
        scheme.symmetric,
        zeros_minus_one=zeros_minus_one and fmt.name == "gptq",
    )
    wanted = [fmt.weight, fmt.scales]
    wanted += [] if scheme.symmetric else [fmt.zeros]
    wanted += ["bias"] if problem.has_bias else []
    found = {suffix: _stack(tensors, f"{half}_{suffix}", count) for suffix in wanted}
    headers = {name: (dtype_name(t.dtype), tuple(t.shape[1:])) for name, t in found.items()}
    fmt.check_headers(headers, quant, outputs, inputs, Origin(half))

    groups, device = scheme.num_groups(inputs), found[fmt.weight].device
    words = -(-inputs // scheme.pack_factor)
    codes = torch.empty(count, outputs, words, dtype=torch.int32, device=device)  # [E, N, W]
    scales = torch.empty(  # [E, N, G]
        count, outputs, groups, dtype=torch_dtype(scheme.scale_dtype), device=device
    )
    zeros = None
    if not scheme.symmetric:
        zeros = torch.empty(count, outputs, groups, dtype=torch.uint8, device=device)  # [E, N, G]
    for expert in range(count):
        origin = Origin(f"{half} of expert {expert}")
        codes[expert].copy_(fmt.codes_of(found[fmt.weight][expert], quant))
        scales[expert].copy_(fmt.scales_of(found[fmt.scales][expert]))
        if zeros is not None:
            zeros[expert].copy_(fmt.zeros_of(found[fmt.zeros][expert], quant, outputs, origin))
    require_finite(scales, ("expert", "output", "group"), f"{half}_{fmt.scales}")
    bias = None
    if problem.has_bias:
        bias = found["bias"].to(torch_dtype(problem.act_dtype), copy=True)  # [E, N]
        require_finite(bias, ("expert", "output"), f"{half}_bias")
    flat = clear_padding(codes.view(-1, words), scheme.num_bits, inputs)
    return QuantWeight(scheme, inputs, flat.view(codes.shape), scales, zeros, None, bias)


def _stack(tensors: Mapping[str, torch.Tensor], name: str, count: int) -> torch.Tensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise CheckpointError(field_error("stacked experts", name, "no tensor", "one"))
    if tensor.dim() == 0 or tensor.shape[0] != count:
        raise CheckpointError(
            field_error(name, "shape", list(tensor.shape), f"{count} experts in front")
        )
    return tensor


def _require_whole_words(
    fmt: Format, half: str, problem: Problem, scheme: QuantScheme, outputs: int
) -> None:
    """Gate and up are packed each for itself along the outputs, so words must not join them."""
    if scheme.has_g_idx:
        raise UnsupportedError(field_error(half, "act-order", "a group index", "none"))
    along_outputs = fmt.name == "awq" or not scheme.symmetric
    part = problem.intermediate_size if half == "w13" else outputs
    if along_outputs and part % scheme.pack_factor:
        raise UnsupportedError(
            field_error(half, "outputs", part, f"a multiple of {scheme.pack_factor} (whole words)")
        )
