"""Which packed copies of a layer's weights stay resident, and what each token bucket runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

from autosel.core.device import Device
from autosel.core.outcome import AccuracyClass, Candidate, Scalar, TokenBucket
from autosel.core.problem import Problem
from autosel.core.workload import Workload
from autosel.errors import AutoselError, field_error

#: Version of the dictionary form.
VERSION = 1

Server = Literal["decode", "prefill"]


def _need(ok: bool, where: str, what: str, found: object, expected: object) -> None:
    if not ok:
        raise AutoselError(field_error(f"Plan.{where}", what, found, expected))


def _is_number(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)  # type: ignore[arg-type]


def _time(where: str, value: object) -> None:
    ok = _is_number(value) and value > 0  # type: ignore[operator]
    _need(ok, where, "microseconds", repr(value), "finite and above 0")


def _share(where: str, name: str, value: object) -> None:
    ok = _is_number(value) and 0 <= value <= 1 + 1e-9  # type: ignore[operator]
    _need(ok, where, name, repr(value), "a share, 0 to 1")


def _whole(where: str, name: str, value: object, least: int = 1) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    ok = whole and least <= value < 2**63  # type: ignore[operator]
    _need(ok, where, name, repr(value), f"a whole number from {least}")


@dataclass(frozen=True, slots=True)
class ResidentLayout:
    """One packed copy of the weights: the layout's key (:attr:`autosel.interfaces.Layout.key`)
    and its bytes for one layer on this rank."""

    layout: str
    nbytes: int

    def __post_init__(self) -> None:
        _whole("resident", "nbytes", self.nbytes)


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """What one token bucket runs.

    candidate, time_us  what runs, and its time a call (measured at ``bucket.measured`` tokens)
    best, best_us       what would run if every layout were resident
    calls               share of the workload's calls, 0 to 1
    tokens              share of the workload's tokens, 0 to 1
    tie                 another candidate on a resident layout is not told apart from ``candidate``
    """

    bucket: TokenBucket
    candidate: Candidate
    time_us: float
    best: Candidate
    best_us: float
    calls: float
    tokens: float
    tie: bool = False
    accuracy: AccuracyClass = "exact"

    def __post_init__(self) -> None:
        where = f"buckets[{self.bucket.label}]"
        _time(f"{where}.time_us", self.time_us)
        _time(f"{where}.best_us", self.best_us)
        for name in ("calls", "tokens"):
            _share(where, name, getattr(self, name))
        allowed = get_args(AccuracyClass)
        _need(self.accuracy in allowed, where, "accuracy", repr(self.accuracy), allowed)


@dataclass(frozen=True, slots=True)
class NextCopy:
    """The best set of layouts with one more copy than the plan has: what it costs and saves.

    resident          the whole set
    extra_bytes       bytes it takes beyond the plan's, for one layer
    gain_us           expected time it saves a call; ``gain_interval`` its 95 % interval, None
                      where there are too few samples for one
    fits, worth       whether it fits in the budget; whether the gain clears the noise
    break_even_calls  calls after which the time to pack the added copies is saved again; None
                      where nothing is saved or the packing time is not known
    """

    resident: tuple[ResidentLayout, ...]
    extra_bytes: int
    gain_us: float
    gain_interval: tuple[float, float] | None
    fits: bool
    worth: bool
    break_even_calls: float | None = None

    def __post_init__(self) -> None:
        _whole("next_copy", "extra_bytes", self.extra_bytes, -(2**63))
        gains = (self.gain_us, *(self.gain_interval or ()))
        _need(all(map(_is_number, gains)), "next_copy", "gains", gains, "finite microseconds")
        calls = self.break_even_calls
        sound = calls is None or (_is_number(calls) and calls >= 0)
        _need(sound, "next_copy", "break_even_calls", repr(calls), "calls, from 0")
        for name in ("fits", "worth"):
            flag = getattr(self, name)
            _need(isinstance(flag, bool), "next_copy", name, repr(flag), "true or false")


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The traffic at which another single layout would serve as well as the plan's only one.

    Two kinds of calls: those in ``buckets`` (where ``layout`` is faster) and the others. ``share``
    of all calls are of the first kind in this workload; at ``break_even`` both layouts take equally
    long, above it ``layout`` alone is better.
    """

    layout: str
    buckets: tuple[str, ...]
    share: float
    break_even: float

    def __post_init__(self) -> None:
        _share("break_even", "share", self.share)
        _share("break_even", "break_even", self.break_even)


