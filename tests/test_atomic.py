"""Files that appear whole or not at all."""

import os
import stat

import pytest

from autosel.atomic import atomic_file
from autosel.errors import AutoselError


def test_it_appears_whole_with_ordinary_rights(tmp_path):
    path = tmp_path / "a.txt"
    before = os.umask(0o027)
    try:
        with atomic_file(path) as partial:
            partial.write_text("new")
            assert not path.exists()
            assert partial.parent == tmp_path
    finally:
        os.umask(before)
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write():
        with atomic_file(path) as partial:
            partial.write_text("half")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("folder", "a folder"), ("none/a.txt", "No such file"), ("a" * 300, "too long")],
)
def test_a_place_that_cannot_be_written_is_said_before_the_work(tmp_path, name, words):
    (tmp_path / "folder").mkdir()
    with pytest.raises(AutoselError, match=words), atomic_file(tmp_path / name):
        raise AssertionError("the block ran")


def test_a_device_stays_a_device():
    with pytest.raises(AutoselError, match="a device or pipe"), atomic_file("/dev/null"):
        raise AssertionError("the block ran")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_link_to_an_open_stream_stays_a_link(tmp_path):
    """``/dev/stdout`` leads to a plain file when output is redirected."""
    file, link = tmp_path / "redirected", tmp_path / "stdout"
    with file.open("w") as stream:
        link.symlink_to(f"/proc/self/fd/{stream.fileno()}")
        if not link.is_file():
            pytest.skip("no /proc here")
        with pytest.raises(AutoselError, match="a device or pipe"), atomic_file(link):
            raise AssertionError("the block ran")
    assert link.is_symlink()
