"""Constants of the function between the GEMMs: used, or the layer is refused; never left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autosel.checkpoint import Checkpoint
from autosel.moe_layer import MoELayer
from tests.checkpoint_builder import make_checkpoint as make


def layer(folder: Path, config: dict[str, Any], quant: dict[str, Any]) -> MoELayer:
    return Checkpoint.open(make(folder, config=config, quant=quant)).layers[0]


@pytest.mark.parametrize(
    ("config", "quant", "expected"),
    [
        ({"swiglu_limit": 7.0}, {}, "siluL7"),
        ({"swiglu_limit": 7.0}, {"gemm1_clamp_limit": 5.0}, "siluL5"),
        ({"swiglu_alpha": 1.0, "swiglu_beta": 0.0}, {}, "silu"),
        ({"swiglu_alpha": 1.5, "swiglu_limit": 7.0}, {}, "swigluoai_uninterleaveL7a1.5"),
        ({"swiglu_beta": 1.0, "swiglu_limit": 7.0}, {}, "swigluoai_uninterleaveL7b1"),
        ({"swiglu_limit": None, "swiglu_limits": [0.0, None]}, {}, "silu"),
        ({"hidden_act": "swigluoai"}, {}, "swigluoai"),
        ({"hidden_act": "swigluoai", "swiglu_limit": 7}, {}, "swigluoai"),
        (
            {"hidden_act": "swigluoai", "swiglu_limit": 7},
            {"gemm1_alpha": 1.5},
            "swigluoai_uninterleaveL7a1.5b1",
        ),
        ({"hidden_act": "swiglustep"}, {}, "swiglustep"),
        ({"hidden_act": "swiglustep", "swiglu_limit": 3.0}, {}, "swiglustepL3"),
        ({"hidden_act": "situ", "situ_beta": 2}, {}, "situb2"),
        ({"hidden_act": "situ", "situ_beta": 2, "situ_linear_beta": 3}, {}, "situb2lb3"),
    ],
)
def test_constants_are_read(tmp_path: Path, config: Any, quant: Any, expected: str) -> None:
    found = layer(tmp_path, config, quant)
    assert found.problem is not None, found.reason
    assert found.problem.activation.key == expected


@pytest.mark.parametrize(
    ("config", "quant", "reason"),
    [
        ({"hidden_act": "gelu", "swiglu_limit": 7.0}, {}, "swiglu_limit: value: found 7.0"),
        ({"hidden_act": "gelu", "swiglu_beta": 1}, {}, "swiglu_beta: value: found 1.0"),
        ({"hidden_act": "gelu_new"}, {"gemm1_clamp_limit": 5}, "gemm1_clamp_limit: value: found 5"),
        ({"hidden_act": "swiglustep", "swiglu_alpha": 1.7}, {}, "swiglu_alpha: value: found 1.7"),
        ({"hidden_act": "situ", "situ_beta": 2}, {"gemm1_beta": 3}, "gemm1_beta: value: found 3"),
        ({"hidden_act": "situ"}, {}, "situ_beta: value: found nothing"),
        ({"swiglu_alpha": 1.7}, {}, "expected none without a swiglu_limit"),
        ({}, {"gemm1_alpha": 1.7}, "gemm1_alpha: value: found 1.7"),
        ({}, {"gemm1_beta": 1.0}, "gemm1_beta: value: found 1.0"),
        ({"swiglu_limits": 7.0}, {}, "a number or null for each layer"),
        ({"swiglu_limits": [-7.0, 0]}, {}, "a number or null for each layer"),
        ({"swiglu_limits": ["7", 0]}, {}, "a number or null for each layer"),
        ({"hidden_act": "gelu", "swiglu_limits": [7.0]}, {}, "swiglu_limits: value: found 7.0"),
        ({"swiglu_limit": 0}, {}, "swiglu_limit: value: found 0.0, expected above 0"),
        ({"swiglu_limit": -1.0}, {}, "expected above 0, or null"),
        ({"swiglu_limit": "7"}, {}, "swiglu_limit"),
    ],
)
def test_a_constant_without_a_place_refuses_the_layer(
    tmp_path: Path, config: Any, quant: Any, reason: str
) -> None:
    found = layer(tmp_path, config, quant)
    assert (found.status, found.problem) == ("refused", None)
    assert reason in found.reason
    assert found.reason.startswith(f"{tmp_path / 'config.json'}:")
    assert "\n" not in found.reason


def test_clamps_of_single_layers(tmp_path: Path) -> None:
    """Step-3.5 clamps the last layers alone; the others are plain silu."""
    made = make(tmp_path, layers=3, config={"swiglu_limits": [0.0, None, 7.0]})
    found = [layer.problem for layer in Checkpoint.open(made).layers]
    keys = [problem.activation.key for problem in found if problem is not None]
    assert keys == ["silu", "silu", "swiglustepL7"]
    short = make(tmp_path / "short", layers=2, config={"swiglu_limits": [7.0]})
    first, second = Checkpoint.open(short).layers
    assert first.status == "quantized"
    assert "found none for layer 1, expected a number or null for each layer" in second.reason
