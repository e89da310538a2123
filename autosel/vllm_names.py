"""The names of vLLM's WNA16 MoE oracle for people who come from there: thin functions on top.

| vLLM (``fused_moe/oracle/int_wna16.py``)  | autosel                                            |
|-------------------------------------------|----------------------------------------------------|
| ``WNA16MoEBackend.MARLIN`` and so on      | ``registry.get("marlin")`` and so on               |
| ``map_wna16_backend(name)``               | ``registry.get(name)``                             |
| ``select_wna16_moe_backend(...)``         | ``backend.supports(problem, device)``, then timing |
| ``convert_to_wna16_moe_kernel_format(..)``| ``backend.layout(problem, params).pack(experts)``  |
| ``make_wna16_moe_quant_config(...)``      | ``CanonicalExperts.problem``, ``PackedExperts``    |
| ``make_wna16_moe_kernel(...).apply(...)`` | ``dispatch.apply(backend, packed, x, routing, ..)``|

Differences that matter: conversions never change their input; zero points are true ones whatever
the checkpoint's convention; every reason for a no is given, not the first;
:func:`select_wna16_moe_backend` follows vLLM's fixed order and measures nothing, which is what the
rest of autosel is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import torch

from autosel import registry
from autosel.core import CanonicalExperts, Device, Params, Problem
from autosel.device import detect
from autosel.errors import AutoselError, NothingUsableError, UnsupportedError, field_error
from autosel.interfaces import Backend


class WNA16MoEBackend(Enum):
    """The ten backends; the value in lower case is the name in autosel's registry."""

    MARLIN = "MARLIN"
    BATCHED_MARLIN = "BATCHED_MARLIN"
    HUMMING = "HUMMING"
    CPU = "CPU"
    ZEN_CPU = "ZEN_CPU"
    FLASHINFER_TRTLLM = "FLASHINFER_TRTLLM"
    TRITON = "TRITON"
    XPU = "XPU"
    EMULATION = "EMULATION"
    RDNA3 = "RDNA3"

    @property
    def backend(self) -> Backend:
        return registry.get(self.value)


#: vLLM's order of preference by kind of device; on others than these, the last one.
PRIORITY: Mapping[str, tuple[WNA16MoEBackend, ...]] = {
    "cpu": (WNA16MoEBackend.ZEN_CPU, WNA16MoEBackend.CPU),
    "xpu": (WNA16MoEBackend.XPU,),
    "": (
        WNA16MoEBackend.RDNA3,
        WNA16MoEBackend.FLASHINFER_TRTLLM,
        WNA16MoEBackend.MARLIN,
        WNA16MoEBackend.BATCHED_MARLIN,
        WNA16MoEBackend.TRITON,
        WNA16MoEBackend.HUMMING,
        WNA16MoEBackend.EMULATION,
    ),
}


def map_wna16_backend(runner_backend: str) -> WNA16MoEBackend:
    """The member for a user's word (``--moe-backend``); all ten can be named, in any case.

    Raises AutoselError, listing the names.
    """
    key = registry.normalize(runner_backend).upper()
    if key not in WNA16MoEBackend.__members__:
        names = ", ".join(member.value.lower() for member in WNA16MoEBackend)
        raise AutoselError(field_error("moe_backend", "name", repr(runner_backend), names))
    return WNA16MoEBackend[key]


def select_wna16_moe_backend(
    problem: Problem,
    device: Device | None = None,
    *,
    moe_backend: str = "auto",
    batched_activations: bool = False,
) -> tuple[WNA16MoEBackend, Backend]:
    """The first backend in vLLM's order that supports the layer, or the one asked for.

    ``batched_activations`` says that an all-to-all gives per-expert batches, which is what
    BATCHED_MARLIN is for (and only it). On compute capability 9.0 HUMMING comes before MARLIN, as
    in vLLM 0.33. Raises UnsupportedError with every reason of the backend asked for, or
    NothingUsableError with those of all.
    """
    device = detect() if device is None else device
    if moe_backend != "auto":
        member = map_wna16_backend(moe_backend)
        support = member.backend.supports(problem, device)
        if not support:
            raise UnsupportedError(f"backend {member.value.lower()}: {support}")
        return member, member.backend
    reasons = []
    for member in _order(device):
        if (member is WNA16MoEBackend.BATCHED_MARLIN) != batched_activations:
            continue
        support = member.backend.supports(problem, device)
        if support:
            return member, member.backend
        reasons.append(f"{member.value.lower()}: {support}")
    raise NothingUsableError("no backend supports this layer here: " + " | ".join(reasons))


