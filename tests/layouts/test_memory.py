"""Packing and unpacking work on one expert at a time: no temporary is as large as the layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autosel.interfaces import Layout
from autosel.layouts.exllama import Exllama
from autosel.layouts.flashinfer_mxint4 import FlashInferMxInt4
from autosel.layouts.humming import Humming
from autosel.layouts.marlin import Marlin
from autosel.layouts.nfirst_bytes import NFirstBytes
from tests.layouts import make

EXPERTS = 32


class LargestTemporary(TorchDispatchMode):
    """Bytes of the largest tensor made by an operation, the empty stacks left out."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and func is not torch.ops.aten.empty.memory_format:
            inputs = [a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)]
            if out.untyped_storage().data_ptr() not in inputs:  # no view, not in place
                self.largest = max(self.largest, out.numel() * out.element_size())
        return out


CASES: list[tuple[Layout, dict[str, Any]]] = [
    (Marlin(), {"symmetric": False, "bias": True}),
    (Marlin(), {"bits": 8, "act_order": "w2"}),
    (Humming(), {"symmetric": False, "bias": True}),
    (Humming(), {"bits": 8, "symmetric": False}),
    (NFirstBytes(), {"symmetric": False, "bias": True}),
    (NFirstBytes(signed=True, scale_dtype="bfloat16"), {}),
    (FlashInferMxInt4(), {}),
    (Exllama("bfloat16"), {}),
]


@pytest.mark.parametrize(("layout", "scheme"), CASES, ids=lambda v: getattr(v, "name", ""))
def test_temporaries_are_one_expert(layout: Layout, scheme: dict[str, Any]) -> None:
    problem = make.problem(256, 256, experts=EXPERTS, **scheme)
    experts = make.experts(problem)
    one_expert = 2 * 256 * 256  # codes of w13, one byte each
    with LargestTemporary() as packing:
        packed = layout.pack(experts)
    with LargestTemporary() as unpacking:
        layout.unpack(packed)
    # words are assembled in 32-bit integers, one of which holds at least four codes; index tables
    # of 64 bits stand beside the scales
    for mode in (packing, unpacking):
        assert 0 < mode.largest <= 2 * one_expert
        assert mode.largest < packed.nbytes / 4
