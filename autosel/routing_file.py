"""Recorded routings: the experts that real traffic went to, from a file of topk ids.

``file:PATH`` names a CSV (a row a token, a number a slot), a JSON list of such rows, or a
safetensors file with one integer tensor ``[tokens, top_k]`` (``topk_ids``, where there are more).
What is stored with timings is ``recorded:HASH``, the hash of the ids: the same traffic has the
same key whatever the file is called, and other traffic never has. A key alone can be looked up; to
make a routing of it again the file must have been read in this process.
"""

from __future__ import annotations

import csv
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from autosel.errors import RoutingError, field_error

PREFIX = "file:"
KEY_PREFIX = "recorded:"
#: A larger file is not a list of ids; 10 million tokens of 8 slots in decimal are some 300 MB.
MAX_BYTES = 512 << 20
#: No model has so many experts; keeps a table of something else from being taken for ids.
MAX_EXPERTS = 1 << 16

Ids = npt.NDArray[np.int32]

_read: dict[str, tuple[Ids, str]] = {}  # key -> ids, path


def resolve(kind: str) -> tuple[str, str]:
    """The key and the path of ``file:PATH``, which is read now; of a key the path it came from.

    Any other kind is its own key and has no path. Raises RoutingError, in one line, for a file that
    will not do.
    """
    if kind.startswith(PREFIX):
        path = kind.removeprefix(PREFIX)
        return load(path), path
    return kind, _read[kind][1] if kind in _read else ""


def is_known(kind: str) -> bool:
    """Whether a routing of this kind can be made here; a recording's must have been read."""
    return not kind.startswith(KEY_PREFIX) or kind in _read


def load(path: str) -> str:
    """Read a file of ids and return its key; see :func:`resolve`."""
    ids = _ids(Path(path))
    key = KEY_PREFIX + hashlib.sha256(repr(ids.shape).encode() + ids.tobytes()).hexdigest()[:16]
    _read[key] = (ids, path)
    return key


def recorded(key: str, num_experts: int, top_k: int) -> Ids:
    """The ids of a key, int32 ``[tokens, top_k]``; RoutingError where they do not fit the layer."""
    if key not in _read:
        raise RoutingError(
            field_error(f"routing {key}", "recording", "only its key", f"{PREFIX}PATH")
        )
    ids, path = _read[key]
    where = f"routing file {path}"
    if ids.shape[1] != top_k:
        raise RoutingError(field_error(where, "slots a token", ids.shape[1], top_k))
    top = int(ids.max())
    if top >= num_experts:
        raise RoutingError(field_error(where, "expert", top, f"0 to {num_experts - 1}"))
    return ids


def _ids(path: Path) -> Ids:
    where = f"routing file {path}"
    readers = {".csv": _csv, ".json": _json, ".safetensors": _safetensors}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise RoutingError(field_error(where, "name", repr(path.name), ", ".join(readers)))
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise RoutingError(field_error(where, "bytes", size, f"at most {MAX_BYTES}"))
        rows = reader(path)
    except RoutingError:
        raise
    except (OSError, ValueError, RecursionError, csv.Error, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        found = " ".join(str(reason).split())[:200] or type(error).__name__
        raise RoutingError(field_error(where, "file", found, "rows of expert ids")) from None
    except Exception as error:  # safetensors raises its own, without a common base
        found = " ".join(str(error).split())[:200]
        raise RoutingError(field_error(where, "file", found, "rows of expert ids")) from None
    return _checked(rows, where)


def _checked(rows: Any, where: str) -> Ids:
    try:
        table = np.asarray(rows)
    except ValueError:
        raise RoutingError(
            field_error(where, "rows", "different lengths", "as many ids in each")
        ) from None
    if table.ndim != 2 or table.size == 0:
        raise RoutingError(field_error(where, "shape", list(table.shape), "[tokens, top_k]"))
    if table.dtype.kind not in "iu":
        raise RoutingError(field_error(where, "ids", table.dtype.name, "whole numbers"))
    low, high = int(table.min()), int(table.max())
    if low < 0 or high >= MAX_EXPERTS:
        raise RoutingError(
            field_error(where, "id", low if low < 0 else high, f"0 to {MAX_EXPERTS - 1}")
        )
    ids: Ids = np.ascontiguousarray(table, dtype=np.int32)
    ordered = np.sort(ids, axis=1)
    double = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    if double.any():
        row = int(double.argmax())
        raise RoutingError(
            field_error(where, f"token {row}", ids[row].tolist(), "different experts")
        )
    return ids


def _csv(path: Path) -> list[list[int]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = [row for row in csv.reader(file) if row]
    if rows and not all(cell.strip().isdecimal() for cell in rows[0]):
        rows = rows[1:]  # a header
    return [[int(cell) for cell in row] for row in rows]


def _json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def _safetensors(path: Path) -> Any:
    from safetensors.numpy import load_file

    tensors = load_file(path)
    if "topk_ids" in tensors:
        return tensors["topk_ids"]
    if len(tensors) != 1:
        found = ", ".join(sorted(tensors)[:5]) or "none"
        where = f"routing file {path}"
        raise RoutingError(field_error(where, "tensors", found, "topk_ids, or one alone"))
    return next(iter(tensors.values()))