@dataclass(frozen=True, slots=True)
class SingleLayout:
    """The one layout for a server that does only prefill, or only decode.

    ``time_us`` is its expected time a call in that server's workload and ``best_us`` that with
    every layout resident.
    """

    server: Server
    workload: str
    layout: str
    nbytes: int
    time_us: float
    best_us: float

    def __post_init__(self) -> None:
        servers = get_args(Server)
        _need(self.server in servers, "single", "server", repr(self.server), servers)
        _whole("single", "nbytes", self.nbytes)
        _time("single.time_us", self.time_us)
        _time("single.best_us", self.best_us)


@dataclass(frozen=True, slots=True)
class Plan:
    """Resident layouts and bucket -> candidate for one layer, device, routing and workload.

    budget           as it was asked for (``1.0x``, ``1.5x``, ``12GiB``)
    budget_bytes     the same in bytes, for one layer on this rank
    copy_bytes       the unit ``1.0x``: bytes of the smallest packed copy of this layer
    layers           layers of the model that this plan is for; one step calls each once
    resident         the packed copies, in the order of their keys
    buckets          sorted and apart; a token count in none is served by the built-in default
    time_us          expected time a call over the calls that buckets answer for
    best_us          the same with every layout resident
    next_copy        price of one more copy; None where no further copy would help
    break_even       None where more than one layout is resident or no other is ever faster
    single           answers for split prefill and decode servers
    timing           way of timing of the measurements
    requirements     conditions in words that candidates had to meet
    why              one sentence
    """

    problem: Problem
    device: Device
    routing: str
    workload: Workload
    budget: str
    budget_bytes: int
    copy_bytes: int
    resident: tuple[ResidentLayout, ...]
    buckets: tuple[PlannedBucket, ...]
    time_us: float
    best_us: float
    why: str
    layers: int = 1
    next_copy: NextCopy | None = None
    break_even: BreakEven | None = None
    single: tuple[SingleLayout, ...] = ()
    timing: tuple[tuple[str, Scalar], ...] = ()
    requirements: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _need(bool(self.buckets), "buckets", "number", 0, "at least 1")
        _need(bool(self.resident), "resident", "number", 0, "at least 1")
        for name in ("budget_bytes", "copy_bytes", "layers"):
            _whole(name, "value", getattr(self, name))
        keys = [item.layout for item in self.resident]
        _need(keys == sorted(set(keys)), "resident", "layouts", keys, "sorted, each once")
        found = self.resident_bytes
        expected = f"at most the budget of {self.budget_bytes}"
        _need(found <= self.budget_bytes, "resident", "bytes", found, expected)
        for one, after in pairwise(item.bucket for item in self.buckets):
            apart = one.high is not None and one.high < after.low
            _need(apart, "buckets", "order", f"{one.label} before {after.label}", "sorted, apart")
        for item in self.buckets:
            where = f"buckets[{item.bucket.label}]"
            _need(item.candidate.layout in keys, where, "layout", item.candidate.layout, keys)
        for name in ("calls", "tokens"):
            total = sum(getattr(item, name) for item in self.buckets)
            _need(abs(total - 1) < 1e-6, "buckets", f"{name} in all", total, 1)
        _time("time_us", self.time_us)
        _time("best_us", self.best_us)
        expected_us = sum(item.calls * item.time_us for item in self.buckets)
        close = math.isclose(self.time_us, expected_us, rel_tol=1e-6)
        _need(close, "time_us", "value", self.time_us, f"{expected_us}, the buckets' mean")

    @property
    def resident_bytes(self) -> int:
        """Bytes of all resident copies of one layer."""
        return sum(item.nbytes for item in self.resident)

    @property
    def step_us(self) -> float:
        """Expected time of all layers of this plan in one step."""
        return self.layers * self.time_us

    def bucket(self, num_tokens: int) -> PlannedBucket | None:
        """What a call of ``num_tokens`` tokens runs; None where the plan does not say."""
        return next((item for item in self.buckets if num_tokens in item.bucket), None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; :meth:`from_dict` is the inverse."""
        return {
            "version": VERSION,
            "problem": self.problem.to_dict(),
            "problem_key": self.problem.key,
            "device": self.device.to_dict(),
            "routing": self.routing,
            "timing": dict(self.timing),
            "requirements": list(self.requirements),
            "workload": self.workload.to_dict(),
            "budget": self.budget,
            "budget_bytes": self.budget_bytes,
            "copy_bytes": self.copy_bytes,
            "layers": self.layers,
            "resident": [asdict(item) for item in self.resident],
            "buckets": [_bucket_dict(item) for item in self.buckets],
            "time_us": self.time_us,
            "best_us": self.best_us,
            "next_copy": _next_dict(self.next_copy),
            "break_even": None if self.break_even is None else asdict(self.break_even),
            "single": [asdict(item) for item in self.single],
            "why": self.why,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Plan:
        """The plan that :meth:`to_dict` wrote; AutoselError, naming the field, for anything else.

        Text from outside may be handed here as it came out of a JSON reader.
        """
        try:
            _need(data["version"] == VERSION, "version", "value", data["version"], VERSION)
            return Plan(
                problem=Problem.from_dict(data["problem"]),
                device=Device.from_dict(data["device"]),
                routing=str(data["routing"]),
                timing=tuple(sorted(dict(data["timing"]).items())),
                requirements=tuple(map(str, data["requirements"])),
                workload=Workload.from_dict(data["workload"]),
                budget=str(data["budget"]),
                budget_bytes=data["budget_bytes"],
                copy_bytes=data["copy_bytes"],
                layers=data["layers"],
                resident=tuple(ResidentLayout(**item) for item in data["resident"]),
                buckets=tuple(map(_bucket_from, data["buckets"])),
                time_us=data["time_us"],
                best_us=data["best_us"],
                next_copy=None if data["next_copy"] is None else _next_from(data["next_copy"]),
                break_even=None if data["break_even"] is None else _even_from(data["break_even"]),
                single=tuple(SingleLayout(**item) for item in data["single"]),
                why=str(data["why"]),
            )
        except KeyError as error:
            raise AutoselError(field_error("Plan", "field", "nothing", error)) from None
        except (TypeError, ValueError, AttributeError) as error:
            text = " ".join(str(error).split())
            raise AutoselError(field_error("Plan", "record", text, "a plan's fields")) from None


def _candidate_dict(candidate: Candidate) -> dict[str, Any]:
    return {
        "backend": candidate.backend,
        "params": candidate.params_dict,
        "layout": candidate.layout,
        "key": candidate.key,
    }


def _candidate_from(data: Mapping[str, Any]) -> Candidate:
    for name, value in dict(data["params"]).items():
        scalar = value is None or isinstance(value, bool | int | float | str)
        _need(scalar, f"candidate.params[{name}]", "value", type(value).__name__, "a scalar")
    return Candidate.of(str(data["backend"]), dict(data["params"]), str(data["layout"]))


def _bucket_dict(item: PlannedBucket) -> dict[str, Any]:
    return {
        "bucket": {**asdict(item.bucket), "label": item.bucket.label},
        "candidate": _candidate_dict(item.candidate),
        "time_us": item.time_us,
        "best": _candidate_dict(item.best),
        "best_us": item.best_us,
        "calls": item.calls,
        "tokens": item.tokens,
        "tie": item.tie,
        "accuracy": item.accuracy,
    }


def _bucket_from(data: Mapping[str, Any]) -> PlannedBucket:
    low, high, measured = (data["bucket"][name] for name in ("low", "high", "measured"))
    counts = (low, measured, low if high is None else high)
    sound = all(isinstance(v, int) and not isinstance(v, bool) and v >= 1 for v in counts)
    _need(sound, "buckets", "bucket", [low, high, measured], "token counts from 1")
    _need(high is None or low <= high, "buckets", "high", high, f"at least low = {low}")
    return PlannedBucket(
        bucket=TokenBucket(low, high, measured),
        candidate=_candidate_from(data["candidate"]),
        time_us=data["time_us"],
        best=_candidate_from(data["best"]),
        best_us=data["best_us"],
        calls=data["calls"],
        tokens=data["tokens"],
        tie=bool(data["tie"]),
        accuracy=data["accuracy"],
    )


def _next_dict(item: NextCopy | None) -> dict[str, Any] | None:
    if item is None:
        return None
    interval = None if item.gain_interval is None else list(item.gain_interval)
    return {**asdict(item), "gain_interval": interval}


def _next_from(data: Mapping[str, Any]) -> NextCopy:
    values = dict(data)
    values["resident"] = tuple(ResidentLayout(**item) for item in values["resident"])
    if values["gain_interval"] is not None:
        low, high = values["gain_interval"]
        values["gain_interval"] = (float(low), float(high))
    return NextCopy(**values)


def _even_from(data: Mapping[str, Any]) -> BreakEven:
    return BreakEven(**{**data, "buckets": tuple(data["buckets"])})
