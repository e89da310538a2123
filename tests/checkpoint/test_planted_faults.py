"""The comparison with the tools' weights sees each mistake that readers have made elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autosel import expert_names
from autosel.checkpoint import Checkpoint
from autosel.formats import awq, base, compressed_tensors, gptq
from autosel.packing import unpack_last
from tests.checkpoint.test_fixture_weights import differing, expected_key

Patch = Callable[[pytest.MonkeyPatch], None]


def wrong_elements(item: Any) -> int:
    """Weights that differ from the tool's in any bit."""
    layer = item.moe_layers[0]
    return sum(
        differing(weight, item.expected[expected_key(layer, name)])
        for name, weight in Checkpoint.open(item.path).dequantize(layer)
    )


def zeros_by_field(patch: pytest.MonkeyPatch) -> None:
    """One added to each field by itself, so that a borrow is not undone."""

    def read(self: Any, tensor: torch.Tensor, quant: Any, outputs: int, origin: Any) -> Any:
        fields = unpack_last(tensor, quant.num_bits, outputs)
        return ((fields + 1) & ((1 << quant.num_bits) - 1)).t().contiguous()

    patch.setattr(gptq.GPTQ, "zeros_of", read)


def v1_as_v2(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(gptq._CONVENTIONS, "gptq", False)


def no_group_index(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(base, "normalize_g_idx", lambda *args: None)


def awq_in_plain_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(awq, "NIBBLE", tuple(range(8)))


def gate_and_down_swapped(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(expert_names.PROJECTIONS, "w1", "down")
    patch.setitem(expert_names.PROJECTIONS, "w2", "gate")


def zero_points_ignored(patch: pytest.MonkeyPatch) -> None:
    def read(self: Any, tensor: torch.Tensor, quant: Any, outputs: int, origin: Any) -> Any:
        return torch.full((outputs, tensor.shape[1]), quant.implicit_zero, dtype=torch.uint8)

    patch.setattr(compressed_tensors.CompressedTensors, "zeros_of", read)


def rounded_twice(patch: pytest.MonkeyPatch) -> None:
    """Scales cast to another 16-bit type on the way."""
    plain = awq.AWQ.scales_of
    patch.setattr(awq.AWQ, "scales_of", lambda self, t: plain(self, t).bfloat16().to(t.dtype))


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("gptq-v1-w4-g32-asym-deepseekv2", zeros_by_field),
        ("gptq-v1-w4-g32-asym-deepseekv2", v1_as_v2),
        ("gptq-autogptq-w8-g64-asym-mixtral", v1_as_v2),
        ("gptq-v1-w4-g64-sym-actorder-qwen3moe", no_group_index),
        ("ct-w4-g32-sym-actgroup-qwen3moe", no_group_index),
        ("awq-w4-g32-deepseekv3", awq_in_plain_order),
        ("awq-w4-g32-deepseekv3", rounded_twice),
        ("ct-w4-channel-asym-qwen3moe", zero_points_ignored),
    ],
)
def test_a_planted_fault_changes_weights(
    get_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, name: str, fault: Patch
) -> None:
    item = get_checkpoint(name)
    assert wrong_elements(item) == 0
    fault(monkeypatch)
    assert wrong_elements(item) > 100


def test_projections_under_each_others_names_do_not_fit(
    get_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """w1 and w2 swapped: the shapes tell, and the layer is refused."""
    gate_and_down_swapped(monkeypatch)
    (layer,) = Checkpoint.open(get_checkpoint("ct-w4-g128-sym-mixtral").path).layers
    assert layer.status == "refused"
