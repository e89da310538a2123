"""The MoeWNA16 layout: bytes in memory, made by a loader from GPTQ or AWQ; it is never on disk.

    w13_qweight  uint8 [E, 2*I, H/(8/bits)]    w2_qweight  uint8 [E, H, I/(8/bits)]
    w13_scales   float [E, 2*I, H/g]           w2_scales   float [E, H, I/g]
    w13_qzeros   uint8 [E, 2*I/(8/bits), H/g]  w2_qzeros   uint8 [E, H/(8/bits), I/g]

The low bits hold the even input (weights) or output (zero points); zero points are true ones and
there only where the layer is asymmetric. ``g`` is the layer's one group size, halved until it
divides both H and I, but not below 32
(vLLM, ``model_executor/layers/quantization/moe_wna16.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

import torch

from autosel.canonical import check_experts
from autosel.core import CanonicalExperts, Problem, QuantScheme, QuantWeight
from autosel.errors import CheckpointError, field_error

NAME = "moe_wna16"
MIN_GROUP = 32


def common_group_size(problem: Problem) -> int:
    """The layout's group size for a layer; raises CheckpointError when there is none."""
    size = problem.w13.group_size
    found = size
    while size >= MIN_GROUP and (problem.hidden_size % size or problem.intermediate_size % size):
        if size % 2:
            size = 0
        size //= 2
    if size < MIN_GROUP:
        raise CheckpointError(
            field_error(
                NAME,
                f"group_size for {problem.hidden_size} and {problem.intermediate_size} inputs",
                found,
                f"one whose half, quarter, ... divides both and is at least {MIN_GROUP}",
            )
        )
    return size


def write(experts: CanonicalExperts) -> dict[str, torch.Tensor]:
    """The layout's tensors; scales and zero points repeat where the group size was halved."""
    problem = experts.problem
    require(problem)
    size = common_group_size(problem)
    per_byte = 8 // problem.w13.num_bits
    out: dict[str, torch.Tensor] = {}
    for name, weight in (("w13", experts.w13), ("w2", experts.w2)):
        bytes_used = weight.num_inputs // per_byte
        repeats = weight.scheme.group_size // size
        # Little-endian words, so their bytes already stand in the order of the inputs.
        as_bytes = weight.codes.contiguous().view(torch.uint8)  # [E, N, 4 * W]
        out[f"{name}_qweight"] = as_bytes[..., :bytes_used].contiguous()
        out[f"{name}_scales"] = weight.scales.repeat_interleave(repeats, -1)[
            ..., : weight.num_inputs // size
        ].contiguous()
        if weight.zero_points is not None:
            zeros = weight.zero_points.repeat_interleave(repeats, -1)
            zeros = zeros[..., : weight.num_inputs // size]  # [E, N, G']
            out[f"{name}_qzeros"] = pack_outputs(zeros, problem.w13.num_bits)
    return out


def read(tensors: Mapping[str, torch.Tensor], problem: Problem) -> CanonicalExperts:
    """Canonical experts with the layout's own (possibly halved) group size.

    ``problem`` describes the layer before the group size was halved. Raises CheckpointError for a
    missing tensor or one of another shape.
    """
    require(problem)
    scheme = replace(problem.w13, group_size=common_group_size(problem))
    w13 = _read_one(tensors, "w13", scheme, problem.w13_shape)
    w2 = _read_one(tensors, "w2", scheme, problem.w2_shape)
    scheme = replace(scheme, scale_dtype=w13.scheme.scale_dtype)
    experts = CanonicalExperts(replace(problem, w13=scheme, w2=scheme), w13, w2)
    check_experts(experts)
    return experts


def _read_one(
    tensors: Mapping[str, torch.Tensor], name: str, scheme: QuantScheme, shape: tuple[int, int, int]
) -> QuantWeight:
    experts, outputs, inputs = shape
    per_byte = 8 // scheme.num_bits
    groups = inputs // scheme.group_size
    expected = {
        f"{name}_qweight": (experts, outputs, inputs // per_byte),
        f"{name}_scales": (experts, outputs, groups),
    }
    if not scheme.symmetric:
        expected[f"{name}_qzeros"] = (experts, outputs // per_byte, groups)
    for tensor_name, wanted in expected.items():
        found = tuple(tensors[tensor_name].shape) if tensor_name in tensors else None
        if found != wanted:
            raise CheckpointError(
                field_error(f"{NAME}.{tensor_name}", "shape", found or "no tensor", wanted)
            )
    stored = tensors[f"{name}_qweight"]
    padding = -stored.shape[-1] % 4
    codes = torch.nn.functional.pad(stored, (0, padding)).contiguous().view(torch.int32)
    zeros = None
    if not scheme.symmetric:
        zeros = _unpack_outputs(tensors[f"{name}_qzeros"], scheme.num_bits)
    scales = tensors[f"{name}_scales"]
    found_scheme = replace(scheme, scale_dtype=str(scales.dtype).removeprefix("torch."))
    return QuantWeight(found_scheme, inputs, codes, scales, zeros)


def require(problem: Problem) -> None:
    """The layout knows one scheme for both GEMMs, no act-order, no bias, whole bytes."""
    per_byte = 8 // problem.w13.num_bits
    facts = (
        (sys.byteorder, "little", "byte order"),
        (problem.w13 == problem.w2, True, "one scheme for w13 and w2"),
        (problem.w13.has_g_idx, False, "group index"),
        (problem.has_bias, False, "bias"),
        (problem.hidden_size % per_byte, 0, f"hidden_size modulo {per_byte}"),
        (problem.intermediate_size % per_byte, 0, f"intermediate_size modulo {per_byte}"),
    )
    for found, expected, what in facts:
        if found != expected:
            raise CheckpointError(field_error(NAME, what, found, expected))


def pack_outputs(zeros: torch.Tensor, num_bits: int) -> torch.Tensor:
    """uint8 ``[E, N, G]`` to uint8 ``[E, N / (8 / bits), G]``, even output in the low bits."""
    if num_bits == 8:
        return zeros.contiguous()
    return (zeros[:, 0::2] | (zeros[:, 1::2] << 4)).contiguous()


def _unpack_outputs(zeros: torch.Tensor, num_bits: int) -> torch.Tensor:
    if num_bits == 8:
        return zeros.contiguous()
    pairs = torch.stack((zeros & 15, zeros >> 4), dim=2)  # [E, N/2, 2, G]
    return pairs.flatten(1, 2).contiguous()
