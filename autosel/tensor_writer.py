"""Writes a safetensors file tensor by tensor, so that a large layer never stands in memory.

The format puts the header first, and the header needs every tensor's place; the data therefore goes
to a scratch file beside the target and is copied behind the header at the end. See
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch

from autosel.atomic import atomic_file
from autosel.errors import AutoselError, field_error

#: The format's names of the types that dequantised weights can have.
_TYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}


@dataclass
class _Section:
    """The tensors of one type: where each lies in the scratch file."""

    file: IO[bytes]
    size: int = 0
    places: dict[str, tuple[list[int], int, int]] = field(default_factory=dict)


def write_tensors(
    path: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Write ``(name, tensor)`` pairs to ``path`` and return each name's shape and type.

    The file appears whole or not at all. Tensors may be on any device and of the types bfloat16,
    float16, float32 and float64. Raises AutoselError for another type, a name that comes twice,
    or no tensor at all.
    """
    written: dict[str, tuple[tuple[int, ...], str]] = {}
    with atomic_file(path) as partial:
        sections: dict[torch.dtype, _Section] = {}
        with contextlib.ExitStack() as scratch_files:
            for name, tensor in tensors:
                if tensor.dtype not in _TYPES:
                    expected = "one of " + ", ".join(_TYPES.values())
                    raise AutoselError(field_error(str(path), name, tensor.dtype, expected))
                if name in written:
                    raise AutoselError(field_error(str(path), name, "two tensors", "one"))
                if tensor.dtype not in sections:
                    scratch = scratch_files.enter_context(
                        tempfile.TemporaryFile(dir=partial.parent)
                    )
                    sections[tensor.dtype] = _Section(scratch)
                _append(sections[tensor.dtype], name, tensor)
                written[name] = (tuple(tensor.shape), _TYPES[tensor.dtype])
            if not written:
                raise AutoselError(field_error(str(path), "tensors", "none", "at least one"))
            _assemble(partial, sections, metadata or {})
    return written


def _append(section: _Section, name: str, tensor: torch.Tensor) -> None:
    # The format is little-endian, like every machine torch runs on.
    data = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    section.file.write(data.data)
    section.places[name] = (list(tensor.shape), section.size, section.size + data.nbytes)
    section.size += data.nbytes


def _assemble(
    partial: Path, sections: Mapping[torch.dtype, _Section], metadata: Mapping[str, str]
) -> None:
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    # Wide types first keep every tensor aligned to its own size.
    ordered = sorted(sections.items(), key=lambda item: -item[0].itemsize)
    base = 0
    for dtype, section in ordered:
        for name, (shape, start, end) in section.places.items():
            header[name] = {
                "dtype": _TYPES[dtype],
                "shape": shape,
                "data_offsets": [base + start, base + end],
            }
        base += section.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, section in ordered:
            section.file.seek(0)
            shutil.copyfileobj(section.file, file, 1 << 22)
