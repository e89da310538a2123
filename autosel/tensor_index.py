"""Finds the safetensors files of a checkpoint folder and lists their tensors from the headers.

Only headers are read. Files come from outside: shard names may not leave the folder, pickle files
are never opened, and anything that is missing or damaged is said before any weight is used.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from autosel.errors import CheckpointError, field_error
from autosel.json_file import JsonFile
from autosel.plain_file import lfs_pointer, not_regular, read_whole

SINGLE = "model.safetensors"
PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
#: Files and tensors named in a note.
_NAMED = 3
_NUMBERED = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors$")


class TensorInfo(NamedTuple):
    """One tensor of a header: ``dtype`` in safetensors' spelling (``I32``, ``BF16``)."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]


class TensorIndex:
    """Every tensor of a checkpoint folder; ``notes`` are findings that do not stop the reading.

    ``unnamed`` are in files that are read, but the folder's index does not name them there.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, TensorInfo],
        notes: tuple[str, ...],
        unnamed: tuple[TensorInfo, ...] = (),
    ) -> None:
        self.folder = folder
        self.tensors = dict(tensors)
        self.notes = notes
        self.unnamed = unnamed

    @staticmethod
    def open(folder: Path) -> TensorIndex:
        """Raises CheckpointError for missing, unsafe, damaged or contradicting files."""
        notes: list[str] = []
        try:
            index_name, named = _named_tensors(folder, notes)
        except (OSError, RuntimeError) as exc:  # no permission, loops of links, endless names
            raise CheckpointError(f"{folder}: cannot be read: {_one_line(exc)}") from None
        tensors: dict[str, TensorInfo] = {}
        unnamed: list[TensorInfo] = []
        for file, wanted in named.items():
            found = _read_header(folder / file, file)
            for name in wanted if wanted is not None else found:
                if name not in found:
                    raise CheckpointError(
                        f"{folder / file}: tensor {name}: named in the index, missing in the file"
                    )
                if name in tensors:
                    raise CheckpointError(
                        f"{folder}: tensor {name}: found in {tensors[name].file} and in {file}, "
                        "expected in one file"
                    )
                tensors[name] = found[name]
            if wanted is not None:
                known = set(wanted)
                unnamed += [info for name, info in found.items() if name not in known]
        if unnamed:
            notes.append(_unnamed_note(unnamed, index_name))
        return TensorIndex(folder, tensors, tuple(notes), tuple(unnamed))

    @contextmanager
    def reader(self) -> Iterator[TensorReader]:
        """Access to the weights; files stay open, and mapped into memory, only inside."""
        reader = TensorReader(self)
        try:
            yield reader
        finally:
            reader.close()


class TensorReader:
    """Reads tensors on the CPU; what it returns may be a view of a mapped file: never write."""

    def __init__(self, index: TensorIndex) -> None:
        self._index = index
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()

    def get(self, name: str) -> torch.Tensor:
        """The whole tensor."""
        info = self._index.tensors[name]
        tensor: torch.Tensor = self._call(info, lambda file: file.get_tensor(name))
        return tensor

    def get_at(self, name: str, position: int) -> torch.Tensor:
        """``tensor[position]`` of a stacked tensor, reading that part alone."""
        info = self._index.tensors[name]
        tensor: torch.Tensor = self._call(info, lambda file: file.get_slice(name)[position])
        return tensor

    def close(self) -> None:
        self._open.clear()
        self._stack.close()

    def _call(self, info: TensorInfo, read: Any) -> Any:
        path = self._index.folder / info.file
        try:
            if info.file not in self._open:
                self._open[info.file] = self._stack.enter_context(_open(path))
            return read(self._open[info.file])
        except (SafetensorError, OSError, RuntimeError) as exc:
            raise CheckpointError(f"{path}: tensor {info.name}: {_one_line(exc)}") from None


def _unnamed_note(unnamed: list[TensorInfo], index_name: str) -> str:
    files = list(dict.fromkeys(info.file for info in unnamed))
    plural = "s" if len(unnamed) > 1 else ""
    return (
        f"{len(unnamed)} tensor{plural} in {_some(files)}, not named there in {index_name}, "
        f"not read: {_some([info.name for info in unnamed])}"
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _named_tensors(folder: Path, notes: list[str]) -> tuple[str, dict[str, list[str] | None]]:
    """The index's name, if any, and the files to read with the tensors wanted, None for all."""
    if not folder.is_dir():
        kind = "a file" if folder.exists() else "nothing"
        raise CheckpointError(field_error(str(folder), "path", kind, "a checkpoint folder"))
    # Hidden files are the system's, such as the ._NAME that macOS puts beside NAME.
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    weights = [name for name in names if name.endswith(".safetensors")]
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    pickles = [name for name in names if name.lower().endswith(PICKLE_ENDINGS)]
    if not weights and not indexes:
        if pickles:
            raise CheckpointError(
                f"{folder}: weights: found only {', '.join(pickles[:3])}, expected safetensors "
                "files; pickle files can run code and are never loaded"
            )
        raise CheckpointError(
            field_error(str(folder), "weights", "no file", f"{SINGLE} or an index of shards")
        )
    if pickles:
        notes.append(f"not read, pickle: {', '.join(pickles)}")
    if f"{SINGLE}.index.json" in indexes:
        indexes = [f"{SINGLE}.index.json"]
    if len(indexes) > 1:
        raise CheckpointError(field_error(str(folder), "indexes", ", ".join(indexes), "one"))
    if indexes:
        wanted = _read_index(folder, indexes[0])
        if SINGLE in weights and not _is_one_of(folder, SINGLE, wanted):
            # Loaders differ: some prefer the single file, some the index. Neither is asked for.
            raise CheckpointError(
                f"{folder}: found two sets of weights, {SINGLE} and the shards of {indexes[0]}, "
                "expected one; remove the stale one"
            )
        extra = sorted(set(weights) - set(wanted))
        if extra:
            notes.append(f"not read, not named in {indexes[0]}: {', '.join(extra)}")
        return indexes[0], dict(wanted)
    if SINGLE in weights:
        extra = [name for name in weights if name != SINGLE]
        if extra:
            notes.append(f"not read beside {SINGLE}: {', '.join(extra)}")
        return "", {SINGLE: None}
    _require_all_numbers(folder, weights)
    for name in weights:
        _check_file(folder, name)
    return "", dict.fromkeys(weights)


