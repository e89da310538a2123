"""What a worker and its parent say to each other, and how third parties' objects travel.

Both ends are this program on this machine: pickles here carry our own objects, never a file or
anything else from outside. Classes that only this process knows (defined in a function, a notebook
or the main script) travel by value, which is what cloudpickle is for.
"""

from __future__ import annotations

import importlib.util
import pickle
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import cloudpickle

from autosel.core import Candidate, Device, Measurement, Params, Problem, Status
from autosel.errors import AutoselError
from autosel.failures import one_line
from autosel.handlers import let_through
from autosel.interfaces import Backend
from autosel.process_state import ProcessState
from autosel.sources import WeightSource
from autosel.timing import TimingSettings
from autosel.trial_rows import Known
from autosel.tune_types import SweepSettings

# jobs, parent to worker -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything a fresh worker needs. ``backends`` are the ones registered in the parent only.

    ``cases_saved``: an earlier worker has left the judged inputs in the shared file; ``known`` is
    what earlier ones found out.
    """

    source: WeightSource
    settings: SweepSettings
    device: Device
    device_index: int | None
    tokens: tuple[int, ...]
    state: ProcessState
    backends: Mapping[str, bytes]
    cases_saved: bool
    known: Known


@dataclass(frozen=True, slots=True)
class Load:
    """Read the weights and work out the right results."""


@dataclass(frozen=True, slots=True)
class Compile:
    """Compile one candidate's kernels, in a helper that has no weights and touches no device."""

    backend: str
    data: bytes | None
    problem: Problem
    params: Params
    num_tokens: int
    device: Device


@dataclass(frozen=True, slots=True)
class Attempt:
    """Pack, call and, where ``verify``, judge one candidate on the quick set."""

    backend: str
    params: Params
    num_tokens: int
    verify: bool = True


@dataclass(frozen=True, slots=True)
class Prove:
    """Judge the candidate of a timed row on the full set."""

    row: Measurement


@dataclass(frozen=True, slots=True)
class Time:
    """Time verified candidates against each other; the beat counts in the order of ``rows``."""

    rows: tuple[Measurement, ...]
    settings: TimingSettings
    num_tokens: int


Job = Setup | Compile | Load | Attempt | Prove | Time

# messages, worker to parent ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """The process has imported what it needs. ``helpers`` are processes that belong to it."""

    helpers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A step begins, as :meth:`autosel.tune_types.Observer.step` hears it."""

    what: str
    num_tokens: int
    candidate: Candidate | None


@dataclass(frozen=True, slots=True)
class Timed:
    """As :meth:`autosel.tune_types.Observer.timed` hears it."""

    num_tokens: int
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Attempted:
    """What came of an attempt, and what became known by it."""

    row: Measurement
    known: Known


@dataclass(frozen=True, slots=True)
class Poisoned:
    """Timing came to no end: the row of this number made the device unusable for all."""

    number: int
    status: Status
    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """The job's result. ``step`` ran last; ``spoiled`` says why the process must end now."""

    value: Any
    step: str = ""
    spoiled: str = ""


@dataclass(frozen=True, slots=True)
class Raised:
    """The job could not be done, through no candidate's fault."""

    error: AutoselError


Message = Ready | Step | Timed | Done | Raised


def dump(thing: Any) -> bytes:
    """Bytes of a job; classes that another process cannot import go along by value."""
    with _by_value(_modules_of(thing)):
        return bytes(cloudpickle.dumps(thing))


def load(data: bytes) -> Any:
    """What :func:`dump` or :func:`pickle.dumps` of the other end made."""
    return pickle.loads(data)


def portable(error: BaseException) -> AutoselError:
    """``error`` as one of ours that survives the journey with its one line."""
    if isinstance(error, AutoselError):
        try:
            copy = pickle.loads(pickle.dumps(error))
            if type(copy) is type(error) and str(copy) == str(error):
                return error
        except Exception:  # a subclass whose __init__ wants more than the message
            return AutoselError(one_line(error))
    made = AutoselError(f"{type(error).__name__}: {one_line(error)}")
    made.add_note("".join(traceback.format_exception(error))[-8000:])  # shown with --debug
    return made


def pack_backend(backend: Backend) -> bytes:
    """Bytes of a registered backend; AutoselError, with what to do, when it cannot be sent."""
    try:
        return dump(backend)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        let_through(error)
        raise AutoselError(
            f"backend {backend.name} cannot be sent to the worker process "
            f"({type(error).__name__}: {one_line(error)}); keep locks, handles and tensors on a "
            f"device out of the object, or sweep with isolate=False"
        ) from None


def _modules_of(thing: Any) -> list[ModuleType]:
    """The module of ``thing``'s class, where another process could not import it by its name."""
    name = type(thing).__module__
    module = sys.modules.get(name)
    if module is None or name == "__main__":  # cloudpickle sends what is in these by itself
        return []
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is not None and not spec.has_location:  # built in, or frozen into the interpreter
        return []
    found = spec.origin if spec else None
    return [] if found and found == getattr(module, "__file__", None) else [module]


@contextmanager
def _by_value(modules: list[ModuleType]) -> Iterator[None]:
    known = cloudpickle.list_registry_pickle_by_value()
    added = [module for module in modules if module.__name__ not in known]
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)
