"""Faults in any layout are seen by its way back: weights planted wrong, and single packed bits.

Layouts without a way back are seen through the reference: their backends' tests and
``tests/gpu/test_layouts_on_gpu.py`` run :data:`make.FAULTS` through the verification.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autosel.core import Activation, CanonicalExperts
from autosel.errors import AutoselError
from autosel.interfaces import Layout, PackedExperts
from autosel.layouts.aten_int4 import AtenInt4
from autosel.layouts.aten_int8 import AtenInt8
from autosel.layouts.blocked_int4 import BlockedInt4
from autosel.layouts.exllama import Exllama
from autosel.layouts.flashinfer_mxint4 import FlashInferMxInt4
from autosel.layouts.humming import Humming
from autosel.layouts.marlin import Marlin
from autosel.layouts.nfirst_bytes import NFirstBytes
from autosel.layouts.panel16 import Panel16Layout
from autosel.layouts.wna16_tiled import Wna16Tiled
from autosel.layouts.zen_s4 import ZenS4
from tests.layouts import make

#: Sizes that nothing pads, so that every stored bit means something.
SIZE = 256
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "marlin": (Marlin(), {"symmetric": False, "bias": True}),
    "marlin 8 bit": (Marlin(), {"bits": 8, "act_order": "w13+w2"}),
    "humming": (Humming(), {"symmetric": False, "bias": True}),
    "humming 8 bit": (Humming(), {"bits": 8, "symmetric": False}),
    "nfirst_bytes": (NFirstBytes(), {"symmetric": False, "bias": True, "act_order": "w13+w2"}),
    "nfirst_bytes 8 bit": (NFirstBytes(), {"bits": 8, "symmetric": False}),
    "nfirst_bytes signed": (NFirstBytes(signed=True, scale_dtype="bfloat16"), {}),
    "flashinfer_mxint4": (FlashInferMxInt4(), {}),
    "exllama": (Exllama("bfloat16"), {}),
    "wna16_tiled": (Wna16Tiled(), {"symmetric": False, "bias": True, "act_order": "w13+w2"}),
    "wna16_tiled 8 bit": (Wna16Tiled(), {"bits": 8, "symmetric": False}),
    "panel16": (Panel16Layout(), {"symmetric": False, "bias": True}),
    "aten_int4": (AtenInt4(), {"symmetric": False}),
    "aten_int8": (AtenInt8(), {"bits": 8, "group": -1}),
    "blocked_int4": (BlockedInt4(), {"symmetric": False}),
    "zen_s4": (ZenS4(), {}),
    "zen_s4 interleaved": (ZenS4(interleaved=True), {"activation": Activation("swigluoai")}),
}


def experts_of(case: str) -> tuple[Layout, CanonicalExperts]:
    layout, scheme = LAYOUTS[case]
    return layout, make.experts(make.problem(SIZE, SIZE, experts=3, **scheme))


def same(a: CanonicalExperts, b: CanonicalExperts) -> bool:
    try:
        make.assert_same(a, b)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("fault", make.FAULTS)
@pytest.mark.parametrize("case", LAYOUTS)
def test_planted_weights_come_back_as_planted(case: str, fault: str) -> None:
    """Each fault changes what is packed, so a layout that lost or mixed it up would be seen."""
    layout, experts = experts_of(case)
    if fault == "zero point" and experts.w13.zero_points is None:
        pytest.skip("symmetric: no zero points")
    broken = make.planted(experts, fault)
    packed = layout.pack(broken)
    back = layout.unpack(packed)
    assert same(back, broken)
    assert not same(back, experts)
    right = layout.pack(experts)
    assert any(not torch.equal(packed.tensors[k], t) for k, t in right.tensors.items())


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_change_anywhere_in_what_is_packed_is_seen(case: str) -> None:
    layout, experts = experts_of(case)
    packed = layout.pack(experts)
    rng = torch.Generator().manual_seed(0)
    assert same(layout.unpack(packed), experts)
    for name in packed.tensors:
        for _ in range(4):
            changed = spoiled(packed, name, rng)
            try:
                back = layout.unpack(changed)
            except AutoselError:
                continue  # what can be told from the rest is refused
            assert not same(back, experts), name


def spoiled(packed: PackedExperts, name: str, rng: torch.Generator) -> PackedExperts:
    """A copy with one element of one tensor changed: a bit of an integer, a float doubled, two
    places of an order exchanged.
    """
    tensors = {key: tensor.clone() for key, tensor in packed.tensors.items()}
    flat = tensors[name].view(-1) if tensors[name].is_contiguous() else None
    assert flat is not None, f"{name} is not contiguous"
    place = int(torch.randint(len(flat), (), generator=rng))
    if "order" in name or "gather" in name:
        row = tensors[name][int(torch.randint(3, (), generator=rng))]
        row[[0, -1]] = row[[-1, 0]]  # of the first and of the last group
    elif flat.is_floating_point():
        flat[place] = 2 * flat[place] if flat[place] != 0 else 1
    else:
        bits = 8 * flat.element_size()
        flat.view(torch.uint8).view(len(flat), -1)[place, 0] ^= 1 << int(
            torch.randint(min(bits, 4), (), generator=rng)
        )
    return PackedExperts(packed.layout, packed.problem, tensors, packed.meta)


@pytest.mark.parametrize("case", LAYOUTS)
def test_experts_exchanged_in_what_is_packed_are_seen(case: str) -> None:
    layout, experts = experts_of(case)
    packed = layout.pack(experts)
    for name, tensor in packed.tensors.items():
        exchanged = tensor[[1, 0, 2]]
        if torch.equal(exchanged, tensor):
            assert (layout.name, name[-6:]) == ("exllama", "_zeros")  # the same for every expert
            continue
        tensors = {**packed.tensors, name: exchanged}
        changed = PackedExperts(packed.layout, packed.problem, tensors, packed.meta)
        try:
            back = layout.unpack(changed)
        except AutoselError:
            continue
        assert not same(back, experts), name
