"""What callers may pass to a layer, by kind: one line says what is wrong instead of a traceback.

Asked once when a layer is made, and in calls only where something is unusual already.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, TypeGuard

import torch

from autosel.core import Plan
from autosel.errors import AutoselError, RoutingError, field_error
from autosel.routing_spec import RouterSpec
from autosel.store import Store


def is_whole(value: object) -> TypeGuard[Integral]:
    """A bool is a whole number to Python, and a mistake here."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _names(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str)


#: Option to what is right and its words. None is right where it is the default; what is not named
#: here is checked where it is used.
_KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "path": (lambda v: isinstance(v, str | os.PathLike), "a checkpoint folder"),
    "tp_rank": (is_whole, "a whole number"),
    "tp_size": (is_whole, "a whole number"),
    "ep_rank": (is_whole, "a whole number"),
    "ep_size": (is_whole, "a whole number"),
    "device": (lambda v: isinstance(v, str | int | torch.device), "a torch device"),
    "db": (lambda v: v is None or isinstance(v, str | Path | Store), "a file or an open Store"),
    "require": (_names, "a list of properties"),
    "plan": (lambda v: v is None or isinstance(v, Plan), "a Plan"),
    "routing": (lambda v: isinstance(v, str), "a kind of routing"),
    "router": (lambda v: v is None or isinstance(v, RouterSpec), "a RouterSpec"),
    "correction_bias": (lambda v: v is None or isinstance(v, torch.Tensor), "a tensor"),
    "shared_experts": (lambda v: v is None or callable(v), "a callable"),
}


def check_options(options: Mapping[str, Any]) -> None:
    """AutoselError for an option, or an argument of ``from_checkpoint``, of the wrong kind."""
    for name, (right, words) in _KINDS.items():
        if name in options and not right(options[name]):
            raise AutoselError(field_error("FusedMoE", name, _shown(options[name]), words))


def check_tensors(**given: object) -> None:
    """AutoselError for what is no tensor."""
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            kind = RoutingError if name.startswith("topk") else AutoselError
            raise kind(field_error(name, "type", _shown(value), "a tensor"))


def check_out(out: object, shape: torch.Size) -> None:
    """AutoselError for an ``out`` that cannot take a result of this shape."""
    check_tensors(out=out)
    assert isinstance(out, torch.Tensor)
    if out.shape != shape:
        raise AutoselError(field_error("out", "shape", list(out.shape), list(shape)))


def shared_rows(given: object, y: torch.Tensor) -> torch.Tensor:
    """What shared experts returned as ``[M, H]``, to be added to ``y``."""
    what = "shared experts' output"
    check_tensors(**{what: given})
    assert isinstance(given, torch.Tensor)
    if given.dim() == 0 or given.shape[-1] != y.shape[-1] or given.numel() != y.numel():
        found, wanted = list(given.shape), f"that of x: {y.shape[0]} tokens of {y.shape[-1]}"
        raise AutoselError(field_error(what, "shape", found, wanted))
    if given.device != y.device:
        raise AutoselError(field_error(what, "device", given.device, y.device))
    return given.reshape(y.shape)


def check_token_counts(counts: tuple[object, ...]) -> None:
    """AutoselError for what is no number of tokens; 0 is one."""
    for count in counts:
        if not is_whole(count) or int(count) < 0:
            wanted = "a whole number of tokens"
            raise AutoselError(field_error("FusedMoE.warm_up", "tokens", _shown(count), wanted))


def _shown(value: object) -> str:
    """Short, and of one line, whatever it is."""
    if value is None or isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str) and len(value) <= 80:
        return ascii(value)
    return type(value).__name__
