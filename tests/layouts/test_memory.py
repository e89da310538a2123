"""Packing and unpacking work on one expert at a time: what they hold besides the result is small.

An allocator that counts: every storage that an operation makes counts from then until the last
tensor on it is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autosel.core import Activation
from autosel.interfaces import Layout
from autosel.layouts.aten_int4 import AtenInt4
from autosel.layouts.aten_int8 import AtenInt8
from autosel.layouts.blocked_int4 import BlockedInt4
from autosel.layouts.dense import Dense
from autosel.layouts.exllama import Exllama
from autosel.layouts.flashinfer_mxint4 import FlashInferMxInt4
from autosel.layouts.humming import Humming
from autosel.layouts.marlin import Marlin
from autosel.layouts.nfirst_bytes import NFirstBytes
from autosel.layouts.panel16 import Panel16Layout
from autosel.layouts.wna16_tiled import Wna16Tiled
from autosel.layouts.zen_s4 import ZenS4
from tests.layouts import make

EXPERTS, SIZE = 32, 256
#: Codes of one expert, a byte each: w13 and w2.
ONE_EXPERT = 3 * SIZE * SIZE


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages alive that were made inside, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._users: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs or {}))
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
        }
        for leaf in tree_leaves(out):
            if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
                continue
            storage = leaf.untyped_storage()
            place = storage.data_ptr()
            if place not in self._users:
                if place in known or not storage.nbytes():
                    continue  # a view of something made outside
                self._users[place], self._sizes[place] = 0, storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
            self._users[place] += 1
            weakref.finalize(leaf, self._gone, place)
        return out

    def _gone(self, place: int) -> None:
        self._users[place] -= 1
        if not self._users[place]:
            del self._users[place]
            self.now -= self._sizes.pop(place)


CASES: list[tuple[Layout, dict[str, Any]]] = [
    (Marlin(), {"symmetric": False, "bias": True}),
    (Marlin(), {"bits": 8, "act_order": "w2"}),
    (Marlin("float16"), {"act_dtype": "float16"}),
    (Humming(), {"symmetric": False, "bias": True}),
    (Humming(), {"bits": 8, "symmetric": False}),
    (NFirstBytes(), {"symmetric": False, "bias": True}),
    (NFirstBytes(signed=True, scale_dtype="bfloat16"), {}),
    (FlashInferMxInt4(), {}),
    (Exllama("bfloat16"), {}),
    (Wna16Tiled(), {"symmetric": False, "bias": True, "act_order": "w13+w2"}),
    (Dense(), {"symmetric": False}),
    (Panel16Layout(), {"symmetric": False, "bias": True}),
    (BlockedInt4(), {"symmetric": False}),
    (ZenS4(), {}),
    (ZenS4(interleaved=True), {"activation": Activation("swigluoai")}),
    (AtenInt4(), {"symmetric": False}),
    (AtenInt8(), {"bits": 8, "group": -1}),
]


def extra(call: Callable[[], Any], returned: Callable[[Any], int]) -> int:
    with LiveBytes() as counted:
        result = call()
    assert counted.peak >= returned(result) > 0  # it counts at all
    return counted.peak - returned(result)


def tensors_bytes(of: Any) -> int:
    return sum(t.numel() * t.element_size() for w in (of.w13, of.w2) for t in w.tensors.values())


@pytest.mark.parametrize(("layout", "scheme"), CASES, ids=lambda v: getattr(v, "key", ""))
def test_what_is_held_besides_the_result_is_a_few_experts(
    layout: Layout, scheme: dict[str, Any]
) -> None:
    """At most 8 bytes a code of one expert at once: words in 32 bits, values in float32. Unpacking
    PyTorch's int4 looks every code's place up in a table of 32 bits, made once.
    """
    experts = make.experts(make.problem(SIZE, SIZE, experts=EXPERTS, **scheme))
    limit = 8 * ONE_EXPERT
    assert extra(lambda: layout.pack(experts), lambda packed: packed.nbytes) <= limit
    packed = layout.pack(experts)
    if layout.invertible:
        limit *= 3 if isinstance(layout, AtenInt4) else 1
        assert extra(lambda: layout.unpack(packed), tensors_bytes) <= limit
    assert limit < EXPERTS * ONE_EXPERT  # unpacking all experts at once would be seen


def test_the_count_sees_a_layer_unpacked_at_once() -> None:
    experts = make.experts(make.problem(SIZE, SIZE, experts=EXPERTS))

    def greedy() -> torch.Tensor:
        words = experts.w13.codes
        return torch.stack([(words >> 4 * i) & 15 for i in range(8)], -1).to(torch.uint8)

    assert extra(greedy, lambda out: out.numel()) > 8 * ONE_EXPERT
