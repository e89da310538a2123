"""What the Python API is given, by kind: devices by name or as they are, and numbers of tokens."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autosel.core import Device
from autosel.device import detect
from autosel.errors import AutoselError, field_error
from autosel.layer_arguments import is_whole

#: A device by torch's name, as a :class:`Device` that was detected or stored, or the best one here.
Where = str | torch.device | Device | None


def device_of(where: Where) -> Device:
    """What is known of a device; the best one here when left out."""
    if where is None or isinstance(where, Device):
        return where or detect()
    from autosel.layer_place import place

    return place(where, "device")[1]


def token_count(value: object) -> int:
    """AutoselError for what is no number of tokens."""
    if is_whole(value) and int(value) >= 1:
        return int(value)
    wanted = "a whole number of at least 1"
    raise AutoselError(field_error("tokens", "value", ascii(value)[:80], wanted))


def token_counts(given: object) -> tuple[int, ...]:
    """One number or several; AutoselError for anything else, text included."""
    if isinstance(given, Iterable) and not isinstance(given, str | bytes):
        return tuple(token_count(value) for value in given)
    return () if given is None else (token_count(given),)
