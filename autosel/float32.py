"""How exactly this process multiplies float32: torch's settings, made exact for a while and kept.

torch has two interfaces to them. The old one is a word for all products. The new one is a tree
(all; cuda, mkldnn; their operations) in which ``none`` takes over what stands above. The word
cannot be read once the tree contradicts it, and setting it writes into the tree, so that both are
kept and put back, place by place. Older torch has only the word.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

#: The word's name among the settings; the others are places of the tree.
WORD = "word"

_C: Any = torch._C
_HAS_TREE = hasattr(_C, "_get_fp32_precision_getter") and hasattr(_C, "_set_fp32_precision_setter")
#: Places of the tree; those above, the topmost first, are what the others take over.
_ABOVE = ("generic.all", "cuda.all", "mkldnn.all") if _HAS_TREE else ()
_PRODUCTS = ("cuda.matmul", "mkldnn.matmul") if _HAS_TREE else ()
_OTHERS = ("cuda.conv", "cuda.rnn", "mkldnn.conv", "mkldnn.rnn") if _HAS_TREE else ()
#: What makes products exact.
_EXACT = {**dict.fromkeys(_ABOVE, "none"), **dict.fromkeys(_PRODUCTS, "ieee"), WORD: "highest"}

_lock = threading.Lock()
_inside = 0
#: What the process had before the first who is inside; empty where products were exact already.
_before: dict[str, str] = {}


def settings() -> dict[str, str]:
    """The word and each place's own value; what :func:`exact` holds for now is looked through."""
    with _lock:
        found = _take()
        _write(found)
        return found | _held(found)


def put(wanted: Mapping[str, str]) -> None:
    """Set all as :func:`settings` gave it; products stay exact for whoever is inside."""
    with _lock:
        _write(wanted)
        if _inside:
            _before.clear()
            _make_exact()


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Exact float32 products inside.

    The settings are the whole process's: of several threads inside, the first saves them and the
    last puts them back. What somebody sets in the meantime stays.
    """
    global _inside
    with _lock:
        _make_exact()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _before:
                found = _take()
                _write(found | _held(found))
                _before.clear()


def _make_exact() -> None:
    if _readable_word() == "highest" and all(_get(p) in ("none", "ieee") for p in _PRODUCTS):
        return  # so that nothing is to be put back
    found = _take()
    _write(_EXACT)
    _before.update({n: found[n] for n in _EXACT if n not in _before or found[n] != _EXACT[n]})


def _held(found: Mapping[str, str]) -> dict[str, str]:
    """What was before, where it is still as :func:`exact` left it."""
    return {name: value for name, value in _before.items() if found[name] == _EXACT[name]}


def _take() -> dict[str, str]:
    """Own values of all places, and the word. Those above are ``none`` afterwards: what a place
    takes over reads as if it were its own."""
    found = {}
    for place in (*_ABOVE, *_PRODUCTS, *_OTHERS):
        found[place] = _get(place)
        if place in _ABOVE:
            _set(place, "none")
    word = _readable_word()
    if word is None:
        _write(dict.fromkeys(_PRODUCTS, "ieee"))
        word = torch.get_float32_matmul_precision()
        _write({place: found[place] for place in _PRODUCTS})
    return found | {WORD: word}


def _write(wanted: Mapping[str, str]) -> None:
    """Set what is wanted and differs; the rest stays."""
    above = {}
    for place in _ABOVE:
        above[place] = _get(place)
        _set(place, "none")
    if WORD in wanted and _readable_word() != wanted[WORD]:
        torch.set_float32_matmul_precision(wanted[WORD])  # writes into the tree as well
    for place in (*_PRODUCTS, *_OTHERS):
        _set(place, wanted.get(place, _get(place)))
    for place in reversed(_ABOVE):
        _set(place, wanted.get(place, above[place]))


def _readable_word() -> str | None:
    """None where the tree contradicts the word, for which torch raises."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _get(place: str) -> str:
    return str(_C._get_fp32_precision_getter(*place.split(".")))


def _set(place: str, value: str) -> None:
    # cuda.conv has a default of its own that no value stands for and that writing would end.
    if _get(place) != value:
        _C._set_fp32_precision_setter(*place.split("."), value)
