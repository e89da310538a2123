"""Text that is safe to print and JSON that strict readers accept.

Names come from files that strangers wrote, so control characters (terminal escapes among them)
never reach the terminal, and NaN or infinity never reach a JSON reader.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from autosel.safe_text import one_line, printable

__all__ = [
    "bytes_text",
    "jsonable",
    "one_line",
    "percent_text",
    "printable",
    "time_text",
    "to_json",
    "tokens_text",
]


def jsonable(value: Any) -> Any:
    """``value`` in JSON's own types: non-finite floats become null, unknown objects their text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: jsonable(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {jsonable(str(key)): jsonable(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [jsonable(item) for item in value]
    if hasattr(value, "item"):  # a numpy or torch scalar
        return jsonable(value.item())
    return jsonable(os.fspath(value) if hasattr(value, "__fspath__") else str(value))


def to_json(value: Any) -> str:
    """Strict JSON text of ``value``, indented, in ASCII."""
    return json.dumps(jsonable(value), indent=2, allow_nan=False)


def time_text(microseconds: float | None) -> str:
    """``123 us``, ``4.56 ms`` or ``7.89 s``: three significant digits; ``-`` for no time."""
    if microseconds is None or not math.isfinite(microseconds):
        return "-"
    for factor, unit in ((1e6, "s"), (1e3, "ms")):
        if microseconds >= factor * 0.9995:
            return f"{_three(microseconds / factor)} {unit}"
    return f"{_three(microseconds)} us"


def tokens_text(count: int | str) -> str:
    """``1 token``, ``16 tokens``, ``5-8 tokens``."""
    return f"{count} token{'' if str(count) == '1' else 's'}"


def bytes_text(count: float | None) -> str:
    """``640 B``, ``1.50 KiB`` ... ``2.00 TiB``; ``-`` for no size."""
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{_three(size)} {unit}"
        size /= 1024
    return f"{_three(size)} TiB"


def percent_text(fraction: float | None) -> str:
    """``12.3 %``, at least three significant digits from 10 % up; ``-`` for none."""
    if fraction is None or not math.isfinite(fraction):
        return "-"
    percent = fraction * 100 if abs(fraction) >= 5e-4 else 0.0  # no -0.0
    return f"{percent:.1f} %" if abs(percent) < 1000 else f"{float(f'{percent:.2e}'):.0f} %"


def _three(value: float) -> str:
    """Three significant digits without an exponent."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.2e}")  # so that 0.9999 counts as 1
    digits = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{value:.{digits}f}"
