"""Files that are missing, unsafe, damaged or stale: said in one line before anything is used."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from autosel.checkpoint import Checkpoint
from autosel.errors import AutoselError, CheckpointError
from tests.checkpoint_builder import Made, make_checkpoint


def refusal(folder: Path) -> str:
    """The message of the refusal: one line, no matter what is wrong."""
    with pytest.raises(AutoselError) as exc:
        Checkpoint.open(folder)
    message = str(exc.value)
    assert "\n" not in message
    return message


def edit_index(folder: Path, **entries: str) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"].update(entries)
    path.write_text(json.dumps(index))


def test_missing_shards_are_all_listed(tmp_path: Path) -> None:
    folder = Made().write(tmp_path, shards=4)
    (folder / "model-00002-of-00004.safetensors").unlink()
    (folder / "model-00004-of-00004.safetensors").unlink()
    message = refusal(folder)
    assert "missing 2" in message
    assert "model-00002-of-00004.safetensors, model-00004-of-00004.safetensors" in message


def test_missing_shards_are_noticed_without_an_index(tmp_path: Path) -> None:
    folder = Made().write(tmp_path, shards=3)
    (folder / "model.safetensors.index.json").unlink()
    assert len(Checkpoint.open(folder).layers) == 1
    (folder / "model-00003-of-00003.safetensors").unlink()
    assert "missing 1 of its files: model-00003-of-00003.safetensors" in refusal(folder)


def test_empty_folder_and_no_folder(tmp_path: Path) -> None:
    assert "weights: found no file" in refusal(tmp_path)
    assert "found nothing, expected a checkpoint folder" in refusal(tmp_path / "absent")
    (tmp_path / "file").write_text("x")
    assert "found a file" in refusal(tmp_path / "file")


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "sub/../../outside.safetensors",
        "/etc/outside.safetensors",
        "..\\outside.safetensors",
        "sub\\outside.safetensors",
        "C:outside.safetensors",
        "C:\\outside.safetensors",
        "//host/share/outside.safetensors",
        "out\x00side.safetensors",
    ],
)
def test_shard_names_that_leave_the_folder_are_refused_before_any_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = Made().write(tmp_path / "model", shards=2)
    save_file({"model.x": torch.zeros(1)}, tmp_path / "outside.safetensors")
    edit_index(folder, **{"model.x": name})
    opened: list[object] = []
    monkeypatch.setattr("autosel.tensor_index.safe_open", lambda *a, **k: opened.append(a))
    message = refusal(folder)
    assert repr(name) in message
    assert "relative path inside the folder" in message
    assert not opened


def test_a_shard_in_a_subfolder_is_read(tmp_path: Path) -> None:
    folder = Made().write(tmp_path, shards=2)
    (folder / "part").mkdir()
    (folder / "model-00002-of-00002.safetensors").rename(folder / "part" / "b.safetensors")
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace("model-00002-of-00002", "part/b"))
    experts = Checkpoint.open(folder).read_experts(0)
    assert experts.problem.num_experts == 4


def test_links_as_in_a_hub_cache_are_followed_and_a_linked_folder_is_not(tmp_path: Path) -> None:
    folder = Made().write(tmp_path / "snapshot")
    blob = tmp_path / "blob"
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to(blob)
    assert Checkpoint.open(folder).layers[0].status == "quantized"
    other = Made().write(tmp_path / "other", shards=2)
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / "b.safetensors"
    (other / "model-00002-of-00002.safetensors").rename(moved)
    (other / "part").symlink_to(tmp_path / "elsewhere")
    path = other / "model.safetensors.index.json"
    path.write_text(path.read_text().replace("model-00002-of-00002", "part/b"))
    assert "expected inside" in refusal(other)


def test_a_fifo_is_refused_without_waiting(tmp_path: Path) -> None:
    folder = Made().write(tmp_path)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    assert "regular file" in refusal(folder)


def test_index_entries_must_be_safetensors(tmp_path: Path) -> None:
    folder = Made().write(tmp_path, shards=2)
    (folder / "more.bin").write_bytes(b"x")
    edit_index(folder, **{"model.x": "more.bin"})
    assert "expected a .safetensors file" in refusal(folder)


class Marker:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickle_is_never_loaded(tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(tmp_path / "model")
    marker = tmp_path / "ran"
    (folder / name).write_bytes(pickle.dumps(Marker(marker)))
    opened = Checkpoint.open(folder)
    opened.read_experts(0)
    assert name in opened.notes[0]
    (folder / "model.safetensors").unlink()
    message = refusal(folder)
    assert name in message
    assert "expected safetensors" in message
    assert not marker.exists()
    pickle.loads((folder / name).read_bytes())  # the trap is a real one
    assert marker.exists()


@pytest.mark.parametrize("keep", [0, 4, 8, 200, -1])
def test_files_cut_short_are_refused_by_name(tmp_path: Path, keep: int) -> None:
    folder = make_checkpoint(tmp_path)
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[:keep])
    message = refusal(folder)
    assert "model.safetensors: damaged or cut short" in message


def test_a_header_that_claims_too_much_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes((1 << 62).to_bytes(8, "little") + file.read_bytes()[8:])
    assert "damaged" in refusal(folder)


def test_index_names_a_tensor_that_its_file_lacks(tmp_path: Path) -> None:
    folder = Made().write(tmp_path, shards=2)
    edit_index(folder, **{"model.x": "model-00001-of-00002.safetensors"})
    message = refusal(folder)
    assert "model-00001-of-00002.safetensors: tensor model.x" in message


def test_one_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = Made().write(tmp_path, shards=2)
    (folder / "model.safetensors.index.json").unlink()
    first = load_file(folder / "model-00001-of-00002.safetensors")
    name, tensor = next(iter(first.items()))
    second = load_file(folder / "model-00002-of-00002.safetensors")
    save_file({**second, name: tensor}, folder / "model-00002-of-00002.safetensors")
    message = refusal(folder)
    assert name in message
    assert "expected in one file" in message


def test_two_sets_of_weights_are_refused(tmp_path: Path) -> None:
    folder = Made().write(tmp_path, shards=2)
    Made(bits=8).write(folder)
    assert "found two sets of weights" in refusal(folder)


def test_stale_shards_beside_the_index_are_noted_and_not_read(tmp_path: Path) -> None:
    folder = Made().write(tmp_path, shards=2)
    save_file({"model.layers.0.mlp.experts.0.x": torch.zeros(1)}, folder / "old.safetensors")
    opened = Checkpoint.open(folder)
    assert "old.safetensors" in opened.notes[0]
    assert all(row.file != "old.safetensors" for row in opened.accounting())


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_a_bad_index_is_one_line(tmp_path: Path, text: str) -> None:
    folder = Made().write(tmp_path, shards=2)
    (folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refusal(folder)


def test_a_file_changed_after_opening_is_reported(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    opened = Checkpoint.open(folder)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor "):
        opened.read_experts(0)


def test_odd_paths_and_names_are_one_line(tmp_path: Path) -> None:
    folder = Made().write(tmp_path / "long", shards=2)
    edit_index(folder, **{"model.x": "x" * 5000 + ".safetensors"})
    assert "cannot be read" in refusal(folder)
    folder = Made().write(tmp_path / "loop", shards=2)
    (folder / "a").symlink_to(folder / "b")
    (folder / "b").symlink_to(folder / "a")
    edit_index(folder, **{"model.x": "a/x.safetensors"})
    refusal(folder)
    made = Made()
    made.tensors["model.layers.0.mlp.experts.0.up_proj.\x1b[31m\nqweight"] = torch.zeros(1)
    assert "printable" in refusal(made.write(tmp_path / "names"))
