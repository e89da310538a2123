"""Python entry points of third parties: refused before the call when their arguments changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from autosel.errors import UnsupportedError, field_error


def call(where: str, function: Callable[..., Any], values: Mapping[str, object]) -> Any:
    """``function(**values)``, leaving out what it has no name for when that value is None.

    Raises UnsupportedError, before anything runs, for an argument without a default that is not
    in ``values``, and for a value (not None) that the function has no place for.
    """
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = {p.name for p in named}
    unknown = [p.name for p in named if p.default is p.empty and p.name not in values]
    dropped = [n for n, v in values.items() if n not in names and v is not None]
    if unknown or dropped:
        found = f"{', '.join(unknown) or 'none'} unknown, {', '.join(dropped) or 'none'} missing"
        raise UnsupportedError(
            field_error(where, "arguments", found, "a signature this version of autosel knows")
        )
    return function(**{name: value for name, value in values.items() if name in names})