def _is_one_of(folder: Path, name: str, files: Mapping[str, object]) -> bool:
    """Whether it is among the files, also under another name: a link, or one in other case."""
    return name in files or any((folder / name).samefile(folder / file) for file in files)


def _require_all_numbers(folder: Path, weights: list[str]) -> None:
    """``-00001-of-00003`` in a name tells how many shards there must be, index or not."""
    missing = []
    for name in weights:
        match = _NUMBERED.match(name)
        if match:
            count = int(match["count"])
            # A huge count in a hostile name must not build a huge list.
            for number in range(1, min(count, 10_000) + 1):
                expected = f"{match['stem']}-{number:05d}-of-{count:05d}.safetensors"
                if expected not in weights and expected not in missing:
                    missing.append(expected)
    if missing:
        raise CheckpointError(_missing_files(folder, missing))


def _missing_files(folder: Path, missing: list[str]) -> str:
    return f"{folder}: missing {len(missing)} of its files: {', '.join(missing)}"


def _read_index(folder: Path, index_name: str) -> dict[str, list[str]]:
    """The shards of an index with their tensor names, every path checked before any is opened."""
    path = folder / index_name
    index = JsonFile.read(path)
    weight_map = index.data.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            field_error(
                index.where("weight_map"), "value", type(weight_map).__name__, "a filled object"
            )
        )
    named: dict[str, list[str]] = defaultdict(list)
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(
                field_error(f"{path}: {tensor}", "file", repr(file)[:80], "a file name")
            )
        named[file].append(tensor)
    wanted: dict[str, list[str]] = defaultdict(list)
    for file, tensors in named.items():
        _check_name(path, file)
        wanted[PurePosixPath(file).as_posix()] += tensors  # ./x is the file that is listed as x
    missing = [file for file in wanted if not (folder / file).exists()]
    if missing:
        raise CheckpointError(_missing_files(folder, missing))
    for file in wanted:
        _check_file(folder, file)
    return dict(wanted)


def _check_name(index: Path, file: str) -> None:
    """Only plain relative paths below the folder, for both POSIX and Windows readers."""
    posix, windows = PurePosixPath(file), PureWindowsPath(file)
    unsafe = (
        posix.is_absolute()
        or windows.drive
        or windows.root
        or "\\" in file
        or ".." in posix.parts
        or any(ord(char) < 32 for char in file)
    )
    if unsafe:
        raise CheckpointError(
            field_error(str(index), "shard", repr(file), "a relative path inside the folder")
        )
    if not file.endswith(".safetensors"):
        raise CheckpointError(field_error(str(index), "shard", repr(file), "a .safetensors file"))


def _check_file(folder: Path, file: str) -> None:
    """A regular file whose folder lies inside; the file itself may be a link, as in hub caches."""
    path = folder / file
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(
            field_error(str(path), "its folder", path.parent.resolve(), f"inside {folder}")
        )
    _require_regular(path)


def _require_regular(path: Path) -> None:
    fault = not_regular(path)
    if fault:
        raise CheckpointError(fault)


def _read_header(path: Path, file: str) -> dict[str, TensorInfo]:
    try:
        with _open(path) as handle:
            found = {}
            for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
                if not name.isprintable():
                    raise CheckpointError(
                        field_error(str(path), "tensor name", repr(name), "printable characters")
                    )
                part = handle.get_slice(name)
                shape = tuple(part.get_shape())
                found[name] = TensorInfo(name, file, part.get_dtype(), shape)
            return found
    except (OSError, RuntimeError) as exc:  # no permission, no free file descriptor
        raise CheckpointError(f"{path}: cannot be read: {_one_line(exc)}") from None
    except SafetensorError as exc:
        raise CheckpointError(_damage(path, exc)) from None


def _damage(path: Path, exc: Exception) -> str:
    """Why a file has no header; a clone without Git LFS has small stand-ins for the weights."""
    damage = f"{path}: damaged or cut short ({path.stat().st_size} bytes): {_one_line(exc)}"
    return lfs_pointer(path, read_whole(path, 100), "the weights themselves") or damage


def _open(path: Path) -> Any:
    """The file's tensors; safetensors and torch open names in UTF-8 only, POSIX has others too."""
    try:
        os.fsencode(path).decode("utf-8")  # of the bytes: the process's own encoding may be ASCII
    except UnicodeError:
        raise CheckpointError(
            field_error(str(path), "path", "one that is not UTF-8", "one that safetensors opens")
        ) from None
    _require_regular(path)
    with path.open("rb"):  # safetensors says "no such file" of one that may not be read
        return safe_open(path, framework="pt")


def _one_line(exc: Exception) -> str:
    reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
    return " ".join(str(reason).split())
