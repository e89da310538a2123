"""What a user of the vLLM plugin can say: on or off by environment, the rest in vLLM's own config.

``--additional-config '{"autosel": {"db": "/path/autosel.db"}}'`` is vLLM's place for plugins; it is
part of the key of its compile cache.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autosel.core import check_properties
from autosel.errors import AutoselError, field_error

#: Switches the plugin on; vLLM loads every plugin that is installed, so being there says nothing.
SWITCH = "AUTOSEL_VLLM"
KEY = "autosel"

_ON, _OFF = ("1", "on", "true", "yes"), ("", "0", "off", "false", "no")


def switched_on(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether :data:`SWITCH` says so; AutoselError for a word that is neither yes nor no."""
    word = environ.get(SWITCH, "").strip().lower()
    if word in _ON:
        return True
    if word not in _OFF:
        raise AutoselError(field_error("environment", SWITCH, repr(word), "1 or 0"))
    return False


@dataclass(frozen=True, slots=True)
class Options:
    """The ``autosel`` entry of vLLM's additional config; nothing has to be given.

    db        database file with the decisions; the user's own when left out (``AUTOSEL_DB``)
    model     folder of the checkpoint where it is not the one vLLM was given
    allow_a8  may a decision whose winner quantises activations to 8 bits be used
    routing   kind of routing of the decisions that are looked up
    require   properties that whoever serves must be certified for
    """

    db: str | None = None
    model: str | None = None
    allow_a8: bool = False
    routing: str = "uniform"
    require: tuple[str, ...] = ()

    @staticmethod
    def of(additional_config: Any) -> Options:
        """Read vLLM's ``additional_config``; AutoselError for what is not understood."""
        if not isinstance(additional_config, dict):
            found = type(additional_config).__name__
            raise AutoselError(field_error("vLLM", "additional_config", found, "a dict"))
        given = additional_config.get(KEY, {})
        where = f"additional_config[{KEY!r}]"
        if not isinstance(given, dict):
            raise AutoselError(field_error(where, "value", type(given).__name__, "an object"))
        kinds = {"db": str, "model": str, "allow_a8": bool, "routing": str, "require": list}
        for name, value in given.items():
            if name not in kinds:
                raise AutoselError(field_error(where, "option", repr(name), ", ".join(kinds)))
            if not isinstance(value, kinds[name]):
                raise AutoselError(field_error(where, name, repr(value), kinds[name].__name__))
        named = [str(name) for name in given.get("require", ())]
        return Options(**{**given, "require": check_properties(named)})
