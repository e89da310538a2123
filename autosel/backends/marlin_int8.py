"""Marlin with activations quantised to int8, a row at a time: accuracy class ``a8``.

The operator and its blocks are those of :mod:`autosel.backends.marlin`; its kernels multiply int8
activations with 4-bit weights on the integer tensor cores (vLLM's W4A8-INT8; the fp8 kernels of the
same operator are for compute capability 8.9 and 12.x alone and are not offered).
"""

from __future__ import annotations

from typing import ClassVar

import torch

from autosel.backends import _rules, _vllm_ops
from autosel.backends._steps import quantize_rows
from autosel.backends.marlin import BLOCK_SIZES, Inputs, Marlin
from autosel.core import AccuracyClass, Device, Params, Problem, Support
from autosel.interfaces import Layout, PackedExperts, Requirements
from autosel.layouts.marlin import MarlinInt8 as MarlinInt8Layout


class MarlinInt8(Marlin):
    """Both GEMMs on int8 rows, the second on the quantised result of the activation."""

    name: ClassVar[str] = "marlin_int8"
    summary: ClassVar[str] = "Marlin's kernels on int8 activations, from vLLM"
    block_sizes: ClassVar[tuple[int, ...]] = BLOCK_SIZES[1:]  # the least rows of an int8 kernel: 16

    def available(self, device: Device) -> Support:
        found = super().available(device)
        needs = Requirements()
        op = _vllm_ops.find("_moe_C", "moe_wna16_marlin_gemm") if found else None
        if op is not None:
            there = "a_scales" in _vllm_ops.arguments(op)
            needs.need(there, "operator's argument a_scales", "missing", "a newer vllm")
        return Support(found.reasons + needs.support.reasons)

    def supports(self, problem: Problem, device: Device) -> Support:
        needs = Requirements()
        for name, scheme, _, _ in _rules.gemms(problem):
            needs.one_of(f"{name} bits", scheme.num_bits, (4,))
        return Support(super().supports(problem, device).reasons + needs.support.reasons)

    def layout(self, problem: Problem, params: Params) -> Layout:
        return MarlinInt8Layout(problem.act_dtype)

    def accuracy(self, params: Params) -> AccuracyClass:
        return "a8"

    def inputs(self, packed: PackedExperts, name: str, rows: torch.Tensor) -> Inputs:
        return quantize_rows(rows, packed.meta["factors"][name])
