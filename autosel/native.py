"""Builds the C++ of ``kernels/csrc`` with the system compiler and loads it.

The sources have a plain C interface, so no torch headers are needed and a build takes seconds. The
library is kept in the user's cache folder under the hash of everything it was made from: sources,
compiler, flags and the processor's instruction sets.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

import platformdirs

from autosel.errors import UnsupportedError

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


def _build(cxx: str, flags: tuple[str, ...], target: Path) -> None:
    """Compile into a private file and rename: whoever comes second overwrites with equal bytes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / target.name
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
        built.replace(target)


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
    name = f"libautosel-wna16-{_digest(cxx, flags)}.so"
    target = cache_dir() / "native" / name
    try:
        return _built_in(target, cxx, flags)
    except OSError:
        return _built_aside(name, cxx, flags)


def _built_aside(name: str, cxx: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    """For a read-only or foreign cache folder: the library in a folder that does not stay."""
    try:
        with tempfile.TemporaryDirectory(prefix="autosel-", ignore_cleanup_errors=True) as folder:
            return _built_in(Path(folder) / name, cxx, flags)  # once loaded, no file is needed
    except OSError as error:
        raise UnsupportedError(f"CPU kernel: {error}") from None


def _built_in(target: Path, cxx: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    """Build ``target`` unless it is there, and load it; OSError where neither works."""
    try:
        if not target.exists():
            _build(cxx, flags, target)
    except subprocess.TimeoutExpired:
        raise UnsupportedError(
            f"{cxx}: building the CPU kernel: found no end after {_TIMEOUT_S} s"
        ) from None
    library = ctypes.CDLL(str(target))
    library.wna16_workspace_bytes.restype = ctypes.c_int64
    return library
