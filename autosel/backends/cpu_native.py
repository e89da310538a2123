"""Our CPU kernel: int4 and int8 weights kept exact, fused, built for this processor at first use.

Source: kernels/csrc, docs/cpu-kernel.md.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import ClassVar

import torch

from autosel import native
from autosel.core import AccuracyClass, Device, Params, Problem, Routing, Support
from autosel.errors import UnsupportedError, field_error
from autosel.interfaces import Backend, Layout, PackedExperts, Requirements, Space
from autosel.layouts.panel16 import Panel16Layout

#: ``Wna16Dot``: how codes meet activations, and the instruction sets of the processor it takes.
_DOTS = {
    "fp32": (0, ()),
    "bf16": (1, ("avx512_bf16",)),
    "amx": (2, ("avx512_bf16", "amx_bf16", "amx_int8")),
    "int8": (3, ("avx512_vnni",)),
    "amx_int8": (4, ("avx512_vnni", "amx_bf16", "amx_int8")),
}
_A8 = ("int8", "amx_int8")
#: Rows an expert from which tiles are the better first guess.
_TILE_ROWS = 4
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
#: Activation code of the C++ source, and the model constants where its formula fixes them.
_ACTIVATIONS = {
    "silu": (0, {}),
    "gelu": (1, {}),
    "gelu_tanh": (2, {}),
    "swigluoai": (3, {"limit": 7.0, "alpha": 1.702, "beta": 1.0}),
    "swigluoai_uninterleave": (3, {"alpha": 1.0, "beta": 0.0}),
    "swiglustep": (4, {"limit": 7.0}),
    "situ": (5, {}),
    "silu_no_mul": (6, {}),
    "gelu_no_mul": (7, {}),
    "gelu_tanh_no_mul": (8, {}),
    "relu2_no_mul": (9, {}),
}


class _Gemm(ctypes.Structure):
    """``Wna16Gemm`` of kernels/csrc/wna16_interface.h."""

    _fields_ = [
        *[(n, ctypes.c_void_p) for n in ("codes", "scales", "zeros", "bias", "gather")],
        *[(n, ctypes.c_int64) for n in ("outputs", "inputs", "groups", "group_inputs")],
        *[(n, ctypes.c_int32) for n in ("scale_dtype", "bits")],
    ]


class _Layer(ctypes.Structure):
    """``Wna16Layer``."""

    _fields_ = [
        ("w13", _Gemm),
        ("w2", _Gemm),
        *[(n, ctypes.c_int64) for n in ("experts", "hidden", "inter")],
        *[(n, ctypes.c_int32) for n in ("gated", "weight_on_input", "act_dtype", "activation")],
        *[(n, ctypes.c_float) for n in ("limit", "alpha", "beta", "linear_beta")],
    ]


class _Call(ctypes.Structure):
    """``Wna16Call``."""

    _fields_ = [
        *[(n, ctypes.c_void_p) for n in ("x", "ids", "weights", "out", "workspace")],
        *[(n, ctypes.c_int64) for n in ("tokens", "top_k")],
        *[(n, ctypes.c_int32) for n in ("threads", "dot")],
    ]


def _gemm(packed: PackedExperts, name: str) -> _Gemm:
    scheme = getattr(packed.problem, name)
    tensors = packed.tensors
    codes, scales = tensors[f"{name}_codes"], tensors[f"{name}_scales"]

    def pointer(suffix: str) -> int | None:
        tensor = tensors.get(f"{name}_{suffix}")
        return None if tensor is None else tensor.data_ptr()

    inputs = codes.shape[2] * scheme.pack_factor
    return _Gemm(
        codes.data_ptr(),
        scales.data_ptr(),
        pointer("zeros"),
        pointer("bias"),
        pointer("gather"),
        codes.shape[1] * 16,
        inputs,
        scales.shape[2],
        inputs if scheme.group_size == -1 else scheme.group_size,
        _DTYPES[scales.dtype],
        scheme.num_bits,
    )


def _layer(packed: PackedExperts) -> _Layer:
    problem = packed.problem
    code, constants = _ACTIVATIONS[problem.activation.name]
    values = {
        name: getattr(problem.activation, name)
        for name in ("limit", "alpha", "beta", "linear_beta")
        if getattr(problem.activation, name) is not None
    }
    values = {**constants, **values}
    return _Layer(
        _gemm(packed, "w13"),
        _gemm(packed, "w2"),
        problem.num_local_experts,
        problem.hidden_size,
        problem.intermediate_size,
        problem.activation.gated,
        problem.router_weight_on_input,
        _DTYPES[getattr(torch, problem.act_dtype)],
        code,
        *[values.get(name, 0.0) for name in ("limit", "alpha", "beta", "linear_beta")],
    )


class CpuNativeBackend(Backend):
    """kernels/csrc/wna16_moe.cpp on the panel16 layout."""

    name: ClassVar[str] = "cpu_native"
    summary: ClassVar[str] = "our fused C++ kernel, exact weights, built here at first use"
    ours: ClassVar[bool] = True
    reads_any_ids: bool = True

    def __init__(self) -> None:
        self._local = threading.local()
        # Built once a packed layer: the call itself may take 20 us at one token.
        self._layers: weakref.WeakKeyDictionary[PackedExperts, _Layer] = weakref.WeakKeyDictionary()

    def available(self, device: Device) -> Support:
        needs = Requirements()
        needs.one_of("device", device.kind, ("cpu",))
        needs.need(native.compiler() is not None, "C++ compiler", "none", "g++ or clang++, or CXX")
        return needs.support

    def supports(self, problem: Problem, device: Device) -> Support:
        needs = Requirements()
        for name, scheme in (("w13", problem.w13), ("w2", problem.w2)):
            if scheme.group_size != -1:
                needs.multiple(f"{name} group size", scheme.group_size, scheme.pack_factor)
        return Support(self.available(device).reasons + needs.support.reasons)

    def layout(self, problem: Problem, params: Params) -> Layout:
        return Panel16Layout()

    def space(self, problem: Problem, num_tokens: int, device: Device) -> Space:
        # vdpbf16ps is twice the fp32 rate on AMD Zen 4 and half of it on Intel Sapphire Rapids,
        # so where both exist the choice is measured.
        names = [
            name
            for name, (_, sets) in _DOTS.items()
            if set(sets) <= set(device.flags)
            and (problem.act_dtype == "bfloat16" or name not in ("bf16", "amx"))
        ]
        rows = num_tokens * problem.top_k / problem.num_experts
        wanted = ("amx", "bf16", "fp32") if rows >= _TILE_ROWS else ("bf16", "fp32")
        default = {"dot": next(name for name in wanted if name in names)}
        return Space(default, {"dot": tuple(names)} if len(names) > 1 else {})

    def accuracy(self, params: Params) -> AccuracyClass:
        return "a8" if params.get("dot") in _A8 else "exact"

    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        library = native.load()
        layer = self._layers.get(packed)
        if layer is None:
            layer = self._layers[packed] = _layer(packed)
        name = str(params.get("dot", "fp32"))
        dot = _DOTS[name][0]
        if not library.wna16_can(dot):
            raise UnsupportedError(
                field_error(self.name, "dot", name, "one that compiler, processor and system allow")
            )
        call = _Call(
            x.data_ptr(),
            routing.topk_ids.data_ptr(),
            routing.topk_weights.data_ptr(),
            out.data_ptr(),
            None,
            x.shape[0],
            routing.topk_ids.shape[1],
            torch.get_num_threads(),
            dot,
        )
        needed = int(library.wna16_workspace_bytes(ctypes.byref(layer), ctypes.byref(call)))
        call.workspace = self._workspace(needed).data_ptr()
        library.wna16_run(ctypes.byref(layer), ctypes.byref(call))
        return out

    def _workspace(self, nbytes: int) -> torch.Tensor:
        """A buffer of this thread that only grows, so that steady state allocates nothing."""
        held: torch.Tensor | None = getattr(self._local, "buffer", None)
        if held is None or held.numel() < nbytes:
            held = torch.empty(nbytes, dtype=torch.uint8)
            self._local.buffer = held
        return held
