"""A recipe for weights: its problem without reading them, and the same after."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel.checkpoint import Checkpoint
from autosel.errors import AutoselError, CheckpointError, UnsupportedError
from autosel.sources import CheckpointSource

SPLITS: list[dict[str, Any]] = [
    {},
    {"tp_size": 2},
    {"tp_size": 2, "tp_rank": 1},
    {"tp_size": 4, "tp_rank": 3},
    {"ep_size": 2, "ep_rank": 1},
    {"act_dtype": "float16"},
]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_the_problem_known_beforehand_is_the_one_of_the_weights(
    checkpoint: Any, split: dict[str, Any]
) -> None:
    """Every real checkpoint: a sweep's key and a later look-up's key are one and the same."""
    for layer in checkpoint.moe_layers:
        source = CheckpointSource(str(checkpoint.path), layer, **split)
        experts = source.load()
        assert source.problem == experts.problem
        assert source.problem.key == experts.problem.key
        assert checkpoint.name in source.label


def test_what_is_loaded_is_what_the_checkpoint_reads(get_checkpoint: Any) -> None:
    found = get_checkpoint("ct-w4-g128-sym-mixtral")
    source = pickle.loads(pickle.dumps(CheckpointSource(str(found.path), 0)))
    experts = source.load("cpu")
    direct = Checkpoint.open(found.path).read_experts(0)
    for ours, theirs in ((experts.w13, direct.w13), (experts.w2, direct.w2)):
        assert ours.tensors.keys() == theirs.tensors.keys()
        for name, tensor in ours.tensors.items():
            assert torch.equal(tensor, theirs.tensors[name])


def test_missing_folders_layers_and_splits_are_refused(get_checkpoint: Any, tmp_path: Path) -> None:
    path = str(get_checkpoint("ct-w4-g128-sym-mixtral").path)
    with pytest.raises(AutoselError):
        _ = CheckpointSource(str(tmp_path / "nowhere"), 0).problem
    with pytest.raises(CheckpointError, match="found 7, expected one of 0"):
        _ = CheckpointSource(path, 7).problem
    with pytest.raises(UnsupportedError, match=r"128.*multiple of 3"):
        _ = CheckpointSource(path, 0, tp_size=3).problem


def test_a_changed_folder_is_read_anew(get_checkpoint: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(get_checkpoint("ct-w4-g128-sym-mixtral").path, folder)
    source = CheckpointSource(str(folder), 0)
    assert source.problem.act_dtype == "bfloat16"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = "float16"
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    assert source.problem.act_dtype == "float16"
