"""Streamed safetensors files, read back with the safetensors package."""

import pytest
import torch
from safetensors import safe_open

from autosel.errors import AutoselError
from autosel.tensor_writer import write_tensors


def read(path):
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def test_what_is_written_reads_back_bit_for_bit(tmp_path):
    generator = torch.Generator().manual_seed(1)
    made = {
        # An odd number of 16-bit values before a 32-bit tensor: alignment must still hold.
        "a.weight": torch.randn(3, 5, generator=generator).to(torch.bfloat16),
        "b.weight": torch.randn(4, 2, generator=generator),
        "c.weight": torch.randn(7, 3, generator=generator).to(torch.float16),
        "d.weight": torch.randn(6, 4, generator=generator).t(),  # not contiguous
        "e.weight": torch.empty(0, 4, dtype=torch.bfloat16),
        "f.weight": torch.tensor(3.0, dtype=torch.float64),
    }
    path = tmp_path / "out.safetensors"
    written = write_tensors(path, made.items(), {"format": "pt"})
    found, metadata = read(path)
    assert metadata == {"format": "pt"}
    assert set(found) == set(made) == set(written)
    for name, tensor in made.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor), name
        assert written[name][0] == tuple(tensor.shape)
    assert [p.name for p in tmp_path.iterdir()] == ["out.safetensors"]


def test_tensors_are_aligned_to_their_own_size(tmp_path):
    path = tmp_path / "out.safetensors"
    write_tensors(
        path,
        [("h", torch.zeros(3, dtype=torch.float16)), ("f", torch.zeros(3)), ("g", torch.ones(1))],
    )
    import json

    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    widths = {"F16": 2, "F32": 4}
    assert (8 + size) % 8 == 0
    assert all(v["data_offsets"][0] % widths[v["dtype"]] == 0 for v in header.values())


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([], "found none, expected at least one"),
        ([("a", torch.zeros(2)), ("a", torch.zeros(2))], "a: found two tensors"),
        ([("a", torch.zeros(2, dtype=torch.int8))], "a: found torch.int8"),
    ],
)
def test_what_cannot_be_written_leaves_nothing(tmp_path, tensors, words):
    with pytest.raises(AutoselError, match=words):
        write_tensors(tmp_path / "x.safetensors", tensors)
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_middle_keeps_the_old_file(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")

    def broken():
        yield "a", torch.zeros(1000)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tensors(path, broken())
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize("place", ["missing/x.safetensors", "."])
def test_a_place_that_cannot_be_written_is_one_line(tmp_path, place):
    def never():
        raise AssertionError("asked for tensors before the place was checked")
        yield

    with pytest.raises(AutoselError) as info:
        write_tensors(tmp_path / place, never())
    assert "\n" not in str(info.value)


def test_a_device_is_never_replaced():
    with pytest.raises(AutoselError, match="a device or pipe"):
        write_tensors("/dev/null", [("a", torch.zeros(1))])
