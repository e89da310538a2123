"""Builds the C++ of ``kernels/csrc`` with the system compiler and loads it.

The sources have a plain C interface, so no torch headers are needed and a build takes seconds. The
library is kept in the user's cache folder under the hash of everything it was made from (sources,
compiler, flags and the processor's instruction sets) and the hash of its content. It runs as this
user, so only one that nobody else can have written, and that is whole, is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import warnings
from importlib import resources
from pathlib import Path

import platformdirs

from autosel.errors import UnsupportedError, field_error

SOURCES = (
    "wna16_moe.cpp",
    "wna16_layer.h",
    "wna16_act.h",
    "wna16_amx.h",
    "wna16_amx_emulated.h",
    "wna16_dot.h",
    "wna16_int8.h",
    "wna16_interface.h",
    "wna16_vec.h",
)
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-Wno-psabi")
_TIMEOUT_S = 300


def compiler() -> str | None:
    """The C++ compiler to use: ``$CXX`` or the first of the usual names on PATH."""
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _source_dir() -> Path:
    return Path(str(resources.files("autosel"))) / "kernels" / "csrc"


def host_arch() -> str:
    """The compiler flag for exactly this processor's instruction sets."""
    return "-mcpu=native" if os.uname().machine == "aarch64" else "-march=native"


def command(cxx: str, flags: tuple[str, ...], out: Path) -> list[str]:
    """The compiler call that makes the library ``out``."""
    return [cxx, *_FLAGS, *flags, "-fopenmp", "-o", str(out), str(_source_dir() / SOURCES[0])]


def _digest(cxx: str, flags: tuple[str, ...]) -> str:
    """Hash of everything the library depends on."""
    state = hashlib.sha256()
    for name in SOURCES:
        state.update((_source_dir() / name).read_bytes())
    version = subprocess.run([cxx, "--version"], capture_output=True, check=False, timeout=60)
    state.update(version.stdout)
    state.update(repr(command(cxx, flags, Path("out"))[1:]).encode())
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(errors="replace").splitlines()
        sets = [line for line in lines if line.startswith(("flags", "Features"))]
        state.update("".join(sets[:1]).encode())  # instruction sets of the first core
    return state.hexdigest()[:20]


def cache_dir() -> Path:
    """Folder of built libraries: ``$AUTOSEL_CACHE`` or the user's cache folder."""
    override = os.environ.get("AUTOSEL_CACHE")
    return Path(override) if override else Path(platformdirs.user_cache_dir("autosel"))


class _ForeignError(Exception):
    """The folder is not only ours to write, in one line: what lies there may be anybody's code."""


def _foreign(status: os.stat_result) -> str | None:
    """Who else may change this, or None. Systems without users' numbers keep folders private."""
    if not hasattr(os, "geteuid"):
        return None
    if status.st_uid not in (0, os.geteuid()):
        return f"owner {status.st_uid}"
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return f"mode {stat.S_IMODE(status.st_mode):o}" if others else None


def _private(folder: Path) -> None:
    """Make the folder, or raise _ForeignError where others may write to it."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    status = folder.stat()
    if hasattr(os, "geteuid") and status.st_uid == os.geteuid() and _foreign(status):
        # Made under a lax umask. Files of others that are in it are told by their owner.
        folder.chmod(stat.S_IMODE(status.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
        status = folder.stat()
    found = _foreign(status)
    if found:
        expected = "a folder that only this user can write to"
        raise _ForeignError(field_error(f"CPU kernel: {folder}", "folder", found, expected))


def _is_whole(library: Path) -> bool:
    """Whether the file is ours and has the hash that its name ends with.

    Loading half a library ends the process, and loading somebody else's runs it.
    """
    try:
        descriptor = os.open(library, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            regular = stat.S_ISREG(status.st_mode) and not _foreign(status)
            return regular and library.stem.endswith(f"-{_content_hash(file.read())}")
    except OSError:
        return False


def _content_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _build(cxx: str, flags: tuple[str, ...], folder: Path, name: str) -> Path:
    """Compile into a private file and rename: whoever comes second overwrites with equal bytes."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / "library.so"
        done = subprocess.run(
            command(cxx, flags, built),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
            raise UnsupportedError(f"{cxx}: building the CPU kernel failed: {lines[0].strip()}")
        built.chmod(0o755)
        with built.open("rb+") as file:
            target = folder / f"{name}-{_content_hash(file.read())}.so"
            os.fsync(file.fileno())  # a power cut must not leave the name without the content
        return built.replace(target)


def load() -> ctypes.CDLL:
    """The library for this processor; raises UnsupportedError with the reason for none."""
    return build((host_arch(),))


@functools.cache
def build(flags: tuple[str, ...]) -> ctypes.CDLL:
    """The library built with ``flags`` (instruction sets, sanitizers), from the cache or anew."""
    import torch  # noqa: F401  # loads its OpenMP runtime first, so that both share one thread pool

    cxx = compiler()
    if cxx is None:
        raise UnsupportedError(
            "CPU kernel: found no C++ compiler, required g++ or clang++ (or CXX)"
        )
    name = f"libautosel-wna16-{_digest(cxx, flags)}"
    for place in (_usual, _aside):
        try:
            return _built_in(place(), name, cxx, flags)
        except _ForeignError as error:
            told = f"{error}; it is kept elsewhere, as long as temporary files stay"
            warnings.warn(told, RuntimeWarning, stacklevel=3)
        except OSError:
            pass
    return _built_for_now(name, cxx, flags)


def _usual() -> Path:
    return cache_dir() / "native"


def _aside() -> Path:
    """Where a cache folder that is read-only or somebody else's, such as one that a container
    mounts, does not make every process build anew."""
    user = os.geteuid() if hasattr(os, "geteuid") else "user"
    return Path(tempfile.gettempdir()) / f"autosel-{user}"


def _built_for_now(name: str, cxx: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    """The library in a folder that does not stay, where there is none that may keep it."""
    try:
        with tempfile.TemporaryDirectory(prefix="autosel-", ignore_cleanup_errors=True) as folder:
            return _built_in(Path(folder), name, cxx, flags)  # once loaded, no file is needed
    except (OSError, _ForeignError) as error:
        raise UnsupportedError(f"CPU kernel: {error}") from None


def _built_in(folder: Path, name: str, cxx: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    """The library of ``folder``, built where no whole one is; OSError where neither works."""
    _private(folder)
    found = sorted(folder.glob(f"{name}-*.so"))
    whole = [library for library in found if _is_whole(library)]
    try:
        target = whole[0] if whole else _build(cxx, flags, folder, name)
    except subprocess.TimeoutExpired:
        raise UnsupportedError(
            f"{cxx}: building the CPU kernel: found no end after {_TIMEOUT_S} s"
        ) from None
    for damaged in set(found) - {*whole, target}:
        with contextlib.suppress(OSError):
            damaged.unlink()
    library = ctypes.CDLL(str(target))
    library.wna16_workspace_bytes.restype = ctypes.c_int64
    return library
