"""Whatever a file holds, the answer is layers or one line: never another kind of exception."""

from __future__ import annotations

import copy
import json
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from autosel.checkpoint import Checkpoint
from autosel.errors import AutoselError
from tests.checkpoint_builder import Made

ODD = (
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    7,
    10**30,
    -2.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "re:(",
    "re:.*",
    [],
    ["a", 1],
    [[["b"]]],
    {},
    {"a": {"b": None}},
)


def one_line(exc: AutoselError) -> None:
    assert "\n" not in str(exc)


def use_all(folder: Path) -> None:
    """Everything a command may do with a folder."""
    opened = Checkpoint.open(folder)
    opened.accounting()
    for layer in opened.layers:
        assert (layer.problem is not None) == (layer.status == "quantized")
        assert layer.status == "quantized" or layer.reason
        assert "\n" not in layer.reason
        assert not layer.reason.startswith("unexpected")  # a fault of ours
        for use in (
            lambda i=layer.index: opened.router(i),
            lambda i=layer.index: list(opened.dequantize(i)),
            lambda i=layer.index: opened.read_experts(i),
            lambda i=layer.index: opened.read_experts(i, tp_rank=1, tp_size=2),
        ):
            try:
                use()
            except AutoselError as exc:
                one_line(exc)


def survives(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            use_all(folder)
        except AutoselError as exc:
            one_line(exc)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every position inside a JSON value."""
    found = [path] if path else []
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def put(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    changed = copy.deepcopy(value)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = odd
    return changed


FORMATS = ("gptq", "awq", "compressed-tensors")


@pytest.mark.parametrize(
    ("fmt", "stacked"), [*((fmt, False) for fmt in FORMATS), ("compressed-tensors", True)]
)
def test_any_value_of_a_config_may_be_anything(tmp_path: Path, fmt: str, stacked: bool) -> None:
    quant = {
        "gptq": {"dynamic": {r"+:.*experts\.1.*": {"group_size": 32}, r"-:.*attn.*": {}}},
        "awq": {"modules_to_not_convert": ["lm_head", "mlp.gate"]},
        "compressed-tensors": {"ignore": ["lm_head", "re:.*attn.*"], "transform_config": {}},
    }[fmt]
    made = Made(
        fmt=fmt,
        experts=2,
        quant=quant,
        config={
            "model_type": "deepseek_v3",
            "n_group": 1,
            "topk_group": 1,
            "scoring_func": "sigmoid",
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "swiglu_limit": None,
        },
    )
    if stacked:
        made.stack(True)
    folder = made.write(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    use_all(folder)  # so that the changes below start from something that works
    for path in places(config):
        for odd in ODD:
            (folder / "config.json").write_text(json.dumps(put(config, path, odd)))
            survives(folder)


@pytest.mark.parametrize("fmt", FORMATS)
def test_any_tensor_may_have_any_dtype_and_shape(tmp_path: Path, fmt: str) -> None:
    rng = random.Random(1)
    made = Made(fmt=fmt, experts=2, symmetric=False, act_order=fmt != "awq", hidden=96, inter=64)
    folder = made.write(tmp_path)
    good = load_file(folder / "model.safetensors")
    dtypes = (torch.float16, torch.float32, torch.int32, torch.int64, torch.uint8, torch.bool)
    for name, tensor in good.items():
        changes = (
            tensor.flatten(),
            tensor[:0],
            tensor[:1],
            tensor[None],
            tensor.reshape(-1)[0],
            torch.cat([tensor, tensor]),
            tensor.to(rng.choice(dtypes)),
            torch.full_like(tensor, -1),
            torch.zeros_like(tensor),
            tensor * float("nan") if tensor.is_floating_point() else tensor * 0 + 99,
        )
        for changed in changes:
            save_file({**good, name: changed.contiguous()}, folder / "model.safetensors")
            survives(folder)


def test_any_byte_of_a_header_or_index_may_be_damaged(tmp_path: Path) -> None:
    rng = random.Random(2)
    folder = Made(experts=2).write(tmp_path / "good", shards=2)
    for file in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json"):
        raw = (folder / file).read_bytes()
        size = min(len(raw), 4096)
        for _ in range(60):
            spoilt = bytearray(raw)
            spoilt[rng.randrange(size)] = rng.randrange(256)
            copied = shutil.copytree(folder, tmp_path / "bad", dirs_exist_ok=True)
            (copied / file).write_bytes(spoilt)
            survives(copied)
