"""The configuration lists of humming-kernels, computed once on a machine and kept in files.

For one GEMM and kind of kernel the package's heuristics are asked for some 800 numbers of rows:
2.8 to 4.8 s of one core (EPYC Zen 4; release 0.1.19, H200, 128 experts of 2048 x 768, int4), four
lists a layer and two more for batches. Kept in memory alone they would be computed again in each
process, of which a sweep has one that calls the kernels and up to 64 that compile them.

A file is made for everything that a list depends on: the package's sources, the description of the
layer, the kind, and what the package knows of the device. It is a matter of speed alone: where it
cannot be read, written or locked, the list is computed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from autosel.atomic import atomic_file
from autosel.backends import _package
from autosel.backends._humming_offline import KNOWN, missed
from autosel.errors import AutoselError, UnsupportedError, field_error
from autosel.native import cache_dir

DISTRIBUTION = "humming-kernels"
_FORMAT = 1
#: How long another process is waited for before the list is computed here as well. One that died
#: has no lock any more, so this is for one that is stuck; where eight processes shared two busy
#: cores, a list took 30 s. Counted in looks and not by the clock: helpers are stopped while
#: something is timed, and would all be late when they go on.
WAIT_S = 60.0
LOOK_S = 0.05
#: Facts of the device that the heuristics of some architectures read and that only a process which
#: has opened it knows. Cards of one name can differ in them (the memory of GeForce cards does).
_FURTHER = (
    "max_threads_per_block",
    "l1_cache_size",
    "l2_cache_size",
    "default_smem_size",
    "sm_clock_khz",
    "memory_bandwidth_gbps",
    "tensorcore_tops",
)

#: ``[low, high, configuration]`` each, for ``low < rows <= high``, in order.
Choices = list[Any]
#: The package's ``get_heuristics_config``.
Heuristics = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Asked:
    """One list: the package's description of a GEMM and the kind of kernel."""

    layer: Any
    kind: str


def choices(heuristics: Heuristics, asked: Asked, meanwhile: Iterable[Asked] = ()) -> Choices:
    """The list, as JSON gives it back.

    While another process computes it, those of ``meanwhile`` that nobody is at are computed here,
    one after the other, for whoever asks for them next. Raises what the package raises.
    """
    others = iter(meanwhile)
    for _ in range(round(WAIT_S / LOOK_S)):
        found = _kept(heuristics, asked)
        if found is not None:
            return found
        other = next(others, None)
        if other is None:
            time.sleep(LOOK_S)
            continue
        with contextlib.suppress(Exception):  # who needs it will meet the same
            _kept(heuristics, other)
    return _made(heuristics, asked, _file(asked))


def _kept(heuristics: Heuristics, asked: Asked) -> Choices | None:
    """From its file, else computed and left there; None while another process computes it."""
    file = _file(asked)
    found = None if file is None else file.read()
    if file is None or found is not None:
        return found or _made(heuristics, asked, None)
    with contextlib.ExitStack() as held:
        try:
            file.path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(file.path.with_suffix(".lock"), timeout=0))
        except Timeout:
            return None
        except (OSError, NotImplementedError):  # no such folder to be had, or no locks in it
            return _made(heuristics, asked, None)
        # Between the look and the lock another process may have come to its end.
        return file.read() or _made(heuristics, asked, file)


def _made(heuristics: Heuristics, asked: Asked, file: _File | None) -> Choices:
    missed.clear()
    made = heuristics(
        layer_config=asked.layer,
        use_f16_accum=False,
        use_batch_invariant=False,
        gemm_type=asked.kind,
    )
    if missed:  # and the package went on without: not the list that the device itself would get
        what = ", ".join(sorted(missed))
        raise UnsupportedError(field_error("humming", "device's facts", what, ", ".join(KNOWN)))
    found: Choices = json.loads(json.dumps(made))
    if file is not None:
        file.write(found)
    return found


@dataclass(frozen=True)
class _File:
    """Where a list is kept, what it is made for, and the further facts as this process knows them
    (none where it has not opened the device)."""

    path: Path
    made_for: dict[str, Any]
    further: dict[str, Any] | None

    def read(self) -> Choices | None:
        """None where there is none, or a damaged or foreign one, which is replaced."""
        try:
            data = json.loads(self.path.read_bytes())
            made_for, further, found = data["made_for"], data["further"], data["choices"]
            whole = data["sha256"] == _sha256(found)
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        if made_for != self.made_for or not whole or not _is_list(found):
            return None
        # A list that was made without them did not need them.
        same = further is None or self.further is None or further == self.further
        return list(found) if same else None

    def write(self, found: Choices) -> None:
        if not _is_list(found):  # a release of another shape; its user says what is wrong with it
            return
        data = {
            "made_for": self.made_for,
            "further": self.further,
            "choices": found,
            "sha256": _sha256(found),
        }
        with contextlib.suppress(OSError, AutoselError), atomic_file(self.path) as partial:
            partial.write_text(json.dumps(data), encoding="utf-8")


def _file(asked: Asked) -> _File | None:
    """None where what the list depends on is not known."""
    where = f"package {DISTRIBUTION}, humming.device"
    try:
        device: Any = _package.member(where, "humming.device", "DeviceInfo", "a class")()
        facts = {name: getattr(device, name) for name in KNOWN}
        further = {name: getattr(device, name, None) for name in _FURTHER}
        made_for = {
            "format": _FORMAT,
            "package": _sources(),
            "layer": asked.layer.to_str(),
            "kind": asked.kind,
            # as autosel spells the names of devices
            "device": {**facts, "name": " ".join(str(facts["name"]).split())},
            # The heuristics of some architectures prefer other kernels in the package's own tests.
            "tests": [
                os.environ.get("HUMMING_TEST_TUNING_SOURCE"),
                "PYTEST_CURRENT_TEST" in os.environ,
            ],
        }
        path = cache_dir() / "humming" / f"{_sha256(made_for)[:32]}.json"
    except Exception:  # another release, or a driver that does not answer: without a file then
        return None
    opened = any(value is not None for value in further.values())
    return _File(path, made_for, further if opened else None)


@functools.cache
def _sources() -> str:
    """Version and hash of the package's Python sources, which also tells an edited copy.

    5 ms for the 77 files of release 0.1.19. Raises where neither is there to tell.
    """
    spec = importlib.util.find_spec("humming")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = sorted(
        (path.relative_to(f).as_posix(), path) for f in folders for path in f.rglob("*.py")
    )
    state = hashlib.sha256()
    for name, path in files:
        content = path.read_bytes()
        state.update(f"{name} {len(content)}\n".encode() + content)
    try:
        version = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:  # a folder on the path
        if not files:
            raise
        version = "no version"
    return f"{version} {state.hexdigest()}"


def unpackaged() -> Mapping[str, str]:
    """The hash of a Humming that lies in a folder on the path and is not installed."""
    try:
        content = _sources().rpartition(" ")[2]
    except metadata.PackageNotFoundError:
        return {}
    return {DISTRIBUTION: f"sha256:{content[:20]}"}


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _is_list(found: Any) -> bool:
    """Intervals of rows one behind the other, each with a block of positive sizes."""
    if not isinstance(found, list) or not found:
        return False
    end = 0
    for entry in found:
        if not isinstance(entry, list) or len(entry) != 3:
            return False
        low, high, chosen = entry
        block = chosen.get("block_shape") if isinstance(chosen, dict) else None
        if not isinstance(block, list) or len(block) != 3:
            return False
        if not all(type(n) is int for n in (low, high, *block)) or min(block) < 1:
            return False
        if not low == end < high:
            return False
        end = high
    return True
