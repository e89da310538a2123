"""Reads the parts of a pack that stand by themselves: layers, devices, candidates, figures.

Everything raises PackError in one line that names the place, what was found and expected.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

from autosel import records
from autosel.core import (
    Activation,
    Candidate,
    Certificate,
    Device,
    ErrorFigures,
    Plan,
    Problem,
    QuantScheme,
    TokenBucket,
)
from autosel.errors import AutoselError, PackError
from autosel.packs import fields as f
from autosel.packs.model import Source
from autosel.packs.strict_json import shown
from autosel.stats import Summary

T = TypeVar("T")

_FIGURES = frozenset(item.name for item in fields(ErrorFigures))
_SUMMARY = frozenset(item.name for item in fields(Summary))
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z")


def at(table: list[T], value: Any, where: str) -> T:
    if not table:
        f.refuse(where, "place", shown(value), "nothing, its list is empty")
    return table[f.integer(value, where, 0, len(table) - 1)]


def problem(value: Any, where: str) -> Problem:
    f.object_of(value, where, [item.name for item in fields(Problem)])
    for key in ("num_experts", "num_local_experts", "top_k", "hidden_size", "intermediate_size"):
        f.integer(value[key], f"{where}.{key}", 1, 2**31 - 1)
    for key in ("has_bias", "router_weight_on_input"):
        f.boolean(value[key], f"{where}.{key}")
    f.name(value["act_dtype"], f"{where}.act_dtype")
    for key in ("w13", "w2"):
        _scheme(value[key], f"{where}.{key}")
    activation = f.object_of(
        value["activation"], f"{where}.activation", [item.name for item in fields(Activation)]
    )
    for key, item in activation.items():
        place = f"{where}.activation.{key}"
        if key == "name":
            f.name(item, place)
        else:
            f.optional(item, place, partial(f.number, low=-1e9, high=1e9))
    return _built(lambda: Problem.from_dict(value), where)


def _scheme(value: Any, where: str) -> None:
    f.object_of(value, where, [item.name for item in fields(QuantScheme)])
    f.integer(value["num_bits"], f"{where}.num_bits", 1, 64)
    f.integer(value["group_size"], f"{where}.group_size", -1, 2**31 - 1)
    f.boolean(value["symmetric"], f"{where}.symmetric")
    f.boolean(value["has_g_idx"], f"{where}.has_g_idx")
    f.name(value["scale_dtype"], f"{where}.scale_dtype")


def candidate(value: Any, where: str) -> Candidate:
    f.object_of(value, where, ("backend", "params", "layout"))
    return Candidate.of(
        f.name(value["backend"], f"{where}.backend"),
        f.scalars(value["params"], f"{where}.params"),
        f.name(value["layout"], f"{where}.layout", empty=True),
    )


def source(value: Any, where: str) -> Source:
    f.object_of(value, where, ("device", "autosel", "created", "command"))
    made = f.object_of(value["autosel"], f"{where}.autosel", ("version", "commit"))
    return Source(
        _device(value["device"], f"{where}.device"),
        f.text(made["version"], f"{where}.autosel.version", most=f.MAX_NAME),
        f.optional(made["commit"], f"{where}.autosel.commit", f.name),
        moment(value["created"], f"{where}.created"),
        f.text(value["command"], f"{where}.command"),
    )


#: How each field of a device is read; a field of another kind is a short text or null.
_DEVICE: dict[str, Callable[[Any, str], Any]] = {
    "kind": lambda v, w: f.choice(v, w, ("cpu", "cuda", "rocm", "xpu")),
    "name": lambda v, w: f.text(v, w, most=256),
    "capability": lambda v, w: f.optional(v, w, lambda x, y: f.items(x, y, f.integer, most=2)),
    "flags": lambda v, w: f.items(v, w, f.name, most=1000),
    "versions": lambda v, w: _versions(v, w),
}


def _device(value: Any, where: str) -> Device:
    """Fields that a newer autosel added to a device may be absent: they are then unknown."""
    known = {item.name: item for item in fields(Device)}
    f.object_of(value, where, ("kind", "name", "versions"), known)
    for key, item in value.items():
        parse = _DEVICE.get(key) or (lambda v, w: f.sane(v, w, depth=1))
        parse(item, f"{where}.{key}")
    for key in ("multiprocessors", "memory_bytes", "cache_bytes", "shared_memory_bytes", "threads"):
        f.optional(value.get(key), f"{where}.{key}", f.integer)
    f.optional(value.get("driver"), f"{where}.driver", partial(f.text, most=256))
    capability = value.get("capability")
    if capability is not None and len(capability) != 2:
        f.refuse(f"{where}.capability", "numbers", len(capability), 2)
    whole = {"capability": None, "flags": [], **value}
    return _built(lambda: Device.from_dict(whole), where)


def _versions(value: Any, where: str) -> None:
    if not isinstance(value, dict) or len(value) > 1000:
        f.refuse(where, "value", f.kind(value), "an object of at most 1000 versions")
    for key, item in value.items():
        f.text(key, f"{where} key", most=f.MAX_NAME)
        f.text(item, f"{where}.{key}", most=256)


def bucket(value: Any, where: str) -> TokenBucket:
    f.object_of(value, where, ("low", "high", "measured"))
    count = partial(f.integer, low=1, high=2**31 - 1)
    low = count(value["low"], f"{where}.low")
    high = f.optional(value["high"], f"{where}.high", count)
    if high is not None and high < low:
        f.refuse(f"{where}.high", "value", high, f"at least low = {low}")
    return TokenBucket(low, high, count(value["measured"], f"{where}.measured"))


def check_cover(buckets: list[TokenBucket], where: str) -> None:
    """Every token count from 1 on stands in exactly one bucket."""
    wanted: int | None = 1
    for number, bucket in enumerate(sorted(buckets, key=lambda item: item.low)):
        if wanted is None or bucket.low != wanted:
            kind = "overlap" if wanted is None or bucket.low < wanted else "gap"
            f.refuse(f"{where}[{number}].bucket", kind, f"low {bucket.low}", f"low {wanted}")
        wanted = None if bucket.high is None else bucket.high + 1
    if wanted is not None:
        f.refuse(where, "gap", f"nothing from {wanted} tokens on", "an open last bucket")


def summary(value: Any, where: str) -> Summary:
    found = f.numbers(value, where, _SUMMARY, 0, f.MAX_US)
    f.integer(found["samples"], f"{where}.samples", 1)
    f.number(found["quantile"], f"{where}.quantile", 0, 1)
    times = [found[key] for key in ("min_us", "low_us", "median_us", "high_us")]
    if times != sorted(times):
        f.refuse(where, "quantiles", times, "in order")
    for key in ("min_us", "estimate_us"):
        f.time_us(found[key], f"{where}.{key}")
    return Summary(**value)


def errors(value: Any, where: str) -> ErrorFigures:
    f.numbers(value, where, _FIGURES, -1e300, 1e300, nothing=True)
    return ErrorFigures(**value)


def observations(value: Any, where: str) -> tuple[tuple[str, Any], ...]:
    if not isinstance(value, dict) or len(value) > f.MAX_PARAMS:
        f.refuse(where, "value", f.kind(value), f"an object of at most {f.MAX_PARAMS} names")
    for key, item in value.items():
        f.name(key, f"{where} key")
        # One figure a sample, as text: a scalar in the measurement's own form.
        if isinstance(item, str):
            f.text(item, f"{where}.{key}", most=100_000)
        else:
            f.scalar(item, f"{where}.{key}")
    return tuple(sorted(value.items()))


def certificate(value: Any, where: str) -> Certificate:
    f.sane(value, where)
    _candidate_inside(value, where)
    return _built(lambda: Certificate.from_dict(value), where)


def plan(value: Any, where: str) -> Plan:
    f.sane(value, where)
    made = _built(lambda: Plan.from_dict(value), where)
    for number, item in enumerate(made.buckets):
        for one in (item.candidate, item.best):
            candidate(records.candidate_dict(one), f"{where}.buckets[{number}]")
    return made


def _candidate_inside(value: Any, where: str) -> None:
    if isinstance(value, dict) and isinstance(value.get("candidate"), dict):
        inner = {key: item for key, item in value["candidate"].items() if key != "key"}
        candidate(inner, f"{where}.candidate")


def moment(value: Any, where: str) -> str:
    found = f.text(value, where, most=40)
    if not _TIME.fullmatch(found):
        f.refuse(where, "time", shown(value), "2026-01-31T12:00:00Z")
    return found


def _built(build: Callable[[], T], where: str) -> T:
    """``build()``, its refusal in words that name the place."""
    try:
        return build()
    except PackError:
        raise
    except (AutoselError, TypeError, ValueError, KeyError, OverflowError, AttributeError) as error:
        detail = " ".join(str(error).split())[:200]
        raise PackError(f"{where}: {ascii(detail)[1:-1]}") from None
