"""Settings of a whole process that one candidate may change for all others, kept and put back.

Threads, the default type, gradients, random numbers, the working folder, the environment, signal
handlers and timers: a library may set any of them for itself. What is measured after it must run
as before, and a worker process must run as the process that started it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autosel import float32


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: ``read`` gives its value and ``write`` sets it.

    travels  it makes sense in another process as well
    shapes   it changes what a call computes or how fast it does
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    travels: bool = True
    shapes: bool = False


class ProcessState:
    """The settings as they were when it was made; values only, so that it can be sent."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)

    @classmethod
    def now(cls, *, to_send: bool = False) -> ProcessState:
        """This process's settings; ``to_send`` leaves out what means nothing elsewhere."""
        values = {}
        for setting in SETTINGS:
            if setting.travels or not to_send:
                # A torch build without a setting, or one that two interfaces set in turn.
                with contextlib.suppress(Exception):
                    values[setting.name] = setting.read()
        return cls(values)

    def put_back(self, *, all_settings: bool = True) -> tuple[str, ...]:
        """Set what differs and return its names; else only what shapes a call, which is quick."""
        changed = []
        for setting in SETTINGS if all_settings else _SHAPING:
            if setting.name not in self.values:
                continue
            wanted = self.values[setting.name]
            with contextlib.suppress(Exception):
                if _differs(setting, wanted):
                    setting.write(wanted)
                    changed.append(setting.name)
        _cancel_timers()
        return tuple(changed)


def _differs(setting: Setting, wanted: Any) -> bool:
    try:
        return bool(setting.read() != wanted)
    except Exception:
        # It could be read before: the folder is gone, or two interfaces contradict each other.
        return True


def _read_random() -> tuple[bytes, Any]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate()


def _write_random(state: tuple[bytes, Any]) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state[0]), dtype=torch.uint8))
    random.setstate(state[1])


def _keeps_denormals() -> bool:
    return bool((torch.tensor(1e-310, dtype=torch.float64) * 1.0) != 0)


def _write_environment(wanted: dict[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)


def _read_signals() -> dict[int, Any]:
    found = {number: signal.getsignal(number) for number in signal.valid_signals()}
    # None is a handler that was not set from Python, which cannot be set from it either.
    return {number: handler for number, handler in found.items() if handler is not None}


def _write_signals(wanted: dict[int, Any]) -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    for number, handler in wanted.items():
        with contextlib.suppress(OSError, ValueError):  # SIGKILL, SIGSTOP
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)


def _cancel_timers() -> None:
    """A timer that a candidate set would go off in another one's call."""
    for kind in ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF"):
        if hasattr(signal, kind) and any(signal.getitimer(getattr(signal, kind))):
            signal.setitimer(getattr(signal, kind), 0)


def _read_deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _write_deterministic(wanted: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(wanted[0], warn_only=wanted[1])


def _flag(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _write_collector(on: bool) -> None:
    if on:
        gc.enable()
    else:
        gc.disable()


def _in_place(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """A list that others hold, such as ``sys.path``: its content counts."""

    def write(value: list[Any]) -> None:
        getattr(owner, name)[:] = value

    return lambda: list(getattr(owner, name)), write


_cuda: Any = torch.backends.cuda.matmul
_cudnn: Any = torch.backends.cudnn

SETTINGS: tuple[Setting, ...] = (
    Setting("threads", torch.get_num_threads, torch.set_num_threads, shapes=True),
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype, shapes=True),
    Setting("gradients", torch.is_grad_enabled, torch.set_grad_enabled, shapes=True),
    Setting("float32 precision", float32.settings, float32.put, shapes=True),
    # After the one before: writing this one would end torch's own default for convolutions.
    Setting("TF32 of cuDNN", *_flag(_cudnn, "allow_tf32")),
    Setting("deterministic", _read_deterministic, _write_deterministic, shapes=True),
    Setting("denormals", _keeps_denormals, lambda on: torch.set_flush_denormal(not on)),
    Setting("FP16 reduction", *_flag(_cuda, "allow_fp16_reduced_precision_reduction")),
    Setting("BF16 reduction", *_flag(_cuda, "allow_bf16_reduced_precision_reduction")),
    Setting("cuDNN benchmark", *_flag(_cudnn, "benchmark")),
    Setting(
        "autocast on the CPU",
        lambda: torch.is_autocast_enabled("cpu"),
        lambda on: torch.set_autocast_enabled("cpu", on),
    ),
    Setting(
        "autocast on the GPU",
        lambda: torch.is_autocast_enabled("cuda"),
        lambda on: torch.set_autocast_enabled("cuda", on),
    ),
    Setting("random numbers", _read_random, _write_random, travels=False),
    Setting("working folder", os.getcwd, os.chdir),
    Setting("environment", lambda: dict(os.environ), _write_environment, travels=False),
    Setting("signal handlers", _read_signals, _write_signals, travels=False),
    Setting("module path", *_in_place(sys, "path")),
    Setting("warning filters", *_in_place(warnings, "filters"), travels=False),
    Setting("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    Setting("garbage collection", gc.isenabled, _write_collector, travels=False),
    Setting("standard output", *_flag(sys, "stdout"), travels=False),
    Setting("standard error", *_flag(sys, "stderr"), travels=False),
    Setting(
        "processors",
        lambda: os.sched_getaffinity(0),
        lambda wanted: os.sched_setaffinity(0, wanted),
        travels=False,  # inherited
    ),
)
_SHAPING = tuple(setting for setting in SETTINGS if setting.shapes)
