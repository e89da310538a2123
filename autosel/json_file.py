"""Reads the JSON files of a checkpoint folder and says where in the file a bad value stands.

``Infinity`` and ``NaN`` occur in published configs and are read as Python reads them; a field that
is needed then refuses them by its own type. A byte-order mark and UTF-16 are understood.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from json.decoder import JSONDecodeError, JSONDecoder
from pathlib import Path
from typing import Any

from autosel.errors import ConfigError, field_error
from autosel.plain_file import lfs_pointer, not_regular, read_whole

#: Largest JSON file that is read. The index of a model of a million tensors is near 100 MB.
MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class JsonFile:
    """One parsed file whose top level is an object; ``text`` is kept to find line numbers."""

    path: Path
    text: str
    data: dict[str, Any]

    @staticmethod
    def read(path: Path) -> JsonFile:
        """Raises ConfigError in one line: file, line, and what is wrong."""
        raw = _bytes(path)
        try:
            text = raw.decode(json.detect_encoding(raw)).removeprefix("\ufeff")
            data = json.loads(text)
        except JSONDecodeError as exc:
            what = "file ends" if exc.pos >= len(text.rstrip()) else "not valid JSON"
            raise ConfigError(f"{path}:{exc.lineno}: {what}: {exc.msg}") from None
        except UnicodeDecodeError as exc:
            line = raw[: exc.start].count(b"\n") + 1
            raise ConfigError(f"{path}:{line}: not valid {exc.encoding} text") from None
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"{path}: not valid JSON: {exc}") from None
        if not isinstance(data, dict):
            raise ConfigError(
                field_error(f"{path}:1", "top level", type(data).__name__, "an object")
            )
        return JsonFile(path, text, data)

    def where(self, *keys: str) -> str:
        """``FILE:LINE: a.b.c`` of the value under those keys; no line when it is not there."""
        at = locate(self.text, keys)
        line = "" if at is None else f":{self.text.count(chr(10), 0, at) + 1}"
        # A key may be any text, such as a pattern; it must not break the message's one line.
        shown = (key if key.isprintable() else repr(key) for key in keys)
        return f"{self.path}{line}: {'.'.join(shown)}"


def _bytes(path: Path) -> bytes:
    try:
        fault = not_regular(path)
        raw = b"" if fault else read_whole(path, MAX_BYTES)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror or exc}") from None
    if len(raw) > MAX_BYTES:
        fault = field_error(str(path), "size", f"more than {MAX_BYTES} bytes", "fewer")
    fault = fault or lfs_pointer(path, raw, "the JSON file itself")
    if fault:
        raise ConfigError(fault)
    return raw


def locate(text: str, keys: Sequence[str]) -> int | None:
    """Offset of the value under nested object ``keys`` in valid JSON ``text``, or None.

    Of equal keys in one object the last counts, as in :func:`json.loads`.
    """
    decoder = JSONDecoder()
    start: int | None = _skip_space(text, 0)
    for key in keys:
        if start is None or text[start] != "{":
            return None
        found: int | None = None
        pos = _skip_space(text, start + 1)
        while text[pos] != "}":
            name, pos = decoder.raw_decode(text, pos)
            pos = _skip_space(text, _skip_space(text, pos) + 1)  # over the colon
            if name == key:
                found = pos
            _, pos = decoder.raw_decode(text, pos)
            pos = _skip_space(text, pos)
            if text[pos] == ",":
                pos = _skip_space(text, pos + 1)
        start = found
    return start


def _skip_space(text: str, pos: int) -> int:
    while text[pos] in " \t\r\n":
        pos += 1
    return pos


@dataclass(frozen=True)
class Section:
    """An object inside a JSON file, with typed access whose errors name file, line and field."""

    file: JsonFile
    keys: tuple[str, ...]
    data: Mapping[str, Any]

    def where(self, *more: str) -> str:
        return self.file.where(*self.keys, *more)

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def section(self, name: str) -> Section | None:
        """The object under ``name``; None when absent or null."""
        value = self._typed(name, lambda v: isinstance(v, Mapping), "an object")
        return None if value is None else Section(self.file, (*self.keys, name), value)

    def integer(self, name: str) -> int | None:
        """A whole number, or None when absent or null."""
        value = self._typed(
            name, lambda v: isinstance(v, int) and not isinstance(v, bool), "an integer"
        )
        return None if value is None else int(value)

    def integer_of_all(self, name: str) -> int | None:
        """A whole number, also spelt as one per layer (``[8, 8, 8]``) as long as all are equal."""
        value = self.data.get(name)
        if not isinstance(value, list):
            return self.integer(name)
        for item in value:
            if not isinstance(item, int) or isinstance(item, bool) or item != value[0]:
                shown = ", ".join(map(repr, value[:4])) + (", ..." if len(value) > 4 else "")
                raise ConfigError(
                    field_error(
                        self.where(name), "value", f"[{shown}]"[:80], "one integer for all layers"
                    )
                )
        return int(value[0]) if value else None

    def number(self, name: str) -> float | None:
        """A finite number, or None when absent or null."""
        value = self._typed(
            name,
            lambda v: (
                isinstance(v, (int, float)) and not isinstance(v, bool) and abs(v) < float("inf")
            ),
            "a finite number",
        )
        return None if value is None else float(value)

    def boolean(self, name: str) -> bool | None:
        value = self._typed(name, lambda v: isinstance(v, bool), "true or false")
        return None if value is None else bool(value)

    def string(self, name: str) -> str | None:
        value = self._typed(name, lambda v: isinstance(v, str), "a string")
        return None if value is None else str(value)

    def strings(self, name: str) -> tuple[str, ...]:
        """A list of strings, or a list of such lists, flattened; empty when absent or null."""
        value = self._typed(name, lambda v: isinstance(v, list), "a list of strings")
        flat: list[str] = []
        for item in value or ():
            flat += item if isinstance(item, list) else [item]
        for item in flat:
            if not isinstance(item, str):
                raise ConfigError(field_error(self.where(name), "entry", repr(item), "a string"))
        return tuple(flat)

    def first(self, *names: str) -> str | None:
        """Which of several spellings of one field is there; contradicting values are refused."""
        present = [name for name in names if name in self]
        for other in present[1:]:
            if self.data[other] != self.data[present[0]]:
                raise ConfigError(
                    field_error(
                        self.where(other),
                        "value",
                        repr(self.data[other]),
                        f"{self.data[present[0]]!r} as in {present[0]}",
                    )
                )
        return present[0] if present else None

    def _typed(self, name: str, ok: Callable[[Any], bool], expected: str) -> Any:
        value = self.data.get(name)
        if value is not None and not ok(value):
            shown = repr(value) if not isinstance(value, (list, dict)) else type(value).__name__
            raise ConfigError(field_error(self.where(name), "value", shown[:80], expected))
        return value
