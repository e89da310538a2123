"""The checkpoint formats: one file a format, each with one object named ``FORMAT``.

A third party adds one through the entry-point group ``autosel.formats``.
"""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from autosel.errors import ConfigError, field_error

if TYPE_CHECKING:
    from autosel.formats.base import Format
    from autosel.json_file import Section

ENTRY_POINT_GROUP = "autosel.formats"


@cache
def all_formats() -> tuple[Format, ...]:
    """Every format that can stand on disk, the built-in ones first."""
    modules = (
        importlib.import_module(f"{__name__}.{info.name}")
        for info in pkgutil.iter_modules(__path__)
    )
    found: list[Format] = [module.FORMAT for module in modules if hasattr(module, "FORMAT")]
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            found.append(entry.load())
        except Exception as exc:  # another package's fault must not stop the built-in formats
            warnings.warn(f"format {entry.name!r} ({entry.value}): {exc}", stacklevel=2)
    return tuple(found)


def find_format(config: Section) -> Format:
    """The format of a quantisation config; raises ConfigError when none knows it."""
    for candidate in all_formats():
        if candidate.matches(config):
            return candidate
    method = config.data.get("quant_method", config.data.get("method"))
    known = ", ".join(candidate.name for candidate in all_formats())
    raise ConfigError(
        field_error(config.where("quant_method"), "method", repr(method), f"one of {known}")
    )
