"""The built library runs as this user: only one that is ours and whole may be loaded."""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from autosel import native
from autosel.errors import UnsupportedError

needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away"
)
needs_users = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no users' numbers here")
if native.compiler() is None:
    pytest.skip("no C++ compiler", allow_module_level=True)

GOOD = 'extern "C" long wna16_workspace_bytes() { return 7; }\n'
EVIL = """#include <cstdio>
extern "C" long wna16_workspace_bytes() { return 666; }
__attribute__((constructor)) static void at_load() { std::fclose(std::fopen("MARKER", "w")); }
"""
STRANGER = 12345


class Cache:
    """A cache folder of its own, and builds of a small library in place of ours."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = root / "cache" / "native"
        self.marker = root / "loaded"
        self.evil_source = root / "evil.cpp"
        self.evil_source.write_text(EVIL.replace("MARKER", str(self.marker)))
        self.source = root / "good.cpp"
        self.source.write_text(GOOD)
        self.builds = 0
        monkeypatch.setenv("AUTOSEL_CACHE", str(root / "cache"))
        (root / "temporary").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(root / "temporary"))
        monkeypatch.setattr(native, "command", self._command)

    def _command(self, cxx: str, flags: tuple[str, ...], out: Path) -> list[str]:
        self.builds += out.name != "out"  # else it is only hashed
        return [cxx, "-shared", "-fPIC", "-o", str(out), str(self.source)]

    def load(self) -> ctypes.CDLL:
        native.build.cache_clear()
        return native.load()

    def libraries(self) -> list[Path]:
        return sorted(self.folder.glob("*.so"))

    def evil(self, name: str) -> Path:
        """A library of somebody else's under the name that ours would be looked for by."""
        self.source, good = self.evil_source, self.source
        made = native._build(str(native.compiler()), (), self.folder, name)
        self.source, self.builds = good, 0
        return made


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cache]:
    yield Cache(tmp_path, monkeypatch)
    native.build.cache_clear()  # else tests that follow would call the small library


def _name(library: Path) -> str:
    return library.stem.rpartition("-")[0]


def test_a_library_is_built_once_and_named_by_its_content(cache: Cache) -> None:
    cache.load()
    (library,) = cache.libraries()
    assert library.stem.endswith("-" + hashlib.sha256(library.read_bytes()).hexdigest())
    assert not native._foreign(library.stat())
    cache.load()
    assert cache.builds == 1
    assert cache.libraries() == [library]


@pytest.mark.parametrize("size", [0, 100, 0.5, -1])
def test_a_library_that_is_not_whole_is_built_again(cache: Cache, size: float) -> None:
    cache.load()
    (library,) = cache.libraries()
    whole = library.read_bytes()
    library.unlink()  # the one that this process has loaded stays as it is
    library.write_bytes(whole[: int(size * len(whole)) if 0 < size < 1 else int(size)])
    library.chmod(0o755)
    assert cache.load().wna16_workspace_bytes() == 7
    assert cache.builds == 2
    assert [file.read_bytes() for file in cache.libraries()] == [whole]
    cache.load()
    assert cache.builds == 2  # repaired


def test_what_has_another_hash_than_its_name_is_removed(cache: Cache) -> None:
    cache.load()
    (library,) = cache.libraries()
    other = library.with_name(f"{_name(library)}-{'0' * 64}.so")
    library.rename(other)
    cache.load()
    assert cache.libraries() == [library]


@needs_root
def test_a_folder_of_another_user_is_not_used(cache: Cache) -> None:
    cache.load()
    (library,) = cache.libraries()
    library.unlink()
    evil = cache.evil(_name(library))
    for place in (evil, cache.folder, cache.folder.parent):
        os.chown(place, STRANGER, STRANGER)
        place.chmod(0o777)
    with pytest.warns(RuntimeWarning, match=r"native: folder: found owner 12345, expected") as told:
        assert cache.load().wna16_workspace_bytes() == 7
    assert len(told) == 1
    assert "\n" not in str(told[0].message)
    assert not cache.marker.exists()
    assert cache.libraries() == [evil]  # nothing of ours is put where others may change it
    aside = cache.folder.parent.parent / "temporary" / f"autosel-{os.geteuid()}"
    assert len([*aside.glob("*.so")]) == 1
    assert not native._foreign(aside.stat())
    with pytest.warns(RuntimeWarning, match="found owner 12345"):
        cache.load()
    assert cache.builds == 1  # kept for the next process
    os.chown(aside, STRANGER, STRANGER)
    with pytest.warns(RuntimeWarning, match="found owner 12345"):
        assert cache.load().wna16_workspace_bytes() == 7  # for now alone
    assert cache.builds == 2


@needs_root
def test_a_file_of_another_user_is_built_again(cache: Cache) -> None:
    cache.load()
    (library,) = cache.libraries()
    library.unlink()
    os.chown(evil := cache.evil(_name(library)), STRANGER, STRANGER)
    assert cache.load().wna16_workspace_bytes() == 7
    assert not cache.marker.exists()
    assert evil not in cache.libraries()


@needs_users
@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_file_that_others_may_change_is_built_again(cache: Cache, mode: int) -> None:
    cache.load()
    (library,) = cache.libraries()
    library.unlink()
    cache.evil(_name(library)).chmod(mode)
    assert cache.load().wna16_workspace_bytes() == 7
    assert not cache.marker.exists()


@needs_users
def test_a_link_is_not_followed(cache: Cache, tmp_path: Path) -> None:
    cache.load()
    (library,) = cache.libraries()
    elsewhere = tmp_path / library.name
    library.rename(elsewhere)
    library.symlink_to(elsewhere)
    cache.load()
    assert cache.builds == 2


@needs_users
def test_a_folder_of_ours_made_under_a_lax_umask_is_closed_to_others(cache: Cache) -> None:
    cache.folder.mkdir(parents=True)
    cache.folder.chmod(0o777)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.load()
    assert cache.folder.stat().st_mode & 0o777 == 0o755
    assert len(cache.libraries()) == 1


def test_systems_without_users_numbers_build_as_well(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "geteuid", raising=False)
    monkeypatch.delattr(os, "O_NOFOLLOW", raising=False)
    cache.load()
    cache.load()
    assert cache.builds == 1


@needs_root
def test_no_private_folder_anywhere_is_a_reason(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache.folder.mkdir(parents=True)
    os.chown(cache.folder, STRANGER, STRANGER)
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with (
        pytest.warns(RuntimeWarning, match="found owner"),
        pytest.raises(UnsupportedError, match="Not a directory"),
    ):
        cache.load()


def test_the_content_is_on_the_disk_before_the_name(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[Path]] = []
    monkeypatch.setattr(os, "fsync", lambda _: seen.append(cache.libraries()))
    cache.load()
    assert seen == [[]]
