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


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "name", ["quantize_config.json", "quant_config.json", "model.safetensors.index.json"]
)
def test_a_pipe_or_a_device_in_place_of_json_is_refused_without_waiting(
    tmp_path: Path, name: str
) -> None:
    folder = make_checkpoint(tmp_path)
    os.mkfifo(folder / name)
    assert f"{name}: kind: found a named pipe, expected a regular file" in refusal(folder)
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    assert f"{name}: kind: found a device, expected a regular file" in refusal(folder)
    (folder / name).unlink()
    (folder / name).mkdir()
    assert f"{name}: kind: found a folder" in refusal(folder)


def test_a_huge_json_file_is_refused_unread(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    with (folder / "quantize_config.json").open("wb") as file:
        file.truncate(1 << 40)  # takes no space
    assert "quantize_config.json: size: found " in refusal(folder)


@pytest.mark.timeout(20)
def test_a_file_that_becomes_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    opened = Checkpoint.open(folder)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"found a named pipe, expected a regular file"):
        opened.read_experts(0)


def leave_out(folder: Path, part: str, count: int | None = None) -> list[str]:
    """Take the first ``count`` tensors that have ``part`` in their names out of the index."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    gone = [name for name in index["weight_map"] if part in name][:count]
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if n not in gone}
    path.write_text(json.dumps(index))
    return gone


def test_tensors_that_the_index_leaves_out_are_said_and_accounted_for(tmp_path: Path) -> None:
    folder = Made(layers=2).write(tmp_path, shards=2)
    assert Checkpoint.open(folder).notes == ()
    gone = leave_out(folder, ".layers.1.")
    opened = Checkpoint.open(folder)
    assert [layer.index for layer in opened.layers] == [0]
    (note,) = opened.notes
    assert note.startswith(
        f"{len(gone)} tensors in model-00001-of-00002.safetensors, "
        "model-00002-of-00002.safetensors, not named there in model.safetensors.index.json, "
        "not read: model.layers.1."
    )
    assert note.endswith(f" and {len(gone) - 3} more")
    rows = {row.name: row for row in opened.accounting()}
    for name in gone:
        if "expert" in name:
            assert rows[name].why == "not named in the index: not read"
            assert not rows[name].used


def test_one_tensor_that_the_index_leaves_out_is_named(tmp_path: Path) -> None:
    folder = Made().write(tmp_path, shards=2)
    (name,) = leave_out(folder, ".experts.1.up_proj.qweight", 1)
    opened = Checkpoint.open(folder)
    assert opened.layers[0].status == "refused"
    (note,) = opened.notes
    assert note.startswith("1 tensor in model-0000")
    assert note.endswith(f"not read: {name}")


@pytest.mark.parametrize("spelling", ["./model.safetensors", ".//model.safetensors", "link"])
def test_other_names_of_the_one_file_are_no_second_set(tmp_path: Path, spelling: str) -> None:
    folder = make_checkpoint(tmp_path)
    if spelling == "link":
        spelling = "weights.safetensors"
        (folder / spelling).symlink_to("model.safetensors")
    names = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, spelling)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    opened = Checkpoint.open(folder)
    assert opened.layers[0].status == "quantized"
    if spelling != "weights.safetensors":
        assert opened.notes == ()


def test_hidden_files_are_left_alone(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-32g.safetensors")
    for name in ("gptq_model-4bit-32g.safetensors", "x.safetensors.index.json", "x.bin"):
        (folder / f"._{name}").write_bytes(b"\x00\x05\x16\x07" + bytes(100))
    opened = Checkpoint.open(folder)
    assert opened.layers[0].status == "quantized"
    assert opened.notes == ()


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "model.safetensors.index.json"]
)
def test_a_pointer_of_git_lfs_is_told_from_damage(tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 9\n"
    (folder / name).write_text(pointer)
    message = refusal(folder)
    assert f"{name}: content: found a Git LFS pointer, expected " in message
    assert message.endswith("; run git lfs pull")
