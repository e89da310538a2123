"""A checkpoint of more layers than the fixtures have: one layer of a real one, repeated."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file


def repeat_layer(source: Path, folder: Path, count: int) -> Path:
    """``folder`` with ``count`` copies of layer 0 of ``source``, in one file."""
    folder.mkdir()
    tensors = {}
    for file in source.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if ".layers." not in name:
                tensors[name] = tensor
            elif ".layers.0." in name:
                for number in range(count):
                    tensors[name.replace(".layers.0.", f".layers.{number}.")] = tensor.clone()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": count}))
    for extra in source.glob("quant*.json"):
        shutil.copy(extra, folder)
    return folder