def priority(device: Device) -> tuple[str, ...]:
    """Registry names in vLLM's order of preference on ``device``, without all-to-all batches."""
    order = (member for member in _order(device) if member is not WNA16MoEBackend.BATCHED_MARLIN)
    return tuple(member.value.lower() for member in order)


def _order(device: Device) -> tuple[WNA16MoEBackend, ...]:
    order = PRIORITY.get(device.kind, PRIORITY[""])
    if device.capability != (9, 0):
        return order
    humming: WNA16MoEBackend = WNA16MoEBackend.HUMMING
    others = [member for member in order if member is not humming]
    others.insert(others.index(WNA16MoEBackend.MARLIN), humming)
    return tuple(others)


class KernelFormat(NamedTuple):
    """vLLM's ten results, in its order; what a layout has no tensor for is None.

    Global input scales belong to 8-bit activations, which no layout here is packed for.
    """

    w13_qweight: torch.Tensor
    w2_qweight: torch.Tensor
    w13_scales: torch.Tensor | None
    w2_scales: torch.Tensor | None
    w13_qzeros: torch.Tensor | None = None
    w2_qzeros: torch.Tensor | None = None
    w13_input_global_scale: torch.Tensor | None = None
    w2_input_global_scale: torch.Tensor | None = None
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None


#: Where layouts keep a result, by vLLM's name; FlashInfer's layout uses its operator's names.
_TENSORS = {
    "w13_qweight": ("w13", "gemm1_weights"),
    "w2_qweight": ("w2", "gemm2_weights"),
    "w13_scales": ("w13_scales", "gemm1_weights_scale"),
    "w2_scales": ("w2_scales", "gemm2_weights_scale"),
    "w13_qzeros": ("w13_zeros",),
    "w2_qzeros": ("w2_zeros",),
    "w13_bias": ("w13_bias",),
    "w2_bias": ("w2_bias",),
}


def convert_to_wna16_moe_kernel_format(
    backend: WNA16MoEBackend, experts: CanonicalExperts, params: Params | None = None
) -> KernelFormat:
    """Pack ``experts`` for ``backend``; they stay as they are.

    Raises UnsupportedError when the layout cannot express them.
    """
    packed = backend.backend.layout(experts.problem, params or {}).pack(experts)
    found = {
        field: next((packed.tensors[n] for n in names if n in packed.tensors), None)
        for field, names in _TENSORS.items()
    }
    for field in ("w13_qweight", "w2_qweight"):
        if found[field] is None:
            raise UnsupportedError(
                field_error(
                    f"backend {backend.value.lower()}",
                    "packed tensors",
                    ", ".join(packed.tensors),
                    "one weight tensor for each GEMM",
                )
            )
    return KernelFormat(**found)  # type: ignore[arg-type]


class WNA16MoEQuantConfig(NamedTuple):
    """The arguments of vLLM's builder for a packed layer, ready for ``**config._asdict()``."""

    w1_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None
    group_size: int
    num_bits: int
    w1_zp: torch.Tensor | None
    w2_zp: torch.Tensor | None
    w1_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None
    gemm1_clamp_limit: float | None
    gemm1_alpha: float | None
    gemm1_beta: float | None


def make_wna16_moe_quant_config(problem: Problem, converted: KernelFormat) -> WNA16MoEQuantConfig:
    """What vLLM's ``make_wna16_moe_quant_config`` wants to know of a layer.

    Raises UnsupportedError where its one group size and bit width cannot describe both GEMMs.
    """
    for what in ("num_bits", "group_size"):
        first, second = getattr(problem.w13, what), getattr(problem.w2, what)
        if first != second:
            raise UnsupportedError(
                field_error("quant config", what, f"{first} and {second}", "the same in w13 and w2")
            )
    return WNA16MoEQuantConfig(
        converted.w13_scales,
        converted.w2_scales,
        problem.w13.group_size,
        problem.w13.num_bits,
        converted.w13_qzeros,
        converted.w2_qzeros,
        converted.w13_bias,
        converted.w2_bias,
        problem.activation.limit,
        problem.activation.alpha,
        problem.activation.beta,
    )
